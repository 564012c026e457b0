"""What is no number: NaN and infinities in weights, rewards and losses, and options at extremes.

Each run ends in one line that names what was wrong, and leaves nothing that could pass for a
result; or what is wrong is left out and counted.
"""

import json
import math
import shutil
import sys
from collections import namedtuple
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from unittest import mock

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dschat_lora import __main__ as command
from dschat_lora.algos.tensors import is_finite
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.engine.process_group import shutdown
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunction, RewardSum, ScoreError, Scores
from dschat_lora.rl.score.user_functions import TrainerState
from helpers.addons import has_verb
from helpers.glue_toys import save_encoder, write_task
from helpers.rlhf_course import save_family, write_prompts, write_turns_template
from helpers.roles import Words
from helpers.spread import ALL
from helpers.step1 import metrics, write_jsonl

NAN, INF = math.nan, math.inf
Q = "model.decoder.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.decoder.embed_tokens.weight"
RUN = "--max_seq_len 32 --max_steps 2 --per_device_train_batch_size 4 --save_interval 1"
RUN += " --sample_generations 0 --output_dir out"
SFT = f"sft --model_name_or_path MODEL --data_path sft.jsonl --eval_data_path sft.jsonl {RUN}"
REWARD = f"reward --model_name_or_path MODEL --data_path pairs.jsonl {RUN}"
DPO = f"dpo --model_name_or_path MODEL --data_path pairs.jsonl --eval_data_path pairs.jsonl {RUN}"
RLHF = """
    rlhf --actor_model_name_or_path opt/actor --data_path prompts.jsonl --eval_prompts 2
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --num_generations 2 --save_interval 1
    --per_device_generation_batch_size 8 --per_device_training_batch_size 8 --max_steps 4
    --output_dir out
"""
FUNCTIONS = """
import sys

calls = []


def distinct(responses):
    return [float(len(set(text))) for text in responses]


def breaks(responses):
    calls.append(len(responses))
    return [float("nan") if len(calls) > 4 else 1.0 * n for n, _ in enumerate(responses)]


def some(responses):
    return [None if n % 3 == 0 else 1.0 * n for n, _ in enumerate(responses)]


def prints(responses):
    print("to the standard output")
    return [1.0] * len(responses)


def nothing(responses):
    return [None] * len(responses)


def large(responses):
    return [3e38] * len(responses)


def huge(responses):
    return [1e300] * len(responses)


def ends(responses):
    sys.exit(0)


def switches(responses):
    import torch

    torch.set_grad_enabled(False)
    return [1.0 * n for n, _ in enumerate(responses)]
"""

Ended = namedtuple("Ended", "code out err")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with tiny models and data, in which commands run in this process."""
    directory = tmp_path_factory.mktemp("numbers")
    save_family("opt", directory / "opt", layers=1)
    write_prompts(directory / "prompts.jsonl", 16)
    write_turns_template(directory / "turns.jinja")
    letters = ["ab" + "cdefgh"[n % 6] * (n % 5 + 1) for n in range(16)]
    write_jsonl(
        directory / "sft.jsonl",
        [{"prompt": text, "completion": "xyz"[n % 3] * 2} for n, text in enumerate(letters)],
    )
    pairs = [
        {"prompt": text, "chosen": "xyz"[n % 3] * 2, "rejected": "pq"[n % 2] * 3}
        for n, text in enumerate(letters)
    ]
    write_jsonl(directory / "pairs.jsonl", pairs)
    same = [{**pair, "rejected": pair["chosen"]} for pair in pairs]
    write_jsonl(directory / "same.jsonl", same)
    write_jsonl(directory / "some_same.jsonl", same[:8] + pairs[8:])
    write_jsonl(directory / "token.jsonl", [{"text": "a"}] * 8)
    write_jsonl(directory / "prompt.jsonl", [{"prompt": "a"}])
    (directory / "numbers_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.syspath_prepend(directory)
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            patch.setenv(name, "1")
        for name in ("LOCAL_RANK", "RANK"):
            patch.setenv(name, "0")
        # As a run does, whose own group is the tests': nothing is compiled.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield directory
        shutdown()  # with what DeepSpeed remembers of the group


@pytest.fixture
def run(home, capsys, monkeypatch):
    """``run(line)``: how the command ended, whose process group is the tests'."""

    def call(line, *, keep=False):
        if not has_verb(line.split()[0]):
            pytest.skip("the verb is of an add-on that is not there")
        if not keep:
            shutil.rmtree(home / "out", ignore_errors=True)
        sys.modules.pop("numbers_functions", None)
        monkeypatch.setattr(sys, "argv", ["dschat-lora", *line.split()])
        capsys.readouterr()
        code = 0
        with (
            mock.patch("dschat_lora.runtime.run.init_distributed"),
            mock.patch("dschat_lora.runtime.run.shutdown"),
        ):
            try:
                command.main()
            except SystemExit as end:
                code = end.code
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(run, home):
    """``refused(line)``: the words of a command that ends in one line, and leaves no result."""

    def call(line, *, keep=False):
        ended = run(line, keep=keep)
        assert ended.code == 2, ended
        *_, last = ended.err.splitlines()
        assert last.startswith("error: "), ended.err
        assert "Traceback" not in ended.err
        if not keep:
            assert not list(home.glob("out/**/adapter_model.safetensors"))
        for checkpoint in checkpoints_of(home / "out"):
            for path in checkpoint.glob("*.safetensors"):
                assert all(map(is_finite, load_file(path).values())), path
        return last

    return call


