"""Which checkpoint a run goes on from, and with which options; settled before anything heavy."""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dschat_lora.checkpoint.history import (
    CHECKPOINTS,
    STATE_FILE,
    Choice,
    checkpoints_of,
    newest_valid,
    read_state,
    step_of,
)
from dschat_lora.checkpoint.manifest import MANIFEST, DamagedError, verify
from dschat_lora.config.groups import ParallelConfig
from dschat_lora.config.held import is_held, is_in_module
from dschat_lora.config.options import (
    build_config,
    command_line,
    flatten,
    option_fields,
    option_names,
    options_of,
    options_that_run,
    typed_options,
    value_text,
)
from dschat_lora.config.other_names import GONE, GONE_SINCE
from dschat_lora.data.digests import DataIdentity
from dschat_lora.engine.ds_config import fields_that_write
from dschat_lora.models.option_checks import check_processes
from dschat_lora.report.directory import check_idle, newest_directory
from dschat_lora.report.terminal import say_once

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Resumable(DataclassInstance, Protocol):
        """Options of a run that can go on from a checkpoint."""

        @property
        def run(self) -> "OutputOptions": ...
        @property
        def parallel(self) -> ParallelConfig: ...
        @property
        def given(self) -> frozenset[str]: ...
        @property
        def checkpoint(self) -> str | None: ...
        @property
        def rejected(self) -> tuple[str, ...]: ...
        @property
        def fixed(self) -> frozenset[str]: ...
        @property
        def rows(self) -> Mapping[str, tuple[str, ...]]: ...


class OutputOptions(Protocol):
    """Where a run writes, and what it goes on from."""

    @property
    def output_dir(self) -> str | None: ...
    @property
    def overwrite_output_dir(self) -> bool: ...
    @property
    def resume_from_checkpoint(self) -> str | None: ...
    @property
    def accept_changed_data(self) -> bool: ...


ConfigT = TypeVar("ConfigT", bound="Resumable")

# Options of one process, not of the run: never taken from a checkpoint.
_OF_THE_PROCESS = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "accept_changed_data"),
    *("dry_run", "verbose", "deepspeed"),
)
_MOST_ROWS = 2**20  # of a step; more are none that a run has
_TURNS = {"rows_per_step": "a step", "responses": "an iteration"}
_IDENTITY = {
    "stage": "the stage",
    "model": "the base model's weights",
    "rest": "the base model's weights outside its text model",
    "tokenizer": "the tokenizer",
    "train_data": "the training data",
    "eval_data": "the evaluation data",
    "media": "the inputs of rows other than text",
    "dtype": "--dtype",
    "adapter": "the adapter",
    "start": "the initial adapter",
    "packing": "whether rows are packed",
    "rows": "the number of rows after packing",
    "stream": "the sources that are streamed",
    "rows_per_step": "the rows of a step",
    "deepspeed_processes": "the processes, which shard the optimizer state with --deepspeed",
    "tokens_per_device": "--tokens_per_device",
    "responses": "the responses of an iteration",
    "critic": "the reward model",
    "text": "the pretraining text",
    "answers": "the answers of the data",
    "streams": "the random number generator",
}
# What --accept_changed_data lets differ.
_OF_DATA = {"media", "train_data", "eval_data", "text", "answers", "rows"}


def settle(config: ConfigT, *, stage: str) -> ConfigT:
    """The config with the checkpoint it goes on from, and the options that one was made with.

    Options that are not typed again are those of the checkpoint, which is "" for a fresh start.
    Where the number of processes differs, the accumulation follows, so that a step stays a step.
    Call on the first rank.

    Raises:
        ValueError: if there is no checkpoint to go on from, or options contradict it; the
            message lists every difference.
    """
    wanted = config.run.resume_from_checkpoint
    if wanted is None:
        if config.run.accept_changed_data:
            raise ValueError("--accept_changed_data needs --resume_from_checkpoint")
        return replace(config, checkpoint="")
    run, choice = _find_checkpoint(wanted, config.run.output_dir, stage)
    for reason in choice.rejected.values():
        say_once(f"  note         checkpoint rejected: {reason}")
    if choice.path is None:
        return _without_checkpoint(config, wanted, run, choice.rejected.values())
    state = read_state(choice.path)
    if not isinstance(state.get("options"), dict):  # anybody may have written it
        raise ValueError(f"{choice.path / STATE_FILE} is not the state of a run")
    made_by = state["identity"].get("stage", stage)
    if made_by != stage:
        raise ValueError(
            f"--resume_from_checkpoint {choice.path} belongs to a run of the stage {made_by}, not "
            f"{stage}; use the command that wrote it"
        )
    merged = _with_options_of(state, config, choice.path)
    if merged.run.output_dir is None and run is None:
        raise ValueError(
            f"--resume_from_checkpoint {wanted} is not part of a run; give an --output_dir"
        )
    output_dir = merged.run.output_dir or str(run)
    resolved = replace(
        with_options(merged, {"output_dir": output_dir}),
        checkpoint=str(choice.path.absolute()),
        rejected=tuple(map(str, choice.rejected)),
    )
    if config.run.overwrite_output_dir and resumes_in_place(resolved):
        raise ValueError(
            "--resume_from_checkpoint resumes a run that --overwrite_output_dir would delete; "
            "give one"
        )
    say_once(f"resuming from {choice.path}, after step {state['step']:,}")
    return resolved


