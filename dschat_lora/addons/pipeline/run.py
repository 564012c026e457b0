"""Run of a pipeline: checks, one stage after another, and a report of the results.

``pipeline.json`` records options and status of each stage: it says which to skip, begin, resume or
do again.
"""

import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dschat_lora.addons.pipeline.recipe import Recipe, check_stages, read_recipe
from dschat_lora.addons.report.html import render_report
from dschat_lora.addons.report.run_data import RunData, read_run
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.commands.launch import Relay, launch_command, launcher_command, typed_command
from dschat_lora.commands.stages import STAGES, restated
from dschat_lora.config.options import build_config, command_line, value_text
from dschat_lora.config.staging import alone, check_within, write_whole
from dschat_lora.report.directory import leftovers, read_object
from dschat_lora.report.terminal import error_message, fitted_command, log_once, table
from dschat_lora.report.texts import duration, short
from dschat_lora.runtime.stage_main import fail

RECORD = "pipeline.json"
_FINISHED = {"status": "finished", "replaces": None}
#: action for a stage: none; a new run; the rest of one; a new run in place of one
How = Literal["skip", "begin", "resume", "redo"]
_WORDS = {
    "skip": "finished, skipped",
    "begin": "to run",
    "resume": "to resume from its newest checkpoint, if it has one",
    "redo": "to run again, overwriting the existing run",
}
# Where stages leave what they trained.
_RESULTS = ("adapter", "model")
_ROLES = ("actor", "critic", "actor_ema")
# Options about its directory, by what is done with a stage.
_DIRECTORY_OPTIONS: dict[str, dict[str, Any]] = {
    "redo": {"overwrite_output_dir": True},
    "resume": {"resume_from_checkpoint": "auto"},
}
HEADER = ["stage", "time", "result", "before", "after"]