def spoilt(source, name, value, *, file="model.safetensors"):
    """A copy ``spoilt`` of a model with ``value`` in place of a weight, or times a number."""
    shutil.rmtree("spoilt", ignore_errors=True)
    shutil.copytree(source, "spoilt")
    tensors = load_file(Path("spoilt", file))
    if callable(value):
        tensors[name] = value(tensors[name])
    else:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, Path("spoilt", file), metadata={"format": "pt"})


# ---------------------------------------------------------------------------- weights

LOADS = {
    "sft": SFT.replace("MODEL", "spoilt"),
    "sft of 4 bits": SFT.replace("MODEL", "spoilt") + " --base_bits 4 --lora_dim 2",
    "reward": REWARD.replace("MODEL", "spoilt"),
    "dpo": DPO.replace("MODEL", "spoilt"),
    "eval": "eval spoilt sft.jsonl",
    "eval of pairs": "eval spoilt pairs.jsonl --json",
    "generate": "generate spoilt ab --max_new_tokens 4",
}


@pytest.mark.parametrize("value", [NAN, INF, -INF] if ALL else [NAN])
@pytest.mark.parametrize("line", LOADS.values(), ids=LOADS)
def test_weight_of_a_base_that_is_not_finite_is_named_before_anything_is_computed(
    refused, line, value
):
    spoilt("opt/base", Q, value)
    assert f"{Q} holds values that are not finite" in refused(line)


REWARD_MODELS = {
    "score": "score spoilt pairs.jsonl",
    "eval": "eval spoilt pairs.jsonl",
    "eval of own answers": "eval opt/actor prompts.jsonl --reward_model spoilt --max_new_tokens 4",
    **{
        algorithm: f"{RLHF} --algorithm {algorithm} --critic_model_name_or_path spoilt"
        for algorithm in ("ppo", "rloo", "grpo")
    },
}


@pytest.mark.parametrize("name", ["score.weight", EMBEDDING] if ALL else ["score.weight"])
@pytest.mark.parametrize("line", REWARD_MODELS.values(), ids=REWARD_MODELS)
def test_weight_of_a_reward_model_that_is_not_finite_is_named(refused, line, name):
    spoilt("opt/whole", name, NAN)
    assert f"{name} holds values that are not finite" in refused(line)


@pytest.mark.parametrize(
    "line", ["generate spoilt ab --max_new_tokens 4", "merge spoilt --output_dir merged"]
)
@pytest.mark.parametrize("value", [NAN, INF])
def test_factor_of_an_adapter_that_is_not_finite_is_named(refused, line, value):
    name = f"base_model.model.{Q.replace('.weight', '.lora_B.weight')}"
    spoilt("opt/actor", name, value, file="adapter_model.safetensors")
    assert "q_proj.lora_B holds values that are not finite" in refused(line)
    assert not Path("merged").exists()


