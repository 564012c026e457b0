"""``dschat-lora doctor --first_hour``: what a card computes, how fast and in how much memory.

Every command is a process of its own with a time limit, so that neither a crash nor a hang keeps
the rest from running.
"""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dschat_lora.addons.planning.hour_checks import (
    PROBES,
    Command,
    Item,
    checks,
    measurements,
    write_data,
)
from dschat_lora.addons.report.html import render
from dschat_lora.addons.report.markup import number, value_text
from dschat_lora.config.staging import write_whole
from dschat_lora.engine.children import variables_of_no_launch
from dschat_lora.report.log import jsonable
from dschat_lora.report.terminal import log_once, to_json, wrapped
from dschat_lora.report.texts import short
from dschat_lora.runtime.directory import RunDirectory

GIB = 2**30
SECONDS = 40 * 60.0
LEAST_SECONDS = 20.0  # no command begins that has less left
NO_TIME = "no time"
_TAIL_LINES = 25
_IN_PATHS = r"[\w.+@~-]"
# An address of the web, or words between slashes, of which the last one ends with no point.
_PATH = re.compile(rf"https?://\S+|(?<!{_IN_PATHS}){_IN_PATHS}*(?:/{_IN_PATHS}*[\w+~-])+/?")


class ProcessGroup(subprocess.Popen[bytes]):
    """A process with a group of its own, which is killed whole."""

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            super().wait()


Start = Callable[[Sequence[str], Mapping[str, str], Path], ProcessGroup]


def start_python(
    words: Sequence[str], environment: Mapping[str, str], output: Path
) -> ProcessGroup:
    """``python -m`` words; its output goes to ``output`` and the same with .log, of errors."""
    with output.open("wb") as out, output.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", *words]
        return ProcessGroup(
            command, env=environment, stdout=out, stderr=log, start_new_session=True
        )


@dataclass(frozen=True)
class CommandResult:
    """How a command ended: ``reason`` is empty if well; ``state`` is that of what needs it."""

    state: str = "passed"
    reason: str = ""
    tail: str = ""


