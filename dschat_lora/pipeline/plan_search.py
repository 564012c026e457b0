"""Search for settings of a stage that fit a device, the least costly first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from dschat_lora.config.options import flatten
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.pipeline.plan import GENERATION, TRAINING, StagePlan
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.runtime.memory import fewest

# Positions of a micro-batch from which on a GPU is busy; below, recomputation costs less.
ENOUGH_POSITIONS = 2048
MOST_ROWS = 4096  # of a micro-batch that is looked for

Change = Mapping[str, Any]  # option -> value
Planner = Callable[[Change], StagePlan]  # the plan with options changed; a ValueError refuses them


@dataclass(frozen=True)
class Rows:
    """Options that say how many rows a phase computes at a time, and how often in a step."""

    phase: str
    size: str
    times: str
    multiple_of: int = 1

    def at_once(self, plan: StagePlan) -> int:
        """Rows at a time."""
        return int(getattr(plan.config.batch, self.size))

    def changed(self, plan: StagePlan, rows: int, times: int | None = None) -> StagePlan:
        """The plan with so many rows at a time."""
        batch = replace(plan.config.batch, **{self.size: rows})
        if times is not None:
            batch = replace(batch, **{self.times: times})
        return plan.changed(replace(plan.config, batch=batch))

    def of_one_step(self, plan: StagePlan) -> Iterator[StagePlan]:
        """The same step in ever smaller micro-batches, beginning with the present one."""
        now = self.at_once(plan)
        total = now * getattr(plan.config.batch, self.times)
        for rows in range(now, 0, -1):
            if total % rows == 0 and rows % self.multiple_of == 0:
                yield self.changed(plan, rows, total // rows)


def rows_of(config: Any) -> list[Rows]:
    """What sizes micro-batches, by phase; none where tokens do."""
    if isinstance(config, RlhfConfig):
        batch = config.batch
        decoding = "per_device_generation_batch_size"
        found = [Rows(GENERATION, decoding, "generation_batches", batch.num_generations)]
        if not batch.tokens_per_device:
            size = "per_device_training_batch_size"
            found.append(Rows(TRAINING, size, "gradient_accumulation_steps"))
        return found
    if config.batch.tokens_per_device:
        return []
    return [Rows(TRAINING, "per_device_train_batch_size", "gradient_accumulation_steps")]


def recomputing_options(config: Any) -> tuple[str, ...]:
    """Options of recomputation; the critic's first, which costs less as a rule."""
    if not isinstance(config, RlhfConfig):
        return ("gradient_checkpointing",)
    return tuple(f"{role}_gradient_checkpointing" for role in ("critic", "actor"))[
        not config.has_critic :
    ]


def with_recomputation(plan: StagePlan, options: Sequence[str]) -> StagePlan:
    """The plan with recomputation by these options, and by no others."""
    config = plan.config
    if isinstance(config, SupervisedConfig):
        model = replace(config.model, gradient_checkpointing=bool(options))
        return plan.changed(replace(config, model=model))
    roles = {
        name: replace(
            getattr(config, name),
            gradient_checkpointing=f"{name}_gradient_checkpointing" in options,
        )
        for name in ("actor", "critic")
    }
    return plan.changed(replace(config, **roles))


def resolved(plan: StagePlan, usable: int | None) -> StagePlan:
    """The plan with ``auto`` recomputation as a run decides it on a device, off without one."""
    values, options = flatten(plan.config), recomputing_options(plan.config)
    on = [name for name in options if values[name] is True]
    undecided = [name for name in options if values[name] == "auto"]
    if usable is None:
        return with_recomputation(plan, on)

    def fits(more: Sequence[str]) -> bool:
        return with_recomputation(plan, [*on, *more]).phases[TRAINING] <= usable

    return with_recomputation(plan, [*on, *fewest(undecided, fits)])


