"""Advice on a GPU out of memory: options to change, from the estimate of what fills it.

Every remedy is a change of options that is estimated again, so that what is advised fits by
the same estimate that is shown. Two remedies are computed here, as the estimate sees the model
as built: 16 bits halve activations and frozen weights, and an adapter alone needs next to no
gradients and optimizer state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import combinations, product

import torch

from dschat_lora.config.options import command_line
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size, world_size
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.option_checks import check_divides, check_training
from dschat_lora.perf.cards import USABLE
from dschat_lora.perf.memory import MemoryEstimate
from dschat_lora.perf.shape import describe
from dschat_lora.runtime.graphs import takes_graphs
from dschat_lora.runtime.memory import GIB, TrainedModel, peak_here
from dschat_lora.runtime.roles import OneRole, trained_models

Change = Mapping[str, object]  # option -> its new value
Estimator = Callable[..., MemoryEstimate]  # with the arguments of TrainedModel.estimate

_WORTHWHILE = 0.02  # of the memory in use; a change that saves less is not advised
_MOST_ALTERNATIVES = 3
_NOTHING_LEFT = "no option is left that saves memory: take a larger device or a smaller model"
_RANK = 16  # of the adapter advised instead of training every weight
# Options that a run can be resumed with at another value.
_RESUMABLE = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("offload_activations", "zero_stage", "offload", "tensor_parallel_size"),
}
_PARTS = {"optimizer": "of optimizer state", "loss": "for the loss"}


@dataclass(frozen=True)
class MemoryOptions:
    """Options that decide about memory, each under its name on the command line."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    offload_activations: bool
    dtype: str
    zero_stage: int
    tensor_parallel_size: int
    offload: bool
    lora_dim: int
    only_optimize_lora: bool
    max_seq_len: int
    world_size: int  # data-parallel processes: given at the start like an option

    @property
    def trains_base(self) -> bool:
        return self.lora_dim == 0 or not self.only_optimize_lora

    @property
    def engine_stage(self) -> int:
        """The ZeRO stage in use: trained weights in 16 bits run at stage 1 or above."""
        return max(self.zero_stage, int(self.trains_base and self.dtype != "fp32"))

    def changed(self, change: Change) -> "MemoryOptions":
        return replace(self, **change)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Remedy:
    """Changes to the same end, the mildest first; one of them is enough."""

    words: str
    changes: Sequence[Change]


def advise(
    error: torch.OutOfMemoryError,
    device_bytes: int | None,
    adapted: AdaptedModel,
    config: SupervisedConfig,
    settings: EngineSettings,
) -> str:
    """:func:`out_of_memory_advice` of a supervised stage, on a device with so many bytes."""
    now, lora_dim = trained_model(adapted, config), adapted.lora.lora_dim
    advice = out_of_memory_advice(
        make_estimator(adapted, config, settings),
        MemoryOptions(
            per_device_train_batch_size=now.rows,
            gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
            gradient_checkpointing=now.recomputes,
            offload_activations=now.offloads,
            dtype=settings.dtype,
            zero_stage=settings.zero_stage,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            offload=settings.offload,
            lora_dim=lora_dim,
            only_optimize_lora=lora_dim == 0 or adapted.lora.only_optimize_lora,
            max_seq_len=config.data.max_seq_len,
            world_size=data_world_size(),
        ),
        device_bytes=device_bytes,
        larger_groups=_larger_groups(adapted, config),
    )
    peak = peak_here(settings.torch_dtype)
    if takes_graphs(now, config.model, peak=peak):
        kept = now.estimated().activations / GIB
        advice += f". --training_graphs off takes {kept:.3g} GiB less, where graphs were recorded"
    if tokens := config.batch.tokens_per_device:
        advice += f". Fewer than --tokens_per_device {tokens} take less, in another run"
    return advice


def trained_model(adapted: AdaptedModel, config: SupervisedConfig) -> TrainedModel:
    """The one model of a supervised stage as it trains."""
    return trained_models(config, OneRole(adapted))["model"]


def make_estimator(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings
) -> Estimator | None:
    """The memory estimate of this model at other settings; None if it is not understood."""
    try:
        describe(adapted.model)
    except ValueError:
        return None
    return trained_model(adapted, config).estimate


def _larger_groups(adapted: AdaptedModel, config: SupervisedConfig) -> list[int]:
    """Multiples of ``--tensor_parallel_size`` that the processes and the model allow as well."""
    size, count = config.parallel.tensor_parallel_size, world_size()
    allowed: list[int] = []
    if config.parallel.context_parallel_size > 1:  # which goes with none
        return allowed
    for larger in (n for n in range(2 * size, count + 1, size) if count % n == 0):
        with suppress(ValueError):
            check_divides(adapted.model.config.to_dict(), larger)
            check_training(config.model, adapted.lora, larger)
            allowed.append(larger)
    return allowed


