"""Plans of stages by their options, and the search for settings that fit a device."""

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import or_
from pathlib import Path
from typing import Any

from dschat_lora.addons.pipeline.recipe import Recipe, checked_stages
from dschat_lora.addons.planning.cards import Card
from dschat_lora.addons.planning.plan import (
    GENERATION,
    TRAINING,
    Config,
    StagePlan,
    build_plan,
    peak_of,
    recomputation,
    recomputing_options,
    with_recomputation,
)
from dschat_lora.addons.planning.published import published_name, with_placeholders
from dschat_lora.commands.stages import STAGES, check_stage, restated
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.options import command_line, flatten, option_names, with_values
from dschat_lora.data.audit import DataAudit
from dschat_lora.data.media import media_reader
from dschat_lora.data.rows import config_sources
from dschat_lora.engine.distributed import planned_processes
from dschat_lora.models.loading import load_tokenizer, only_errors
from dschat_lora.models.option_checks import shapes_alone
from dschat_lora.models.source import find_model
from dschat_lora.perf.cards import USABLE
from dschat_lora.rl.learn.roles import Roles
from dschat_lora.rl.loop.memory import decoding_by_memory, unpacking_for_rollouts
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.memory import UNKNOWN_PEAK
from dschat_lora.runtime.micro_batches import StepCosts, whole_micro_batches
from dschat_lora.runtime.setup import prepare_data

# Of no consequence for memory; what they name need not be there.
_OUTPUT = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dry_run")
MOST_ROWS = 4096  # of a micro-batch that is looked for

Change = Mapping[str, Any]  # option -> value
Planner = Callable[[Change], StagePlan]  # the plan with options changed; a ValueError refuses them


@dataclass(frozen=True)
class Planned:
    """What is known of a stage: its plan as given, and one that fits where that does not."""

    name: str
    options: Mapping[str, Any]  # as typed
    processes: int
    plan: StagePlan
    card: Card | None
    largest: dict[str, int]  # rows at a time that fit, by option
    better: StagePlan | None = None
    changes: Change | None = None  # the options of what fits that were not typed so
    data: DataAudit | str | None = None  # why it was not counted; None: no data is named

    @property
    def fits(self) -> bool | None:
        """Whether it fits as it was given; None without a device."""
        return None if self.card is None else self.plan.peak <= self.card.usable_bytes

    @property
    def command(self) -> str | None:
        """A command line that fits, or the one that was planned without a device."""
        if self.fits is False and self.changes is None:
            return None
        options: dict[str, Any] = {"num_gpus": self.processes} if self.processes > 1 else {}
        options |= {**self.options, **(self.changes or {})}
        for option, value in options.items():  # a model's short name as the hub's
            if isinstance(value, str) and "/" not in value and not Path(value).exists():
                options[option] = published_name(value) or value
        return shlex.join(["dschat-lora", self.name, *command_line(options)])


def plan_stage(
    name: str, options: Mapping[str, Any], home: Path, *, card: Card | None, processes: int = 1
) -> Planned:
    """The plan of a stage by its options; published models need no files.

    Call it, and read what it returns, within :func:`planning`. ``home`` is a new directory, for
    placeholders; without a ``card`` no particular device is planned for.

    Raises:
        ValueError: as the stage would refuse the options, or where its architecture is not
            understood.
    """
    values = _with_dtype({k: v for k, v in options.items() if k not in _OUTPUT})
    if any(option.endswith("model_name_or_path") for option in values):
        values.setdefault("data_path", (str(BUNDLED_DATA["train"]),))  # rows to be checked
    values = with_placeholders(name, values, home / "published")
    built: dict[str, StagePlan] = {}

    def planner(change: Change) -> StagePlan:
        config = check_stage(name, values | dict(change), processes)
        made_of = str(change.get("base_bits"))
        if made_of not in built:
            built[made_of] = build_plan(config, home)
        return built[made_of].changed(config)

    return _planned(name, options, planner({}), planner, card=card, processes=processes)