@dataclass
class Hour:
    """Runs commands, each once, until the time is over."""

    work: Path
    start: Start = start_python
    seconds: float = SECONDS
    done: dict[str, CommandResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def measure(self, item: Item) -> dict[str, Any]:
        """What came of an item: ``state`` is passed, failed or not run."""
        if item.lacks:
            return {
                "name": item.name,
                **asdict(CommandResult("not run", item.lacks)),
                "seconds": 0.0,
            }
        begun, outcome, facts = time.monotonic(), CommandResult(), dict[str, Any]()
        try:
            for command in item.commands:
                outcome = self.run(command)
                if outcome.reason:
                    break
            else:
                facts = item.read()
        except Exception as error:  # noqa: BLE001 - what a broken run wrote can be anything
            reason = f"its results cannot be read: {type(error).__name__}: {error}"
            outcome = CommandResult("failed", public(reason))
        if "differences" in facts:
            rows = [each._asdict() | {"holds": each.holds} for each in facts["differences"]]
            facts = {"differences": rows}
            if not all(row["holds"] for row in rows):
                outcome = CommandResult("failed")
        seconds = round(time.monotonic() - begun, 1)
        return {"name": item.name, **asdict(outcome), **facts, "seconds": seconds}

    def run(self, command: Command) -> CommandResult:
        """How the command ended; one that has run is not run again."""
        if command.name not in self.done:
            self.done[command.name] = self._run(command)
        return self.done[command.name]

    def _run(self, command: Command) -> CommandResult:
        left = self.deadline - time.monotonic()
        limit = min(command.seconds, left)
        if limit < min(LEAST_SECONDS, command.seconds):
            return CommandResult("not run", NO_TIME)
        output = self.work / f"{command.name}.out"
        process = self.start(command.words, environment_of(command), output)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            if limit < command.seconds:
                return CommandResult("not run", NO_TIME)
            reason = f"{command.name}: no end within {command.seconds:g} s"
            return CommandResult("failed", reason, tail_of(output))
        finally:
            process.kill()
        if code:
            reason = command.refusals.get(code, "")
        else:
            reason = command.objection(output.read_text(encoding="utf-8"))
        if reason or code == 0:
            return CommandResult("not run", reason) if reason else CommandResult()
        tail = tail_of(output)
        cause = f"exit code {code}: {(tail.splitlines() or ['it said nothing'])[-1].strip()}"
        if code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
        return CommandResult("failed", f"{command.name}: {cause}", tail)


def environment_of(command: Command) -> dict[str, str]:
    """Of a command: one process on one device, offline, without TF32."""
    chosen = {"DS_ACCELERATOR": command.device, "NVIDIA_TF32_OVERRIDE": "0"}
    if command.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        chosen["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    return variables_of_no_launch() | chosen | {"HF_HUB_OFFLINE": "1"}


def tail_of(output: Path) -> str:
    """The last lines that a command wrote, errors if there are any, as :func:`public` text."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace").strip()
        for path in (output.with_suffix(".log"), output)
        if path.is_file()
    ]
    text = next(filter(None, texts), "")
    return public("\n".join(text.splitlines()[-_TAIL_LINES:]))


def public(text: str) -> str:
    """Text without directories and the names of host and user, as it goes into a bug report."""

    def file_alone(found: re.Match[str]) -> str:
        """Of a path the name of its file, or that it is a directory; anything else as it is."""
        path = found[0]
        name = path.rpartition("/")[2]
        if path.startswith("http"):
            return path
        if re.search(r"\w\.[A-Za-z]\w*$", name):
            return name
        return "DIRECTORY" if path[0] in "/~-." else path

    for name, instead in _private_names():
        starts = "" if name.startswith("/") else r"(?<!\w)"
        text = re.sub(rf"{starts}{re.escape(name)}(?!\w)", instead, text)
    return _PATH.sub(file_alone, text)


def _private_names() -> list[tuple[str, str]]:
    """What a report leaves out, each before its parts, and what stands for it."""
    directories, users = [], []
    with suppress(OSError):  # it was removed
        directories.append(str(Path.cwd()))
    with suppress(RuntimeError):  # there is none
        directories += [str(Path.home()), f"/{Path.home().name}"]
    with suppress(OSError, KeyError):  # the user's number has no name
        users.append(getpass.getuser())
    host, full = socket.gethostname(), _full_host_name()
    hosts = [full, host, host.partition(".")[0]]
    domain = full.partition(".")[2]
    return [
        *((each, "/DIRECTORY") for each in directories if each != "/"),
        *((each, "HOST") for each in hosts if not each.isdecimal()),
        *((each, "DOMAIN") for each in [domain] if "." in each),
        *((each, "USER") for each in users if each != "root"),
    ]


@cache
def _full_host_name() -> str:
    return socket.getfqdn()  # asks the network


def first_hour() -> None:
    """Run all on the first card; the exit code is 1 if a check failed.

    Raises:
        ValueError: if torch sees no card.
    """
    with tempfile.TemporaryDirectory(prefix="dschat-lora-") as directory:
        hour = Hour(Path(directory))
        machine = find_machine(hour)
        output = RunDirectory.claim(None, name="first-hour").path
        write_data(hour.work)
        dtype = machine["dtype"]
        items = {
            "checks": checks(hour.work, dtype),
            "measurements": measurements(hour.work, dtype, machine["memory_bytes"]),
        }
        passed = run_items(hour, machine, items, output)
    if not passed:
        raise SystemExit(1)


def find_machine(hour: Hour) -> dict[str, Any]:
    """What the card is.

    Raises:
        ValueError: if there is none, or asking for it fails.
    """
    file = hour.work / "machine.json"
    outcome = hour.run(Command("machine", (PROBES, "machine", str(file)), "cuda", 120))
    if outcome.reason:
        raise ValueError(f"--first_hour cannot ask torch for the GPU: {outcome.reason}")
    machine: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "card" not in machine:
        raise ValueError(
            "--first_hour needs a GPU, and torch sees none; dschat-lora doctor says what is here"
        )
    return machine


def run_items(
    hour: Hour, machine: Mapping[str, Any], items: Mapping[str, Sequence[Item]], output: Path
) -> bool:
    """Run the items, print a line for each, and keep JSON and page up to date.

    Whether none of the checks failed, and at least one passed.
    """
    log_once(f"{machine['card']}; at most {hour.seconds / 60:g} minutes; results in {output}")
    results: dict[str, Any] = {"machine": machine, "checks": [], "measurements": []}
    for kind, each in items.items():
        for item in each:
            result = hour.measure(item)
            results[kind].append(result)
            log_once(wrapped(_line(result)))
            write_whole(output / "first_hour.json", to_json(jsonable(results)) + "\n")
            write_whole(output / "first_hour.html", page_of(results))
    states = [result["state"] for result in results["checks"]]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("passed", "failed", "not run"))
    log_once(f"checks: {counts}")
    log_once(f"page: {output / 'first_hour.html'} (open it in a browser)")
    log_once(f"attach it and {output / 'first_hour.json'} to a bug report:")
    log_once("they name card and versions, and neither the host, its user, nor directories")
    return "failed" not in states and "passed" in states


def page_of(found: Mapping[str, Any]) -> str:
    """The page from the data of ``first_hour.json``."""
    machine, measurements = found["machine"], found["measurements"]
    rows = [
        [name.removesuffix("_bytes").replace("_", " "), f"{value / GIB:.1f} GiB"]
        if name in ("memory_bytes", "host_memory_bytes")
        else [name.replace("_", " "), value_text(value)]
        for name, value in machine.items()
        if not isinstance(value, Mapping)
    ]
    rows += [[name, value_text(value)] for name, value in machine["versions"].items()]
    speed = ["tokens_per_second", "generation_tokens_per_second", "step_seconds"]
    speed += ["tflops_per_device", "mfu"]
    memory = []
    for result in measurements:
        if "peak_bytes" in result:
            peak, plan = number(result["peak_bytes"]), number(result.get("planned_bytes"))
            memory.append([result["name"], *map(short, (peak / GIB, plan / GIB, peak / plan))])
    return render(
        "first_hour.html",
        f"First hour on {machine['card']}",
        folder=Path(__file__).parent / "page",
        links={"machine": "Machine", "checks": "Checks", "speed": "Speed and memory"},
        machine=rows,
        checks=found["checks"],
        measurements=measurements,
        speed=[[r["name"], *(short(number(r.get(key))) for key in speed)] for r in measurements],
        memory=memory,
        reasons=[[r["name"], r["state"], r["reason"]] for r in measurements if r["reason"]],
    )


def _line(result: Mapping[str, Any]) -> str:
    """What came of an item, in a line of the terminal."""
    marks = {"passed": "  ", "failed": "X ", "not run": "- "}
    words = result["reason"]
    if not words and "differences" in result:

        def of_allowed(row: Mapping[str, Any]) -> float:
            return float(row["found"] / row["allowed"]) if row["allowed"] else 0.0

        worst = min(result["differences"], key=lambda row: (row["holds"], -of_allowed(row)))
        words = f"{worst['quantity']} {worst['found']:.2g}, allowed {worst['allowed']:.2g}"
    elif not words:
        words = f"{short(number(result['tokens_per_second']))} tokens/s"
    state = result["state"] if result["state"] != "passed" or "differences" in result else "done"
    return f"{marks[result['state']]}{result['name']}: {state}, {words}"
