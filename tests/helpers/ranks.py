"""Processes over gloo that stay up between tests and run one function after another."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1]


class RanksFailedError(AssertionError):
    """A rank raised, died or took too long; the message holds every rank's report."""


class Ranks:
    """``size`` processes as a launcher starts them, each waiting for the next function.

    They are started at the first call and replaced after a failure, which may leave them
    waiting for each other. They end when their standard input does, so none outlives a test run.
    """

    def __init__(self, size: int, directory: Path, **environment: str) -> None:
        self.size, self.directory, self.environment = size, directory, environment
        self._processes: list[subprocess.Popen[str]] = []
        self._calls = self._starts = 0

    def run(self, function: str, *, timeout: float = 180, **arguments: Any) -> list[Any]:
        """What ``module:function`` returned on each rank, given the same JSON-able arguments."""
        if not self._processes:
            self._start()
        self._calls += 1
        results = [self.directory / f"result-{self._calls}-{r}.pt" for r in range(self.size)]
        for process, result in zip(self._processes, results, strict=True):
            request = {"function": function, "arguments": arguments, "result": str(result)}
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        try:
            return self._collect(results, time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes, which a later call starts anew."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._processes = []

    def log(self, rank: int) -> str:
        """What a rank wrote to its standard output and error."""
        path = self.directory / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _start(self) -> None:
        port = free_port()
        self._starts += 1
        private = self.directory / f"start-{self._starts}"
        private.mkdir(parents=True)
        for rank in range(self.size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(private),
                "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            }
            with (self.directory / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "helpers.rank_main"],
                    env=environment | self.environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            self._processes.append(process)

    def _collect(self, results: list[Path], deadline: float) -> list[Any]:
        while not all(path.exists() for path in results):
            late = time.monotonic() > deadline
            dead = any(process.poll() is not None for process in self._processes)
            failed = any(
                path.exists() and "error" in torch.load(path, weights_only=True) for path in results
            )
            if late or dead or failed:
                time.sleep(0.5)  # the other ranks may be about to report too
                break
            time.sleep(0.02)
        reports = [
            torch.load(path, weights_only=True) if path.exists() else {"error": "no result\n"}
            for path in results
        ]
        if any("error" in report for report in reports):
            raise RanksFailedError(
                "\n".join(
                    f"rank {rank}: {report.get('error', 'ran')}{self.log(rank)[-2000:]}"
                    for rank, report in enumerate(reports)
                )
            )
        return [report["value"] for report in reports]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
