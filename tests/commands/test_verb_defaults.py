"""What verbs, Python and the scripts of training/ take where options do not say it."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

import dschat_lora as dl
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.checkpoint.adapter_config import read_adapter_config
from dschat_lora.checkpoint.history import step_directory
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.commands import train
from dschat_lora.config.addons import provided
from dschat_lora.config.options import build_config, flatten, parse_config
from dschat_lora.report.terminal import quiet
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.resume import options_to_keep
from helpers.step1 import metrics, write_adapter_config

DISTILL, TAUGHT = [*provided("stage")], "--teacher_system_prompt brief"
SCORED = ["--reward_function", "dschat_lora.world:reward"]


@pytest.fixture(autouse=True)
def elsewhere(own_directory, tmp_path, first_rows):
    """A directory with an adapter of rank 4, a reward model's, one of all weights, and files."""
    write_adapter_config(tmp_path / "adapter")
    shutil.copytree(BUNDLED_MODEL, tmp_path / "whole" / "model")
    shutil.copytree(BUNDLED_MODEL, tmp_path / "scorer")
    fields = json.loads(Path("scorer/config.json").read_text(encoding="utf-8"))
    fields["architectures"] = ["OPTForSequenceClassification"]
    Path("scorer/config.json").write_text(json.dumps(fields), encoding="utf-8")
    Path("silent.yaml").write_text("seed: 7\n", encoding="utf-8")
    Path("says.yaml").write_text("lora_dim: 8\n", encoding="utf-8")


@pytest.fixture
def checked(monkeypatch):
    """``checked(start, stage, words)``: the config that the verb, or the script, would train by."""

    def run_main(config_class, check, main, *, argv, read_file, **texts):
        found.append(check(parse_config(config_class, argv, read_file=read_file)))

    found = []
    monkeypatch.setattr(train, "run_main", run_main)

    def call(start, stage, words=""):
        argv = words.split()
        if start == "verb":
            train.stage(stage, argv)
        else:
            train.run_stage(stage, argv=argv)
        return found.pop()

    return call


@pytest.fixture
def launched(monkeypatch):
    """The command lines that go to DeepSpeed's launcher."""
    found = []
    monkeypatch.setattr(train, "launch_stage", lambda *given: found.append(given))
    return found


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
@pytest.mark.parametrize(
    ("words", "verb", "script"),
    [
        ("", 16, 0),
        ("--model_name_or_path whole", 16, 0),
        ("--lora_dim 0", 0, 0),
        ("--lora_dim 8", 8, 8),
        ("--model_name_or_path adapter", 4, 4),
        ("--config silent.yaml", 0, 0),
        ("--config=silent.yaml", 0, 0),
        ("--config=silent.yaml --model_name_or_path adapter", 4, 4),
        ("--config says.yaml", 8, 8),
        ("--config silent.yaml --lora_dim 2", 2, 2),
        ("--resume_from_checkpoint auto --output_dir new", 16, 0),
        ("--num_train_epochs 0", 0, 0),
    ],
)
def test_verbs_train_adapters_of_rank_16_where_nothing_says_a_rank(
    checked, stage, words, verb, script
):
    if words.endswith("says.yaml"):
        words += " --lora_alpha 8"
    assert checked("verb", stage, words).lora.lora_dim == verb
    assert checked("script", stage, words).lora.lora_dim == script