class PipelineRecord:
    """``pipeline.json``: options and status of each stage, rewritten whole at each update."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RECORD
        self._content = read_object(self._path)

    def stage(self, name: str) -> dict[str, Any] | None:
        """``options`` and ``status`` of a stage; None if it is unknown."""
        stage = self._content.get("stages", {}).get(name)
        return stage if isinstance(stage, dict) else None

    def update(self, name: str, **fields: object) -> None:
        """Add or replace fields of a stage.

        Raises:
            OSError: if the disk refuses; the file stays as it was.
        """
        stages = dict(self._content.get("stages", {}))
        stages[name] = {**(self.stage(name) or {}), **fields}
        self._content = {**self._content, "stages": stages}
        write_whole(self._path, json.dumps(self._content, indent=2) + "\n")

    def finish(self, name: str) -> None:
        """Record that a stage is finished, unless it is known to be."""
        if self.stage(name) != {**(self.stage(name) or {}), **_FINISHED}:
            self.update(name, **_FINISHED)


def run_pipeline(
    file: str,
    *,
    output_dir: str | None = None,
    num_gpus: int | None = None,
    overrides: Sequence[str] = (),
    redo_from: str | None = None,
    dry_run: bool = False,
) -> None:
    """Run the unfinished stages of a YAML file, and show the results of all.

    Options override the file's, ``overrides`` by ``STAGE.OPTION=VALUE``. The stage ``redo_from``
    is run again, with all later ones. A ``dry_run`` only checks and prints what would be done. An
    error, a stage that fails and a signal end the process with one line.
    """
    words = command_line({"output_dir": output_dir, "num_gpus": num_gpus})
    words += ["--set", *overrides] if overrides else []
    again = shlex.join(["dschat-lora", "pipeline", file, *words])
    relay = Relay()
    try:
        recipe = read_recipe(file, output_dir=output_dir, num_gpus=num_gpus, overrides=overrides)
        steps = make_state(recipe, PipelineRecord(recipe.directory), redo_from=redo_from)
        check_stages(recipe, done=[stage for stage, how in steps.items() if how == "skip"])
        for stage, how in steps.items():
            check_within(recipe.directory / stage, recipe.directory)
            log_once(f"stage {stage}: {_WORDS[how]}")
        if dry_run:
            for stage, how in steps.items():
                if how != "skip":
                    log_once(fitted_command(_typed(recipe, stage, how), "$ "))
            log_once("dry run: nothing was started or written")
            return
        with alone(recipe.directory, "pipeline"), relay.listening():
            _run_stages(recipe, steps, relay, again=again)
            _show_results(recipe)
    except KeyboardInterrupt:
        fail("stopped; no stage was started", code=130)
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)


def _run_stages(recipe: Recipe, steps: Mapping[str, How], relay: Relay, *, again: str) -> None:
    """Run the unfinished stages, up to the first that fails or is stopped."""
    record = PipelineRecord(recipe.directory)
    for stage, how in steps.items():
        if how == "redo":  # noted for all before any begins, should this one be stopped
            replaced = read_object(recipe.directory / stage / "run.json").get("started")
            record.update(stage, status="to be done again", replaces=replaced)
    for stage, how in steps.items():
        if how == "skip":
            record.finish(stage)
            continue
        record.update(stage, options=dict(recipe.stages[stage]), status="running")
        log_once("\n" + fitted_command(_typed(recipe, stage, how), "$ "))
        argv = command_line(_options(recipe, stage, how))
        code = relay.run(launch_command(stage, recipe.launcher, argv, program=launcher_command()))
        status = str(read_object(recipe.directory / stage / "run.json").get("status"))
        finished = code == 0 and status == "finished"
        if finished:
            record.finish(stage)
        else:
            record.update(stage, status=f"ended with exit code {code}: {status}")
        if received := relay.received:
            when = "after the stage" if finished else "in the stage"
            name = signal.Signals(received).name
            fail(f"stopped by {name} {when} {stage}; resume with: {again}", code=128 + received)
        if not finished:
            fail(
                f"the stage {stage} ended with exit code {code} (see its last lines); after "
                f"fixing the cause, resume with: {again}",
                code=code or 1,
            )


def _options(recipe: Recipe, stage: str, how: How) -> dict[str, Any]:
    """The options of a stage, with where it writes and how it begins."""
    home = {"output_dir": str(recipe.directory / stage)}
    options = recipe.stages[stage]
    if all(Path(options[name]).expanduser().exists() for name in recipe.sources(stage)):
        options = restated(options, build_config(STAGES[stage].config, options))
    return {**options, **home, **_DIRECTORY_OPTIONS.get(how, {})}


def _typed(recipe: Recipe, stage: str, how: How) -> str:
    return shlex.join(typed_command(stage, recipe.launcher, _options(recipe, stage, how)))


def make_state(
    recipe: Recipe, record: PipelineRecord, *, redo_from: str | None = None
) -> dict[str, How]:
    """The action for each stage, in order; ``redo_from`` and later ones are run again.

    Raises:
        ValueError: if an earlier run differs from what the recipe asks for.
    """
    names = list(recipe.stages)
    if redo_from is not None and redo_from not in names:
        raise ValueError(f"--from {redo_from} must be one of {', '.join(names)}")
    first = len(names) if redo_from is None else names.index(redo_from)
    steps: dict[str, How] = {}
    for number, name in enumerate(names):
        begun = leftovers(recipe.directory / name)
        if number >= first:
            how: How = "redo" if begun or record.stage(name) is not None else "begin"
        else:
            how = _how(recipe, record, name)
        # A stage whose input model is going to change cannot be kept.
        sources = recipe.sources(name).values()
        stale = [each for each in sources if steps.get(each, "skip") != "skip"]
        if how in ("skip", "resume") and stale and begun:
            raise ValueError(
                f"{recipe.file}: stage {name} depends on the stage {stale[0]}, which is not "
                f"finished; use --from {stale[0]} to run it and all later stages again"
            )
        steps[name] = how
    return steps


def _how(recipe: Recipe, record: PipelineRecord, name: str) -> How:
    directory, known = recipe.directory / name, record.stage(name)
    facts = read_object(directory / "run.json")
    if known is None:
        if left := leftovers(directory):
            raise ValueError(
                f"{directory} holds a run ({', '.join(p.name for p in left)}) that {RECORD} next "
                f"to it does not list; choose another --output_dir, or use --from {name} to "
                "replace it"
            )
        return "begin"
    if known.get("replaces") is not None and facts.get("started") == known["replaces"]:
        return "redo"  # it was asked for and has not begun
    finished = facts.get("status") == "finished"
    then, now = known.get("options", {}), recipe.stages[name]
    changes = [
        f"--{n} was {value_text(then.get(n))}, now {value_text(now.get(n))}"
        for n in sorted(then.keys() | now.keys())
        if then.get(n) != now.get(n)
    ]
    if changes:
        if finished:
            raise ValueError(
                f"{recipe.file}: stage {name} is finished, with other options: "
                f"{'; '.join(changes)}; restore them, or use --from {name} to run it and all "
                "later stages again"
            )
        # Options that are not typed are those of the checkpoint.
        if (dropped := sorted(then.keys() - now.keys())) and checkpoints_of(directory):
            raise ValueError(
                f"{recipe.file}: stage {name} was begun with --{dropped[0]} "
                f"{value_text(then[dropped[0]])}, which is no longer given; set it, or use --from "
                f"{name} to start again"
            )
    return "skip" if finished else "resume"


def _show_results(recipe: Recipe) -> None:
    """Print time, results and adapters of every stage, and write the report."""
    stories = {name: read_run(recipe.directory / name) for name in recipe.stages}
    rows = [row for name, story in stories.items() for row in result_rows(name, story)]
    log_once("")
    for line in table(HEADER, rows):
        log_once(line)
    log_once("")
    for name in recipe.stages:
        for path in outputs(recipe.directory / name):
            log_once(f"{name}: {path}")
    report = recipe.directory / "report.html"
    results = {"Held out, before and after": (HEADER, rows)}
    write_whole(
        report, render_report(recipe.directory.resolve().name, list(stories.values()), results)
    )
    log_once(f"report: {report}")


def result_rows(name: str, story: RunData) -> list[list[str]]:
    """A row for each result in run.json; those before and after share one."""
    results = story.part("results")
    quantities = dict.fromkeys(
        key.removesuffix(" before").removesuffix(" after") for key in results
    )

    def cell(value: object) -> str:
        return "-" if value is None else short(value) if isinstance(value, float) else str(value)

    rows = [
        [quantity, *(cell(results.get(f"{quantity} {when}")) for when in ("before", "after"))]
        for quantity in quantities
    ]
    first, *others = rows or [["-", "-", "-"]]
    return [[name, duration(story.seconds), *first], *(["", "", *row] for row in others)]


def outputs(directory: Path) -> list[Path]:
    """The adapters and models that a stage left."""
    places = [directory, *(directory / role for role in _ROLES)]
    return [path for place in places for each in _RESULTS if (path := place / each).is_dir()]
