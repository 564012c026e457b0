"""Processes over gloo that stay up between tests and run one function after another."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from helpers.launcher import Launcher, Running

MAIN = Path(__file__).with_name("rank_main.py")


class RanksFailedError(AssertionError):
    """A rank raised, died or took too long; the message holds every rank's report."""


class Ranks:
    """``size`` processes as a launcher starts them, each waiting for the next function.

    They are started at the first call and replaced after a failure, which may leave them
    waiting for each other. They end when their standard input does, so none outlives a test run.
    """

    def __init__(self, size: int, directory: Path, launcher: Launcher, **environment: str) -> None:
        self.size, self.directory, self.environment = size, directory, environment
        self._launcher = launcher
        self._running: Running | None = None
        self._calls = 0

    def run(self, function: str, *, timeout: float = 180, **arguments: Any) -> list[Any]:
        """What ``module:function`` returned on each rank, given the same JSON-able arguments."""
        if self._running is None:
            self._running = self._launcher.start(
                *([], self.directory),
                ranks=self.size,
                env=self.environment,
                script=MAIN,
                listening=True,
            )
        self._calls += 1
        results = [self.directory / f"result-{self._calls}-{r}.pt" for r in range(self.size)]
        for source, result in zip(self._running.inputs, results, strict=True):
            request = {"function": function, "arguments": arguments, "result": str(result)}
            source.write(json.dumps(request) + "\n")
        try:
            return self._collect(results, time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes, which a later call starts anew."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()
            for source in self._running.inputs:
                source.close()
        self._running = None

    def _collect(self, results: list[Path], deadline: float) -> list[Any]:
        running = self._running
        assert running is not None
        while not all(path.exists() for path in results):
            late = time.monotonic() > deadline
            dead = any(code is not None for code in running.codes())
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
                    f"rank {rank}: {report.get('error', 'ran')}{running.output(rank)[-2000:]}"
                    for rank, report in enumerate(reports)
                )
            )
        return [report["value"] for report in reports]
