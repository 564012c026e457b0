"""A pipeline's file, its checks, what it remembers, and signals; stages are stood in for."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dschat_lora.__main__ import main
from dschat_lora.addons.pipeline import run as course
from dschat_lora.addons.pipeline.recipe import check_stages, read_recipe
from dschat_lora.addons.report.run_data import RunData
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.commands.launch import Relay
from dschat_lora.commands.stages import options_of_file
from dschat_lora.config.options import build_config, command_line, parse_config
from dschat_lora.config.stages import RewardStageConfig, SupervisedConfig
from helpers.step1 import ROOT, write_adapter_config

ALL = "stages: {sft: {lora_dim: 8}, reward: {}, rlhf: {}}"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch, first_rows):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe_of():
    """``recipe_of(text, ...)``: what a file of this text asks for, written to ``out``."""

    def read(text, **options):
        return read_recipe(written(text), **options)

    return read


def written(text):
    Path("run.yaml").write_text(f"output_dir: out\n{text}\n", encoding="utf-8")
    return "run.yaml"


# ---------------------------------------------------------------------------- the file


@pytest.mark.smoke
def test_stages_take_the_outputs_of_earlier_ones(recipe_of):
    stages = recipe_of(ALL).stages
    assert list(stages) == ["sft", "reward", "rlhf"]
    assert stages["sft"] == {"lora_dim": 8}
    assert stages["reward"] == {"model_name_or_path": "out/sft"}
    assert stages["rlhf"] == {
        "actor_model_name_or_path": "out/sft",
        "critic_model_name_or_path": "out/reward",
    }


def test_newest_policy_becomes_the_actor(recipe_of):
    stages = recipe_of("stages: {sft: , dpo: , reward: , rlhf: }").stages
    assert stages["dpo"]["model_name_or_path"] == "out/sft"
    assert stages["reward"]["model_name_or_path"] == "out/sft"
    assert stages["rlhf"]["actor_model_name_or_path"] == "out/dpo"


def test_models_that_the_file_names_win_and_null_names_none(recipe_of):
    text = """stages:
      sft: {}
      reward: {model_name_or_path: other/model}
      rlhf: {actor_model_name_or_path: null, reward_function: 'a:b'}"""
    recipe = recipe_of(text)
    assert recipe.stages["reward"]["model_name_or_path"] == "other/model"
    assert "actor_model_name_or_path" not in recipe.stages["rlhf"]
    assert recipe.sources("rlhf") == {"critic_model_name_or_path": "reward"}
    assert recipe.sources("reward") == {}


def test_output_of_a_later_stage_is_no_default(recipe_of):
    stages = recipe_of("stages: {reward: {}, sft: {}}").stages
    assert stages == {"reward": {}, "sft": {}}


def test_common_options_go_to_the_stages_that_have_them(recipe_of):
    stages = recipe_of("common: {seed: 7, max_seq_len: 64, kl_coef: 0.2}\n" + ALL).stages
    assert stages["sft"] == {"lora_dim": 8, "seed": 7, "max_seq_len": 64}
    assert stages["rlhf"]["kl_coef"] == 0.2
    assert "max_seq_len" not in stages["rlhf"]


def test_command_line_wins(recipe_of):
    recipe = recipe_of(
        "launcher: {num_gpus: 2, master_port: 30000}\n" + ALL,
        output_dir="other",
        num_gpus=1,
        overrides=["sft.lora_dim=4", "sft.data_path=[a/b, c/d]", "rlhf.kl_coef=1e-2"],
    )
    assert (recipe.launcher.num_gpus, recipe.launcher.master_port) == (1, 30000)
    assert recipe.stages["sft"] == {"lora_dim": 4, "data_path": ["a/b", "c/d"]}
    assert recipe.stages["rlhf"]["kl_coef"] == 0.01
    assert recipe.stages["reward"] == {"model_name_or_path": "other/sft"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: {}", "unknown stage; did you mean stages?"),
        ("stages: {}", "stages must name one or more of sft, reward, dpo, rlhf"),
        ("stages: {stf: {}}", "stages: unknown stf; did you mean sft?"),
        ("stages: {sft: 3}", "stage sft must hold 'name: value' lines, got '3'"),
        (
            "stages: {sft: {lora_dmi: 3}}",
            "stage sft: unknown option --lora_dmi; did you mean --lora_dim?",
        ),
        (
            "stages: {sft: {lora_dim: many}}",
            "stage sft: lora_dim must be a whole number, got 'many'",
        ),
        ("stages: {sft: {packing: 1}}", "stage sft: packing must be true or false, got '1'"),
        ("stages: {sft: {}, rlhf: {kl_coef: -1}}", "stage rlhf: --kl_coef must be >= 0, got -1"),
        (
            "common: {sede: 3}\nstages: {sft: {}}",
            "common: unknown option --sede; did you mean --seed?",
        ),
        ("common: {kl_coef: 0.1}\nstages: {sft: {}}", "common: unknown option --kl_coef"),
        (
            "launcher: {num_gpu: 1}\nstages: {sft: {}}",
            "launcher: unknown option --num_gpu; did you mean --num_gpus?",
        ),
        ("launcher: {num_gpus: 0}\nstages: {sft: {}}", "launcher: --num_gpus must be >= 1, got 0"),
        ("stages: {sft: {output_dir: here}}", "stage sft: output_dir is the pipeline's to set"),
    ],
)
def test_mistake_in_the_file_is_named(recipe_of, text, message):
    with pytest.raises(ValueError, match=f"^run.yaml: {re.escape(message)}"):
        recipe_of(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft", "--set sft must be STAGE.OPTION=VALUE"),
        ("dpo.seed=1", "the stages are sft, reward, rlhf, not dpo"),
        ("sft.sede=1", "unknown option --sede; did you mean --seed?"),
        ("sft.seed=x", "seed must be a whole number, got 'x'"),
    ],
)
def test_mistake_in_an_override_is_named(recipe_of, override, message):
    with pytest.raises(ValueError, match=f"--set {override}.*") as error:
        recipe_of(ALL, overrides=[override])
    assert message in str(error.value)


def test_options_are_typed_as_a_script_reads_them():
    values = {
        **{"lora_learning_rate": 1e-5, "packing": False, "print_loss": True},
        **{"modules_to_save": [], "data_path": ["a b", "c"], "eot_token": "--end"},
    }
    typed = command_line({**values, "data_split": None})
    assert parse_config(SupervisedConfig, typed) == build_config(SupervisedConfig, values)


def test_directory_must_be_named():
    Path("run.yaml").write_text(ALL, encoding="utf-8")
    with pytest.raises(ValueError, match="output_dir must be a directory, got None; name it"):
        read_recipe("run.yaml")


@pytest.mark.parametrize(
    ("text", "stage", "expected"),
    [
        ("sft: {}", "sft", {"lora_dim": 0}),
        ("sft: {lora_dim: 4}", "sft", {"lora_dim": 4}),
        ("dpo: {model_name_or_path: adapter}", "dpo", {}),
        ("rlhf: {reward_function: ['builtin:length=12']}", "rlhf", {"actor_lora_dim": 0}),
        (
            "rlhf: {actor_lora_dim: 4, reward_function: ['builtin:length=12']}",
            "rlhf",
            {"actor_lora_dim": 4},
        ),
        (
            "rlhf: {actor_model_name_or_path: adapter, critic_model_name_or_path: scorer}",
            "rlhf",
            {"critic_lora_dim": 0},
        ),
        ("sft: {}\n  dpo: {}", "dpo", {}),  # of what is yet to be written
    ],
)
def test_stages_of_a_file_train_what_it_says_by_the_verbs_that_a_pipeline_runs(
    recipe_of, tmp_path, text, stage, expected
):
    write_adapter_config(tmp_path / "adapter")
    shutil.copytree(BUNDLED_MODEL, "scorer")
    fields = json.loads(Path("scorer/config.json").read_text(encoding="utf-8"))
    fields["architectures"] = ["OPTForSequenceClassification"]
    Path("scorer/config.json").write_text(json.dumps(fields), encoding="utf-8")
    options = course._options(recipe_of(f"stages:\n  {text}"), stage, "begin")
    assert {n: value for n, value in options.items() if n.endswith("lora_dim")} == expected


def test_the_file_makes_no_objects(recipe_of):
    with pytest.raises(ValueError, match=r"^run\.yaml cannot be read"):
        recipe_of("stages:\n  sft:\n    seed: !!python/object/apply:os.system ['touch ran']")
    assert not Path("ran").exists()


def test_stage_takes_its_part_of_a_file_as_the_pipeline_would_run_it():
    recipe = read_recipe("bundled")
    options = options_of_file("rlhf", "bundled")
    assert options == {**recipe.stages["rlhf"], "output_dir": "output/bundled/rlhf"}
    assert options["actor_model_name_or_path"] == "output/bundled/sft"
    assert options["max_steps"] == 3
    with pytest.raises(ValueError, match="--config bundled has the stages sft, reward, rlhf, and"):
        options_of_file("dpo", "bundled")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("pipeline", ["FILE"]),
        ("pipeline none.yaml", ["none.yaml", "recipes"]),
        ("rlhf --config bundled", ["--actor_model_name_or_path", "output/bundled/sft"]),
        ("dpo --config bundled", ["stages sft, reward, rlhf"]),
    ],
)
def test_wrong_call_is_one_line_with_code_2(monkeypatch, capsys, line, parts):
    monkeypatch.setattr("sys.argv", ["dschat-lora", *line.split()])
    with pytest.raises(SystemExit, match="^2$"):
        main()
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:7]) == ("", 1, "error: ")
    assert all(part in err for part in parts), err


# ---------------------------------------------------------------------------- before the first


@pytest.mark.smoke
def test_stages_are_checked_as_if_the_earlier_outputs_were_there(recipe_of):
    found = check_stages(recipe_of(ALL))
    assert isinstance(found["reward"], RewardStageConfig)
    # The adapter of sft goes on, in the reward model and in the actor; the critic is reward's.
    assert found["reward"].lora.lora_dim == 8
    assert found["rlhf"].actor.lora_dim == found["rlhf"].critic.lora_dim == 8


def test_nothing_is_said_or_written_by_checks(recipe_of, capsys):
    before = sorted(Path().rglob("*"))
    recipe = recipe_of(ALL)
    check_stages(recipe)
    assert capsys.readouterr().out == ""
    assert sorted(Path().rglob("*")) == [*before, Path("run.yaml")]


def test_whole_models_are_stood_in_for_too(recipe_of):
    found = check_stages(recipe_of("stages: {sft: {}, reward: {}, rlhf: {}}"))
    assert found["rlhf"].critic.lora_dim == 0


def test_a_teacher_that_is_yet_to_train_has_a_placeholder(recipe_of):
    text = "stages: {sft: {lora_dim: 8}, reward: {}, rlhf: {}, distill: {}}"
    found = check_stages(recipe_of(text))
    assert recipe_of(text).stages["distill"]["teacher_model_name_or_path"] == "out/rlhf"
    assert found["distill"].actor.lora_dim == 8
    assert found["distill"].stage == "distill"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "stages: {sft: {lora_dim: 8}, reward: {lora_dim: 4}}",
            "reward: --lora_dim is 4, but the adapter out/sft/adapter has 8",
        ),
        (
            "stages: {reward: {}, rlhf: {actor_model_name_or_path: out/reward}}",
            "rlhf: --actor_model_name_or_path out/reward",
        ),
        (
            "stages: {sft: {}, reward: {max_seq_len: 4096}}",
            "reward: --max_seq_len is 4096, but the model has ",
        ),
        (
            "stages: {sft: {}, rlhf: {data_path: nosuch.jsonl, reward_function: 'os:getcwd'}}",
            "rlhf: --data_path nosuch.jsonl does not exist",
        ),
        (
            "stages: {sft: {}, rlhf: {}}",
            "rlhf: --critic_model_name_or_path must name a reward model",
        ),
        (
            "stages: {sft: {model_name_or_path: ./nosuch}}",
            "sft: --model_name_or_path ./nosuch does not exist",
        ),
        (
            "stages: {sft: {}, reward: {offload: true}}",
            "reward: --offload needs --zero_stage 1, 2 or 3",
        ),
    ],
)
def test_what_a_later_stage_would_refuse_is_said_at_once(recipe_of, text, message):
    with pytest.raises(ValueError, match=f"^run.yaml: stage {re.escape(message)}"):
        check_stages(recipe_of(text))


def test_processes_to_a_model_are_taken_to_be_there_where_their_number_is_not_given(recipe_of):
    stage = "stages: {sft: {lora_dim: 4, tensor_parallel_size: 2}}"
    check_stages(recipe_of(stage))
    check_stages(recipe_of("launcher: {num_gpus: 4}\n" + stage))
    with pytest.raises(ValueError, match="size 2 does not divide the number of .* processes, 3"):
        check_stages(recipe_of("launcher: {num_gpus: 3}\n" + stage))


def test_processes_count_where_the_launcher_has_their_number(recipe_of):
    Path("ds.json").write_text(json.dumps({"train_batch_size": 64}), encoding="utf-8")
    stage = "stages: {sft: {per_device_train_batch_size: 16, deepspeed_config: ds.json}}"
    check_stages(recipe_of("launcher: {num_gpus: 4}\n" + stage))
    check_stages(recipe_of(stage))
    with pytest.raises(ValueError, match="train_batch_size"):
        check_stages(recipe_of("launcher: {num_gpus: 2}\n" + stage))
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("start", [["-m", "dschat_lora"], ["-m", "dschat_lora.__main__"]])
def test_mistake_ends_the_command_at_once_in_one_line(start):
    written("stages: {sft: {}, reward: {}, rlhf: {kl_cof: 1}}")
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, *start, "pipeline", "run.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert time.monotonic() - begun < 5
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "error: run.yaml: stage rlhf: unknown option --kl_cof; did you mean --kl_coef?\n"
    )


# ---------------------------------------------------------------------------- stages in order

# Behaves as a stage would, by what stands in the file "orders": a line a stage, the last for all.
LAUNCHER = f"""#!{sys.executable}
import json, pathlib, sys
argv = sys.argv[1:]
home = pathlib.Path(argv[argv.index("--output_dir") + 1])
with open("commands", "a") as file:
    file.write(json.dumps(argv) + "\\n")