def test_base_of_an_adapter_that_is_not_finite_is_not_merged(refused):
    spoilt("opt/base", Q, NAN)
    shutil.copytree("opt/actor", "on_spoilt", dirs_exist_ok=True)
    config = json.loads(Path("opt/actor/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "spoilt"
    Path("on_spoilt/adapter_config.json").write_text(json.dumps(config))
    assert f"{Q} holds values that are" in refused("merge on_spoilt --output_dir merged")
    assert not Path("merged").exists()


@pytest.mark.parametrize("alpha", ["1e300", "1e-300", "Infinity", "NaN", "1" + "0" * 400])
def test_scaling_beyond_fp32_is_no_adapter(refused, alpha):
    shutil.copytree("opt/actor", "on_spoilt", dirs_exist_ok=True)
    text = Path("opt/actor/adapter_config.json").read_text()
    assert '"lora_alpha": 8' in text
    Path("on_spoilt/adapter_config.json").write_text(
        text.replace('"lora_alpha": 8', f'"lora_alpha": {alpha}')
    )
    assert "lora_alpha is " in refused("eval on_spoilt sft.jsonl")


def test_merge_that_overflows_in_fp16_is_not_written(refused):
    spoilt(
        "opt/actor",
        "base_model.model." + Q.replace(".weight", ".lora_B.weight"),
        1e7,
        file="adapter_model.safetensors",
    )
    line = refused("merge spoilt --output_dir merged --dtype fp16 --merge_max_kl 1e9")
    assert f"the model is not saved: {Q} holds values that are not finite" in line
    assert not Path("merged").exists()


# ---------------------------------------------------------------------------- checkpoints


def spoil_state(checkpoint, part, value):
    """Put ``value`` into a tensor whose name begins with ``part``; returns file and name."""
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = next(each for each in tensors if each.startswith(part))
    tensors[name].view(-1)[0] = value
    save_file(tensors, path)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, kind="checkpoint")
    return path, name


STATES = {
    "moment": ("exp_avg:", NAN),
    "second moment": ("exp_avg_sq:", INF),
    "weight": ("weight:", NAN),
}


@pytest.mark.parametrize(("part", "value"), STATES.values(), ids=STATES)
@pytest.mark.parametrize("stage", ["sft", "ppo"] if ALL else ["sft"])
def test_state_of_a_checkpoint_that_is_not_finite_is_named_with_its_file(
    run, refused, home, stage, part, value
):
    line = SFT.replace("MODEL", "opt/base") + " --lora_dim 2"
    if stage == "ppo":
        line = f"{RLHF} --critic_model_name_or_path opt/reward"
    assert run(line.replace("--max_steps 4", "--max_steps 2")).code == 0
    newest, *_ = checkpoints_of(home / "out")
    path, name = spoil_state(newest, part, value)
    more = line.replace("--max_steps 2", "--max_steps 4") + " --resume_from_checkpoint latest"
    ended = run(more, keep=True)
    assert ended.code == 2
    assert f"{path}: {name} holds values that are not finite" in ended.err
    assert [path.name for path in checkpoints_of(home / "out")] == [
        "step-00000002",
        "step-00000001",
    ]


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["0", "3"])
def test_all_processes_end_where_one_reads_what_is_not_finite(launcher, run, home, stage):
    line = (
        SFT.replace("MODEL", "opt/base").removeprefix("sft") + f" --lora_dim 2 --zero_stage {stage}"
    )
    assert run(f"sft {line}").code == 0
    newest, *_ = checkpoints_of(home / "out")
    spoil_state(newest, "exp_avg:", NAN)
    spoilt("opt/base", Q, NAN)
    halves = "train_batch_size 4", "train_batch_size 2"
    for argv, words in (
        (
            line.replace("max_steps 2", "max_steps 3") + " --resume_from_checkpoint latest",
            "exp_avg:",
        ),
        (line.replace("opt/base", "spoilt").replace("dir out", "dir other"), Q),
    ):
        running = launcher.start(argv.replace(*halves).split(), home, ranks=2)
        assert running.wait(60) == [2, 2]
        assert running.err().count("error: ") == 1
        assert words in running.err()
        assert "Traceback" not in running.err()


# ---------------------------------------------------------------------------- training


def test_run_of_which_every_step_was_skipped_is_not_finished(refused):
    line = refused(DPO.replace("MODEL", "opt/base") + " --lora_dim 2 --beta 1e30")
    assert "training stopped at step 2: the gradient was not finite 2 times in a row" in line
    assert "There is no checkpoint yet" in line


