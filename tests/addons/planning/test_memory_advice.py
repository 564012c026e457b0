"""What is said where a GPU is full: what fills it, and options that take less; sizes in GiB."""

import re
from dataclasses import replace

import pytest
import torch

from dschat_lora.addons.planning import memory_advice
from dschat_lora.addons.planning.memory_advice import advise_rl, advise_supervised
from dschat_lora.config.groups import LoraConfig
from dschat_lora.models.build import AdaptedModel
from dschat_lora.perf.memory import MemoryEstimate
from dschat_lora.rl.response.errors import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.runtime.memory import MemoryPlan, TrainedModel, explaining_memory
from helpers.perf_models import add_lora, opt, project_lora
from helpers.roles import config_of
from helpers.runs import LORA, engine_settings, load_model
from helpers.step1 import parsed

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


def advice(*options, device=None, lora=LORA, **settings):
    """Of SFT of OPT with four heads, 16 rows of 512 tokens in two micro-batches."""
    rows = ["--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 2]
    config = parsed(*rows, "--max_seq_len", 512, "--no-gradient_checkpointing", *options)
    model = add_lora(opt(), 4, layer=project_lora)
    adapted = AdaptedModel(model, LoraConfig(**lora), [])
    settings = replace(engine_settings(), **{"dtype": "bf16", **settings})
    return advise_supervised(FULL, device and int(device * GIB), adapted, config, settings)


def suggested(text):
    """The options of each remedy, in the order of the text."""
    return re.findall(r"\((--[^)]*)\)", text)


FEWER = "--per_device_train_batch_size 8 --gradient_accumulation_steps 4"
RECOMPUTED = "--gradient_checkpointing"
MOVED = "--gradient_checkpointing --offload_activations"
HOST = "--zero_stage 3 --offload"


def test_the_whole_message(estimated):
    estimated(activations=61.2, weights=12.6, optimizer=1.2, loss=0.5, gathered=0.01)
    assert advice(device=79.1) == (
        "out of GPU memory: by estimate 61.2 GiB of activations, 12.6 GiB of weights, 1.2 GiB of "
        "optimizer state and 0.5 GiB for the loss, on a device of 79.1 GiB; try in this order: "
        f"compute fewer rows at once, the same batch of 32 rows a step, so the run can be resumed "
        f"({FEWER}), or recompute activations ({RECOMPUTED}), or keep inputs of blocks in host "
        f"memory ({MOVED}), or use host memory ({HOST}); dschat-lora plan with the run's options "
        "and --for 79.1GiB says what is enough"
    )


def test_a_device_that_should_be_large_enough_is_said_to_be_shared(estimated):
    estimated(activations=20, weights=3)
    words = "where training should fit unless another program uses it"
    assert words in advice(device=26)
    assert words not in advice(device=25)  # 22.5 of it are planned with


ALL_WEIGHTS = {"lora_dim": 0}
ONE_ROW = ("--per_device_train_batch_size", 1)
RESTING = ("--gradient_checkpointing", "--offload_activations")


@pytest.mark.parametrize(
    ("processes", "options", "settings", "expected"),
    [
        (1, (), {}, [FEWER, RECOMPUTED, MOVED, HOST]),
        (1, ONE_ROW, {}, [RECOMPUTED, MOVED, HOST, "--max_seq_len 256"]),
        (1, RESTING, {}, [FEWER, HOST]),
        (1, RESTING, {"dtype": "fp32"}, [FEWER, "--dtype auto", HOST]),
        (1, RESTING, {"zero_stage": 3, "offload": True}, [FEWER]),
        # ZeRO divides optimizer state and gradients, then weights; so does the host take them
        (
            *(3, RESTING, {"lora": ALL_WEIGHTS}),
            [FEWER, "--zero_stage 2", "--zero_stage 1 --offload", "--lora_dim 16"],
        ),
        (
            *(3, RESTING, {"lora": ALL_WEIGHTS, "zero_stage": 2, "offload": True}),
            [FEWER, "--zero_stage 3", HOST, "--lora_dim 16"],
        ),
        (
            *(1, RESTING, {"lora": LORA | {"only_optimize_lora": False}}),
            [FEWER, "--zero_stage 1 --offload", "--only_optimize_lora"],
        ),
        # 2 divides four heads and four processes
        (
            *(4, RESTING, {}),
            [
                *(FEWER, "--zero_stage 3"),
                *("--gradient_accumulation_steps 4 --tensor_parallel_size 2", HOST),
            ],
        ),
        (1, (*RESTING, "--tokens_per_device", 4096), {}, [HOST]),
    ],
)
def test_what_is_left_is_advised_in_this_order(
    world, estimated, processes, options, settings, expected
):
    world(processes)
    estimated(activations=9, weights=3)
    assert suggested(advice(*options, **settings)) == expected


def test_where_weights_take_the_most_rows_stay(estimated):
    estimated(activations=3, weights=9)
    assert suggested(advice()) == [RECOMPUTED, MOVED, HOST]


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
    size = re.search(r"--tensor_parallel_size (\d+)", advice(*options))
    assert (size and size[1]) == advised


def test_a_model_that_is_not_understood_has_options_without_sizes(monkeypatch):
    def refuse(self):
        raise ValueError("an architecture of its own")

    monkeypatch.setattr(TrainedModel, "estimated", refuse)
    said = advice(device=24)
    assert said.startswith("out of GPU memory: try in this order: compute fewer rows at once, ")
    assert "dschat-lora plan" not in said


def test_where_no_option_is_left_that_is_said(estimated):
    estimated(weights=50)
    # in host memory at stage 3
    said = advice(*RESTING, zero_stage=3, offload=True, device=24)
    assert said.endswith(
        "; no option is left that saves memory: take a larger device or a smaller model"
    )


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
    monkeypatch.setattr(memory_advice, "takes_graphs", lambda *_, **__: True)
    assert advice().endswith(". --training_graphs off takes 3 GiB less, where graphs were recorded")


PLAN = MemoryPlan(10 * GIB, 10 * GIB, GIB, 16 * GIB, 8 * GIB)
NOT_RECOMPUTED = {"lora_dim": 8, "gradient_checkpointing": False}
BATCH = {"per_device_training_batch_size": 16, "per_device_generation_batch_size": 8}
BOTH = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
RL = [
    "--per_device_training_batch_size 8 --gradient_accumulation_steps 2",
    *(BOTH, f"{BOTH} --offload_activations", "--base_bits 4", HOST),
]


def rl_config(batch=None, **groups):
    roles = {"actor": NOT_RECOMPUTED, "critic": NOT_RECOMPUTED}
    return config_of(**{**roles, **groups, "batch": {**BATCH, **(batch or {})}})


def rl_advice(error=FULL, plan=PLAN, device=None, **groups):
    return advise_rl(error, device and device * GIB, rl_config(**groups), plan)


def test_the_whole_message_of_step_3():
    assert rl_advice(device=24).startswith(
        "out of GPU memory while training: by estimate 16 GiB for a micro-batch, 10 GiB of weights "
        "and 1 GiB of gradients and optimizer state, on a device of 24 GiB; try in this order: "
        f"compute fewer rows at once ({RL[0]}), or recompute activations ({BOTH}), or "
    )
    assert suggested(rl_advice()) == RL


def test_while_responses_are_decoded_fewer_are_advised_those_of_a_prompt_together():
    batch = {"per_device_generation_batch_size": 12, "num_generations": 4, "generation_batches": 2}
    batch["per_device_training_batch_size"] = 4
    said = rl_advice(FullWhileDecodingError(), batch=batch)
    assert said.startswith("out of GPU memory while responses are decoded: by estimate 10 GiB of")
    assert "8 GiB for decoding" in said
    assert suggested(said) == ["--max_num_seqs 4", "--base_bits 4", HOST]


def test_micro_batches_by_tokens_stay_long_enough_for_a_row():
    assert (
        suggested(rl_advice(batch={"tokens_per_device": 16 * 512}))[0] == "--tokens_per_device 4096"
    )
    assert "--tokens_per_device" not in rl_advice(batch={"tokens_per_device": 900})


def test_four_bits_are_advised_where_the_base_is_frozen():
    whole = {"lora_dim": 0, "gradient_checkpointing": False}
    assert suggested(rl_advice(actor=whole)) == [each for each in RL if each != "--base_bits 4"]


def test_several_processes_can_share(world):
    world(2)
    assert suggested(rl_advice()) == [*RL[:-1], "--zero_stage 3", HOST]


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
    assert said.startswith("out of GPU memory while training: try in this order: compute fewer")
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
