"""Rendering of chat templates in a process of its own, whose time and memory are bounded.

A template is a program that came with a model. The sandbox of transformers keeps it from files and
from Python's objects; what it keeps from neither, a loop without end or a text of gigabytes, ends
this process alone. Requests and replies are lines of JSON.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

SECONDS = 5  # of the processor, for one rendering
MEMORY = 2**30  # bytes, beside those of the interpreter
MOST_CHARACTERS = 32 * 2**20  # of a rendered text
# Finds modules where this process does, whatever lies in the working directory.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_lora.data.template_process import serve; serve()"
)


class TemplateProcess:
    """Another process that renders templates, from the first request until this one ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._endless: set[str] = set()  # templates that exceeded a bound

    def render(self, template: str, request: Mapping[str, Any]) -> tuple[str, list[list[int]]]:
        """Text, and (start, end) of each ``{% generation %}`` block if ``request`` asks for them.

        ``request`` holds the arguments of ``render_jinja_template``.

        Raises:
            ValueError: if the template refuses them, or exceeds a bound.
        """
        try:
            line = json.dumps({**request, "chat_template": template}, default=str).encode()
        except RecursionError:
            raise ValueError("lists or objects are nested too deeply") from None
        with self._lock:
            reply = {} if template in self._endless else self._ask(line)
            if not reply:
                self._endless.add(template)
        if "text" in reply:
            return reply["text"], reply["marks"]
        limits = f"{SECONDS} s, {MEMORY / 2**30:g} GiB of memory or {MOST_CHARACTERS:,} characters"
        raise ValueError(reply.get("error") or f"it takes more than {limits}")

    def _ask(self, line: bytes) -> dict[str, Any]:
        """The reply; empty if there is none."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if reply.endswith(b"\n"):
            found: dict[str, Any] = json.loads(reply)
            return found
        process.communicate()
        self._process = None
        if process.returncode > 0:  # no signal of a bound
            return {"error": f"the process that renders it ended with {process.returncode}"}
        return {}

    def _start(self) -> subprocess.Popen[bytes]:
        path = [each or os.getcwd() for each in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        return self._process


_processes: dict[int, TemplateProcess] = {}


def template_process() -> TemplateProcess:
    """That of this process; what is forked gets one of its own."""
    return _processes.setdefault(os.getpid(), TemplateProcess())


def serve() -> None:
    """Answer requests until there are no more."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    refusals = (
        *(TemplateError, ArithmeticError, AttributeError, ImportError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    )
    if os.path.exists("/proc/self/statm"):  # on Linux
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    reply: dict[str, Any]
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no reply
    for line in os.fdopen(0, "rb"):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process
        try:
            request = json.loads(line)
            text, marks = _render(render_jinja_template, request)
            reply = {"text": text, "marks": marks} if len(text) <= MOST_CHARACTERS else {}
        except refusals as error:
            reply = {"error": str(error)[:2000] or type(error).__name__}
        except MemoryError:
            reply = {}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _render(render: Any, request: dict[str, Any]) -> tuple[str, list[Any]]:
    messages, variables = request.pop("messages"), request.pop("variables")
    texts, marks = render(conversations=[messages], **request, **variables)
    return texts[0], marks[0] if marks else []
