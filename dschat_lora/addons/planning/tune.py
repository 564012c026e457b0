"""Search for a stage's learning rate, rank and batch: short runs, ended by successive halving.

Optuna's pruner ends runs that fall behind at 1, f, f^2, ... times the shortest length, f the
reduction factor (asynchronous successive halving, arXiv:1810.05934), and its journal ``study.log``
keeps what is known. Every run has the schedule of the whole length: one that is not ended is the
run that its options make, and nothing is trained twice.
"""

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dschat_lora.addons.planning.config import TuneConfig
from dschat_lora.addons.report.html import render_report
from dschat_lora.addons.report.markup import number
from dschat_lora.addons.report.run_data import read_run
from dschat_lora.commands.launch import (
    PACKAGE,
    LauncherConfig,
    launch_command,
    launcher_command,
    receiving,
    signal_ranks,
    typed_command,
)
from dschat_lora.commands.stages import STAGES, check_stage, restated
from dschat_lora.config.files import parse_json
from dschat_lora.config.options import command_line, flatten, value_text
from dschat_lora.config.plurals import counted
from dschat_lora.config.stages import StageConfig
from dschat_lora.config.staging import alone, check_place, open_in_place, write_whole
from dschat_lora.engine.children import end_with_parent, variables_of_no_launch, visible_gpu
from dschat_lora.lora.rates import octaves_above, ruled_rates
from dschat_lora.models.loading import load_config
from dschat_lora.models.source import find_model
from dschat_lora.report.directory import check_idle, leftovers
from dschat_lora.report.terminal import fitted_command, log_once, table
from dschat_lora.report.texts import short
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.directory import RunDirectory
from dschat_lora.runtime.stage_main import fail

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

STUDY = "study.log"
DEFAULT_STEPS = 162
LENGTHS = 27  # a whole run has so many times the steps of the shortest
OCTAVES = (0, 1, -1, 2, -2, 3, -3)  # of the rates around the rule's
POLL_SECONDS = 0.2
# What a search does without, unless it is typed.
_SPARING = {"save_interval": 0, "save_total_limit": 1, "sample_generations": 0}
_OWN = ("overwrite_output_dir", "resume_from_checkpoint", "dry_run", "eval_interval")
_RISING = ("accuracy", "margin", "reward", "judge", "eos_rate")  # parts of names that are to rise


@dataclass(frozen=True)
class Search:
    """What is searched, and how long runs are."""

    stage: str
    options: Mapping[str, Any]  # of the stage, as typed
    candidates: Sequence[Mapping[str, float]]  # by option, the rate first; the likeliest come first
    max_steps: int
    min_steps: int
    reduction_factor: int
    metric: str
    seeds: Sequence[int]

    @property
    def rises(self) -> bool:
        """Whether the metric is to rise."""
        return any(part in self.metric for part in _RISING)

    def values(self, name: str) -> list[float]:
        """What the candidates have of an option, in order."""
        return sorted({each[name] for each in self.candidates})

    def of_run(self, chosen: Mapping[str, float]) -> dict[str, Any]:
        """The options of a run; one of a larger batch makes fewer steps, of as many rows."""
        batches = [name for name in chosen if name.endswith("batch_size")]
        share = math.prod(self.values(name)[0] / chosen[name] for name in batches)
        lengths = {"max_steps": self.max_steps, "eval_interval": self.min_steps}
        scaled = {name: max(1, round(steps * share)) for name, steps in lengths.items()}
        return {**_SPARING, **self.options, **scaled, **chosen}