def check_identity(
    checkpoint: Path,
    now: Mapping[str, Any],
    *,
    num_steps: int = 0,
    accepts_changed_data: bool = False,
) -> None:
    """Refuse to give the state of one run to another, or to one that would have ended before.

    Where it ``accepts_changed_data``, what differs of these is said, and no reason to refuse.

    Raises:
        ValueError: listing everything that differs, or could not be compared.
    """
    state = read_state(checkpoint)
    then = state["identity"]
    if num_steps and state["step"] > num_steps:
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint} is after step {state['step']}, and "
            f"--max_steps or --num_train_epochs end the run at step {num_steps}; raise them, or "
            "resume from an earlier checkpoint"
        )
    if then.get("dtype") != now.get("dtype"):
        # The weights are then of another type too, which says nothing of the model.
        then, now = ({**each, "model": None, "rest": None} for each in (then, now))
    differences = {}
    for name in (*_IDENTITY, *sorted({*then, *now} - {*_IDENTITY})):
        words = _difference(then.get(name), now.get(name))
        if words is not None:
            differences[name] = f"{_IDENTITY.get(name, f'the {name}')} {words}"
    if accepts_changed_data:
        for name in differences.keys() & _OF_DATA:
            say_once(f"  note         accepted: {differences.pop(name)}")
    if differences:
        hint = "; --accept_changed_data resumes anyway" if differences.keys() <= _OF_DATA else ""
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint}: the run differs: "
            f"{'; '.join(differences.values())}{hint}"
        )


def _difference(before: object, value: object) -> str | None:
    """How a part of the identity differs from ``before``; None where it does not."""
    if isinstance(value, DataIdentity):
        return value.difference(before)
    if before == value:
        return None
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        key = next(k for k in {**before, **value} if before.get(k) != value.get(k))
        return f"({key}: was {before.get(key, 'none')}, now {value.get(key, 'none')})"
    if isinstance(before, Mapping) and "blocks" in before:  # a digest
        return f"(was {before.get('samples')} samples, now {value})"
    return f"(was {before}, now {value})"


def run_of(checkpoint: str | Path) -> Path | None:
    """The output directory that a checkpoint lies in; None for a copy elsewhere."""
    home = Path(checkpoint).parent
    if home.name != CHECKPOINTS:
        home = home.absolute()
    if home.name == CHECKPOINTS:
        return home.parent
    own = step_of(Path(checkpoint)) is not None and (home / "run.json").is_file()
    return home if own else None


def resumes_in_place(config: "Resumable") -> bool:
    """Whether the run continues in the directory of its checkpoint, rather than in a new one."""
    if not config.checkpoint or config.run.output_dir is None:
        return False
    run = run_of(config.checkpoint)
    return run is not None and run.resolve() == Path(config.run.output_dir).expanduser().resolve()


def options_to_keep(config: "Resumable") -> dict[str, Any]:
    """The typed options that a resumed run takes over, JSON-ready."""
    # --deepspeed is a file for GLUE, without effect in other stages.
    left = {*_OF_THE_PROCESS} - config.fixed
    return {n: v for n, v in typed_options(config).items() if n not in left}


