"""Grids of short runs: each in a process of its own, its result stored at once."""

import importlib
import io
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

Figures = float | dict[str, float]


def measure(train: Callable[[Any, Path], Figures], cell: Any, connection: Any) -> None:
    """Send what a run in a directory of its own came to, None of one that failed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(io.StringIO()):
        try:
            connection.send(train(cell, Path(directory)))
        except Exception as error:  # noqa: BLE001 - a rate that is too high may end a run
            print(f"{cell}: {error}", file=sys.stderr)
            connection.send(None)


def run_cells(cells: Sequence[Any], train: Callable[[Any, Path], Figures], path: Path) -> None:
    """Run the cells, instances of a dataclass, that a file of results lacks."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    done = [{name: value for name, value in row.items() if name != "value"} for row in known]
    missing = [cell for cell in cells if asdict(cell) not in done]
    context = multiprocessing.get_context("fork")
    for name in (
        "api.stages",
        "supervised.stages",
        "supervised.pair_stages",
        "rl.loop.train",
    ):  # once, for all runs
        importlib.import_module(f"dschat_lora.{name}")
    for number, cell in enumerate(missing, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(train, cell, theirs))
        process.start()
        value = json.loads(json.dumps(ours.recv()), parse_float=lambda x: round(float(x), 5))
        process.join()
        known.append({**asdict(cell), "value": value})
        lines = ",\n".join(json.dumps(each) for each in known)
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(f"{number}/{len(missing)} {cell}: {value}", flush=True)


def read_cells(kind: type, path: Path) -> dict[Any, Any]:
    """Values by cell of a file of results; None where a run failed."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {kind(**{k: v for k, v in row.items() if k != "value"}): row["value"] for row in rows}
