"""Log of a run: metrics.jsonl, what gets its numbers too, and the terminal."""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from dschat_lora.config.files import named, naming, parse_json
from dschat_lora.config.plurals import counted
from dschat_lora.report.directory import open_alone
from dschat_lora.report.terminal import current_viewer, fitted, is_quiet, silence, write_text
from dschat_lora.report.texts import clock


class Sink(Protocol):
    """Receives the lines of a run as they are written; on the first rank alone."""

    def begin(self, lines: Sequence[bytes], *, first: int) -> None:
        """Open, or open again, after ``lines`` of metrics.jsonl; steps from ``first`` are redone.

        Raises:
            ValueError: if it cannot be used.
        """

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a line, by name."""

    def flush(self) -> None:
        """Have what was added written."""

    def close(self) -> None:
        """End the run in the sink."""


def numbers_of(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names elsewhere, such as ``train/loss``; none of events."""
    if kind == "event":
        return {}
    return {
        f"{kind}/{name}": value
        for name, value in fields.items()
        if isinstance(value, int | float) and name not in ("kind", "step", "time")
    }


class RunLog:
    """Appends one JSON object a line to ``metrics.jsonl`` and prints messages; rank 0 alone.

    On other ranks every method does nothing. A line is flushed as it is written, so that the
    file is valid however the run ends. The file is locked while the run lives: no second run
    writes to the directory. A full disk does not end the run here; see ``failure``.
    """

    def __init__(
        self,
        output_dir: Path | None,
        *,
        active: bool,
        sinks: Sequence[Sink] = (),
        earlier: bool = False,
        verbose: bool = False,
    ) -> None:
        """Open the files of a run; without ``output_dir`` messages are printed, in 80 columns.

        ``active`` says whether this rank writes, ``earlier`` to keep earlier lines for
        :meth:`rewind` instead of emptying the file. ``sinks`` get the numbers of every line;
        ``verbose`` asks for longer lines of steps.

        Raises:
            ValueError: if another process writes to the same directory, or a sink cannot begin.
        """
        self._start = time.monotonic()
        self._active = active
        #: who shows the run in the place of the standard output; whether nothing is printed
        self._viewer, self._is_quiet = current_viewer(), is_quiet()
        self.is_verbose = verbose
        self._file: TextIO | None = None
        self._sinks = sinks if active else ()
        self._total = self._first = 0  # steps, or iterations, and those made before this process
        self._expected = self._start
        self._num_lines = 0
        #: called with the kind, step and fields of each line; one that returns "stop" ends the run
        self.callbacks: Sequence[Callable[[str, int, dict[str, Any]], object]] = ()
        self.is_stopped = False
        #: the first error of the disk, after which nothing more is written
        self.failure: OSError | None = None
        if not active or output_dir is None:
            return
        self._file = open_alone(output_dir / "metrics.jsonl")
        if not earlier:
            self.rewind(num_lines=0, seconds=0.0, step=0)

    @property
    def has_lines(self) -> bool:
        """Whether the file holds a line."""
        return self._num_lines > 0

    @property
    def position(self) -> dict[str, float]:
        """Position of the log, for :meth:`rewind`."""
        return {"num_lines": self._num_lines, "seconds": time.monotonic() - self._start}

    def rewind(
        self, *, num_lines: int, seconds: float, step: int, source: Path | None = None
    ) -> None:
        """Go on after the first ``num_lines`` lines, ``seconds`` into the run, after ``step``.

        Sinks go on after the lines that stay. ``num_lines`` and ``seconds`` are those
        of :attr:`position`; ``source`` is a log of another run, from which lines are copied.
        """
        self._start = time.monotonic() - seconds
        if self._file is None:
            return
        if source is not None and source.is_file():
            earlier = source.read_text(encoding="utf-8").splitlines(keepends=True)
            self._file.writelines(earlier[:num_lines])
            self._file.flush()
        lines: list[bytes] = []
        # Through this very descriptor: closing any other one of the file would drop the lock.
        reader = self._file.buffer
        reader.seek(0)
        while len(lines) < num_lines and (line := reader.readline()).endswith(b"\n"):
            lines.append(line)
        self._file.truncate(sum(map(len, lines)))  # whole ones
        self._file.seek(0, os.SEEK_END)
        self._num_lines = len(lines)
        if self._num_lines < num_lines:
            self.say(
                f"  note         metrics.jsonl held {self._num_lines} of {num_lines} lines: those "
                "between are lost"
            )
        for sink in self._sinks:
            sink.begin(lines, first=step if source is None else 0)
        if self._viewer is not None:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    record = parse_json(line)
                    self._viewer.add(record["kind"], record)

    def expect(self, total_steps: int, done: int = 0) -> None:
        """Begin ``total_steps``, some of them ``done``: optimizer steps, or iterations in RL."""
        self._total, self._first, self._expected = total_steps, done, time.monotonic()
        if self._viewer is not None and self._file is not None and total_steps:
            self._viewer.expect(total_steps, done)

    def time_left(self, done: int) -> float:
        """Seconds to the end after ``done`` steps, at the rate since :meth:`expect`."""
        rate = (time.monotonic() - self._expected) / max(1, done - self._first)
        return rate * (self._total - done)

    def write(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Append one line of ``kind`` train, eval or event."""
        if self._file is None or self.failure is not None:
            return
        record = {"kind": kind, "step": step, "time": time.monotonic() - self._start, **fields}
        try:
            self._file.write(json.dumps(jsonable(record)) + "\n")
            self._file.flush()
            self._num_lines += 1
            _check_in_place(self._file)
            for sink in self._sinks:
                sink.add(step, numbers_of(kind, fields))
        except OSError as error:
            self.failure = named(error, Path(self._file.name))
        if self._viewer is not None:
            self._viewer.add(kind, record)
        for callback in self.callbacks:
            self.is_stopped |= callback(kind, step, dict(record)) == "stop"

    def text(self) -> str:
        """The lines so far; empty if the log has no file."""
        if self._file is None:
            return ""
        # Through this very descriptor: closing any other one of the file would drop the lock.
        reader = self._file.buffer
        reader.seek(0)
        return reader.read().decode("utf-8", errors="replace")

    def sync(self) -> None:
        """Sync the files to disk.

        Raises:
            OSError: if that or an earlier write failed.
        """
        if self.failure is not None:
            raise self.failure
        if self._file is None:
            return
        with naming(Path(self._file.name)):
            for sink in self._sinks:
                sink.flush()
            os.fsync(self._file.fileno())
            _check_in_place(self._file)

    def report_event(self, step: int, event: str, message: str, *, label: str = "warning") -> None:
        """Append an event with a message, and print the message behind ``label``."""
        self.write("event", step, {"event": event, "message": message})
        self.say(f"  {label:<12} {message}")

    def say(self, text: str) -> None:
        """Print a line in the width of the terminal; in a pipe a dry run's in 80 columns.

        A run whose terminal or reader is gone goes on silently.
        """
        if not self._active or self._is_quiet:
            return
        if self._viewer is not None:
            self._viewer.say(text)
            return
        try:
            write_text(fitted(text, 80 if self._file is None else None) + "\n")
        except OSError:
            silence(1)

    def say_metrics(self, text: str) -> None:
        """Print what a line of metrics.jsonl says, unless a viewer shows those lines."""
        if self._viewer is None:
            self.say(text)

    def close(self) -> None:
        """Close the files."""
        for closable in (*self._sinks, self._file):
            try:
                if closable is not None:
                    closable.close()
            except OSError as error:
                # A full disk may refuse again.
                if self.failure is None and self._file is not None:
                    raise named(error, Path(self._file.name)) from error

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_in_place(file: TextIO) -> None:
    """Refuse to go on where the file, and its directory, are no longer under their names.

    Another run may begin there, unlocked; and what was saved so far is not with what follows.
    """
    try:
        same = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (FileNotFoundError, NotADirectoryError):
        same = False
    if not same:
        words = "it was moved, deleted or replaced while the run was writing to it"
        raise FileNotFoundError(errno.ENOENT, words, file.name)


def jsonable(value: object) -> Any:
    """``value`` with non-finite numbers as strings, so that every line is valid JSON."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def train_line(
    step: int, total: int, metrics: Mapping[str, Any], *, left: float, verbose: bool = False
) -> str:
    """A training step as a line of 80 columns, or of more if ``verbose``; ``left`` in seconds."""
    more = [
        f"grad {metrics['grad_norm']:.3g}",
        f"{metrics['step_seconds'] or math.nan:.2f} s",
        f"{metrics['tflops_per_device'] or 0:.3g} TFLOPs",
        *_mfu(metrics),
    ]
    base, lora = metrics["learning_rate"], metrics["lora_learning_rate"]

    def line(*rates: str) -> str:
        parts = [
            f"step {step:>{len(str(total))}}/{total}",
            f"loss {metrics['loss']:.4f}",
            *([f"acc {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []),
            *rates,
            *(more if verbose else []),
            f"{metrics['tokens_per_second'] or 0:,.0f} tok/s",
            f"{clock(left)} left",
        ]
        return _joined(parts, verbose=verbose)

    if lora not in (None, base):
        both = line(f"lr {base:.2e}", f"LoRA {lora:.2e}")
        if verbose or len(both) <= 80:
            return both
    return line(f"lr {lora or base:.2e}")


def _joined(parts: Sequence[str], *, verbose: bool) -> str:
    line = "  ".join(parts)
    return line if verbose or len(line) <= 80 else " ".join(parts)


def _mfu(metrics: Mapping[str, Any]) -> list[str]:
    return [f"MFU {metrics['mfu']:.1%}"] if metrics.get("mfu") is not None else []


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def eval_line(step: int, metrics: Mapping[str, Any]) -> str:
    """An evaluation as a terminal line."""
    tasks = "".join(
        f"; {name.removeprefix('task/').replace('/', ' ')} {value:.4g}"
        for name, value in metrics.items()
        if name.startswith("task/") and not name.endswith("_standard_error")
    )
    if "accuracy" not in metrics:
        return (
            f"eval after step {step}: held-out perplexity {metrics['perplexity']:.4f} "
            f"(loss {metrics['loss']:.4f} over {metrics['tokens']:,} tokens){tasks}"
        )
    details = [
        f"loss {metrics['loss']:.4f} over {metrics['samples']:,} "
        f"{'answers' if 'kl' in metrics else 'pairs'}",
        f"chosen {_score(metrics['chosen_score'])}, rejected {_score(metrics['rejected_score'])}",
    ]
    if "kl" in metrics:
        details.append(f"KL {metrics['kl']:.3f}")
    if "nll_loss" in metrics:
        details.append(f"cross-entropy of chosen answers {metrics['nll_loss']:.4f}")
    if "calibration_error" in metrics:
        details.append(f"calibration error {metrics['calibration_error']:.3f}")
    if metrics.get("length_correlation") is not None:
        details.append(f"correlation with length {metrics['length_correlation']:.2f}")
    accuracy = f"held-out accuracy {metrics['accuracy']:.1%}"
    return f"eval after step {step}: {accuracy} ({'; '.join(details)}){tasks}"


def rlhf_line(
    iteration: int, total: int, metrics: Mapping[str, Any], *, left: float, verbose: bool = False
) -> str:
    """An iteration of step 3 as a line of 80 columns, or of more if ``verbose``."""
    more = [
        f"policy {metrics['policy_loss']:+.4f}",
        *([f"value {metrics['value_loss']:.4f}"] if metrics["value_loss"] is not None else []),
        f"entropy {metrics['entropy']:.3f}",
        f"clip {metrics['clip_fraction']:.1%}",
        f"eos {metrics['eos_rate']:.0%}",
        f"{metrics['step_seconds']:.2f} s",
        f"{metrics['generation_tokens_per_second']:,.0f} tok/s generated",
        f"{metrics['tflops_per_device'] or 0:.3g} TFLOPs",
        *_mfu(metrics),
    ]
    parts = [
        f"iteration {iteration:>{len(str(total))}}/{total}",
        f"reward {metrics['reward']:.3f}",
        f"kl {metrics['kl']:.3f}",
        f"length {metrics['response_length']:.0f}",
        *(more if verbose else []),
        f"{metrics['tokens_per_second']:,.0f} tok/s",
        f"{clock(left)} left",
    ]
    return _joined(parts, verbose=verbose)


def rlhf_eval_line(iteration: int, step: int, metrics: Mapping[str, Any]) -> str:
    """An evaluation of step 3, after so many iterations and optimizer steps, as a terminal line."""
    judged = ""
    if "judge" in metrics:
        judged = f"; judge {metrics['judge']:.3f} sampled, {metrics['greedy_judge']:.3f} greedy"
    return (
        f"eval after iteration {iteration:,} ({counted(step, 'step')}): held-out reward "
        f"{metrics['reward']:.3f} sampled, {metrics['greedy_reward']:.3f} greedy{judged} "
        f"({counted(metrics['samples'], 'prompt')}; "
        f"kl {metrics['kl']:.3f}, length {metrics['response_length']:.1f}, "
        f"eos {metrics['eos_rate']:.0%})"
    )


def summary_lines(metrics: Mapping[str, Any], *, memory_of: str = "") -> list[str]:
    """The run's throughput as terminal lines; ``memory_of`` says what the peak memory counts."""

    def number(name: str, scale: float = 1.0) -> str:
        value = metrics.get(name)
        if value is None:
            return "-"
        value /= scale
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    return [
        f"speed{', without the first step' * metrics['warmup_steps']}: "
        f"{number('step_seconds')} s a step, {number('tokens_per_second')} real tokens/s, "
        f"{number('samples_per_second')} samples/s",
        f"per device: {number('tflops_per_device')} TFLOPs, "
        f"{number('hardware_tflops_per_device')} with recomputation, "
        f"{number('tflops_deepspeed_chat')} by DeepSpeed-Chat's formula (k = 2r/h), "
        + "".join(f"{each}, " for each in _mfu(metrics))
        + f"peak memory {number('peak_memory_bytes', 2**30)} GiB{memory_of}",
    ]