def out_of_memory_advice(
    estimate: Estimator | None,
    now: MemoryOptions,
    *,
    device_bytes: int | None,
    larger_groups: Sequence[int] = (),
) -> str:
    """One sentence: what fills the device, and what to change, the cheapest sufficient first.

    A change of rows keeps the product of micro-batch, accumulation and processes, so it is the
    same run. Where no single change makes the run fit 90 percent of the device, the fewest that
    do so together are given.

    ``estimate`` is None for architectures that are not understood, ``device_bytes`` where the
    memory of the device is unknown: the most effective change comes first then.
    ``larger_groups`` are multiples of ``--tensor_parallel_size`` that the processes and the model
    allow as well.
    """
    typed = partial(_typed, now)
    if estimate is None:
        remedies = _remedies(now, larger_groups, rows_matter=True)
        return f"out of GPU memory: {untested(remedies, typed)}"

    @cache
    def needed(options: MemoryOptions) -> MemoryEstimate:
        return _resident(estimate, options, now)

    memory = asdict(needed(now))
    sizes = {_PARTS.get(name, f"of {name}"): count for name, count in memory.items()}
    advice = sufficient(
        _remedies(now, larger_groups, rows_matter=memory["weights"] < max(memory.values())),
        lambda change: needed(now.changed(change)).total,
        budget=None if device_bytes is None else int(USABLE * device_bytes),
        typed=typed,
    )
    return f"out of GPU memory: by estimate {parts_in_use(sizes, device_bytes)}; {advice}"


