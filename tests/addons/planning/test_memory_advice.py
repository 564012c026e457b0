"""What is said where a GPU is full: what fills it, and options that take less; sizes in GiB."""

import re
from dataclasses import replace

import pytest
import torch

from dschat_lora.addons.planning import memory_advice
from dschat_lora.addons.planning.memory_advice import advise_rl, advise_supervised
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.option_checks import shapes_alone
from dschat_lora.perf.memory import MemoryEstimate
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig, RolloutConfig
from dschat_lora.rl.options.engines import EngineFacts
from dschat_lora.rl.response.errors import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.runtime.memory import MemoryPlan, TrainedModel, explaining_memory
from helpers.perf_models import add_lora, opt, project_lora
from helpers.roles import config_of
from helpers.runs import LORA, engine_settings, load_model
from helpers.step1 import checked, parsed

GIB = 2**30
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """``world(n)``: n processes with data of their own; one at first."""

    def of(size):
        monkeypatch.setattr(memory_advice, "data_world_size", lambda: size)
        monkeypatch.setattr(memory_advice, "world_size", lambda: size)

    of(1)
    return of


@pytest.fixture
def estimated(monkeypatch):
    """``estimated(weights=..., ...)``: GiB that the model is taken to need."""

    def as_made_up(**parts):
        parts = dict.fromkeys(MemoryEstimate.__dataclass_fields__, 0) | parts
        memory = MemoryEstimate(**{name: round(size * GIB) for name, size in parts.items()})
        monkeypatch.setattr(TrainedModel, "estimated", lambda self: memory)

    return as_made_up