def _planned(
    name: str,
    options: Mapping[str, Any],
    plan: StagePlan,
    planner: Planner,
    *,
    card: Card | None,
    processes: int,
) -> Planned:
    given = resolved(plan, card)
    options = restated(options, given.config)
    data = _audit(name, given.config, options)
    if isinstance(data, DataAudit) and data.media and given.left_out is not None:
        beside = {next(iter(data.media)): given.left_out[1]}
        given = replace(given, beside=beside)

        def planner(change: Change, planner: Planner = planner) -> StagePlan:
            return replace(planner(change), beside=beside)

    planned = Planned(name, options, processes, given, card, {}, data=data)
    if card is None:
        return planned
    if planned.fits:
        changes = _changes(plan.config, given.config) or None
        return replace(planned, largest=largest_rows(given, card.usable_bytes), changes=changes)
    bits = "base_bits" in option_names(STAGES[name].config)
    if (fitting := search(planner, card=card, processes=processes, has_bits=bits)) is None:
        return planned
    better, changes = fitting
    largest = largest_rows(better, card.usable_bytes)
    return replace(planned, better=better, changes=changes, largest=largest)


def plan_file(recipe: Recipe, home: Path, *, card: Card | None = None) -> Iterator[Planned]:
    """The plans of the stages of a pipeline, in order; see :func:`plan_stage`."""
    shapes = {
        name: with_placeholders(name, _with_dtype(options), home / "published")
        for name, options in recipe.stages.items()
    }
    for name, config in checked_stages(replace(recipe, stages=shapes), home):
        plan = build_plan(config, home)

        def planner(change: Change, plan: StagePlan = plan) -> StagePlan:
            if change:
                raise ValueError("a stage of a file is planned with its own options only")
            return plan

        options, count = recipe.stages[name], recipe.launcher.processes or 1
        yield _planned(name, options, plan, planner, card=card, processes=count)


@contextmanager
def planning(processes: int = 1, card: Card | None = None) -> Iterator[Path]:
    """Inside the block, which gets a directory for placeholders, so many processes are planned.

    Without a ``card`` their GPUs are of compute capability 8 or more. transformers does not say
    there what is unusual about shapes without weights.
    """
    with (
        only_errors(),
        shapes_alone(),
        planned_processes(processes, has_varlen=card is None or card.has_varlen),
        tempfile.TemporaryDirectory() as temporary,
    ):
        yield Path(temporary).resolve()