def _resident(estimate: Estimator, options: MemoryOptions, built: MemoryOptions) -> MemoryEstimate:
    """Bytes on the device at ``options``, of a model built at ``built``."""
    memory = estimate(
        rows=options.per_device_train_batch_size,
        length=options.max_seq_len,
        gradient_checkpointing=options.gradient_checkpointing,
        offload_activations=options.offload_activations,
        zero_stage=options.engine_stage,
    )
    if options.dtype != built.dtype:
        memory = replace(memory, activations=memory.activations // 2)
        # Trained weights keep an fp32 copy, which is no smaller.
        if not options.trains_base:
            memory = replace(memory, weights=memory.weights // 2)
    if built.trains_base and not options.trains_base:
        memory = replace(memory, gradients=0, optimizer=0, update=0)
    if options.engine_stage < 3:
        # At stage 3 they are over all processes already. Of activations only some are divided.
        parts = options.tensor_parallel_size // built.tensor_parallel_size
        memory = replace(memory, weights=memory.weights // parts)
    if options.offload:
        memory = replace(memory, optimizer=0, update=0)
    if options.offload and options.zero_stage == 3:
        memory = replace(memory, weights=0)
    return memory


def _remedies(now: MemoryOptions, groups: Sequence[int], *, rows_matter: bool) -> list[Remedy]:
    """Changes that are left, the least costly first.

    ``rows_matter`` is False where weights take the most, which fewer positions do not reduce.
    """
    rows, length, shared = now.per_device_train_batch_size, now.max_seq_len, now.world_size > 1
    fewer = [n for n in range(rows // 2, 0, -1) if rows % n == 0]
    recomputing: Change = {"gradient_checkpointing": True}
    # ZeRO divides optimizer state and gradients, then weights; adapters need the last alone.
    stages = [n for n in ((2, 3) if now.trains_base else (3,)) if n > now.engine_stage]
    # Optimizer state goes to the host, then weights, which only stage 3 moves.
    offloading = (max(now.zero_stage, 1), 3) if now.trains_base else (3,)
    adapter: Change = {"only_optimize_lora": True} if now.lora_dim else {"lora_dim": _RANK}
    recompute = "recompute activations"
    if now.gradient_checkpointing:
        recompute = "keep inputs of blocks in host memory"
    table: list[tuple[bool, str, Sequence[Change]]] = [
        (
            rows_matter,
            "compute fewer rows at once",
            [{"per_device_train_batch_size": n} for n in fewer],
        ),
        (True, recompute, [recomputing, {**recomputing, "offload_activations": True}]),
        (now.dtype == "fp32", "compute in 16 bits", [{"dtype": "auto"}]),
        (shared, "share over the processes", [{"zero_stage": stage} for stage in stages]),
        (True, "divide the model", [{"tensor_parallel_size": size} for size in groups]),
        # With offload on, stage 3 over several processes is in the list already.
        (
            not (now.offload and shared),
            "use host memory",
            [{"zero_stage": stage, "offload": True} for stage in offloading],
        ),
        (True, "train adapters alone", [adapter]),
        (
            rows_matter and rows == 1,
            "shorten the rows",
            [{"max_seq_len": length // n} for n in (2, 4, 8) if length // n > 1],
        ),
    ]
    remedies = [
        Remedy(words, [each for each in changes if now.changed(each) != now])
        for applies, words, changes in table
        if applies
    ]
    return [remedy for remedy in remedies if remedy.changes]


def _typed(now: MemoryOptions, change: Change) -> str:
    """The options to type, without those that have their value already.

    A change of how rows are split is noted to keep as many a step.
    """
    after = now.changed(change)
    times = now.per_device_train_batch_size // after.per_device_train_batch_size
    times *= after.tensor_parallel_size // now.tensor_parallel_size
    after = replace(after, gradient_accumulation_steps=now.gradient_accumulation_steps * times)
    news = {name: value for name, value in asdict(after).items() if value != getattr(now, name)}
    flags = " ".join(command_line(news))
    if not change.keys() & {"per_device_train_batch_size", "tensor_parallel_size"}:
        return flags
    rows = now.per_device_train_batch_size * now.gradient_accumulation_steps * now.world_size
    resumable = ", so the run can be resumed" if change.keys() <= _RESUMABLE else ""
    return f"{flags}: the same batch of {rows} rows a step{resumable}"


def untested(remedies: Sequence[Remedy], typed: Callable[[Change], str]) -> str:
    """The remedies in words, where nothing can be estimated; ``typed`` gives a change's options."""
    advice = f"try in this order: {_alternatives(remedies, typed)}"
    return advice if remedies else _NOTHING_LEFT


def sufficient(
    remedies: Sequence[Remedy],
    need: Callable[[Change], int],
    *,
    budget: int | None,
    typed: Callable[[Change], str],
) -> str:
    """The remedies of which one is enough, else the fewest that are together, in words.

    Args:
        remedies: the least costly first.
        need: bytes of the device with a change; with an empty one, as it is.
        budget: bytes that are enough; None: the most effective remedies come first.
        typed: the options of a change, as they are typed.
    """

    def restricted(most: float) -> list[Remedy]:
        """The remedies with those of their changes after which no more is needed, if any."""
        kept = (replace(r, changes=[c for c in r.changes if need(c) <= most]) for r in remedies)
        return [remedy for remedy in kept if remedy.changes]

    remedies = restricted((1 - _WORTHWHILE) * need({}))
    if not remedies:
        return _NOTHING_LEFT
    if budget is None:
        remedies.sort(key=lambda remedy: need(remedy.changes[0]))
        return _alternatives(remedies[:_MOST_ALTERNATIVES], typed)
    if alone := restricted(budget):
        return _alternatives(alone[:_MOST_ALTERNATIVES], typed)
    for count in range(2, len(remedies) + 1):  # the fewest first, of as many the least costly first
        for chosen in combinations(remedies, count):
            for changes in product(*(remedy.changes for remedy in chosen)):
                together = _merge(changes)
                if need(together) <= budget:
                    return f"no single change is enough, take together {typed(together)}"
    everything = typed(_merge(remedy.changes[-1] for remedy in remedies))
    return f"all that helps is not enough ({everything}): take a larger device or a smaller model"


def _merge(changes: Iterable[Change]) -> Change:
    return {name: value for change in changes for name, value in change.items()}


def _alternatives(remedies: Sequence[Remedy], typed: Callable[[Change], str]) -> str:
    """Each remedy in words and as options, in its mildest form."""
    return ", or ".join(f"{each.words} ({typed(each.changes[0])})" for each in remedies)


def parts_in_use(sizes: Mapping[str, int], device_bytes: int | None) -> str:
    """The parts that fill the device, the largest first, without negligible ones.

    ``sizes`` are their bytes by what they are of or for, such as "of weights".
    """

    def gib(count: int) -> str:
        return f"{float(f'{count / 2**30:.3g}'):g} GiB"

    total = sum(sizes.values())
    largest = sorted(sizes.items(), key=lambda part: -part[1])
    parts = [f"{gib(count)} {words}" for words, count in largest if count >= 0.005 * total]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    if device_bytes is None:
        return listed
    on = f"{listed}, on a device of {gib(device_bytes)}"
    if total > USABLE * device_bytes:
        return on
    return f"{on}, where training should fit unless another program uses it"