def run_tune(
    config: TuneConfig, stage: str, options: Mapping[str, Any], launcher: LauncherConfig | None
) -> dict[str, Any]:
    """Search from the start or, with ``--resume``, on; show the trials and the best command.

    ``options`` are the stage's, as typed. Returns what ``dschat_lora.Tuned`` holds.

    Raises:
        ValueError: at options that cannot work, if an earlier search is there, or if no trial came
            to its end.
        SystemExit: with a line, at a signal.
    """
    search = make_search(config, stage, options, launcher)
    free = RunDirectory.claim(None, name=f"tune-{stage}").path if not config.output_dir else ""
    home = Path(config.output_dir or free).expanduser()
    received: list[int] = []
    with alone(home, "search"), receiving(lambda number, _: received.append(number)):
        study = open_study(search, home / STUDY, resume=config.resume)
        run_trials(search, study, home, launcher, config, received)
        if received:
            name = signal.Signals(received[0]).name
            own = {n: v for n, v in asdict(config).items() if v != getattr(TuneConfig(), n)}
            own |= {"output_dir": str(home), "resume": True}
            again = shlex.join(typed_command(f"tune {stage}", launcher, {**options, **own}))
            fail(f"stopped by {name}; resume with: {again}", code=128 + received[0])
        return show_trials(search, study, home, launcher)