ROWS = ("--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 2)
BASE = ("--lora_dim", 4, *ROWS, "--max_seq_len", 512, "--no-gradient_checkpointing")


def advice(*options, device=None, stage=SupervisedConfig):
    """Of SFT of OPT with four heads, 16 rows of 512 tokens in two micro-batches."""
    config = parse_config(stage, [str(each) for each in (*BASE, *options)])
    adapted = AdaptedModel(add_lora(opt(), 4, layer=project_lora), config.lora, [])
    settings = replace(
        engine_settings(dtype="bf16" if config.model.dtype == "auto" else config.model.dtype),
        zero_stage=config.parallel.zero_stage or 0,
        offload=config.parallel.offload,
    )
    return advise_supervised(FULL, device and int(device * GIB), adapted, config, settings)


def suggested(text):
    """The options of each remedy, in the order of the text."""
    return re.findall(r"\((--[^)]*)\)", text)


FEWER = "--per_device_train_batch_size 8 --gradient_accumulation_steps 4"
RECOMPUTED = "--gradient_checkpointing"
MOVED = "--offload_activations"
OF_ROWS = [FEWER, RECOMPUTED, MOVED]
BITS = "--base_bits 4"
HOST = "--zero_stage 3 --offload"


def test_the_whole_message(world, estimated):
    world(3)
    estimated(activations=61.2, weights=12.6, optimizer=1.2, loss=0.5, gathered=0.4, update=0.01)
    assert advice("--offload", "--zero_stage", 3, device=70) == (
        "out of GPU memory: by estimate 61.2 GiB of activations, 12.6 GiB of weights, 1.2 GiB of "
        "optimizer state, 0.5 GiB for the loss and 0.4 GiB for gathered weights, on a device of "
        "70 GiB; try in this order, keeping the earlier ones: compute fewer rows at once, the "
        f"same batch of 96 rows a step, so the run can be resumed ({FEWER}), then recompute "
        f"activations ({RECOMPUTED}), then offload activations to host memory ({MOVED}), then "
        f"hold the base in 4 bits by dschat_lora[qlora] ({BITS}); dschat-lora plan sft with the "
        "options of the run and --num_gpus 3 --for 70GiB shows what is enough"
    )


def test_what_a_step_makes_anew_is_for_the_step(estimated):
    estimated(update=9, unpacked=1)
    said = advice()
    assert "9 GiB for the optimizer's step and 1 GiB for a weight unpacked from 4 bits" in said


def test_where_a_device_should_be_large_enough_the_plan_is_not_asked(estimated):
    estimated(activations=20, weights=3)
    words = "where it should fit: the estimate is too low, or another program uses the device"
    assert words in advice(device=26)
    assert "dschat-lora plan" not in advice(device=26)
    assert words not in advice(device=25)  # 22.5 of it are planned with
    assert advice(device=25).endswith("of the run and --for 25GiB shows what is enough")


def test_a_stage_that_is_not_planned_is_not_said_to_be(estimated):
    class Own(SupervisedConfig):
        stage = "own"

    estimated(activations=20, weights=3)
    assert "dschat-lora plan" not in advice(device=24, stage=Own)


ALL_WEIGHTS = ("--lora_dim", 0)
ONE_ROW = ("--per_device_train_batch_size", 1)
RESTING = ("--gradient_checkpointing", "--offload_activations")
DIVIDED = "--gradient_accumulation_steps 8 --tensor_parallel_size 2"
PROCESSES_AND_OPTIONS = [
    (1, (), [FEWER, RECOMPUTED, MOVED, BITS, HOST]),
    (1, ONE_ROW, [RECOMPUTED, MOVED, BITS, HOST, "--max_seq_len 256"]),
    # four of six rows divide the batch too, and save less
    (
        *(1, (*RESTING, "--per_device_train_batch_size", 6, "--gradient_accumulation_steps", 4)),
        ["--per_device_train_batch_size 3 --gradient_accumulation_steps 8", BITS, HOST],
    ),
    (1, RESTING, [FEWER, BITS, HOST]),
    (1, (*RESTING, "--dtype", "fp32"), [FEWER, "--dtype auto", BITS, HOST]),
    (1, (*RESTING, "--zero_stage", 3), [FEWER, BITS, "--offload"]),
    (1, (*RESTING, "--zero_stage", 3, "--offload", "--base_bits", 4), [FEWER]),
    # weights that are gathered as they are used are not compiled
    (1, (*RESTING, "--compile"), [FEWER, BITS, "--zero_stage 3 --no-compile --offload"]),
    # ZeRO divides optimizer state and gradients, then weights; so does the host take them
    (
        *(3, (*RESTING, *ALL_WEIGHTS)),
        [FEWER, "--zero_stage 2", "--offload", "--lora_dim 16"],
    ),
    (
        *(3, (*RESTING, *ALL_WEIGHTS, "--zero_stage", 2, "--offload")),
        [FEWER, "--zero_stage 3", "--lora_dim 16"],
    ),
    (
        *(3, (*RESTING, *ALL_WEIGHTS, "--zero_stage", 2)),
        [FEWER, "--zero_stage 3", "--offload", "--lora_dim 16"],
    ),
    (
        *(1, (*RESTING, *ALL_WEIGHTS, "--zero_stage", 1, "--offload")),
        [FEWER, "--zero_stage 3", "--lora_dim 16"],
    ),
    (
        *(1, (*RESTING, "--no-only_optimize_lora")),
        [FEWER, "--zero_stage 1 --offload", "--only_optimize_lora"],
    ),
    # 2 divides four heads and four processes, and cuts of a layer no blocks of 4 bits
    (4, RESTING, [FEWER, "--zero_stage 3", DIVIDED, "--offload"]),
    (4, (*RESTING, "--base_bits", 4), [FEWER, "--zero_stage 3", "--offload"]),
    (4, (*RESTING, "--context_parallel_size", 2), [FEWER, "--zero_stage 3", BITS, "--offload"]),
    (1, (*RESTING, "--tokens_per_device", 4096), [BITS, HOST]),
]


@pytest.mark.parametrize(("processes", "options", "expected"), PROCESSES_AND_OPTIONS)
def test_what_is_left_is_advised_in_this_order(world, estimated, processes, options, expected):
    world(processes)
    estimated(activations=9, weights=3, optimizer=3)
    assert suggested(advice(*options)) == expected


@pytest.mark.parametrize(
    ("processes", "options"), [each[:2] for each in PROCESSES_AND_OPTIONS if each[1] != ONE_ROW]
)
def test_the_stage_takes_what_is_advised(
    world, estimated, monkeypatch, tmp_path, processes, options
):
    world(processes)
    estimated(activations=9, weights=3)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.chdir(tmp_path)
    typed = [*BASE, *options]
    if "--tokens_per_device" in options:
        typed = typed[:2] + typed[4:]  # the rows of a micro-batch are as many as it holds
    with shapes_alone():
        for more in suggested(advice(*options)):
            typed += more.split()
            checked(*typed)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"activations": 6, "weights": 6}, (), [*OF_ROWS, BITS, HOST]),
        ({"activations": 5.9, "weights": 6.1}, (), [BITS, HOST, *OF_ROWS]),
        ({"temporaries": 0.31, "loss": 0.31, "weights": 11.4}, (), [BITS, HOST, *OF_ROWS]),
        ({"activations": 0.59, "weights": 11.4}, (), [BITS, HOST]),
        ({"activations": 0.59, "weights": 11.4}, ONE_ROW, [BITS, HOST]),
    ],
)
def test_rows_stay_where_they_take_little_and_come_last_where_others_take_more(
    estimated, sizes, options, expected
):
    estimated(**sizes)
    assert suggested(advice(*options)) == expected