def test_run_that_ends_with_a_loss_that_is_not_finite_is_not_finished(refused, home):
    line = refused(SFT.replace("MODEL", "opt/base") + " --lora_dim 2 --lora_learning_rate 1e30")
    assert "the held-out loss after step 2 is nan: the learning rate may be too high" in line
    assert [each.name for each in checkpoints_of(home / "out")] == ["step-00000001"]


def test_base_that_overflows_on_held_out_rows_is_not_trained(refused, home):
    spoilt("opt/base", EMBEDDING, lambda table: table * 1e30)
    line = refused(SFT.replace("MODEL", "spoilt") + " --lora_dim 2")
    assert "the held-out loss after step 0 is nan: try --dtype bf16 or fp32" in line
    assert not metrics(home / "out", "train")


def test_weights_that_a_step_destroyed_are_named(refused, home):
    # By a decay of more than all of a weight, to an infinity.
    line = SFT.replace("MODEL", "opt/base") + " --lora_dim 2 --max_steps 5"
    line += " --weight_decay 1e30 --lora_learning_rate 1e30"
    words = refused(line.replace("--save_interval 1", "--save_interval 0"))
    assert "weight:model.decoder.layers.0" in words
    assert "lora_A holds values that are not finite. Lower the learning rate" in words
    words = refused(line)
    assert "step-00000001 was not written: weight:model.decoder.layers.0" in words
    assert not checkpoints_of(home / "out")


def test_actor_that_can_answer_nothing_any_more_is_not_finished(refused, home):
    line = f"{RLHF} --algorithm rloo --reward_function numbers_functions:distinct --max_steps 1"
    words = refused(f"{line} --actor_lora_learning_rate 1e30")
    assert "stopped after step 1: no token can be drawn: the model's logits are not finite" in words
    assert not checkpoints_of(home / "out")
    words = refused(f"{line} --actor_lora_learning_rate 1e30 --max_steps 2 --eval_prompts 0")
    assert "stopped after step 1: no token can be drawn" in words
    assert words.endswith("step-00000001")


EXTREMES = {
    "KL in PPO's rewards": "--algorithm ppo --critic_model_name_or_path opt/reward --kl_coef 1e30",
    "KL in RLOO's rewards": "--algorithm rloo --kl_coef 1e30",
    "KL in GRPO's loss": "--algorithm grpo --kl_coef 1e30",
    "critic's rate": "--algorithm ppo --critic_lora_learning_rate 1e30",
    "penalty": "--algorithm ppo --missing_eos_penalty 1e30",
}


@pytest.mark.parametrize("options", EXTREMES.values() if ALL else [EXTREMES["KL in PPO's rewards"]])
def test_extreme_options_of_step_3_end_by_name_with_the_last_good_checkpoint(refused, options):
    line = refused(f"{RLHF} --reward_function numbers_functions:distinct {options}")
    assert "training stopped at step " in line
    assert "the gradient was not finite 3 times in a row" in line
    assert line.endswith(("step-00000001", "There is no checkpoint yet"))


def test_classifier_that_diverges_ends_at_once_and_keeps_no_checkpoint(refused, home):
    save_encoder("roberta", home / "encoder")
    write_task("sst2", home / "sst2")
    line = """
        glue --model_name_or_path encoder --task_name sst2 --data_dir sst2 --apply_lora
        --num_train_epochs 2 --output_dir out --learning_rate 1e30
    """
    words = refused(f"{line} --logging_steps 1")
    assert "training stopped at step 2: the loss is nan; lower --learning_rate" in words
    if not ALL:
        return
    words = refused(f"{line} --logging_steps 500 --save_strategy epoch")
    assert "checkpoint-3 was not written: roberta.encoder.layer.0" in words
    spoilt(home / "encoder", "encoder.layer.0.attention.self.query.weight", NAN)
    words = refused(line.replace("encoder --task", "spoilt --task"))
    assert "attention.self.query.weight holds values that are not finite" in words


# ---------------------------------------------------------------------------- options

