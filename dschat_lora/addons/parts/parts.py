"""Parts of an iteration that are the user's own: metrics, coefficients, a state and files."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dschat_lora.engine.distributed import raise_together, rank
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.appended_file import AppendedFile
from dschat_lora.report.log import RunLog
from dschat_lora.report.rollout_file import FILE
from dschat_lora.rl.learn.experience import AdvantagesAndReturns, Experience, StepResult
from dschat_lora.rl.loop.parts import CALLED
from dschat_lora.rl.loop.schedule import RlhfProgress
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.options.names import load_object, made
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.runtime.resume import resumes_in_place, run_of


class PartError(UserFunctionError):
    """A part of the user's failed; the cause is its error. Raised on every rank."""

    what = "one of --parts"


@dataclass(frozen=True)
class RunOfPart:
    """What the ``begin`` of a part of the user's gets."""

    output_dir: Path
    tokenizer: Tokenizer
    progress: RlhfProgress  # with ``iteration`` and ``step``, those made so far
    log: RunLog
    earlier: Path | None = None  # directory of the run that is gone on from elsewhere
    files: dict[str, AppendedFile] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)  # names of files of all parts

    def appended(self, name: str, head: str = "") -> AppendedFile:
        """A file of the run's directory, to ``append`` text to after each step or iteration.

        Rank 0 alone writes. ``head`` stands before the first of it. Where the run is resumed, what
        was appended after its checkpoint is cut off.

        Raises:
            ValueError: if the name is a path, or that of a file of the run or of another part.
        """
        known = {"metrics.jsonl", "run.json", "report.html", FILE} | self.taken
        if name in known or Path(name).name != name:
            raise ValueError(f"appended({name!r}): give a new file name in the run's directory")
        self.taken.add(name)
        source = None if self.earlier is None else self.earlier / name
        file = AppendedFile(
            self.output_dir / name, self.log, active=rank() == 0, source=source, head=head
        )
        self.files[name] = file
        return file


def find_part(option: str) -> object:
    """The class or object of the user's that ``--parts`` names.

    Raises:
        ValueError: if there is none, or it has no method that is called.
    """
    part = load_object("parts", option)
    if not any(hasattr(part, name) for name in CALLED):
        kind = part if isinstance(part, type) else type(part)
        raise ValueError(
            f"--parts {option} must have after_iteration(experience, targets), after_step(result) "
            f"or before_checkpoint(); {kind.__name__} has none"
        )
    return part


class UserPart:
    """A part of the user's, any method of which may be missing; its files are kept with it."""

    def __init__(self, option: str, run: RunOfPart) -> None:
        """Make an object of the class that ``option`` names, or take the object, and begin.

        Raises:
            ValueError: as :func:`find_part`, or if it appends to a file as it begins.
        """
        self._option, self._run = option, run
        self._failure: RuntimeError | None = None
        self._metrics: dict[str, float] = {}
        self._part = made("parts", option, find_part(option))
        self.name = f"part {getattr(self._part, 'name', type(self._part).__name__)}"
        raise_together(lambda: self._call("begin", run))
        # Where the run is resumed, the file would be written anew.
        if begun := [name for name, file in run.files.items() if file.state()["bytes"]]:
            raise ValueError(
                f"--parts {option} appends to {begun[0]} in begin: give what comes first as "
                f"run.appended({begun[0]!r}, head=...)"
            )

    @property
    def takes_steps_late(self) -> bool:
        """Whether nothing of the user's is called after a step, to see the weights as they are."""
        return not hasattr(self._part, "after_step")

    def after_step(self, result: StepResult) -> None:
        """Tell of a step; what fails is raised once its iteration is whole."""
        try:
            self._call("after_step", result)
        except RuntimeError as error:
            self._failure = self._failure or error

    def after_iteration(
        self, experience: Experience, targets: AdvantagesAndReturns | None
    ) -> dict[str, float]:
        """Metrics of the part.

        Raises:
            PartError: if it fails, or returns something else.
        """

        def call() -> dict[str, float]:
            if self._failure is not None:
                raise self._failure
            metrics = self._call("after_iteration", experience, targets)
            try:
                return {str(name): float(value) for name, value in dict(metrics or {}).items()}
            except (TypeError, ValueError) as error:
                raise RuntimeError(
                    f"--parts {self._option}: after_iteration must return metrics, numbers by "
                    f"name, or None, got {metrics!r}"
                ) from error

        try:
            self._metrics = raise_together(call)
        except RuntimeError as error:
            raise PartError(str(error)) from error
        return self._metrics

    def check_names(self, taken: Collection[str]) -> None:
        """Refuse metrics that have the name of one of the run's.

        Raises:
            ValueError: naming it.
        """
        if names := sorted({*taken} & self._metrics.keys()):
            raise ValueError(f"--parts gives the metric {names[0]}, which is the run's: rename it")

    def before_checkpoint(self) -> None:
        self._call("before_checkpoint")
        for file in self._run.files.values():
            file.sync()

    def state(self) -> dict[str, Any]:
        own = self._call("state")
        try:
            json.dumps(own)
        except (TypeError, ValueError) as error:
            raise RuntimeError(
                f"--parts {self._option}: state must return what JSON holds: {error}"
            ) from error
        return {"own": own, "files": {n: file.state() for n, file in self._run.files.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        for name, of_file in state["files"].items():
            if name in self._run.files:
                self._run.files[name].restore(of_file)
        if state["own"] is not None:
            self._call("restore", state["own"])

    def _call(self, method: str, *args: object) -> Any:
        """What a method returns; None where there is none.

        Raises:
            RuntimeError: if it fails, naming the part.
        """
        function = getattr(self._part, method, None)
        try:
            return None if function is None else function(*args)
        except Exception as error:
            raise RuntimeError(f"--parts {self._option}: {method} failed: {error!r}") from error


def user_parts(names: Sequence[str], setup: RlhfSetup, progress: RlhfProgress) -> list[UserPart]:
    """The parts that options name, which have begun.

    Raises:
        ValueError: if one is none, or two have one name, under which checkpoints keep them.
    """
    run, earlier = setup.run, None
    assert run.directory is not None, "a dry run keeps nothing"
    if run.config.checkpoint and not resumes_in_place(run.config):
        earlier = run_of(Path(run.config.checkpoint))
    of_parts = RunOfPart(run.directory, setup.tokenizer, progress, run.log, earlier)
    parts = [UserPart(name, replace(of_parts, files={})) for name in names]
    check_twins(parts)
    return parts


def check_twins(parts: Sequence[UserPart]) -> None:
    """Refuse two parts of one name.

    Raises:
        ValueError: naming it.
    """
    names = [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--parts names {twice[0].removeprefix('part ')} twice: give each a name of its own"
        )
