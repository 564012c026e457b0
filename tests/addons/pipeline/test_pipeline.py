"""A pipeline's file, its checks, what it remembers, and signals; stages are stood in for."""

import json
import os
import shutil
import signal
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from dschat_lora.addons.pipeline import run as course
from dschat_lora.addons.pipeline.recipe import check_stages, read_recipe
from dschat_lora.addons.report.run_data import RunData
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.commands.launch import Relay
from dschat_lora.commands.stages import options_of_file
from dschat_lora.config.options import build_config, command_line, parse_config
from dschat_lora.config.stages import RewardStageConfig, SupervisedConfig
from helpers.step1 import run as run_command
from helpers.step1 import write_adapter_config

ALL = "stages: {sft: {lora_dim: 8}, reward: {}, rlhf: {}}"


pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


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
@pytest.mark.parametrize(
    ("text", "stages"),
    [
        (
            ALL,
            {
                "sft": {"lora_dim": 8},
                "reward": {"model_name_or_path": "out/sft"},
                "rlhf": {
                    "actor_model_name_or_path": "out/sft",
                    "critic_model_name_or_path": "out/reward",
                },
            },
        ),
        (
            "stages: {sft: , dpo: , rlhf: }",  # the newest policy becomes the actor
            {
                "sft": {},
                "dpo": {"model_name_or_path": "out/sft"},
                "rlhf": {"actor_model_name_or_path": "out/dpo"},
            },
        ),
        ("stages: {reward: {}, sft: {}}", {"reward": {}, "sft": {}}),  # none is of a later stage
        (
            "common: {seed: 7, max_seq_len: 64, kl_coef: 0.2}\nstages: {sft: {}, rlhf: {}}",
            {
                "sft": {"seed": 7, "max_seq_len": 64},
                "rlhf": {"seed": 7, "kl_coef": 0.2, "actor_model_name_or_path": "out/sft"},
            },
        ),
    ],
    ids=["all", "policies", "later", "common"],
)
def test_stages_take_the_outputs_of_earlier_ones(recipe_of, text, stages):
    recipe = recipe_of(text)
    assert [*recipe.stages.items()] == [*stages.items()]


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


def test_options_are_typed_as_a_script_reads_them():
    values = {
        **{"lora_learning_rate": 1e-5, "packing": False, "print_loss": True},
        **{"modules_to_save": [], "data_path": ["a b", "c"], "eot_token": "--end"},
    }
    typed = command_line({**values, "data_split": None})
    assert parse_config(SupervisedConfig, typed) == build_config(SupervisedConfig, values)


REWARDED = "reward_function: ['builtin:length=12']"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sft: {}", {"lora_dim": 0}),
        ("sft: {lora_dim: 4}", {"lora_dim": 4}),
        ("dpo: {model_name_or_path: adapter}", {}),
        (f"rlhf: {{{REWARDED}}}", {"actor_lora_dim": 0}),
        (f"rlhf: {{actor_lora_dim: 4, {REWARDED}}}", {"actor_lora_dim": 4}),
        (
            "rlhf: {actor_model_name_or_path: adapter, critic_model_name_or_path: scorer}",
            {"critic_lora_dim": 0},
        ),
        ("sft: {}\n  dpo: {}", {}),  # of what is yet to be written
    ],
)
def test_stages_of_a_file_train_what_it_says_by_the_verbs_that_a_pipeline_runs(
    recipe_of, tmp_path, text, expected
):
    write_adapter_config(tmp_path / "adapter")
    shutil.copytree(BUNDLED_MODEL, "scorer")
    path = Path("scorer/config.json")
    fields = json.loads(path.read_text()) | {"architectures": ["OPTForSequenceClassification"]}
    path.write_text(json.dumps(fields))
    recipe = recipe_of(f"stages:\n  {text}")
    options = course._options(recipe, [*recipe.stages][-1], "begin")
    assert {n: value for n, value in options.items() if n.endswith("lora_dim")} == expected


def test_stage_takes_its_part_of_a_file_as_the_pipeline_would_run_it():
    recipe = read_recipe("bundled")
    options = options_of_file("rlhf", "bundled")
    assert options == {**recipe.stages["rlhf"], "output_dir": "output/bundled/rlhf"}
    assert options["actor_model_name_or_path"] == "output/bundled/sft"
    assert options["max_steps"] == 3


# ---------------------------------------------------------------------------- before the first


@pytest.mark.smoke
def test_stages_are_checked_as_if_the_earlier_outputs_were_there(recipe_of, capsys):
    recipe = recipe_of(ALL[:-1] + ", distill: {}}")
    before = sorted(Path().rglob("*"))
    checked = check_stages(recipe)
    assert capsys.readouterr().out == ""
    assert sorted(Path().rglob("*")) == before
    assert isinstance(checked["reward"], RewardStageConfig)
    # The adapter of sft goes on, in the reward model and in the actor; the critic is reward's.
    assert checked["reward"].lora.lora_dim == 8
    assert checked["rlhf"].actor.lora_dim == checked["rlhf"].critic.lora_dim == 8
    # A teacher that is yet to train has a placeholder too, and so have whole models.
    assert recipe.stages["distill"]["teacher_model_name_or_path"] == "out/rlhf"
    assert (checked["distill"].actor.lora_dim, checked["distill"].stage) == (8, "distill")
    whole = check_stages(recipe_of("stages: {sft: {}, reward: {}, rlhf: {}}"))
    assert whole["rlhf"].critic.lora_dim == 0


