"""What a run says while it runs: metrics.jsonl, TensorBoard, and the terminal."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm


class RunLog:
    """Appends one JSON object a line to ``metrics.jsonl`` and tells a person; rank 0 alone.

    On other ranks every method does nothing. A line is flushed as it is written, so that the
    file is valid however the run ends.
    """

    def __init__(
        self, output_dir: Path | None, *, active: bool, tensorboard: Path | None = None
    ) -> None:
        """Open the files of a run; without ``output_dir`` only the terminal is told."""
        self._start = time.monotonic()
        self._active = active
        self._file: TextIO | None = None
        self._board: Any = None
        self._bar: tqdm[Any] | None = None
        if not active or output_dir is None:
            return
        self._file = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # an optional extra

            self._board = SummaryWriter(str(tensorboard))

    def expect(self, total_steps: int) -> None:
        """Show a progress bar over ``total_steps`` where a person is watching."""
        if self._file is not None and total_steps and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, unit="step", dynamic_ncols=True)

    def write(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Append one line of ``kind`` train, eval or event."""
        if self._file is None:
            return
        record = {"kind": kind, "step": step, "time": time.monotonic() - self._start, **fields}
        self._file.write(json.dumps(jsonable(record)) + "\n")
        self._file.flush()
        if self._board is not None and kind != "event":
            for name, value in fields.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def say(self, text: str) -> None:
        """Show a line, above the progress bar if there is one."""
        if self._active:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def advance(self) -> None:
        """One optimizer step further on the progress bar."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Close files and the bar."""
        for closable in (self._bar, self._board, self._file):
            if closable is not None:
                closable.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def jsonable(value: Any) -> Any:
    """``value`` with non-finite numbers as strings, so that every line is valid JSON."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def train_line(step: int, total: int, metrics: Mapping[str, Any]) -> str:
    """A training step for a person."""
    seconds = metrics["step_seconds"] or math.nan
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"loss {metrics['loss']:.4f}",
        f"lr {metrics['lora_learning_rate'] or metrics['learning_rate']:.2e}",
        f"grad {metrics['grad_norm']:.3g}",
        f"{seconds:.2f} s",
        f"{metrics['tokens_per_second'] or 0:,.0f} tok/s",
        f"{metrics['tflops_per_device'] or 0:.3g} TFLOPs",
    ]
    if metrics["mfu"] is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    return "  ".join(parts)


def eval_line(step: int, metrics: Mapping[str, Any]) -> str:
    """An evaluation for a person."""
    return (
        f"eval after step {step}: held-out perplexity {metrics['perplexity']:.4f} "
        f"(loss {metrics['loss']:.4f} over {metrics['tokens']:,} tokens)"
    )


def summary_lines(metrics: Mapping[str, Any]) -> list[str]:
    """The run's throughput for a person."""

    def number(name: str, scale: float = 1.0) -> str:
        value = metrics.get(name)
        if value is None:
            return "-"
        value /= scale
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    return [
        f"{metrics['steps']} steps after {metrics['warmup_steps']} of warm-up: "
        f"{number('step_seconds')} s a step, {number('tokens_per_second')} real tokens/s, "
        f"{number('samples_per_second')} samples/s",
        f"per device: {number('tflops_per_device')} TFLOPs (model), "
        f"{number('hardware_tflops_per_device')} (hardware), "
        f"{number('tflops_deepspeed_chat')} (DeepSpeed-Chat's formula with k = 2r/h), "
        f"MFU {number('mfu')}, peak memory {number('peak_memory_bytes', 2**30)} GiB",
    ]