@pytest.mark.parametrize(
    ("words", "verb", "script"),
    [
        ("", (16, 16), (0, 0)),
        ("--actor_lora_dim 0", (0, 0), (0, 0)),
        ("--actor_lora_dim 8", (8, 8), (8, 8)),
        ("--critic_lora_dim 8", (16, 8), (0, 8)),
        ("--actor_model_name_or_path adapter", (4, 4), (4, 4)),
        ("--critic_model_name_or_path scorer", (16, 16), (0, 0)),
        ("--critic_model_name_or_path scorer --actor_lora_dim 8", (8, 16), (8, 0)),
        (
            "--critic_model_name_or_path scorer --actor_lora_dim 0 --critic_lora_dim 0",
            (0, 0),
            (0, 0),
        ),
        ("--algorithm grpo --critic_model_name_or_path scorer", (16, 0), (0, 0)),
    ],
)
def test_roles_of_step_3_have_adapters_of_rank_16_likewise(checked, words, verb, script, capsys):
    for start, expected in {"verb": verb, "script": script}.items():
        config = checked(start, "rlhf", " ".join([words, *SCORED]))
        assert (config.actor.lora_dim, config.critic.lora_dim) == expected
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "words", "role", "verb", "script"),
    [
        ("sft", "--lora_dim 4 --learning_rate 1e-3", "", 1e-3, None),
        ("sft", "--learning_rate 1e-3", "", 1e-3, None),
        ("sft", "--lora_dim 0 --learning_rate 1e-3", "", None, None),
        ("sft", "--learning_rate 1e-3 --model_name_or_path adapter", "", 1e-3, None),
        ("sft", "--config says.yaml --learning_rate 1e-3", "", 1e-3, None),
        ("sft", "--config silent.yaml --learning_rate 1e-3", "", None, None),
        ("sft", "--learning_rate 1e-3 --lora_learning_rate 2e-3", "", 2e-3, 2e-3),
        ("sft", "--learning_rate 1e-3 --lora_lr_multiplier 2", "", None, None),
        ("sft", "--learning_rate auto", "", None, None),
        ("sft", "--learning_rate 1e-3 --no-only_optimize_lora", "", None, None),
        ("dpo", "--lora_dim 4 --learning_rate 1e-3", "", 1e-3, None),
        ("rlhf", "--actor_learning_rate 1e-3", "actor_", 1e-3, 5e-4),
        ("rlhf", "--actor_learning_rate 1e-3", "critic_", 5e-4, 5e-4),
        *((each, f"--learning_rate 1e-3 {TAUGHT}", "actor_", 1e-3, 5e-4) for each in DISTILL),
        ("rlhf", "--critic_learning_rate 1e-3", "critic_", 1e-3, 5e-4),
        ("rlhf", "--actor_lora_dim 0 --critic_learning_rate 1e-3", "critic_", 5e-4, 5e-4),
        ("rlhf", "--actor_lora_dim 0 --critic_lora_dim 4 --critic_learning_rate 1e-3", "critic_",
         1e-3, 5e-4),
    ],
)  # fmt: skip
def test_a_learning_rate_beside_adapters_is_theirs_in_verbs(
    checked, stage, words, role, verb, script
):
    words = " ".join([words, *(SCORED if stage == "rlhf" else [])])
    for start, expected in {"verb": verb, "script": script}.items():
        assert flatten(checked(start, stage, words))[f"{role}lora_learning_rate"] == expected


def test_a_rate_without_effect_is_noted_where_nothing_else_is_said(checked, capsys):
    said = (
        "--learning_rate has no effect: only adapters are trained, at --lora_learning_rate 0.0005"
    )
    checked("script", "sft", "--lora_dim 4 --learning_rate 1e-3")
    assert said in capsys.readouterr().out
    checked("verb", "sft", "--lora_dim 4 --learning_rate 1e-3")
    assert "learning_rate" not in capsys.readouterr().out
    with quiet(), pytest.warns(UserWarning, match=said):
        checked("script", "sft", "--lora_dim 4 --learning_rate 1e-3")
    words = " ".join(["--actor_lora_dim 4 --actor_learning_rate 1e-3", *SCORED])
    with quiet(), pytest.warns(UserWarning, match="--actor_learning_rate .* 0.0005"):
        checked("script", "rlhf", words)
    assert capsys.readouterr().out == ""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("error")
        checked("verb", "sft", "--lora_dim 4 --learning_rate 1e-3")
        checked("verb", "rlhf", words)


@pytest.mark.parametrize("words", ["--target_modules q_proj", "--base_bits 4"])
def test_options_of_adapters_need_no_rank_in_verbs(checked, launched, words):
    assert checked("verb", "sft", words).lora.lora_dim == 16
    with pytest.raises(ValueError, match="--lora_dim"):
        checked("script", "sft", words)
    train.stage("sft", f"--num_gpus 2 {words}".split())
    assert launched[0][2] == words.split()
    with pytest.raises(ValueError, match="--lora_dim"):
        train.stage("sft", f"--num_gpus 2 --config silent.yaml {words}".split())


# ---------------------------------------------------------------------------- resumed runs


@pytest.fixture
def earlier(checked, tmp_path):
    """``earlier(start, words)``: a checkpoint of a run of SFT, in ``out``."""

    def make(start, words):
        config = checked(start, "sft", f"{words} --output_dir out")
        home = step_directory(tmp_path / "out", 5)
        home.mkdir(parents=True)
        rows = config.batch.per_device_train_batch_size
        state = {
            "step": 5,
            "identity": {"stage": "sft", "rows_per_step": rows},
            "options": options_to_keep(config),
            "config": flatten(config),
        }
        (home / "state.json").write_text(json.dumps(state), encoding="utf-8")
        write_manifest(home, kind="checkpoint")
        (tmp_path / "out" / "run.json").write_text("{}", encoding="utf-8")

    return make