@pytest.mark.parametrize(("weights", "shared"), [(3, 2), (5, 3)])
def test_weights_that_take_more_than_what_is_trained_are_shared(world, estimated, weights, shared):
    world(4)
    estimated(weights=weights, gradients=2, optimizer=2)
    options = (*ALL_WEIGHTS, "--zero_stage", 1)
    assert suggested(advice(*options)) == [f"--zero_stage {shared}", "--offload", "--lora_dim 16"]


def test_fewer_rows_after_a_divided_model_have_its_micro_batches(world, estimated):
    world(4)
    estimated(activations=3, weights=9)
    assert suggested(advice(*RESTING)) == [
        *("--zero_stage 3", "--gradient_accumulation_steps 4 --tensor_parallel_size 2"),
        *("--offload", "--per_device_train_batch_size 8 --gradient_accumulation_steps 8"),
    ]


@pytest.mark.parametrize(
    ("processes", "options", "advised"),
    [
        *((4, (), "2"), (4, ("--tensor_parallel_size", 2), "4"), (1, (), None), (3, (), None)),
        (4, ("--tensor_parallel_size", 4), None),
    ],
)
def test_only_sizes_that_processes_and_model_allow_are_advised(
    world, estimated, processes, options, advised
):
    world(processes)
    estimated(weights=30)
    said = advice(*options)
    size = re.search(r"--tensor_parallel_size (\d+)", said)
    assert (size and size[1]) == advised
    assert (BITS in said) == (not options and advised is None)


def test_a_model_that_is_not_understood_has_options_without_sizes(monkeypatch):
    def refuse(self):
        raise ValueError("an architecture of its own")

    monkeypatch.setattr(TrainedModel, "estimated", refuse)
    monkeypatch.setattr(memory_advice, "takes_graphs", lambda *_, **__: True)
    said = advice(device=24)
    assert "--training_graphs" not in said
    assert said.startswith("out of GPU memory: try in this order, keeping the earlier ones: ")
    assert suggested(said) == [FEWER, RECOMPUTED, MOVED, BITS, HOST]
    assert "dschat-lora plan" not in said


def test_where_one_option_is_left_or_none_that_is_said(estimated):
    estimated(weights=50)
    host = ("--zero_stage", 3, "--offload")
    assert "; try to hold the base in 4 bits by" in advice(*host, device=24)
    said = advice(*host, "--base_bits", 4, device=24)
    assert said.endswith("; no further option saves memory: use a larger device or a smaller model")


