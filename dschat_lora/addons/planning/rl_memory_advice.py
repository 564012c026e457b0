"""Advice where step 3 runs out of GPU memory: options to change, from the plan of its memory."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice

import torch

from dschat_lora.addons.planning.memory_advice import (
    Change,
    Remedy,
    parts_in_use,
    sufficient,
    untested,
)
from dschat_lora.config.groups import is_on
from dschat_lora.config.options import build_config, command_line, flatten
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.perf.cards import USABLE
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.errors import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.runtime.memory import MemoryPlan
from dschat_lora.runtime.micro_batches import smaller_micro_batches


def advise(
    error: torch.OutOfMemoryError,
    device_bytes: int | None,
    config: RlhfConfig,
    plan: MemoryPlan | None,
    planned: Callable[[RlhfConfig], MemoryPlan | None],
) -> str:
    """:func:`memory_advice` by what was done when the device was full."""
    if plan is not None and isinstance(error, FullAfterReleaseError):
        plan = replace(plan, keeps_cache=False)
    decodes = isinstance(error, FullWhileDecodingError)
    return memory_advice(config, plan, planned, decodes=decodes, device_bytes=device_bytes)


def memory_advice(
    config: RlhfConfig,
    plan: MemoryPlan | None,
    planned: Callable[[RlhfConfig], MemoryPlan | None],
    *,
    decodes: bool,
    device_bytes: int | None,
) -> str:
    """One sentence: what fills the device, and what to change, the cheapest sufficient first.

    ``decodes`` says whether it was full while responses were decoded, or else in a pass that
    scores them or trains. ``plan`` is that of the run, ``planned`` that of its models with other
    options; it may raise a ValueError.
    """
    keeps_cache, records = (False, False) if plan is None else (plan.keeps_cache, plan.graphs > 0)
    remedies = _remedies(config, keeps_cache=keeps_cache, records=records)
    if plan is None:
        return f"out of GPU memory: {untested(remedies, _typed)}"
    unpacked = plan.cache - whole.cache if (whole := planned(config)) is not None else 0

    @cache
    def phases(options: frozenset[tuple[str, object]]) -> tuple[int, int]:
        """Bytes that are needed with these options: of the phase that ran out, of the other."""
        changed, keeps = plan, plan.keeps_cache
        if change := dict(options):
            with suppress(ValueError):  # what is refused saves nothing
                values = {**flatten(config), **change}
                if stage := change.get("zero_stage"):
                    values |= {"actor_zero_stage": stage, "critic_zero_stage": stage}
                changed = planned(build_config(RlhfConfig, values)) or plan
                graphs = 0 if change.get("training_graphs") == "off" else plan.graphs
                changed = replace(changed, cache=changed.cache + unpacked, graphs=graphs)
            keeps = keeps and "release_inference_cache" not in change
        training = changed.updating + (changed.cache if keeps else 0)
        return (changed.decoding, training) if decodes else (training, changed.decoding)

    def need(change: Change) -> int:
        own, other = phases(frozenset(change.items()))
        # The other phase matters where it would not fit either.
        return own + (0 if device_bytes is None or other <= USABLE * device_bytes else other)

    # What ran out takes all of the device, whatever the estimate says.
    now, _ = phases(frozenset())
    budget = None if device_bytes is None else int(USABLE * min(device_bytes, now))
    sizes = {"of weights": plan.weights, "of gradients and optimizer state": plan.training}
    if records:
        sizes["of CUDA graphs"] = plan.graphs
    if not decodes:
        sizes["for a micro-batch"] = plan.update
    if decodes or plan.keeps_cache:
        sizes["for decoding"] = plan.cache
    return (
        f"out of GPU memory while {'responses are decoded' if decodes else 'training'}: by "
        f"estimate {parts_in_use(sizes, device_bytes)}; "
        f"{sufficient(remedies, need, budget=budget, typed=_typed)}"
    )


def _remedies(config: RlhfConfig, *, keeps_cache: bool, records: bool) -> list[Remedy]:
    """Changes that are left, the least costly first; all but of the bits leave results alone."""
    batch = config.batch
    kept = [f"{role}_gradient_checkpointing" for role in ("critic", "actor")]
    kept = [name for name in kept[not config.has_critic :] if not is_on(flatten(config)[name])]
    recomputed = [dict.fromkeys(kept[: n + 1], True) for n in range(len(kept))]
    offloaded = dict.fromkeys(kept, True) | {"offload_activations": True}
    smaller = smaller_micro_batches(config, longest=config.data.max_seq_len)
    fewer = range(batch.rows_decoded - 1, 0, -1)
    decoded = [{"max_num_seqs": n} for n in fewer if n % batch.num_generations == 0]
    adapted = all(each.lora.lora_dim > 0 for each in config.trained.values())
    frozen = adapted and config.classic.only_optimize_lora
    whole = (config.parallel.zero_stage or 0) < 3
    table: list[tuple[bool, str, Sequence[Change]]] = [
        (keeps_cache, "free what decoding keeps", [{"release_inference_cache": True}]),
        (records, "train without CUDA graphs", [{"training_graphs": "off"}]),
        (
            True,
            "compute fewer rows at once",
            [*islice(smaller, 3 if batch.tokens_per_device else None)],
        ),
        (True, "decode fewer responses at once", decoded),
        (
            not config.parallel.offload_activations,
            "recompute activations" if kept else "keep inputs of blocks in host memory",
            [*recomputed, offloaded],
        ),
        (frozen and config.load.base_bits != 4, "hold the base in 4 bits", [{"base_bits": 4}]),
        (data_world_size() > 1 and whole, "share over the processes", [{"zero_stage": 3}]),
        (
            not (config.parallel.offload and not whole),
            "use host memory",
            [{"zero_stage": 3, "offload": True}],
        ),
    ]
    return [Remedy(words, changes) for applies, words, changes in table if applies and changes]


def _typed(change: Change) -> str:
    return " ".join(command_line(change))