number = len(open("commands").read().splitlines())
orders = open("orders").read().split()
status, code = orders[min(number, len(orders)) - 1].split(":")
home.mkdir(parents=True, exist_ok=True)
if status != "nothing":
    (home / "adapter").mkdir(exist_ok=True)
    record = {{"status": status, "started": str(number)}}
    record["results"] = {{"loss before": 2.0, "loss after": 1.0}}
    (home / "run.json").write_text(json.dumps(record))
    (home / "metrics.jsonl").write_text('{{"kind": "train", "step": 1, "time": 90.0}}\\n')
sys.exit(int(code))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``run(orders, text, ...)``: (exit code, what was said, the stages' commands)."""
    launcher = tmp_path / "deepspeed"
    launcher.write_text(LAUNCHER)
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(course, "launcher_command", lambda: str(launcher))
    monkeypatch.setattr(course, "check_stages", lambda recipe, done: None)

    def call(orders="finished:0", text=ALL, **options):
        Path("orders").write_text(orders)
        Path("commands").write_text("")
        code = 0
        try:
            course.run_pipeline(written(text), **options)
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        lines = Path("commands").read_text().splitlines()
        return code, said.out + said.err, [json.loads(line) for line in lines]

    return call


def stage_of(command):
    return command[command.index("--output_dir") + 1].removeprefix("out/")


def status_of(stage):
    return json.loads(Path("out/pipeline.json").read_text())["stages"][stage]["status"]


@pytest.mark.smoke
def test_stages_run_in_order_and_a_second_run_skips_them(run):
    code, said, commands = run(text="launcher: {num_gpus: 1, master_port: 30001}\n" + ALL)
    assert code == 0
    assert [stage_of(command) for command in commands] == ["sft", "reward", "rlhf"]
    assert commands[0] == [
        *("--num_gpus", "1", "--master_port", "30001", "--module", "dschat_lora", "sft"),
        *("--lora_dim", "8", "--output_dir", "out/sft"),
    ]
    assert "sft: out/sft/adapter" in said
    assert "report: out/report.html" in said
    assert "Held out, before and after" in Path("out/report.html").read_text(encoding="utf-8")

    code, said, commands = run()
    assert (code, commands) == (0, [])
    assert "stage rlhf: finished, and skipped" in said
    assert "sft     1.5 min    loss       2      1" in said


def test_stage_that_fails_ends_the_pipeline_and_goes_on_the_next_time(run):
    code, said, commands = run("finished:0 failed:7")
    assert code == 7
    assert len(commands) == 2
    assert said.splitlines()[-1] == (
        "error: the stage reward ended with exit code 7, and its last lines say why; when that is "
        "put right, go on with: dschat-lora pipeline run.yaml"
    )
    assert status_of("reward") == "ended with exit code 7: failed"

    code, _, commands = run(num_gpus=1, overrides=["rlhf.seed=3"])
    assert code == 0
    assert [stage_of(command) for command in commands] == ["reward", "rlhf"]
    assert commands[0][-2:] == ["--resume_from_checkpoint", "auto"]
    assert commands[1][-1] == "out/rlhf"


def test_launcher_that_ends_well_without_the_stage_having_finished_is_a_failure(run):
    code, said, _ = run("running:0")
    assert code == 1
    assert "the stage sft ended with exit code 0" in said


def test_finished_stage_with_other_options_is_refused_until_it_is_asked_for_again(run):
    run()
    other = "stages: {sft: {lora_dim: 8}, reward: {seed: 3}, rlhf: {}}"
    code, said, commands = run(text=other)
    assert (code, commands) == (2, [])
    assert said == (
        "error: run.yaml: stage reward is finished, with other options: --seed was the default, "
        "now 3; put them back, or use --from reward to do it and all later stages again\n"
    )
    code, said, commands = run(text=other, redo_from="reward")
    assert code == 0
    assert [stage_of(command) for command in commands] == ["reward", "rlhf"]
    assert all(command[-1] == "--overwrite_output_dir" for command in commands)
    assert run(text=other)[2] == []


def test_stage_to_be_done_again_is_not_forgotten_when_an_earlier_one_is_stopped(run):
    run()
    # stopped before it wrote anything, so that the old runs are all there
    assert run("nothing:1", redo_from="reward")[0] == 1
    code, _, commands = run("begun:1")
    assert code == 1
    assert commands[0][-1] == "--overwrite_output_dir"
    _, _, commands = run()
    assert [command[-1] for command in commands] == ["auto", "--overwrite_output_dir"]
    assert run()[2] == []


def test_unfinished_stage_may_change_options_but_not_lose_any(run, monkeypatch):
    run("failed:1")
    monkeypatch.setattr("dschat_lora.addons.pipeline.run.checkpoints_of", lambda run: [run])
    text = "stages: {sft: {lora_dim: 8, logging_steps: 2}}"
    assert run("failed:1", text)[0] == 1
    code, said, commands = run(text="stages: {sft: {logging_steps: 2}}")
    assert (code, commands) == (2, [])
    assert "stage sft was begun with --lora_dim 8, which is given no more; state what" in said
    assert run(text=text)[0] == 0


def test_stage_that_stands_on_one_to_be_finished_is_refused(run):
    run()
    record = json.loads(Path("out/sft/run.json").read_text())
    Path("out/sft/run.json").write_text(json.dumps({**record, "status": "running"}))
    code, said, commands = run()
    assert (code, commands) == (2, [])
    assert "stage reward stands on the stage sft, which is not finished; use --from sft" in said


def test_run_that_the_pipeline_did_not_make_is_refused(run):
    Path("out/sft/adapter").mkdir(parents=True)
    code, said, _ = run()
    assert code == 2
    assert "out/sft holds a run (adapter) that pipeline.json beside it does not know" in said
    assert run(redo_from="sft")[0] == 0


def test_stage_that_is_not_there_cannot_be_begun_from(run):
    code, said, _ = run(redo_from="dpo")
    assert code == 2
    assert "--from dpo must be one of sft, reward, rlhf" in said


def test_dry_run_shows_commands_and_writes_nothing(run):
    code, said, commands = run(dry_run=True)
    assert (code, commands) == (0, [])
    assert "--model_name_or_path out/sft --output_dir out/reward" in said
    assert not Path("out").exists()


def test_second_pipeline_is_kept_out(run):
    with course.alone(Path("out"), "pipeline"):
        code, said, commands = run()
    assert (code, commands) == (2, [])
    assert "another pipeline is at work in out" in said
    Path("out/sft").symlink_to("/etc")
    assert "out/sft is a link to /etc" in run()[1]
    Path("out/sft").unlink()
    assert run()[0] == 0


def test_results_before_and_after_share_a_row():
    story = RunData(
        "rlhf",
        facts={"results": {"reward before": 0.5, "reward after": 1.25, "kl after": 2.0}},
        train=[{"time": 12.5}],
    )
    assert course.result_rows("rlhf", story) == [
        ["rlhf", "12.5 s", "reward", "0.5", "1.25"],
        ["", "", "kl", "-", "2"],
    ]
    assert course.result_rows("sft", RunData("sft")) == [["sft", "0 s", "-", "-", "-"]]


def test_stopped_pipeline_says_how_to_go_on(run, monkeypatch):
    def stopped(self, command):
        self.received = signal.SIGTERM
        return 143

    monkeypatch.setattr(Relay, "run", stopped)
    code, said, _ = run(output_dir="out", overrides=["sft.seed=2"])
    assert code == 143
    assert said.splitlines()[-1] == (
        "error: stopped by SIGTERM in the stage sft; go on with: dschat-lora pipeline run.yaml "
        "--output_dir out --set sft.seed=2"
    )