@pytest.mark.parametrize(
    ("options", "wrong", "message"),
    [
        ("lora_dim: 4, tensor_parallel_size: 2", 3, "size 2 does not divide the number of .* 3"),
        ("per_device_train_batch_size: 16, deepspeed_config: ds.json", 2, "train_batch_size"),
    ],
)
def test_processes_count_where_the_launcher_has_their_number(recipe_of, options, wrong, message):
    Path("ds.json").write_text(json.dumps({"train_batch_size": 64}), encoding="utf-8")
    stage = f"stages: {{sft: {{{options}}}}}"
    check_stages(recipe_of(stage))
    check_stages(recipe_of("launcher: {num_gpus: 4}\n" + stage))
    with pytest.raises(ValueError, match=message):
        check_stages(recipe_of(f"launcher: {{num_gpus: {wrong}}}\n{stage}"))
    assert "WORLD_SIZE" not in os.environ


def test_mistake_ends_the_command_at_once_in_one_line():
    written("stages: {sft: {}, reward: {}, rlhf: {kl_cof: 1}}")
    begun = time.monotonic()
    ended = run_command([sys.executable, "-m", "dschat_lora", "pipeline", "run.yaml"], ".")
    assert time.monotonic() - begun < 5
    message = "run.yaml: stage rlhf: unknown option --kl_cof; did you mean --kl_coef?"
    assert (ended.code, ended.out, ended.err) == (2, "", f"error: {message}\n")


# ---------------------------------------------------------------------------- stages in order


@pytest.fixture
def run(monkeypatch, capsys):
    """``run(orders, text, ...)``: (exit code, what was said, the stages' commands).

    ``orders`` has a word STATUS:CODE for each stage that is started, the last one for all others.
    """
    numbers = count()

    def call(orders="finished:0", text=ALL, **options):
        commands, words = [], orders.split()

        def run_stage(relay, command):
            commands.append(command[1:])
            status, code = words[min(len(commands), len(words)) - 1].split(":")
            relay.received = signal.SIGTERM if status == "stopped" else 0
            home = Path(command[command.index("--output_dir") + 1])
            if status != "nothing":
                (home / "adapter").mkdir(parents=True, exist_ok=True)
                record = {"status": status, "started": f"{next(numbers)}"}
                record["results"] = {"loss before": 2.0, "loss after": 1.0}
                (home / "run.json").write_text(json.dumps(record))
                (home / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "time": 90.0}\n')
            return int(code)

        code = 0
        with monkeypatch.context() as patch:
            patch.setattr(Relay, "run", run_stage)
            patch.setattr(course, "check_stages", lambda recipe, done: None)
            try:
                course.run_pipeline(written(text), **options)
            except SystemExit as end:
                code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err, commands

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
    assert "stage rlhf: finished, skipped" in said
    assert "sft     1.5 min    loss       2      1" in said


def test_stage_that_fails_ends_the_pipeline_and_goes_on_the_next_time(run):
    code, said, commands = run("finished:0 failed:7")
    assert code == 7
    assert len(commands) == 2
    assert said.splitlines()[-1] == (
        "error: the stage reward ended with exit code 7 (see its last lines); after fixing the "
        "cause, resume with: dschat-lora pipeline run.yaml"
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
        "now 3; restore them, or use --from reward to run it and all later stages again\n"
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
    assert "stage sft was begun with --lora_dim 8, which is no longer given; set it," in said
    assert run(text=text)[0] == 0


def test_stage_that_stands_on_one_to_be_finished_is_refused(run):
    run()
    record = json.loads(Path("out/sft/run.json").read_text())
    Path("out/sft/run.json").write_text(json.dumps({**record, "status": "running"}))
    code, said, commands = run()
    assert (code, commands) == (2, [])
    assert "stage reward depends on the stage sft, which is not finished; use --from sft" in said


def test_run_that_the_pipeline_did_not_make_is_refused(run):
    Path("out/sft/adapter").mkdir(parents=True)
    code, said, _ = run()
    assert code == 2
    assert "out/sft holds a run (adapter) that pipeline.json next to it does not list" in said
    assert run(redo_from="sft")[0] == 0


def test_dry_run_shows_commands_and_writes_nothing(run):
    code, said, commands = run(dry_run=True)
    assert (code, commands) == (0, [])
    assert "--model_name_or_path out/sft --output_dir out/reward" in said
    assert not Path("out").exists()


def test_second_pipeline_is_kept_out(run):
    with course.alone(Path("out"), "pipeline"):
        code, said, commands = run()
    assert (code, commands) == (2, [])
    assert "another pipeline is running in out" in said
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


def test_stopped_pipeline_says_how_to_go_on(run):
    code, said, _ = run("stopped:143", output_dir="out", overrides=["sft.seed=2"])
    assert code == 143
    assert said.splitlines()[-1] == (
        "error: stopped by SIGTERM in the stage sft; resume with: dschat-lora pipeline run.yaml "
        "--output_dir out --set sft.seed=2"
    )