OPTIONS = {
    "sft": [*("lora_learning_rate", "lora_alpha", "weight_decay", "max_grad_norm"), "adam_epsilon"],
    "dpo": ["beta", "simpo_gamma"],
    "rlhf": [
        *("kl_coef", "temperature", "cliprange", "clip_reward_value", "importance_cap"),
        *("reward_weights", "adaptive_kl_target", "missing_eos_penalty", "entropy_coef"),
    ],
    "generate": ["temperature"],
}


@pytest.mark.parametrize("value", ["1e300", "-1e39", "1e-300"])
@pytest.mark.parametrize(
    ("verb", "option"), [(verb, option) for verb, names in OPTIONS.items() for option in names]
)
def test_number_that_fp32_would_turn_into_another_is_refused(run, verb, option, value):
    ended = run(f"{verb} --{option}={value}")
    words = f"--{option}: must be 0 or of a size from 1e-30 to 1e+30, got '{value}'"
    assert ended == (2, "", f"error: {words}\n")


# ---------------------------------------------------------------------------- rewards

RESPONSES = [Response((5, n), (7, n, 2), True, n) for n in (3, 4, 6)]
UNDRAWN = replace(RESPONSES[0], undrawn=True)


def score_of(found):
    return RewardFunction("reward_function", "mine:score", lambda responses: found, Words())


SCORES = {
    "numbers": ([1, 2.5, -3], [1.0, 2.5, -3.0]),
    "bools": ([True, False, True], [1.0, 0.0, 1.0]),
    "array": (np.arange(3) / 2, [0.0, 0.5, 1.0]),
    "array of fp16": (np.ones(3, dtype=np.float16), [1.0] * 3),
    "tensor": (torch.tensor([1, 2, 3]), [1.0, 2.0, 3.0]),
    "tensor with gradient": (torch.ones(3, requires_grad=True) * 2, [2.0] * 3),
    "tensors with gradient": ([torch.tensor(1.5, requires_grad=True)] * 3, [1.5] * 3),
    "fractions": ([Fraction(1, 4), Decimal("0.5"), np.float32(2)], [0.25, 0.5, 2.0]),
    "largest": ([3.4e38, -3.4e38, 1e-300], [3.4e38, -3.4e38, 1e-300]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("found", "expected"), SCORES.values(), ids=SCORES)
def test_whatever_is_a_number_is_a_score(found, expected):
    assert score_of(found).own_scores(RESPONSES) == expected


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


NO_SCORES = {
    "beyond fp32": ([1.0, 1e300, 1.0], "returned 1e+300 for the prompt '5 4'"),
    "just beyond fp32": ([3.5e38] * 3, "returned 3.5e+38 for"),
    "negative infinity": ([0.0, 0.0, -INF], "returned -inf for the prompt '5 6'"),
    "NaN for some": ([1.0, NAN, 1.0], "returned nan for the prompt '5 4'"),
    "NaN in an array": (np.array([1.0, NAN, 1.0]), "returned nan for"),
    "NaN in a tensor": (torch.tensor([NAN] * 3), "returned tensor(nan) for"),
    "integer without end": ([10**400] * 3, "returned 1000000"),
    "text": (["good"] * 3, "returned 'good' for"),
    "text of NaN": (["nan"] * 3, "returned 'nan' for"),
    "half an emoji": (["\ud83d"] * 3, "returned '\\ud83d' for"),
    "lists": ([[1.0]] * 3, "returned [1.0] for"),
    "lists without end": ([nested(3000)] * 3, "returned [[[[[[[...]]]]]]] for"),
    "rows of an array": (np.ones((3, 2)), "returned [1.0, 1.0] for"),
    "complex numbers": ([1j] * 3, "returned 1j for"),
    "dicts": ([{}] * 3, "returned {} for"),
    "one text": ("abc", "returned a str for 3 responses"),
    "bytes": (b"abc", "returned a bytes for"),
    "generator": ((n for n in range(3)), "returned a generator for"),
    "map": (map(float, range(3)), "returned a map for"),
    "dict": ({1: 1, 2: 2, 3: 3}, "returned a dict for"),
    "set": ({1, 2, 3}, "returned a set for"),
    "nothing": (None, "returned a NoneType for"),
    "number": (1.0, "returned a float for"),
    "number of an array": (np.float64(1), "returned a float for"),
    "number of a tensor": (torch.tensor(1.0), "returned a Tensor for"),
    "too few": ([1.0], "returned 1 scores for 3 responses"),
    "too many": ([1.0] * 4, "returned 4 scores for"),
    "none": ([], "returned 0 scores for"),
}


@pytest.mark.parametrize(("found", "words"), NO_SCORES.values(), ids=NO_SCORES)
def test_whatever_is_no_score_is_named_in_one_short_line(found, words):
    with pytest.raises(ValueError, match=r"^[^\n]{,400}$") as caught:
        score_of(found).own_scores(RESPONSES)
    assert str(caught.value).startswith(f"--reward_function mine:score {words}")


@pytest.mark.parametrize("options", [{}, {"retries": 1}, {"timeout": 5.0}])
def test_function_that_ends_the_program_does_not_end_the_run_as_if_it_were_done(options):
    def score(responses):
        sys.exit(0)

    function = RewardFunction("reward_function", "mine:score", score, Words(), **options)
    with pytest.raises(RuntimeError, match="--reward_function mine:score called sys.exit"):
        function.own_scores(RESPONSES)


def test_function_that_ends_the_program_ends_a_run_with_its_error(run, home):
    with pytest.raises(RuntimeError, match="--reward_function numbers_functions:ends called sys"):
        run(f"{RLHF} --algorithm rloo --reward_function numbers_functions:ends")
    with pytest.raises(RuntimeError, match="--judge_function numbers_functions:ends called sys"):
        run(
            "eval opt/actor prompts.jsonl --judge_function numbers_functions:ends "
            "--max_new_tokens 4"
        )


def test_function_that_fails_late_leaves_the_last_whole_iteration(refused, home):
    line = refused(
        f"{RLHF} --algorithm rloo --reward_function numbers_functions:breaks --save_interval 0"
    )
    assert "--reward_function numbers_functions:breaks returned nan for the prompt" in line
    assert [each.name for each in checkpoints_of(home / "out")] == ["step-00000002"]


def test_response_without_a_score_is_left_out_and_counted(run, home):
    assert run(f"{RLHF} --algorithm rloo --reward_function numbers_functions:some").code == 0
    for line in metrics(home / "out", "train"):
        assert line["dropped"] == -(-line["samples"] // 3)
        assert math.isfinite(line["loss"])


def test_function_that_switches_gradients_off_does_so_for_itself(run, home):
    assert run(f"{RLHF} --algorithm rloo --reward_function numbers_functions:switches").code == 0
    assert torch.is_grad_enabled()
    assert all(line["grad_norm"] > 0 for line in metrics(home / "out", "train"))


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "grpo"] if ALL else ["ppo"])
def test_reward_model_that_overflows_is_named_with_prompt_and_response(refused, algorithm):
    spoilt("opt/whole", "score.weight", lambda weight: weight * 2e38)
    line = refused(f"{RLHF} --algorithm {algorithm} --critic_model_name_or_path spoilt")
    assert "error: the reward model gives" in line
    assert "after the prompt 'ocdgnaxfd'; a score is a finite number" in line


