"""What is no number: NaN and infinities in weights, rewards and losses, and options at extremes.

Each run ends in one line that names what was wrong, and leaves nothing that could pass for a
result; or what is wrong is left out and counted.
"""

import json
import math
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dschat_lora import __main__ as command
from dschat_lora.algos.tensors import is_finite
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.engine.process_group import shutdown
from helpers.addons import has_verb
from helpers.glue_toys import save_encoder, write_task
from helpers.rlhf_course import save_family, write_prompts, write_turns_template
from helpers.spread import ALL
from helpers.step1 import metrics, write_jsonl

NAN, INF = math.nan, math.inf
Q = "model.decoder.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.decoder.embed_tokens.weight"
RUN = "--max_seq_len 32 --max_steps 2 --per_device_train_batch_size 4 --save_interval 1"
RUN += " --sample_generations 0 --output_dir out"
SFT = f"sft --data_path sft.jsonl --eval_data_path sft.jsonl {RUN} --model_name_or_path "
REWARD = f"reward --data_path pairs.jsonl {RUN} --model_name_or_path "
DPO = f"dpo --data_path pairs.jsonl --eval_data_path pairs.jsonl {RUN} --model_name_or_path "
RLHF = """
    rlhf --actor_model_name_or_path opt/actor --data_path prompts.jsonl --eval_prompts 2
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --num_generations 2 --save_interval 1
    --per_device_generation_batch_size 8 --per_device_training_batch_size 8 --max_steps 4
    --output_dir out --algorithm
"""
RLOO = f"{RLHF} rloo --reward_function numbers_functions:"
JUDGED = "eval opt/actor prompts.jsonl --max_new_tokens 4 --judge_function numbers_functions:"
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


def spoilt(source, name, value, file="model.safetensors"):
    """A copy ``spoilt`` of a model with ``value`` in place of a weight, or times a number."""
    shutil.rmtree("spoilt", ignore_errors=True)
    shutil.copytree(source, "spoilt")
    tensors = load_file(Path("spoilt", file))
    if callable(value):
        tensors[name] = value(tensors[name])
    else:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, Path("spoilt", file), metadata={"format": "pt"})


# ---------------------------------------------------------------------------- refusals

LORA_B = f"base_model.model.{Q.replace('.weight', '.lora_B.weight')}"
ADAPTER = "adapter_model.safetensors"
BAD = "holds values that are not finite"
TRAINED = f"{SFT}opt/base --lora_dim 2"
DESTROYED = f"{TRAINED} --max_steps 5 --weight_decay 1e30 --lora_learning_rate 1e30"
UNDRAWABLE = f"{RLOO}distinct --max_steps 1 --actor_lora_learning_rate 1e30"
NOT_DRAWN = "stopped after step 1: no token can be sampled: the model's logits are not finite"
OWN_ANSWERS = "eval opt/actor prompts.jsonl --reward_model spoilt --max_new_tokens 4"
GENERATE, MERGE = "generate spoilt ab --max_new_tokens 4", "merge spoilt --output_dir merged"
LOADS = [f"{SFT}spoilt", f"{SFT}spoilt --base_bits 4 --lora_dim 2", f"{REWARD}spoilt", GENERATE]
LOADS += [f"{DPO}spoilt", "eval spoilt sft.jsonl", "eval spoilt pairs.jsonl --json"]
BY_MODEL = [f"{RLHF} {each} --critic_model_name_or_path spoilt" for each in ("ppo", "rloo", "grpo")]
BY_LOUD = [
    *("score spoilt pairs.jsonl --output_path scores.jsonl", "eval spoilt pairs.jsonl --json"),
    OWN_ANSWERS,
]
EXTREMES = [
    "ppo --critic_model_name_or_path opt/reward --kl_coef 1e30",
    *("rloo --kl_coef 1e30", "grpo --kl_coef 1e30", "ppo --critic_lora_learning_rate 1e30") * ALL,
    *["ppo --missing_eos_penalty 1e30"] * ALL,
]


def times(factor):
    return lambda weight: weight * factor


