"""Micro-batches of a step, and recomputation in them: of settings of one step the fastest."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeVar

from dschat_lora.checkpoint.history import STATE_FILE
from dschat_lora.config.groups import LoadConfig
from dschat_lora.config.options import command_line, flatten, with_values
from dschat_lora.config.stages import StageConfig
from dschat_lora.engine.distributed import broadcast_string, device, rank
from dschat_lora.models.blocks import can_recompute, offload_inputs, recompute_blocks
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.report.directory import read_object
from dschat_lora.report.texts import duration
from dschat_lora.runtime.graphs import with_graphs
from dschat_lora.runtime.memory import GIB, TrainedModel
from dschat_lora.runtime.run import OpenRun

ConfigT = TypeVar("ConfigT", bound=StageConfig)


def smaller_micro_batches(config: StageConfig, *, longest: int) -> Iterator[dict[str, int]]:
    """Options of ever smaller micro-batches of the same step; ``longest`` is a row's tokens.

    A budget of tokens is divided in steps of two.
    """
    batch, names = config.batch, config.rows["rows_per_step"]
    times: int = getattr(batch, names[-1])
    if tokens := batch.tokens_per_device:
        for parts in (2**n for n in range(1, 32) if tokens >> n >= longest):
            more = {names[-1]: times * parts} if "tokens_per_device" in config.fixed else {}
            yield {"tokens_per_device": tokens // parts} | more
        return
    now = getattr(batch, names[0])
    for rows in range(now - 1, 0, -1):
        if now * times % rows == 0:
            yield {names[0]: rows, names[-1]: now * times // rows}


def whole_micro_batches(config: StageConfig, *, zero_stage: int) -> str | None:
    """The option by which micro-batches stay as they are; None where the run may divide them.

    Sizes that are typed stay, and so do those that a result depends on. What ZeRO 2 and 3,
    ``--offload`` and processes that divide a model or a row exchange in each micro-batch is not
    in the estimate of time.
    """
    size, parallel = config.rows["rows_per_step"][0], config.parallel
    reasons = {
        size: size in config.given or bool(config.batch.tokens_per_device),
        "deepspeed_config": parallel.deepspeed_config is not None,
        "zero_stage": zero_stage > 1,
        "offload": parallel.offload,
        "tensor_parallel_size": parallel.tensor_parallel_size > 1,
        "context_parallel_size": parallel.context_parallel_size > 1,
    }
    return config.bound_to_micro_batches or next((n for n, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class StepCosts(Generic[ConfigT]):
    """What a step takes by its config, by estimate."""

    need: Callable[[ConfigT], int | None]  # bytes on a device; None where that is not understood
    trained: Callable[[ConfigT], Collection[TrainedModel]]
    load: LoadConfig
    peak: float | None  # TFLOP/s of the device; None: of a CPU, whose time is not estimated
    budget: float  # bytes of the device that a step may take

    def seconds(self, config: ConfigT) -> float | None:
        """Of training, without exchanges and optimizer; None on a CPU."""
        if self.peak is None:
            return None
        trained = self.trained(config)
        times, total = config.batch.gradient_accumulation_steps, 0.0
        recorded = with_graphs(
            trained,
            self.load,
            peak=self.peak,
            left=lambda: self.budget - (self.need(config) or 0),
        )
        for each in trained:
            count = times
            if each.tokens and "tokens_per_device" not in config.fixed:  # it divides a step of rows
                count = -(-times * each.rows * each.length // each.tokens)
            one = each.seconds(self.peak, fused=self.load.fused_kernels != "off")
            total += count * (one.recorded() if each in recorded else one).total
        return total

    def fastest(self, config: ConfigT, undecided: Sequence[str], *, splits: bool) -> ConfigT:
        """Of the same step, with ``undecided`` options of recomputation on or off.

        The first of the fastest that fit the budget, those that recompute least before others; else
        what needs least. ``splits`` allows for smaller micro-batches.
        """
        longest = max(each.length * each.sequences for each in self.trained(config))
        sizes = smaller_micro_batches(config, longest=longest) if splits else ()
        configs = (
            with_values(config, {**values, **{name: name in on for name in undecided}})
            for values in ({}, *sizes)
            for count in range(len(undecided) + 1)
            for on in combinations(undecided, count)
        )
        ordered = sorted(configs, key=lambda each: self.seconds(each) or 0.0)
        fitting = (each for each in ordered if (self.need(each) or 0) <= self.budget)
        return next(fitting, None) or min(ordered, key=lambda each: self.need(each) or 0)

    def words(self, config: ConfigT) -> str:
        """Memory and time, for the log."""
        seconds = self.seconds(config)
        time = "" if seconds is None else f" and {duration(seconds)} a step"
        return f"{(self.need(config) or 0) / GIB:.3g} GiB{time}"


def resolve_step(
    run: OpenRun[StageConfig],
    models: Mapping[str, PreTrainedModel],
    config: ConfigT,
    costs: StepCosts[ConfigT],
    *,
    free: int,
) -> ConfigT:
    """The config with its micro-batches and recomputation settled, as the models then do.

    ``models`` are the trained ones, by the option that has their blocks recomputed. A device has
    ``free`` bytes. Rank 0's decision holds; call on every rank.

    Raises:
        ValueError: if blocks are to be recomputed, and the architecture cannot.
    """
    able, decided = all(map(can_recompute, models.values())), None
    if rank() == 0:
        decided = settle(config, [*models], costs, free=free, able=able)
    values, words = json.loads(broadcast_string(json.dumps(decided)))
    if words is not None:
        run.log.say(f"  note         {words}")
    offloads = config.parallel.offload_activations
    if offloads and device().type != "cuda":
        run.log.say(
            "  note         --offload_activations saves no memory on a CPU, where activations are "
            "in host memory anyway"
        )
    run.record.update(values)
    for option, model in models.items():
        if values[option]:
            recompute_blocks(model, option)
            if offloads:
                offload_inputs(model)
    # Roles that do not train recompute nothing.
    others = [n for n in flatten(config) if n.endswith("gradient_checkpointing")]
    return with_values(config, {**dict.fromkeys(others, False), **values})


def settle(
    config: ConfigT,
    options: Sequence[str],
    costs: StepCosts[ConfigT],
    *,
    free: int,
    able: bool = True,
) -> tuple[dict[str, Any], str | None]:
    """Values of ``options`` of recomputation, and of sizes that change; and a note for the log.

    A resumed run does as it did unless an option is typed again. Elsewhere ``auto`` is what makes
    the fastest step that fits ``free`` bytes; on a CPU, what recomputes least. Blocks that are not
    ``able`` to be recomputed are not, where that is ``auto``.
    """
    before = read_object(Path(config.checkpoint) / STATE_FILE) if config.checkpoint else {}
    before, known = before.get("config", {}), flatten(config)
    # The checkpoint holds what auto was resolved to; a typed auto is resolved anew.
    kept = {n: before[n] for n in options if known[n] == "auto" and n in before}
    known |= {n: value for n, value in kept.items() if n not in config.given}
    values = {name: known[name] is True for name in options}
    undecided = [name for name in options if known[name] == "auto"] if able else []
    base = with_values(config, values)
    if costs.need(base) is None:  # of an architecture that is not understood
        return values, None
    stage = max(each.settings.zero_stage for each in costs.trained(base))
    whole = whole_micro_batches(config, zero_stage=stage)
    timed = costs.seconds(base) is not None
    chosen = costs.fastest(base, undecided, splits=timed and whole is None)
    then, sizes, words = flatten(chosen), _sizes(base, chosen), None
    if timed and (undecided or sizes):
        words = _words_on_a_gpu(base, chosen, undecided, sizes, costs, free)
        if whole == config.rows["rows_per_step"][0]:
            other = costs.fastest(base, undecided, splits=True)
            words += _words_of_a_split(chosen, other, costs)
    elif undecided and chosen != base:
        on = ", ".join(f"--{name}" for name in undecided if then[name])
        words = (
            f"activations are recomputed ({on}): by estimate {costs.words(base)} per device "
            f"without, {costs.words(chosen)} with, of {free / GIB:.3g} GiB free"
        )
    return {n: then[n] for n in options} | sizes, words


def _sizes(before: StageConfig, after: StageConfig) -> dict[str, int]:
    """Options of the sizes of micro-batches that differ, as they are after."""
    now, then = flatten(before), flatten(after)
    names = ("tokens_per_device", *before.rows["rows_per_step"])
    return {name: then[name] for name in names if then[name] != now[name]}


def _words_on_a_gpu(
    base: ConfigT,
    chosen: ConfigT,
    undecided: Sequence[str],
    sizes: Mapping[str, int],
    costs: StepCosts[ConfigT],
    free: int,
) -> str:
    """What was chosen, and what the other would take: memory and time."""
    on = [f"--{name}" for name in undecided if flatten(chosen)[name]]
    words = f"activations are recomputed ({', '.join(on)})" if on else "activations are kept"
    if sizes:
        words += f" with smaller micro-batches ({' '.join(command_line(sizes))})"
    words += f": by estimate {costs.words(chosen)} of training, of {free / GIB:.3g} GiB free"
    if chosen != base:
        words += f"; kept, with whole micro-batches, {costs.words(base)}"
    if not on and undecided:
        again = with_values(base, dict.fromkeys(undecided, True))
        words += f"; recomputed{' in whole ones' if sizes else ''} {costs.words(again)}"
    return words


def _words_of_a_split(chosen: ConfigT, other: ConfigT, costs: StepCosts[ConfigT]) -> str:
    """What a division that the user may type would take; empty where it is no faster."""
    slow, quick = costs.seconds(chosen), costs.seconds(other)
    if slow is None or quick is None or quick >= slow:
        return ""
    typed = " ".join(command_line(_sizes(chosen, other)))
    return f". {typed} makes the same step in {costs.words(other)}"