def _with_dtype(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with bf16 for ``auto``, whatever this machine computes best."""
    typed = options.get("dtype", "auto")
    return {**options, "dtype": "bf16" if typed == "auto" else typed}


def _audit(name: str, config: Config, options: Mapping[str, Any]) -> DataAudit | str | None:
    """The audit that the run would show, why it cannot be made, or None where no data is named.

    The prepared data stays in the cache, where the run finds it. Nothing is downloaded.
    ``config`` is as the stage's checks resolved it.

    Raises:
        ValueError: if rows cannot be used.
    """
    if not options.get("data_path"):
        return None
    first = next(iter(config.trained.values()))
    data = config.data.data if isinstance(config, RlhfConfig) else config.data
    model = first.model
    source = find_model(model.model_name_or_path)
    if not (Path(source.tokenizer) / "tokenizer_config.json").is_file():
        return (
            f"not counted: the tokenizer of {options[f'{first.prefix}model_name_or_path']} is not "
            f"in a directory here; --dry_run of {name} counts"
        )
    if any(each.hub_name is not None for each in config_sources(data)):
        return f"not counted: it would be downloaded; use --dry_run of {name} to count"
    tokenizer = load_tokenizer(source.tokenizer, model)
    media = media_reader(config, tokenizer, source.base)
    how: dict[str, Any] = {"seed": config.run.seed, "phase": config.phase, "kind": config.kind}
    return prepare_data(data, tokenizer, media=media, **how).audit


@dataclass(frozen=True)
class BatchOptions:
    """The option that says how many rows a phase computes at a time."""

    phase: str
    size: str
    multiple_of: int = 1

    def at_once(self, plan: StagePlan) -> int:
        """Rows at a time."""
        batch = plan.config.batch
        return int(batch.rows_decoded if self.phase == GENERATION else getattr(batch, self.size))

    def changed(self, plan: StagePlan, rows: int) -> StagePlan:
        """The plan with so many rows at a time."""
        return plan.changed(with_values(plan.config, {self.size: rows}))


def batch_options(config: Config) -> list[BatchOptions]:
    """What sizes micro-batches, by phase; none where tokens do."""
    decoding = []
    if isinstance(config, RlhfConfig):
        decoding = [BatchOptions(GENERATION, "max_num_seqs", config.batch.num_generations)]
    if config.batch.tokens_per_device:
        return decoding
    return [*decoding, BatchOptions(TRAINING, config.rows["rows_per_step"][0])]


def resolved(plan: StagePlan, card: Card | None) -> StagePlan:
    """The plan with ``auto`` as a run settles it on the card; without one nothing is recomputed."""
    on, undecided = recomputation(plan)
    given = with_recomputation(plan, on)
    if card is None:
        return given
    stage = max(each.zero_stage for each in plan.settings.values())
    splits = whole_micro_batches(plan.config, zero_stage=stage) is None
    return with_rows_by_memory(_fastest(given, undecided, card, splits=splits), card)


def with_rows_by_memory(plan: StagePlan, card: Card) -> StagePlan:
    """The plan with as many responses decoded at a time as a run chooses on a card."""
    if not isinstance(plan.models, Roles):
        return plan
    free = int((card.usable_bytes - sum(plan.beside.values())) / USABLE)
    recorded = replace(plan.memory_plan, graphs=plan.time.graph_bytes_on(card))
    memory, _ = unpacking_for_rollouts(recorded, plan.models, free=free)
    config, _ = decoding_by_memory(plan.config, memory, plan.models.actor.model, free=free)
    return plan.changed(config)


def _fastest(plan: StagePlan, undecided: Sequence[str], card: Card, *, splits: bool) -> StagePlan:
    """Of the same step by the rule of a run; what needs least, where nothing fits."""
    costs = StepCosts[Config](
        need=lambda config: plan.changed(config).phases[TRAINING],
        trained=lambda config: plan.changed(config).trained.values(),
        load=plan.load,
        peak=peak_of(card) or UNKNOWN_PEAK,
        budget=card.usable_bytes,
    )
    return plan.changed(costs.fastest(plan.config, undecided, splits=splits))


def largest_rows(plan: StagePlan, usable: int) -> dict[str, int]:
    """The most rows at a time that fit, by option; 0 where not even the fewest do."""
    largest = {}
    for rows in batch_options(plan.config):
        unit = rows.multiple_of

        def need(count: int, rows: BatchOptions = rows) -> int:
            return rows.changed(plan, count * rows.multiple_of).phases[rows.phase]

        largest[rows.size] = unit * _largest(need, usable, MOST_ROWS // unit)
    return largest


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
    planner: Planner, *, card: Card, processes: int, has_bits: bool
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
        if fitting := _in_smaller_batches(plan, card):
            return fitting, _changes(first.config, fitting.config) | change
    return None


def _changes(old: Config, new: Config) -> dict[str, Any]:
    """Options of batches and recomputation whose values differ, but for what is switched off."""
    names = {*recomputing_options(new), "tokens_per_device", "gradient_accumulation_steps"}
    names |= {each.size for each in batch_options(new)}
    before = flatten(old)
    changed = {n: v for n, v in flatten(new).items() if n in names and v != before[n]}
    return {n: v for n, v in changed.items() if v is not False}


def _sharing(config: Config, processes: int, *, has_bits: bool) -> Iterator[dict[str, Any]]:
    """What moves or shrinks weights and optimizer state, the least costly first."""
    yield {}
    adapters = [role.lora for role in config.trained.values()]
    trains_base = any(lora.lora_dim == 0 or not lora.only_optimize_lora for lora in adapters)
    steps: list[dict[str, Any]] = []
    if has_bits and not trains_base:
        steps.append({"base_bits": 4})
    if processes > config.parallel.tensor_parallel_size:
        steps += [{"zero_stage": stage} for stage in ((2, 3) if trains_base else (3,))]
    if trains_base:
        steps.append({"zero_stage": max(config.parallel.zero_stage or 0, 1), "offload": True})
    steps.append({"zero_stage": 3, "offload": True})
    for change in [*steps, *accumulate(steps, or_)]:
        if not change.keys() & config.given:
            yield change


def _in_smaller_batches(plan: StagePlan, card: Card) -> StagePlan | None:
    """The plan in micro-batches, and rows that decode, that fit; None where none do."""
    on, undecided = recomputation(plan)
    plan = _fastest(with_recomputation(plan, on), undecided, card, splits=True)
    plan, usable = with_rows_by_memory(plan, card), card.usable_bytes
    if plan.config.kind == "prompts":
        rows, *_ = batch_options(plan.config)
        sizes = range(rows.at_once(plan) - 1, 0, -1)
        fewer = (rows.changed(plan, n) for n in sizes if n % rows.multiple_of == 0)
        plan = next((p for p in (plan, *fewer) if p.phases[GENERATION] <= usable), plan)
    return plan if plan.peak <= usable else None
