"""Runs of an experiment of LoRA's paper by several seeds, and the spread of their measures."""

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dschat_lora.commands.launch import (
    launch_command,
    launch_stage,
    launcher_command,
    run_or_end,
    split_launcher_options,
)
from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.staging import check_within, write_whole
from dschat_lora.report.directory import default_directory, read_object
from dschat_lora.report.terminal import log_once, table

if TYPE_CHECKING:
    from dschat_lora.config.options import StageOptions

ConfigT = TypeVar("ConfigT", bound="StageOptions")
_OF_A_RUN = {"seed", "seeds", "output_dir"}


@dataclass(frozen=True)
class Spread:
    """A measure over several runs."""

    median: float
    deviation: float  # standard deviation of a sample (n - 1), 0 of one run
    values: tuple[float, ...]  # in the order of the runs


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """The spread of every measure that all ``runs``, one or more, have as a number."""
    measures = {}
    for name in runs[0]:
        values = tuple(run[name] for run in runs if isinstance(run.get(name), int | float))
        if len(values) == len(runs):
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            measures[name] = Spread(statistics.median(values), deviation, values)
    return measures


def show_spreads(measures: Mapping[str, Spread], *, runs: str) -> None:
    """Print a line for each measure; ``runs`` is the title of the single values."""
    rows = [
        (
            name,
            f"{each.median:.4f} +- {each.deviation:.4f}",
            " ".join(f"{value:.4f}" for value in each.values),
        )
        for name, each in measures.items()
    ]
    for line in table(("measure", "median +- deviation", runs), rows):
        log_once(line)


def check_starts_runs(seeds: int, verb: str) -> None:
    """Refuse ``--seeds`` in processes that a launcher started for one run.

    Raises:
        ValueError: naming the command of ``verb`` that starts a launcher for each run.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"--seeds {seeds} starts a launcher for each run: type dschat-lora {verb} "
            f"--num_gpus N --seeds {seeds} ... instead of torchrun or deepspeed"
        )


def run_experiment(
    name: str, main: Callable[..., None], argv: Sequence[str], *, description: str
) -> None:
    """The verb ``name`` in this process, or in those that the launcher starts.

    ``main`` gets the arguments that are not the launcher's, the description and the program for its
    help and, for ``--seeds``, the command that starts the launcher for each run.
    """
    launcher, rest = split_launcher_options(argv)
    command = None
    if launcher is not None:
        command = launch_command(name, launcher, (), program=launcher_command())
        if not any(word.split("=")[0] == "--seeds" for word in rest):
            launch_stage(name, launcher, rest)
    main(rest, command=command, description=description, program=f"dschat-lora {name}")


def once_or_by_seeds(
    name: str, run_once: Callable[[ConfigT], object], command: Sequence[str] | None
) -> Callable[[ConfigT], None]:
    """What runs a checked config once or, of several ``--seeds``, by ``command`` for each."""
    prefix = command or (sys.executable, "-m", "dschat_lora", name)

    def run(config: ConfigT) -> None:
        flat = flatten(config)
        if flat["seeds"] > 1 and not flat["dry_run"]:
            run_seeds(config, name=name, prefix=prefix, run=run_or_end)
        else:
            run_once(config)

    return run


def run_seeds(
    config: "StageOptions",
    *,
    name: str,
    prefix: Sequence[str],
    run: Callable[[Sequence[str]], int],
) -> None:
    """Run ``--seeds`` runs from ``--seed`` on, one after another, each with its own processes.

    They get the options that were given. Their directories are ``OUTPUT_DIR/seed-N``; the spread
    of what their ``run.json`` calls results is shown, and written to ``OUTPUT_DIR/seeds.json``.
    ``prefix`` is the command without options, ``run`` gives the exit code of a command, and
    ``name`` is that of the default directory.

    Raises:
        SystemExit: with the exit code of the first run that fails.
        ValueError: if the directory of a run is a link out of the common one.
    """
    flat = flatten(config)
    given = {option: flat[option] for option in config.given - _OF_A_RUN}
    free = (default_directory(f"{name}-seeds", number) for number in count(1))
    chosen = flat["output_dir"] or next(path for path in free if not path.exists())
    home = Path(chosen).expanduser()
    seeds = range(flat["seed"], flat["seed"] + flat["seeds"])
    runs = []
    for seed in seeds:
        own = home / f"seed-{seed}"
        check_within(own, home)
        log_once(f"seed {seed}: {own}")
        options = command_line({**given, "seed": seed, "output_dir": str(own)})
        code = run([*prefix, *options])
        if code:
            raise SystemExit(code)
        runs.append(read_object(own / "run.json").get("results") or {})
    measures = spreads(runs)
    report = {"seeds": list(seeds), "measures": {n: asdict(each) for n, each in measures.items()}}
    write_whole(home / "seeds.json", json.dumps(report, indent=2) + "\n")
    show_spreads(measures, runs=f"seeds {seeds[0]} to {seeds[-1]}")