def with_options(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """The config with these options too, as if they were typed."""
    changed = build_config(type(config), {**flatten(config), **values})
    return replace(
        changed,
        given=config.given | values.keys(),
        checkpoint=config.checkpoint,
        rejected=config.rejected,
    )


def _find_checkpoint(wanted: str, output_dir: str | None, stage: str) -> tuple[Path | None, Choice]:
    """(output directory looked into, its newest valid checkpoint)."""
    if wanted in ("latest", "auto"):
        run = Path(output_dir).expanduser() if output_dir is not None else newest_directory(stage)
        if run is None:
            return None, Choice(None, {})
        check_idle(run)  # or its checkpoints would come and go
        return run, newest_valid(run)
    path = Path(wanted).expanduser()
    named = path.parent.name == CHECKPOINTS or step_of(path) is not None
    if named or (path / MANIFEST).is_file():
        if not path.is_dir():
            raise ValueError(f"--resume_from_checkpoint {wanted} does not exist")
        try:
            verify(path, kind="checkpoint")
        except DamagedError as error:
            # Given by name: nothing else is taken in its place.
            raise ValueError(
                f"--resume_from_checkpoint {wanted} cannot be used: {error}; use latest to resume "
                "from the newest valid checkpoint"
            ) from error
        return run_of(path), Choice(path, {})
    if not checkpoints_of(path):
        raise ValueError(
            f"--resume_from_checkpoint {wanted} must be latest, auto, a checkpoint, or the output "
            "directory of a run with one"
        )
    return path, newest_valid(path)


def _without_checkpoint(
    config: ConfigT, wanted: str, run: Path | None, reasons: Collection[str]
) -> ConfigT:
    """The config of a fresh start, if ``wanted`` is auto."""
    if wanted == "auto":
        where = f" in {run}" if run is not None else ""
        say_once(f"no checkpoint to resume from{where}: starting from scratch")
        return replace(config, checkpoint="")
    if reasons:
        raise ValueError(
            f"--resume_from_checkpoint {wanted}: no checkpoint in {run} is valid: "
            + "; ".join(reasons)
        )
    where = f"{run} contains no checkpoint" if run is not None else "there is no run to resume"
    raise ValueError(
        f"--resume_from_checkpoint {wanted}: {where}; name the run with --output_dir, or use auto "
        "to start a new run if there is none"
    )


def _with_options_of(state: Mapping[str, Any], config: ConfigT, path: Path) -> ConfigT:
    now = typed_options(config)
    then: dict[str, Any] = state["config"]
    shared = now.keys() & then.keys()
    changed = {n: (then[n], now[n]) for n in sorted(shared) if now[n] != then[n]}
    fixed = changed.keys() & config.fixed
    differences = [
        f"--{name} was {value_text(before)}, now {value_text(after)}"
        for name, (before, after) in changed.items()
        if name in fixed
    ]
    inherited = _inherited(type(config), state, now, path)
    merged = build_config(type(config), {**inherited, **now})
    if flatten(merged)["num_train_epochs"] == 0:
        raise ValueError(
            "--num_train_epochs 0 only evaluates, but --resume_from_checkpoint resumes training: "
            "give an adapter with --model_name_or_path instead"
        )
    _check_groups(merged, path, now)
    notes: list[str] = []
    if "tokens_per_device" not in fixed:  # or steps would be counted in two units
        merged, rows, notes = _with_same_rows(merged, state, now)
        differences += rows
    if differences:
        raise ValueError(
            f"--resume_from_checkpoint {path}: the run differs: {'; '.join(differences)}"
        )
    for note in notes:
        say_once(f"  note         {note}")
    for name, (before, after) in changed.items():
        if name not in (*_OF_THE_PROCESS, *chain.from_iterable(config.rows.values())):
            words = f"{value_text(after)} from here on, {value_text(before)} so far"
            say_once(f"  note         --{name} {words}")
    return merged


def _check_groups(config: "Resumable", path: Path, now: Mapping[str, Any]) -> None:
    """Refuse processes that the sizes of groups, perhaps the checkpoint's, do not divide."""
    names = ("tensor_parallel_size", "context_parallel_size")
    sizes = {name: getattr(config.parallel, name) for name in names if name not in now}
    before = " and ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
    try:
        check_processes(config.parallel, launched_processes())
    except ValueError as error:
        if not before:
            raise
        raise ValueError(
            f"--resume_from_checkpoint {path} is of a run with {before}: give the new size, as "
            f"{error}"
        ) from error


def options_with_code(
    config_class: "type[DataclassInstance]", options: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of the options of a class that run code of the user's choice."""
    names = options_that_run(config_class, "code", "object")
    code = {name: options[name] for name in names if options.get(name)}
    parts = {name: str(options.get(name)) for name in options_that_run(config_class, "part")}
    return code | {n: value for n, value in parts.items() if is_in_module(value) or is_held(value)}


def _inherited(
    config_class: type[ConfigT], state: Mapping[str, Any], now: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Options of the checkpoint that no typed one stands in for, checked as if they were typed.

    Raises:
        ValueError: if one runs code, which has to be typed again, is gone, or lacks its add-on.
    """
    then: dict[str, Any] = state["options"]
    again = [name for name in options_with_code(config_class, then) if name not in now]
    if again:
        raise ValueError(
            f"--resume_from_checkpoint {path} was made with {_typed(again, then)}, which runs "
            "code, so it is not taken from a checkpoint; if you trust it, give it again"
        )
    files = options_that_run(config_class, "file")
    elsewhere = [name for name in files if then.get(name) and name not in now]
    if elsewhere:
        say_once(
            "  note         not taken from the checkpoint, as it points outside the run: "
            f"{_typed(elsewhere, then)}; give it again if needed"
        )
    for name in ("deepspeed_config", "deepspeed"):
        file = then.get(name)
        if isinstance(file, str) and name not in now and (fields := fields_that_write(file)):
            raise ValueError(
                f"--resume_from_checkpoint {path} was made with --{name} {file}, with which "
                f"DeepSpeed writes files ({', '.join(fields)}); if you trust it, give it again"
            )
    typed = (field for name, (field, _) in option_fields(config_class).items() if name in now)
    replaced = set[str]().union(*(field.metadata["replaces"] for field in typed)) - now.keys()
    refused = {*options_that_run(config_class, "code", "object"), *elsewhere}
    for name in GONE.keys() & then.keys():
        if then[name] != GONE[name]:
            words = f"{_typed([name], then)}, an option that was removed in version {GONE_SINCE}"
            raise ValueError(f"--resume_from_checkpoint {path} was made with {words}")
    known = {*option_names(config_class)}
    owner = state.get("addons")  # which older checkpoints lack
    if isinstance(owner, dict) and (gone := [n for n in then if n not in known and n in owner]):
        name = gone[0]
        raise ValueError(
            f"--resume_from_checkpoint {path} was made with {_typed([name], then)} of the add-on "
            f"{owner[name]}, which is not installed or has no such option"
        )
    known -= replaced | refused
    kept = {name: value for name, value in then.items() if name in known and value is not None}
    return options_of(config_class, kept, label=f"{path / STATE_FILE}: options")


def _typed(names: Iterable[str], values: Mapping[str, Any]) -> str:
    """The options as they are typed."""
    return " ".join(command_line({name: values[name] for name in names}))


def _with_same_rows(
    config: ConfigT, state: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[ConfigT, list[str], list[str]]:
    """The config with as many rows as before at each turn, what forbids that, and notes."""
    differences, notes = [], []
    parallel, processes = config.parallel, launched_processes()
    shares = parallel.shares(processes)
    for name, options in config.rows.items():
        rows = _count(state["identity"], name)
        unit = "rows" if len(options) > 1 else "micro-batches"
        *micro_names, times_name = options
        values: dict[str, int] = {}
        for option in micro_names:  # where rows cannot be as many again, what comes near
            micro = now[option] if option in now else _count(state["config"], option)
            if option not in now:
                fitting = [m for m in range(1, micro + 1) if rows % (m * shares) == 0]
                micro = max(fitting, default=min(micro, max(1, rows // shares)))
            values[option] = micro
        at_once = math.prod(values.values()) * shares
        values[times_name] = now.get(times_name, max(1, rows // at_once))
        product = math.prod(values.values()) * shares
        typed = [f"--{option} {value}" for option, value in values.items()]
        if product != rows:
            differences.append(
                f"{_TURNS[name]} had {rows} {unit}, now {' x '.join(typed)} x "
                f"{parallel.share_words(processes)} is {product}"
            )
            continue
        config = with_options(config, values)
        if any(state["config"].get(option) != value for option, value in values.items()):
            notes.append(f"{' '.join(typed)}: {_TURNS[name]} keeps {rows} {unit}")
    return config, differences, notes


def _count(values: Mapping[str, Any], name: str) -> int:
    """A number of rows or steps in a checkpoint.

    Raises:
        ValueError: if it is none that a run has.
    """
    value = values.get(name)
    if type(value) is not int or not 0 < value <= _MOST_ROWS:
        raise ValueError(
            f"{STATE_FILE} of the checkpoint is damaged: it has {value!a:.40} as {name}"
        )
    return value


def launched_processes() -> int:
    """Processes of this run, as the launcher says before they meet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process is rank 0, from the launcher's environment variables."""
    return os.environ.get("RANK", "0") == "0"
