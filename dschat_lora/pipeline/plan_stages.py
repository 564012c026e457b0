"""Plans of stages by the options that a user types, and of the stages of a pipeline's file."""

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.options import command_line, option_names
from dschat_lora.data.audit import DataAudit
from dschat_lora.engine.distributed import planned_processes
from dschat_lora.models.loading import only_errors
from dschat_lora.models.published import published_name
from dschat_lora.perf.cards import Card
from dschat_lora.pipeline.plan import StagePlan, build_plan
from dschat_lora.pipeline.plan_data import audit_of
from dschat_lora.pipeline.plan_search import Change, Planner, largest_rows, resolved, search
from dschat_lora.pipeline.recipe import Recipe
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.pipeline.stand_ins import with_stand_ins
from dschat_lora.pipeline.validation import check_stage, checked_stages

# Of no consequence for memory; what they name need not be there.
_OUTPUT = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dry_run")


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
    changes: Change | None = None  # the options of ``better`` that were not typed so
    data: DataAudit | str | None = None  # why it was not counted; None: no data is named

    @property
    def fits(self) -> bool | None:
        """Whether it fits as it was given; None without a device."""
        return None if self.card is None else self.plan.memory.peak <= self.card.usable_bytes

    @property
    def command(self) -> str | None:
        """A command line that fits, or the one that was planned without a device."""
        if self.fits is False and self.changes is None:
            return None
        launcher = {"num_gpus": self.processes} if self.processes > 1 else {}
        options = {n: _as_typed(v) for n, v in {**self.options, **(self.changes or {})}.items()}
        return shlex.join(["dschat-lora", self.name, *command_line({**launcher, **options})])


def _as_typed(value: Any) -> Any:
    """A model's short name as the hub's."""
    if not isinstance(value, str) or "/" in value or Path(value).exists():
        return value
    return published_name(value) or value


def plan_stage(
    name: str, options: Mapping[str, Any], home: Path, *, card: Card | None, processes: int = 1
) -> Planned:
    """The plan of a stage by its options; published models need no files.

    Call it, and read what it returns, within :func:`planning`.

    Args:
        name: of the stage.
        options: as typed, by name.
        home: receives placeholders; a new directory.
        card: to fit; None for no particular device.
        processes: that train together.

    Raises:
        ValueError: as the stage would refuse the options, or where its architecture is not
            understood.
    """
    values = with_stand_ins(name, _without_data(options), home / "published")
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
    usable = None if card is None else card.usable_bytes
    given = resolved(plan, usable)
    data = audit_of(name, given.config, options)
    found = Planned(name, options, processes, given, card, {}, data=data)
    if usable is None:
        return found
    if found.fits:
        return replace(found, largest=largest_rows(given, usable))
    bits = "base_bits" in option_names(STAGES[name].config)
    better = search(planner, usable=usable, processes=processes, has_bits=bits)
    if better is None:
        return found
    return replace(
        found, better=better[0], changes=better[1], largest=largest_rows(better[0], usable)
    )


def plan_file(recipe: Recipe, home: Path, *, card: Card | None = None) -> Iterator[Planned]:
    """The plans of the stages of a pipeline, in order; see :func:`plan_stage`."""
    shapes = {
        name: with_stand_ins(name, _with_dtype(options), home / "published")
        for name, options in recipe.stages.items()
    }
    for name, config in checked_stages(replace(recipe, stages=shapes), home):
        plan = build_plan(config, home)

        def planner(change: Change, plan: StagePlan = plan) -> StagePlan:
            if change:
                raise ValueError("a file's stage is planned with its own options alone")
            return plan

        options, count = recipe.stages[name], recipe.launcher.processes or 1
        yield _planned(name, options, plan, planner, card=card, processes=count)


@contextmanager
def planning(processes: int = 1) -> Iterator[Path]:
    """Inside the block, which gets a directory for placeholders, so many processes are planned.

    transformers does not say there what is unusual about shapes without weights.
    """
    with (
        only_errors(),
        planned_processes(processes),
        tempfile.TemporaryDirectory() as temporary,
    ):
        yield Path(temporary).resolve()


def _without_data(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with nothing to write, and rows to be checked where none are named."""
    values = _with_dtype({k: v for k, v in options.items() if k not in _OUTPUT})
    if any(name.endswith("model_name_or_path") for name in values):
        values.setdefault("data_path", (str(BUNDLED_DATA["train"]),))
    return values


def _with_dtype(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with bf16 for ``auto``, whatever this machine computes best."""
    typed = options.get("dtype", "auto")
    return {**options, "dtype": "bf16" if typed == "auto" else typed}