def test_the_error_of_a_stage_has_what_fills_the_device_and_which_options_help(
    model_directory, tmp_path
):
    adapted = AdaptedModel(load_model(model_directory("opt"), LORA), LoraConfig(**LORA), [])
    config = parsed("--lora_dim", 4, "--per_device_train_batch_size", 8, "--max_seq_len", 16)
    facts = ("supervised_memory", adapted, config, engine_settings(micro=8))
    with (
        pytest.raises(torch.OutOfMemoryError, match="^out of GPU memory: by estimate ") as error,
        explaining_memory(tmp_path, None, *facts),
    ):
        raise FULL
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 2" in str(error.value)


def test_what_graphs_of_training_keep_is_named_where_they_are_taken(monkeypatch, estimated):
    estimated(activations=3)
    monkeypatch.setattr(memory_advice, "takes_graphs", lambda *_, **__: False)
    assert "--training_graphs" not in advice()
    # One process runs at stage 0, as it has nothing to shard.
    monkeypatch.setattr(
        memory_advice, "takes_graphs", lambda one, *_, **__: one.settings.zero_stage == 0
    )
    said = advice("--zero_stage", 2)
    assert said.endswith(". --training_graphs off takes 3 GiB less, where graphs were recorded")


PLAN = MemoryPlan(10 * GIB, 10 * GIB, GIB, 16 * GIB, 8 * GIB)
NOT_RECOMPUTED = {"lora_dim": 8, "gradient_checkpointing": False}
BATCH = {"per_device_training_batch_size": 16, "per_device_generation_batch_size": 8}
BOTH = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
RL = [
    "--per_device_training_batch_size 8 --gradient_accumulation_steps 2",
    *(BOTH, MOVED, BITS, HOST),
]


def rl_config(batch=None, **groups):
    roles = {"actor": NOT_RECOMPUTED, "critic": NOT_RECOMPUTED}
    return config_of(**{**roles, **groups, "batch": {**BATCH, **(batch or {})}})


def rl_advice(error=FULL, plan=PLAN, device=None, **groups):
    return advise_rl(error, device and device * GIB, rl_config(**groups), plan)


def test_the_whole_message_of_step_3():
    assert rl_advice(device=24).startswith(
        "out of GPU memory while training: by estimate 16 GiB for a micro-batch, 10 GiB of "
        "weights and 1 GiB of gradients and optimizer state, on a device of 24 GiB; try in this "
        f"order, keeping the earlier ones: compute fewer rows at once ({RL[0]}), then recompute "
    )
    assert suggested(rl_advice()) == RL


def test_while_responses_are_decoded_fewer_are_advised_those_of_a_prompt_together():
    batch = {"per_device_generation_batch_size": 12, "num_generations": 4, "generation_batches": 2}
    batch["per_device_training_batch_size"] = 4
    said = rl_advice(FullWhileDecodingError(), batch=batch)
    assert said.startswith("out of GPU memory while responses are decoded: by estimate 10 GiB of")
    assert "8 GiB for decoding" in said
    assert suggested(said) == ["--max_num_seqs 4", BITS, HOST]


def test_micro_batches_by_tokens_stay_long_enough_for_a_row():
    assert (
        suggested(rl_advice(batch={"tokens_per_device": 16 * 512}))[0] == "--tokens_per_device 4096"
    )
    assert "--tokens_per_device" not in rl_advice(batch={"tokens_per_device": 900})


def test_four_bits_are_advised_where_the_base_is_frozen():
    whole = {"lora_dim": 0, "gradient_checkpointing": False}
    without = [each for each in RL if each != BITS]
    assert suggested(rl_advice(actor=whole)) == without
    assert suggested(rl_advice(classic={"only_optimize_lora": False})) == without
    assert suggested(rl_advice(load={"base_bits": 4})) == without
    assert suggested(rl_advice(parallel={"tensor_parallel_size": 2})) == without