def largest_rows(plan: StagePlan, usable: int) -> dict[str, int]:
    """The most rows at a time that fit, by option; 0 where not even the fewest do."""
    found = {}
    for rows in rows_of(plan.config):
        unit = rows.multiple_of

        def need(count: int, rows: Rows = rows) -> int:
            return rows.changed(plan, count * rows.multiple_of).phases[rows.phase]

        found[rows.size] = unit * _largest(need, usable, MOST_ROWS // unit)
    return found


def _largest(need: Callable[[int], int], usable: int, most: int) -> int:
    """The largest number from 1 to ``most`` whose need is ``usable`` or less; 0 where 1's is more.

    The need grows with the number, by nearly as much each time: it is looked for along the line.
    """
    if need(1) > usable:
        return 0
    low, high, is_low = 1, most + 1, True  # ``low`` fits, ``high`` does not
    while high - low > 1 and need(low + 1) <= usable:
        guess = (low + high) // 2
        if is_low:
            guess = low + (usable - need(low)) // max(1, need(low + 1) - need(low))
        guess = min(max(guess, low + 1), high - 1)
        is_low = need(guess) <= usable
        low, high = (guess, high) if is_low else (low, guess)
    return low


def search(
    planner: Planner, *, usable: int, processes: int, has_bits: bool
) -> tuple[StagePlan, dict[str, Any]] | None:
    """The plan that fits, and the options that make it so; None where nothing does.

    Options that the user typed are kept, but a micro-batch may become smaller as its number
    grows: the step stays the same.
    """
    first = planner({})
    for change in _sharing(first.config, processes, has_bits=has_bits):
        try:
            plan = planner(change) if change else first
        except ValueError:
            continue  # the stage refuses it
        if found := _smaller(plan, usable):
            return found, _differences(first, found) | change
    return None


def _sharing(config: Any, processes: int, *, has_bits: bool) -> Iterator[dict[str, Any]]:
    """What moves or shrinks weights and optimizer state, the least costly first."""
    yield {}
    trains_base = _trains_base(config)
    stages = (2, 3) if trains_base else (3,)
    steps: list[dict[str, Any]] = []
    if processes > config.parallel.tensor_parallel_size:
        steps += [{"zero_stage": stage} for stage in stages]
    if has_bits and not trains_base:
        steps.insert(0, {"base_bits": 4})
    steps += [
        {"zero_stage": max(config.parallel.zero_stage or 0, 1), "offload": True}
    ] * trains_base
    steps += [{"zero_stage": 3, "offload": True}]
    candidates = [*steps, *accumulate(steps, lambda a, b: a | b)]
    for change in candidates:
        if not change.keys() & config.given:
            yield change


def _trains_base(config: Any) -> bool:
    if isinstance(config, RlhfConfig):
        ranks = [config.actor.lora_dim] + [config.critic.lora_dim] * config.has_critic
        return min(ranks) == 0 or not config.classic.only_optimize_lora
    return bool(config.lora.lora_dim == 0 or not config.lora.only_optimize_lora)


def _smaller(plan: StagePlan, usable: int) -> StagePlan | None:
    """The plan in micro-batches that fit, recomputed where that leaves too small ones."""
    options = recomputing_options(plan.config)
    values = flatten(plan.config)
    on = [n for n in options if values[n] is True]
    free = [n for n in options if values[n] == "auto"]
    found = []
    for count in range(len(free) + 1):
        fitting = _in_fitting_rows(with_recomputation(plan, [*on, *free[:count]]), usable)
        if fitting is None:
            continue
        found.append(fitting)
        if _positions(fitting) >= min(ENOUGH_POSITIONS, _positions(plan)):
            return fitting
    return max(found, key=_positions, default=None)


def _in_fitting_rows(plan: StagePlan, usable: int) -> StagePlan | None:
    for rows in rows_of(plan.config):
        fitting = (p for p in rows.of_one_step(plan) if p.phases[rows.phase] <= usable)
        found = next(fitting, None)
        if found is None:
            return None
        plan = found
    return plan if max(plan.phases.values()) <= usable else None


def _positions(plan: StagePlan) -> int:
    trained = next(iter(plan.trained.values()))
    return trained.tokens or trained.rows * trained.length * trained.sequences


def _differences(before: StagePlan, after: StagePlan) -> dict[str, Any]:
    """Options whose values differ, recomputation included where it was left open."""
    old, new = flatten(before.config), flatten(after.config)
    batch = {name for rows in rows_of(after.config) for name in (rows.size, rows.times)}
    names = [n for n in new if n in batch or n in recomputing_options(after.config)]
    return {name: new[name] for name in names if new[name] != old[name]}
