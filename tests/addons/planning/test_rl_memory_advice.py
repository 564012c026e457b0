"""What to change where step 3 runs out of GPU memory; sizes are made up, in GiB."""

from dataclasses import replace

import pytest
import torch

from dschat_lora.addons.planning import rl_memory_advice
from dschat_lora.addons.planning.rl_memory_advice import memory_advice
from dschat_lora.rl.response.errors import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.runtime.memory import MemoryPlan, explaining_memory
from helpers.roles import config_of

GIB = 2**30
SMALL = {"per_device_training_batch_size": 1, "per_device_generation_batch_size": 1}
NOT_RECOMPUTED = {"lora_dim": 8, "gradient_checkpointing": False}


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """``world(n)``: n data-parallel processes; one at first."""

    def of(size):
        monkeypatch.setattr(rl_memory_advice, "data_world_size", lambda: size)

    of(1)
    return of


def config(**groups):
    batch = {"per_device_training_batch_size": 16, "per_device_generation_batch_size": 8}
    roles = {"actor": NOT_RECOMPUTED, "critic": NOT_RECOMPUTED}
    return config_of(**{**roles, **groups, "batch": {**batch, **groups.get("batch", {})}})


def planned(options):
    """10 of weights, 3 in four bits; 1 a row that trains, half of it recomputed; 1 a row decoded"""
    batch, parallel = options.batch, options.parallel
    weights = 3 if options.load.base_bits == 4 else 10
    stages = {options.actor.zero_stage, options.critic.zero_stage, parallel.zero_stage}
    if stages == {3}:
        weights = 0 if parallel.offload else weights // 2
    rows = batch.per_device_training_batch_size
    rows = batch.tokens_per_device / 512 or rows
    on = [getattr(options, role).gradient_checkpointing is True for role in ("actor", "critic")]
    update = rows * (1 - 0.25 * sum(on)) * (0.5 if parallel.offload_activations else 1)
    cache = batch.rows_decoded
    sizes = (weights, weights, 1, update, cache)
    return MemoryPlan(*(int(size * GIB) for size in sizes))


def advice(options, *, device, decodes=False, keeps=False, planned=planned):
    plan = replace(planned(options), keeps_cache=keeps)
    return memory_advice(
        options, plan, planned, decodes=decodes, device_bytes=device and device * GIB
    )


def test_micro_batches_become_as_large_as_fits():
    # 27 of 24 are needed; 10 rows would fit, and 8 divide the step.
    said = advice(config(), device=24)
    assert said.startswith(
        "out of GPU memory while training: by estimate 16 GiB for a micro-batch, 10 GiB of "
        "weights and 1 GiB of gradients and optimizer state, on a device of 24 GiB; compute fewer "
        "rows at once (--per_device_training_batch_size 8 --gradient_accumulation_steps 2), or "
        "recompute activations (--critic_gradient_checkpointing --actor_gradient_checkpointing), "
    )


def test_micro_batches_by_tokens_stay_long_enough_for_a_row():
    # 16 rows of 512 tokens, of 21.6 that may be used; half as many fit
    options = config(batch={"tokens_per_device": 16 * 512})
    assert "compute fewer rows at once (--tokens_per_device 4096)" in advice(options, device=24)
    short = config(batch={"tokens_per_device": 900})
    assert "--tokens_per_device" not in advice(short, device=None)


def test_decoding_keeps_the_responses_of_a_prompt_together():
    batch = {"per_device_generation_batch_size": 12, "num_generations": 4, "generation_batches": 2}
    batch["per_device_training_batch_size"] = 4
    # 23 of 20: 7 rows would fit, and of those that 4 divides 4 do
    said = advice(config(batch=batch), device=20, decodes=True)
    assert said.startswith("out of GPU memory while responses are decoded: by estimate 12 GiB for")
    assert "decode fewer responses at once (--max_num_seqs 4)" in said


def test_what_decoding_keeps_goes_first():
    # 35 of 32, and 27 without
    said = advice(config(), device=32, keeps=True)
    assert "8 GiB for decoding" in said
    assert "; free what decoding keeps (--release_inference_cache), or compute fewer" in said
    assert "decoding" not in advice(config(), device=32)


def test_an_estimate_that_fits_is_taken_to_be_too_low():
    # 27 of 64 were not enough: advised is what takes 10 percent less, which 15 rows do not
    said = advice(config(batch={"gradient_accumulation_steps": 15}), device=64)
    assert "where training should fit unless another program uses it" in said
    assert "(--per_device_training_batch_size 12 --gradient_accumulation_steps 20)" in said
    assert "(--critic_gradient_checkpointing)" in said


def test_a_phase_that_does_not_fit_either_is_made_smaller_too():
    options = config(batch={"per_device_generation_batch_size": 16})
    # 27 in both phases, of 16: 14.4 may be used
    assert (
        "; no single change is enough, take together --per_device_training_batch_size 2 "
        "--gradient_accumulation_steps 8 --max_num_seqs 3"
    ) in advice(options, device=16)


def test_four_bits_are_advised_where_the_model_can_be_held_so():
    options = config(batch=SMALL)
    assert "hold the base in 4 bits (--base_bits 4)" in advice(options, device=12)

    def refuses(options):
        if options.load.base_bits == 4:
            raise ValueError("this architecture cannot")
        return planned(options)

    assert "--base_bits" not in advice(options, device=12, planned=refuses)
    whole = config(actor={"lora_dim": 0, "gradient_checkpointing": False})
    assert "--base_bits" not in advice(whole, device=None)


def test_stage_3_is_that_of_every_role(world):
    options = config(batch=SMALL)
    assert "--zero_stage 3)" not in advice(options, device=12)
    world(2)
    assert "share over the processes (--zero_stage 3)" in advice(options, device=12)


def test_where_nothing_fits_that_is_said():
    assert "; all that helps is not enough (" in advice(config(), device=1)


def test_an_architecture_that_is_not_understood_has_options_without_sizes():
    said = memory_advice(config(), None, lambda _: None, decodes=False, device_bytes=GIB)
    assert said.startswith(
        "out of GPU memory: try in this order: compute fewer rows at once "
        "(--per_device_training_batch_size 8 --gradient_accumulation_steps 2), or decode "
    )


@pytest.mark.parametrize(
    ("error", "words", "frees"),
    [
        (torch.OutOfMemoryError, "while training", True),
        (FullAfterReleaseError, "while training", False),
        (FullWhileDecodingError, "while responses are decoded", False),
    ],
)
def test_the_error_says_what_was_done(tmp_path, error, words, frees):
    plan = replace(planned(config()), keeps_cache=True)
    (tmp_path / "step-00000004").mkdir()
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        explaining_memory(tmp_path, plan, "rl_memory", config(), plan, planned),
    ):
        raise error("CUDA out of memory. Tried to allocate 2 GiB")
    assert words in str(raised.value)
    assert ("--release_inference_cache" in str(raised.value)) is frees


def test_memory_of_graphs_is_named_and_can_be_freed():
    plan = replace(planned(config()), graphs=8 * GIB)
    said = memory_advice(config(), plan, planned, decodes=False, device_bytes=39 * GIB)
    assert "8 GiB of CUDA graphs" in said
    assert "; train without CUDA graphs (--training_graphs off), or compute" in said