def make_search(
    config: TuneConfig, stage: str, options: Mapping[str, Any], launcher: LauncherConfig | None
) -> Search:
    """The candidates and lengths that options stand for.

    Raises:
        ValueError: at an option that a search sets itself, or that the stage would refuse.
    """
    for name in _OWN:
        if name in options:
            raise ValueError(f"--{name} is set by the search: remove it")
    processes = 1 if launcher is None else launcher.processes
    is_rl = issubclass(STAGES[stage].config, RlhfConfig)
    role, batch = ("actor_", "training") if is_rl else ("", "train")
    # Options of an adapter are refused where none is asked for.
    checked = check_stage(
        stage, {**options, **{f"{role}lora_dim": rank for rank in config.ranks[:1]}}, processes
    )
    values, options = flatten(checked), restated(options, checked)
    adapts = bool(config.ranks or values[f"{role}lora_dim"])
    rate = f"{role}lora_learning_rate" if adapts else f"{role}learning_rate"
    centre = options[rate] if rate in options else _ruled_rate(checked, stage, adapts=adapts)
    near = [octaves_above(centre, octave) for octave in OCTAVES]
    lists: dict[str, Sequence[float]] = {
        rate: sorted(config.rates, key=lambda each: abs(math.log(each / centre))) or near,
        f"{role}lora_dim": config.ranks,
        f"per_device_{batch}_batch_size": config.batches,
    }
    lists = {name: [*dict.fromkeys(each)] for name, each in lists.items() if each}
    max_steps = options.get("max_steps") or DEFAULT_STEPS
    # Of the largest batch at least one step, and of each as many rows.
    batches = config.batches or (1,)
    multiple = -(-max(batches) // min(batches))
    min_steps = config.min_steps or -(-max_steps // LENGTHS // multiple) * multiple
    if min_steps < multiple:
        raise ValueError(
            f"--min_steps {min_steps} of batches of {min(batches)} are less than a step of "
            f"--batches {max(batches)}: give at least {multiple}"
        )
    if min_steps > max_steps:
        raise ValueError(f"--min_steps {min_steps} must be at most --max_steps, {max_steps}")
    search = Search(
        stage,
        options,
        [dict(zip(lists, each, strict=True)) for each in product(*lists.values())],
        max_steps=max_steps,
        min_steps=min_steps,
        reduction_factor=config.reduction_factor,
        metric=config.metric or ("reward" if is_rl else "loss"),
        seeds=[values["seed"] + n for n in range(config.seeds)],
    )
    for each in search.candidates:
        check_stage(stage, search.of_run(each), processes)
    return search


def _ruled_rate(config: StageConfig, stage: str, *, adapts: bool) -> float:
    first = next(iter(config.trained.values()))
    model, lora = first.model, first.lora
    shape = load_config(find_model(model.model_name_or_path).base, model)
    lora = replace(lora, lora_dim=lora.lora_dim or 1) if adapts else lora
    rates = ruled_rates(shape.model_type, shape.hidden_size, stage=stage, lora=lora)
    return rates.adapter if adapts else rates.base


def open_study(search: Search, path: Path, *, resume: bool) -> "Study":
    """The study in a file; where it is new, with the candidates as trials to come.

    Raises:
        ValueError: if it is there and not to go on, is not there, or is of another search.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if resume and not path.exists():
        raise ValueError(f"--resume: {path.parent} contains no search")
    if path.exists() and not resume:
        raise ValueError(
            f"{path.parent} contains a search: continue it with --resume, or choose another "
            "--output_dir"
        )
    study = optuna.create_study(
        # Absolute: else optuna waits for the lock of a killed process without end.
        storage=JournalStorage(JournalFileBackend(str(path.resolve()))),
        study_name="tune",
        load_if_exists=True,
        direction="maximize" if search.rises else "minimize",
        pruner=optuna.pruners.SuccessiveHalvingPruner(
            min_resource=search.min_steps, reduction_factor=search.reduction_factor
        ),
        # Trials beyond the candidates are drawn where those were good.
        sampler=optuna.samplers.TPESampler(
            seed=search.seeds[0], n_startup_trials=len(search.candidates)
        ),
    )
    now = json.loads(json.dumps(asdict(search)))
    if (then := study.user_attrs.get("search")) is None:
        for each in search.candidates[len(study.trials) :]:
            study.enqueue_trial(dict(each))
        study.set_user_attr("search", now)
        return study
    was, becomes = ({**each, **each["options"]} for each in (then, now))
    for name in sorted((was.keys() | becomes.keys()) - {"options"}):
        if was.get(name) != becomes.get(name):
            raise ValueError(
                f"--resume: {name} was {value_text(was.get(name))}, now "
                f"{value_text(becomes.get(name))}; restore it, or choose another --output_dir"
            )
    return study


@dataclass
class RunningTrial:
    """A trial of the study with the processes of its runs, one for each seed."""

    search: Search
    trial: "Trial"
    options: Mapping[str, Any]
    homes: Sequence[Path]
    launcher: LauncherConfig | None
    slot: int  # among those that run at a time
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    is_pruned: bool = False
    failed: Path | None = None  # the first run that failed
    is_stopped: bool = False

    def start(self) -> None:
        """Start each run or, where it has begun, let it go on from its checkpoint."""
        environment = variables_of_no_launch()
        if self.launcher is None and (cards := torch.cuda.device_count()) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpu(self.slot % cards)
        for home, seed in zip(self.homes, self.search.seeds, strict=True):
            options = {**self.options, "seed": seed, "output_dir": str(home)}
            options |= {"resume_from_checkpoint": "auto"} if leftovers(home) else {}
            argv = command_line(options)
            command = [sys.executable, "-m", PACKAGE, self.search.stage, *argv]
            if self.launcher is not None:
                command = launch_command(
                    self.search.stage, self.launcher, argv, program=launcher_command()
                )
            check_place(home / "metrics.jsonl")
            home.parent.mkdir(parents=True, exist_ok=True)
            _wait_until_idle(home)
            with open_in_place(home.with_suffix(".log"), "ab") as log:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            self.processes.append(process)

    def stop(self) -> None:
        """Have the runs save and end."""
        if self.is_stopped:  # a second signal could cut the saving short
            return
        self.is_stopped = True
        for process in self.processes:
            if process.poll() is not None:
                continue
            if self.launcher is None:
                process.send_signal(signal.SIGTERM)
            else:
                signal_ranks(process, signal.SIGTERM)

    def follow(self) -> bool:
        """Report what the runs have evaluated to the study, prune; whether all runs have ended.

        Raises:
            ValueError: if evaluations have no such metric.
        """
        from optuna.trial import TrialState

        codes = [process.poll() for process in self.processes]
        curves = [self._evaluations(home) for home in self.homes]
        if not self.is_pruned and self._is_behind(curves):
            self.is_pruned = True
            self.trial.study.tell(self.trial, state=TrialState.PRUNED)
        if self.failed is None and not self.is_pruned:
            self.failed = next((h for h, code in zip(self.homes, codes, strict=True) if code), None)
        if self.is_pruned or self.failed:
            self.stop()
        if None in codes:
            return False
        if not self.is_pruned:
            last = [list(curve.values())[-1] if curve else math.nan for curve in curves]
            value = sum(last) / len(last)
            if self.failed or math.isnan(value):
                home = self.failed or self.homes[0]
                log = home.with_suffix(".log").read_text(errors="replace")
                self.trial.set_user_attr("error", (log.strip() or "no output").split("\n")[-1])
                self.trial.study.tell(self.trial, state=TrialState.FAIL)
            else:
                self.trial.study.tell(self.trial, value)
        return True

    def _evaluations(self, home: Path) -> dict[int, float]:
        """The metric of a run by optimizer step, from the first step on."""
        path, metric = home / "metrics.jsonl", self.search.metric
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        evals = [parse_json(line) for line in lines if '"kind": "eval"' in line]
        if evals and metric not in evals[0]:
            known = [n for n, v in evals[0].items() if isinstance(v, float) and n != "time"]
            raise ValueError(f"--metric {metric} must be one of {', '.join(known)}")
        return {each["step"]: number(each[metric]) for each in evals if each["step"]}

    def _is_behind(self, curves: Sequence[dict[int, float]]) -> bool:
        """Whether the pruner ends the trial, once it has what all runs know."""
        own, shortest = self.options["eval_interval"], self.search.min_steps
        # In step 3 an evaluation may come some steps after it is due.
        parts = [{s // own: curve[s] for s in reversed(curve)} for curve in curves]
        known = self.trial.study.get_trials(deepcopy=False)[self.trial.number].intermediate_values
        for part in sorted(set.intersection(*map(set, parts)) - {0}):
            step = part * shortest
            if step in known or step >= self.search.max_steps:
                continue
            self.trial.report(sum(values[part] for values in parts) / len(parts), step)
            if self.trial.should_prune():
                return True
        return False


def run_trials(
    search: Search,
    study: "Study",
    home: Path,
    launcher: LauncherConfig | None,
    config: TuneConfig,
    received: Sequence[int],
) -> None:
    """Run the trials to come, ``--jobs`` at a time; those that were interrupted first.

    It returns when all have ended or, once a signal is ``received``, when all have saved.

    Raises:
        ValueError: if evaluations have no such metric.
    """
    from optuna.trial import Trial, TrialState

    log_once(f"the {'greatest' if search.rises else 'least'} held-out {search.metric} is best")
    begun = [Trial(study, each._trial_id) for each in study.trials if each.state.name == "RUNNING"]
    running: list[RunningTrial] = []
    try:
        while not received:
            for slot in sorted({*range(config.jobs)} - {each.slot for each in running}):
                asked = sum(each.state != TrialState.WAITING for each in study.trials)
                if not begun and asked >= (config.trials or len(search.candidates)):
                    break
                trial = begun.pop(0) if begun else study.ask()
                chosen = _chosen(trial, search)
                name = f"trial-{trial.number:02d}"
                log_once(f"{name} runs: {_words(chosen)}")
                homes = [home / name / f"seed-{seed}" for seed in search.seeds]
                options = search.of_run(chosen)
                running.append(RunningTrial(search, trial, options, homes, launcher, slot))
                running[-1].start()
            if not running:
                return
            time.sleep(POLL_SECONDS)
            for each in [each for each in running if each.follow()]:
                running.remove(each)
                name, _, steps, value, ended = _row(search, study.trials[each.trial.number], home)
                log_once(f"{name}, {ended}: {search.metric} {value} at step {steps}")
    finally:
        for each in running:
            each.stop()
        for process in [process for each in running for process in each.processes]:
            process.wait()


def _chosen(trial: "Trial", search: Search) -> dict[str, Any]:
    """The options of a trial, as its candidate or the sampler has them."""
    rate, *others = search.candidates[0]
    rates = search.values(rate)
    chosen: dict[str, Any] = {rate: trial.suggest_float(rate, rates[0], rates[-1], log=True)}
    return chosen | {n: trial.suggest_categorical(n, search.values(n)) for n in others}


def _words(chosen: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in chosen.items())


def _steps(directory: Path) -> int:
    """Optimizer steps that the runs of a trial have made, all together."""
    return sum(int(read_run(each.parent).steps) for each in directory.glob("*/metrics.jsonl"))


def _row(search: Search, trial: "FrozenTrial", home: Path) -> list[str]:
    """A row of the table of trials: name, options, steps, metric and how it ended."""
    name = f"trial-{trial.number:02d}"
    value = trial.value if trial.value is not None else math.nan
    if trial.state.name == "PRUNED":
        value = trial.intermediate_values[trial.last_step or 0]
    words = {"COMPLETE": "whole", "PRUNED": "pruned"}.get(trial.state.name)
    words = words or f"failed: {trial.user_attrs.get('error', 'interrupted')}"
    return [name, _words(trial.params), str(_steps(home / name)), short(value), words]


def show_trials(
    search: Search, study: "Study", home: Path, launcher: LauncherConfig | None
) -> dict[str, Any]:
    """Print the trials and the command of the best one, and write the page of their curves.

    Raises:
        ValueError: if no trial has come to its end.
    """
    header = ["trial", "options", "steps", search.metric, "ended"]
    rows = [_row(search, each, home) for each in study.trials if each.params]
    for line in table(header, rows):
        log_once(line)
    runs = []
    for each in study.trials:
        for path in sorted((home / f"trial-{each.number:02d}").glob("*/metrics.jsonl")):
            seed = f", {path.parent.name}" if len(search.seeds) > 1 else ""
            run = replace(read_run(path.parent), label=_words(each.params) + seed)
            if each.state.name == "PRUNED":  # nothing that looks wrong
                run = replace(
                    run, label=f"{run.label}, pruned", facts={**run.facts, "status": "unknown"}
                )
            runs.append(run)
    write_whole(
        home / "report.html",
        render_report(
            f"{search.stage}: {counted(len(rows), 'trial')}", runs, {"Trials": (header, rows)}
        ),
    )
    log_once(f"report: {home / 'report.html'}")
    if not any(each.state.name == "COMPLETE" for each in study.trials):
        raise ValueError("no trial finished; see the table for the reasons")
    shares = [
        _steps(home / f"trial-{n:02d}") / search.of_run(each.params)["max_steps"]
        for n, each in enumerate(study.trials)
        if each.params
    ]
    cost, grid = sum(shares) / len(search.seeds), len(shares)
    best = study.best_trial
    log_once(
        f"best: trial-{best.number:02d}, {search.metric} {short(study.best_value)}; the steps of "
        f"{cost:.2f} full trials were run, {cost / grid:.0%} of {grid}"
    )
    options = {**search.options, **best.params}
    if options.get("max_steps"):
        options["max_steps"] = search.of_run(best.params)["max_steps"]
    command = shlex.join(typed_command(search.stage, launcher, options))
    log_once(f"next:\n{fitted_command(command, '  ')}")
    return {
        "path": home,
        "best": dict(best.params),
        "value": study.best_value,
        "trials": [dict(zip(header, row, strict=True)) for row in rows],
        "command": command,
    }


def _wait_until_idle(directory: Path, seconds: float = 60.0) -> None:
    """Wait for a run that saves, as the search that started it was killed.

    Raises:
        ValueError: if it still writes after so many seconds.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return check_idle(directory)
        except ValueError:
            if time.monotonic() > end:
                raise
        time.sleep(POLL_SECONDS)