#: arguments of ``spoilt``
SPOILT = {
    "nothing": (),
    **{f"base {value}": ("opt/base", Q, value) for value in (NAN, INF, -INF)},
    **{f"adapter {value}": ("opt/actor", LORA_B, value, ADAPTER) for value in (NAN, INF, 1e7)},
    "head": ("opt/whole", "score.weight", NAN),
    "embedding of a reward model": ("opt/whole", EMBEDDING, NAN),
    "loud head": ("opt/whole", "score.weight", times(2e38)),
    "loud base": ("opt/base", EMBEDDING, times(1e30)),
}
FIRST = ["step-00000001"]
#: what is spoilt; the command; what its one line says; checkpoints left, None for any
REFUSALS = [
    *[
        (f"base {value}", line, [f"{Q} {BAD}"], [])
        for line in LOADS
        for value in (NAN, *(INF, -INF) * ALL)
    ],
    *[("head", line, [f"score.weight {BAD}"], []) for line in [*BY_LOUD, *BY_MODEL]],
    *[
        ("embedding of a reward model", line, [f"{EMBEDDING} {BAD}"], [])
        for line in [*BY_LOUD, *BY_MODEL] * ALL
    ],
    *[
        (f"adapter {value}", line, [f"q_proj.lora_B {BAD}"], [])
        for line in (GENERATE, MERGE)
        for value in (NAN, INF)
    ],
    (
        *("adapter 10000000.0", f"{MERGE} --dtype fp16 --merge_max_kl 1e9"),
        *([f"the model is not saved: {Q} {BAD}"], []),
    ),
    (
        *("nothing", f"{DPO}opt/base --lora_dim 2 --beta 1e30"),
        ["step 2: the gradient was not finite 2 times in a row", "There is no checkpoint yet"],
        [],
    ),
    (
        *("nothing", f"{TRAINED} --lora_learning_rate 1e30"),
        *(["the held-out loss after step 2 is nan: the learning rate may be too high"], FIRST),
    ),
    (
        *("loud base", f"{SFT}spoilt --lora_dim 2"),
        *(["the held-out loss after step 0 is nan: try --dtype bf16 or fp32"], []),
    ),
    # By a decay of more than all of a weight, to an infinity.
    (
        *("nothing", DESTROYED.replace("--save_interval 1", "--save_interval 0")),
        *(["weight:model.decoder.layers.0", f"lora_A {BAD}. Lower the learning rate"], []),
    ),
    (
        *("nothing", DESTROYED),
        *(["step-00000001 was not written: weight:model.decoder.layers.0"], []),
    ),
    ("nothing", UNDRAWABLE, [NOT_DRAWN], []),
    (
        "nothing",
        f"{UNDRAWABLE} --max_steps 2 --eval_prompts 0",
        [NOT_DRAWN, "step-00000001"],
        FIRST,
    ),
    *[
        (
            *("nothing", f"{RLHF} {options} --reward_function numbers_functions:distinct"),
            *(["training stopped at step ", "the gradient was not finite 3 times in a row"], None),
        )
        for options in EXTREMES
    ],
    (
        *("nothing", f"{RLOO}breaks --save_interval 0"),
        *(
            ["--reward_function numbers_functions:breaks returned nan for the prompt"],
            ["step-00000002"],
        ),
    ),
    *[
        ("loud head", line, ["the reward model gives", "'ocdgnaxfd'; a score must be a finite"], [])
        for line in BY_MODEL[: None if ALL else 1]
    ],
    ("nothing", f"{JUDGED}nothing", ["no answer was scored"], []),
    ("nothing", f"{JUDGED}huge", ["numbers_functions:huge returned 1e+300"], []),
    *[
        (
            *("loud base", f"eval spoilt {data}.jsonl --json"),
            *([f"{data}.jsonl:1: the loss is nan, because the model overflows"], []),
        )
        for data in ("sft", "pairs")
    ],
    *[
        (
            "loud head",
            line,
            ["score is ", f"{'prompt' if line is OWN_ANSWERS else 'pair'}s.jsonl:"],
            [],
        )
        for line in BY_LOUD
    ],
]


@pytest.mark.parametrize(
    ("what", "line", "words", "kept"), REFUSALS, ids=[f"{row[0]}, {row[2][0]}" for row in REFUSALS]
)
def test_what_is_no_number_ends_by_name_and_leaves_no_result(
    refused, home, what, line, words, kept
):
    if SPOILT[what]:
        spoilt(*SPOILT[what])
    said = refused(line)
    for each in words:
        assert each in said
    left = [path.name for path in checkpoints_of(home / "out")]
    assert kept in (None, left)
    if kept is None:
        assert said.endswith(left[0] if left else "There is no checkpoint yet")
    assert not any(Path(each).exists() for each in ("merged", "scores.jsonl"))


def test_sum_of_rewards_that_overflows_within_an_iteration_is_named(run):
    ended = run(
        f"{RLOO}distinct numbers_functions:large --reward_weights 1e30 1e30 --eval_prompts 0"
    )
    assert ended.code == 2
    assert "stopped by a score that failed after step 0" in ended.out
    assert "error: the weighted sum of rewards gives inf for" in ended.err


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
    text = text.replace('"lora_alpha": 8', f'"lora_alpha": {alpha}')
    Path("on_spoilt/adapter_config.json").write_text(text)
    assert "lora_alpha is " in refused("eval on_spoilt sft.jsonl")


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