@pytest.mark.parametrize(
    ("processes", "parallel", "expected"),
    [
        (2, {}, ["--zero_stage 3", "--offload"]),
        (2, {"zero_stage": 3}, ["--offload"]),
        (1, {"zero_stage": 3, "offload": True}, []),
        (1, {"zero_stage": 2, "offload": True}, ["--zero_stage 3"]),
    ],
)
def test_several_processes_can_share_and_the_host_takes_the_rest(
    world, processes, parallel, expected
):
    world(processes)
    assert suggested(rl_advice(parallel=parallel)) == [*RL[:-1], *expected]


@pytest.mark.parametrize(
    ("stage", "typed", "expected"),
    [
        (3, {"actor": 1}, "--actor_zero_stage 3 --offload"),
        (0, {"critic": 1}, "--zero_stage 3 --critic_zero_stage 3 --offload"),
        (0, {"actor": 1, "critic": 3}, "--actor_zero_stage 3 --offload"),
    ],
)
def test_stages_of_roles_that_were_typed_are_named(stage, typed, expected):
    stages = {role: typed.get(role, stage) for role in ("actor", "critic")}
    roles = {role: {**NOT_RECOMPUTED, "zero_stage": own} for role, own in stages.items()}
    config = replace(
        rl_config(**roles, parallel={"zero_stage": stage}),
        given=frozenset(f"{role}_zero_stage" for role in typed),
    )
    assert suggested(advise_rl(FULL, None, config, PLAN))[-1] == expected


def test_an_engine_that_needs_whole_weights_keeps_them(world, monkeypatch):
    world(2)
    whole = EngineFacts("made up", needs_whole_weights=True)
    monkeypatch.setattr(RolloutConfig, "engine", whole)
    assert suggested(rl_advice())[-2:] == ["--zero_stage 2", "--offload"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("error", [FULL, FullWhileDecodingError()])
def test_step_3_takes_what_is_advised(world, monkeypatch, tmp_path, processes, error):
    world(processes)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.chdir(tmp_path)
    typed = [f"--no-{each.removeprefix('--')}" for each in BOTH.split()]
    typed += ["--actor_lora_dim", "8", "--critic_lora_dim", "8"]
    plan = replace(PLAN, keeps_cache=True, graphs=GIB)
    said = advise_rl(error, None, parse_config(RlhfConfig, typed), plan)
    advised = suggested(said)
    assert len(advised) >= 4
    with shapes_alone():
        for more in advised:
            typed += more.split()
            check_rlhf(parse_config(RlhfConfig, typed))


def test_what_decoding_keeps_goes_first():
    said = rl_advice(plan=replace(PLAN, keeps_cache=True))
    assert "8 GiB for decoding" in said
    assert suggested(said) == ["--release_inference_cache", RL[0], "--max_num_seqs 4", *RL[1:]]


def test_memory_of_graphs_is_named_and_can_be_freed():
    said = rl_advice(plan=replace(PLAN, graphs=8 * GIB))
    assert "8 GiB of CUDA graphs" in said
    assert suggested(said) == ["--training_graphs off", *RL]


def test_without_an_estimate_step_3_has_options_without_sizes():
    said = rl_advice(plan=None, device=24)
    assert said.startswith("out of GPU memory while training: try in this order, keeping")
    assert suggested(said) == RL


@pytest.mark.parametrize(
    ("error", "words", "frees"),
    [
        (torch.OutOfMemoryError, "while training", True),
        (FullAfterReleaseError, "while training", False),
        (FullWhileDecodingError, "while responses are decoded", False),
    ],
)
def test_the_error_says_what_was_done(tmp_path, error, words, frees):
    plan = replace(PLAN, keeps_cache=True)
    (tmp_path / "step-00000004").mkdir()
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        explaining_memory(tmp_path, plan, "rl_memory", rl_config(), plan),
    ):
        raise error("CUDA out of memory. Tried to allocate 2 GiB")
    said = str(raised.value)
    assert words in said
    assert ("--release_inference_cache" in said) is frees
    assert said.endswith("step-00000004")