def test_sum_of_rewards_that_overflows_within_an_iteration_is_named(run):
    ended = run(
        f"{RLHF} --algorithm rloo --reward_weights 1e30 1e30 --eval_prompts 0 "
        "--reward_function numbers_functions:distinct numbers_functions:large"
    )
    assert ended.code == 2
    assert "stopped by a score that failed after step 0" in ended.out
    assert "error: the weighted sum of rewards gives inf for" in ended.err


@dataclass(frozen=True)
class Given:
    """Scores that are given by name."""

    scores: dict

    def __call__(self, responses, state):
        by_name = {name: torch.tensor(values) for name, values in self.scores.items()}
        return Scores(torch.zeros(len(responses)), by_name)


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ({"reward_model": [1.0, NAN, 2.0]}, "the reward model gives nan for"),
        ({"mine": [NAN, 1.0, 2.0]}, None),
        ({"mine": [NAN, 0.0, 1.0], "reward_model": [1.0] * 3}, None),
        ({"mine": [NAN] * 3, "reward_model": [0.0, INF, 0.0]}, "the reward model gives inf for"),
        ({"mine": [0.0, -3e38, 0.0]}, "the weighted sum of rewards gives -inf for"),
    ],
)
def test_score_is_no_number_by_the_model_and_left_out_by_a_function(rewards, words):
    scorer = RewardSum((Given(rewards),), dict.fromkeys(rewards, 2.0), Words().decode)
    if words is None:
        scorer(RESPONSES, TrainerState())
        return
    # Left out, whatever its score is.
    assert scorer([UNDRAWN] * 3, TrainerState()).total.isnan().all()
    with pytest.raises(ScoreError) as caught:
        scorer(RESPONSES, TrainerState())
    assert str(caught.value.__cause__).startswith(words)