STATES = [("exp_avg:", NAN), ("exp_avg_sq:", INF), ("weight:", NAN)]
PPO = f"{RLHF} ppo --critic_model_name_or_path opt/reward --max_steps 2"


@pytest.mark.parametrize("line", [TRAINED, *[PPO] * ALL])
def test_state_of_a_checkpoint_that_is_not_finite_is_named_with_its_file(run, home, line):
    assert run(line).code == 0
    newest, older = checkpoints_of(home / "out")
    for part, value in STATES:
        shutil.copytree(newest, home / "sound")
        path, name = spoil_state(newest, part, value)
        ended = run(f"{line} --max_steps 4 --resume_from_checkpoint latest", keep=True)
        assert ended.code == 2
        assert f"{path}: {name} holds values that are not finite" in ended.err
        assert checkpoints_of(home / "out") == [newest, older]
        shutil.rmtree(newest)
        (home / "sound").rename(newest)


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["0", "3"])
def test_all_processes_end_where_one_reads_what_is_not_finite(launcher, run, home, stage):
    line = f"{TRAINED} --zero_stage {stage}"
    assert run(line).code == 0
    spoil_state(checkpoints_of(home / "out")[0], "exp_avg:", NAN)
    spoilt("opt/base", Q, NAN)
    halved = f"{line.removeprefix('sft')} --per_device_train_batch_size 2"
    for more, words in (
        ("--max_steps 3 --resume_from_checkpoint latest", "exp_avg:"),
        ("--model_name_or_path spoilt --output_dir other", Q),
    ):
        running = launcher.start(f"{halved} {more}".split(), home, ranks=2)
        assert running.wait(60) == [2, 2]
        assert running.err().count("error: ") == 1
        assert words in running.err()
        assert "Traceback" not in running.err()


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


@pytest.mark.parametrize(("line", "option"), [(RLOO, "reward"), (JUDGED, "judge")])
def test_function_that_ends_the_program_ends_a_run_with_its_error(run, line, option):
    with pytest.raises(RuntimeError, match=f"--{option}_function numbers_functions:ends called s"):
        run(f"{line}ends")


def test_response_without_a_score_is_left_out_and_counted(run, home):
    assert run(f"{RLOO}some").code == 0
    for line in metrics(home / "out", "train"):
        assert line["dropped"] == -(-line["samples"] // 3)
        assert math.isfinite(line["loss"])


def test_function_that_switches_gradients_off_does_so_for_itself(run, home):
    assert run(f"{RLOO}switches").code == 0
    assert torch.is_grad_enabled()
    assert all(line["grad_norm"] > 0 for line in metrics(home / "out", "train"))


# ---------------------------------------------------------------------------- measures, data


def test_judge_that_prints_leaves_the_standard_output_to_the_measures(run):
    ended = run(f"{JUDGED}prints --json")
    assert json.loads(ended.out)["judge"] == 1.0
    assert "to the standard output" in ended.err


def test_loss_whose_perplexity_overflows_is_told(run):
    spoilt("opt/base", EMBEDDING, times(1e6))
    ended = run("eval spoilt sft.jsonl --json")
    assert ended.code == 0
    measures = json.loads(ended.out, parse_constant=pytest.fail)
    assert measures["loss"] > 710
    assert measures["perplexity"] == "inf"


@pytest.mark.parametrize("line", [REWARD, DPO])
def test_pairs_of_equal_answers_are_left_out_and_counted(run, refused, line):
    line = f"{line}opt/base --lora_dim 2"
    words = refused(line.replace("pairs.jsonl", "same.jsonl"))
    assert "with equal answers (perhaps once cut to" in words
    ended = run(line.replace("pairs.jsonl", "some_same.jsonl"))
    assert ended.code == 0
    assert "8 " in next(line for line in ended.out.splitlines() if "equal" in line)


ONE_TOKEN = [TRAINED.replace("sft.jsonl", "token.jsonl")] + [
    f"{RLHF} {each} --data_path prompt.jsonl --max_answer_seq_len 1 "
    "--reward_function numbers_functions:distinct"
    for each in ("ppo", "rloo", "grpo")
] * ALL


@pytest.mark.parametrize("line", ONE_TOKEN)
def test_rows_and_answers_of_one_token_are_learnt(run, home, line):
    assert run(line).code == 0
    assert all(math.isfinite(each["loss"]) for each in metrics(home / "out", "train"))
