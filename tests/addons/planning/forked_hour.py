"""Processes of the first hour as forks of a process that has a fake card."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.real_accelerator import set_accelerator

from dschat_lora.addons.planning import first_hour, hour_checks
from fakecuda.device import fake_cuda


class Forked:
    """A fork, waited for as a subprocess is."""

    def __init__(self, pid):
        self.pid, self.code = pid, None

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.01)
        return self.code

    def kill(self):
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10)


def fork(words, environment, output):
    """As :func:`first_hour.start_python`."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    for number, path in ((1, output), (2, output.with_suffix(".log"))):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.update(environment)
    code = 1
    try:
        _run(words, environment["DS_ACCELERATOR"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - the log has it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words, device):
    sys.argv = list(words)
    if device == "cpu":
        set_accelerator(CPU_Accelerator())
    with fake_cuda("h200") if device == "cuda" else nullcontext() as watch:
        if watch is not None:
            watch.number = 0.0
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run(directory, names, *, model=None, cpu_forks=True):
    """Results of the checks of these names, or of all, and of measurements of a published shape."""
    out = Path(directory)
    work = out / "work"
    work.mkdir()
    start = fork
    if not cpu_forks:

        def start(words, environment, output):
            on_cpu = environment["DS_ACCELERATOR"] == "cpu"
            return (first_hour.start_python if on_cpu else fork)(words, environment, output)

    hour = first_hour.Hour(work, start)
    machine = first_hour.find_machine(hour)
    hour_checks.write_data(work)
    items = {"checks": hour_checks.checks(work, machine["dtype"]), "measurements": []}
    if names is not None:
        items["checks"] = [each for each in items["checks"] if each.name in names]
    if model is not None:
        sizes = [hour_checks.Size(model, 2, 128, 8)]
        items["measurements"] = hour_checks.measurements(work, "bf16", 10**11, sizes)
    first_hour.run_items(hour, machine, items, out)
    return json.loads((out / "first_hour.json").read_text())