# ---------------------------------------------------------------------------- measures


def test_judge_that_prints_leaves_the_standard_output_to_the_measures(run):
    ended = run(
        "eval opt/actor prompts.jsonl --judge_function numbers_functions:prints "
        "--max_new_tokens 4 --json"
    )
    assert json.loads(ended.out)["judge"] == 1.0
    assert "to the standard output" in ended.err


def test_judge_without_a_score_is_no_missing_column(refused):
    line = "eval opt/actor prompts.jsonl --judge_function numbers_functions:nothing"
    assert "no answer got a score" in refused(f"{line} --max_new_tokens 4")


def test_judge_beyond_fp32_is_named(refused):
    line = "eval opt/actor prompts.jsonl --judge_function numbers_functions:huge"
    assert "numbers_functions:huge returned 1e+300" in refused(f"{line} --max_new_tokens 4")


def test_loss_whose_perplexity_overflows_is_told(run):
    spoilt("opt/base", EMBEDDING, lambda table: table * 1e6)
    ended = run("eval spoilt sft.jsonl --json")
    assert ended.code == 0
    found = json.loads(ended.out, parse_constant=pytest.fail)
    assert found["loss"] > 710
    assert found["perplexity"] == "inf"


@pytest.mark.parametrize("data", ["sft", "pairs"])
def test_loss_that_is_not_finite_is_named_with_its_row(refused, data):
    spoilt("opt/base", EMBEDDING, lambda table: table * 1e30)
    line = refused(f"eval spoilt {data}.jsonl --json")
    assert f"{data}.jsonl:1: the loss is nan, as the model overflows" in line


OVERFLOWING = {
    "score": ("score spoilt pairs.jsonl --output_path scores.jsonl", "pairs.jsonl:"),
    "eval": ("eval spoilt pairs.jsonl --json", "pairs.jsonl:"),
    "own answers": (
        "eval opt/actor prompts.jsonl --reward_model spoilt --max_new_tokens 4",
        "prompts.jsonl:",
    ),
}


@pytest.mark.parametrize(("line", "row"), OVERFLOWING.values(), ids=OVERFLOWING)
def test_score_that_is_not_finite_is_named_with_its_row(refused, line, row):
    spoilt("opt/whole", "score.weight", lambda weight: weight * 2e38)
    words = refused(line)
    assert row in words
    assert "the score is " in words
    assert not Path("scores.jsonl").exists()


# ---------------------------------------------------------------------------- data


@pytest.mark.parametrize("line", [REWARD, DPO])
def test_pairs_of_equal_answers_are_left_out_and_counted(run, refused, line):
    line = line.replace("MODEL", "opt/base") + " --lora_dim 2"
    words = refused(line.replace("pairs.jsonl", "same.jsonl"))
    assert "have equal answers (perhaps once cut to" in words
    ended = run(line.replace("pairs.jsonl", "some_same.jsonl"))
    assert ended.code == 0
    assert "8 " in next(line for line in ended.out.splitlines() if "equal" in line)


def test_rows_of_one_token_are_learnt(run, home):
    line = SFT.replace("MODEL", "opt/base").replace("sft.jsonl", "token.jsonl")
    assert run(f"{line} --lora_dim 2").code == 0
    assert all(math.isfinite(each["loss"]) for each in metrics(home / "out", "train"))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "grpo"])
def test_prompts_and_answers_of_one_token_are_learnt(run, home, algorithm):
    line = RLHF.replace("prompts.jsonl", "prompt.jsonl").replace(
        "answer_seq_len 8", "answer_seq_len 1"
    )
    ended = run(f"{line} --algorithm {algorithm} --reward_function numbers_functions:distinct")
    assert ended.code == 0
    assert all(math.isfinite(each["loss"]) for each in metrics(home / "out", "train"))
