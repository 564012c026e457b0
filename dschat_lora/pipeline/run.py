"""Run of a pipeline: checks, one stage after another, and a report of the results."""

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dschat_lora.config.options import command_line, fail
from dschat_lora.pipeline.launch import Relay, launch_command, launcher_command, typed_command
from dschat_lora.pipeline.recipe import Recipe, read_recipe
from dschat_lora.pipeline.state import PipelineRecord, StageStep, alone, make_state, run_facts
from dschat_lora.pipeline.validation import check_stages
from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.markup import duration, short
from dschat_lora.report.run_data import RunData, read_run
from dschat_lora.report.terminal import error_message, log_once, table

_WORDS = {
    "skip": "finished, and skipped",
    "begin": "to run",
    "resume": "to go on from its newest checkpoint, if it has one",
    "redo": "to run again, over the run that is there",
}
# Where stages leave what they trained.
_RESULTS = ("adapter", "model")
_ROLES = ("actor", "critic", "actor_ema")
HEADER = ["stage", "time", "result", "before", "after"]


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
        check_stages(recipe, done=[step.stage for step in steps if step.how == "skip"])
        for step in steps:
            log_once(f"stage {step.stage}: {_WORDS[step.how]}")
        if dry_run:
            for step in steps:
                if step.how != "skip":
                    log_once(f"$ {shlex.join(_typed(recipe, step))}")
            log_once("dry run: nothing was started or written")
            return
        with alone(recipe.directory), relay.listening():
            _run_stages(recipe, steps, relay, again=again)
            _show_results(recipe)
    except KeyboardInterrupt:
        fail("stopped; no stage was started", code=130)
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)


def _run_stages(recipe: Recipe, steps: Sequence[StageStep], relay: Relay, *, again: str) -> None:
    """Run the unfinished stages, up to the first that fails or is stopped."""
    record = PipelineRecord(recipe.directory)
    for step in steps:
        if step.how == "redo":  # noted for all before any begins, should this one be stopped
            replaced = run_facts(recipe.directory / step.stage).get("started")
            record.update(step.stage, status="to be done again", replaces=replaced)
    for step in steps:
        if step.how == "skip":
            record.finish(step.stage)
            continue
        record.update(step.stage, options=dict(recipe.stages[step.stage]), status="running")
        log_once(f"\n$ {shlex.join(_typed(recipe, step))}")
        argv = command_line(_options(recipe, step))
        code = relay.run(
            launch_command(step.stage, recipe.launcher, argv, program=launcher_command())
        )
        status = str(run_facts(recipe.directory / step.stage).get("status"))
        finished = code == 0 and status == "finished"
        if finished:
            record.finish(step.stage)
        else:
            record.update(step.stage, status=f"ended with exit code {code}: {status}")
        _end_if(step.stage, code, finished=finished, received=relay.received, again=again)


def _end_if(stage: str, code: int, *, finished: bool, received: int, again: str) -> None:
    """End the process where a stage failed, or a signal came."""
    if received:
        when = "after the stage" if finished else "in the stage"
        name = signal.Signals(received).name
        fail(f"stopped by {name} {when} {stage}; go on with: {again}", code=128 + received)
    if not finished:
        fail(
            f"the stage {stage} ended with exit code {code}, and its last lines say why; when "
            f"that is put right, go on with: {again}",
            code=code or 1,
        )


def _options(recipe: Recipe, step: StageStep) -> dict[str, Any]:
    """The options of a stage, with where it writes and how it begins."""
    home = str(recipe.directory / step.stage)
    return {**recipe.stages[step.stage], "output_dir": home, **step.options}


def _typed(recipe: Recipe, step: StageStep) -> list[str]:
    return typed_command(step.stage, recipe.launcher, _options(recipe, step))


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
    write_report(
        report, render_report(recipe.directory.resolve().name, list(stories.values()), results)
    )
    log_once(f"report: {report}")


def result_rows(name: str, story: RunData) -> list[list[str]]:
    """A row for each result in run.json; those before and after share one."""
    results = story.part("results")
    quantities = dict.fromkeys(
        key.removesuffix(" before").removesuffix(" after") for key in results
    )
    rows = [
        [quantity, *(_cell(results.get(f"{quantity} {when}")) for when in ("before", "after"))]
        for quantity in quantities
    ]
    first, *others = rows or [["-", "-", "-"]]
    return [[name, duration(story.seconds), *first], *(["", "", *row] for row in others)]


def _cell(value: object) -> str:
    return "-" if value is None else short(value) if isinstance(value, float) else str(value)


def outputs(directory: Path) -> list[Path]:
    """The adapters and models that a stage left."""
    places = [directory, *(directory / role for role in _ROLES)]
    return [path for place in places for each in _RESULTS if (path := place / each).is_dir()]