@pytest.mark.parametrize(
    ("begun", "words", "more", "rank", "rate"),
    [
        ("script", "", "", 0, None),
        ("verb", "", "", 16, None),
        ("verb", "--learning_rate 1e-3", "", 16, 1e-3),
        ("verb", "--learning_rate 1e-3", "--learning_rate 1e-3", 16, 1e-3),
        ("script", "--lora_dim 4 --learning_rate 1e-3", "", 4, None),
        ("script", "--lora_dim 4 --learning_rate 1e-3", "--learning_rate 1e-3", 4, None),
        ("script", "--model_name_or_path adapter", "", 4, None),
    ],
)
def test_a_resumed_run_keeps_what_it_had_by_whatever_it_is_resumed(
    earlier, checked, begun, words, more, rank, rate
):
    earlier(begun, words)
    for how in ("latest", "auto"):
        for start in ("verb", "script"):
            resume = f"--resume_from_checkpoint {how} --output_dir out {more}"
            config = checked(start, "sft", resume)
            assert (config.lora.lora_dim, config.optim.lora_learning_rate) == (rank, rate)


@pytest.mark.parametrize(
    ("words", "more", "rate"),
    [
        ("--learning_rate 1e-3", "--learning_rate 2e-3", 2e-3),
        ("", "--learning_rate 2e-3", 2e-3),
        ("--learning_rate 1e-3", "--learning_rate 2e-3 --lora_learning_rate 1e-3", 1e-3),
        ("--lora_lr_multiplier 3", "--learning_rate 2e-3", None),
    ],
)
def test_another_rate_that_a_resumed_run_is_given_is_its_adapters(
    earlier, checked, words, more, rate
):
    earlier("verb", words)
    config = checked("verb", "sft", f"--resume_from_checkpoint out {more}")
    assert config.optim.lora_learning_rate == rate


# ---------------------------------------------------------------------------- data


@pytest.mark.parametrize("start", ["verb", "script"])
@pytest.mark.parametrize(
    ("stage", "role", "more"),
    [
        ("sft", "", ""),
        ("reward", "", ""),
        ("dpo", "", ""),
        ("rlhf", "actor_", " ".join(SCORED)),
        *((each, "actor_", TAUGHT) for each in DISTILL),
    ],
)
def test_the_bundled_data_is_for_the_bundled_model_and_what_is_made_of_it(
    checked, start, stage, role, more
):
    option = f"--{role}model_name_or_path"
    line = f"add --data_path FILE, as in dschat-lora {stage} {option} some/model --data_path FILE"
    with pytest.raises(ValueError, match=line) as error:
        checked(start, stage, f"{option} some/model {more}")
    assert "\n" not in str(error.value)
    data = f"--data_path {BUNDLED_DATA['train']}"
    checked(start, stage, f"{option} some/model {data} {more}")
    for own in ("adapter", "whole"):
        checked(start, stage, f"{option} {own} {more}")


def test_an_adapter_on_another_base_needs_data_too(checked, tmp_path):
    write_adapter_config(tmp_path / "foreign", base_model_name_or_path="some/model")
    with pytest.raises(ValueError, match="--model_name_or_path .*foreign needs --data_path"):
        checked("verb", "sft", "--model_name_or_path foreign")


def test_python_asks_for_data_as_the_command_does():
    with pytest.raises(ValueError, match="dschat-lora sft --model_name_or_path some/model --data"):
        dl.sft("some/model")


# ---------------------------------------------------------------------------- responses


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"algorithm": "reinforce_pp"}, 1),
        *(
            ({"algorithm": name}, 8)
            for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
        ),
        ({"algorithm": "reinforce_pp_baseline"}, 8),
        ({"algorithm": "grpo", "num_generations": 4}, 4),
        ({"algorithm": "grpo", "per_device_generation_batch_size": 4}, 4),
        ({"algorithm": "grpo", "per_device_generation_batch_size": 12}, 6),
        ({"algorithm": "grpo", "per_device_generation_batch_size": 8}, 8),
    ],
)
def test_algorithms_that_compare_responses_draw_8_to_a_prompt(options, expected):
    assert build_config(RlhfConfig, options).batch.num_generations == expected


# ---------------------------------------------------------------------------- runs


@pytest.mark.stage
def test_runs_have_adapters_on_all_linear_layers_at_the_rate_that_was_typed():
    short = {"max_steps": 1, "eval_iters": 1, "quiet": True}
    run = dl.sft(learning_rate=1e-3, sample_generations=0, **short)
    tuned = dl.rlhf(
        rewards="dschat_lora.world:reward",
        algorithm="grpo",
        actor_learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_answer_seq_len=8,
        eval_prompts=0,
        print_answers_interval=0,
        **short,
    )
    for each, rate in {run: 1e-3, tuned: 2e-3}.items():
        config = read_adapter_config(each.adapter)
        assert config.r == 16
        names = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
        assert {name.rpartition(".")[2] for name in config.target_modules} == {*names}
        assert rate in metrics(each.path, "train")[0].values()
    assert tuned.record["config"]["num_generations"] == 8
