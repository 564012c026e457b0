"""Rendering of chat templates in a process whose time and memory are bounded.

A template is a program that came with a model. The sandbox of transformers keeps it from files and
from Python's objects; what it keeps from neither, a loop without end or a text of gigabytes, ends
in a process of its own, or in one that prepares data. Requests and replies are lines of JSON.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        # Templates that exceeded a bound, and the shortest request with which they did.
        self._endless: dict[str, int] = {}

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
            reply, shortest = {}, self._endless.get(template)
            if shortest is None or len(line) < shortest:
                reply = (
                    _reply_to(line, wall_seconds=12 * SECONDS) if _works_here else self._ask(line)
                )
                if not reply:
                    self._endless[template] = len(line)
        if "text" in reply:
            return reply["text"], reply["marks"]
        limits = f"{SECONDS} s, {MEMORY / 2**30:g} GiB of memory or {MOST_CHARACTERS:,} characters"
        raise ValueError(reply.get("error") or f"it takes more than {limits}")

    def _ask(self, line: bytes) -> dict[str, Any]:
        """The reply; empty if a bound is exceeded. If it ends otherwise, it is asked once more."""
        for _ in range(2):
            if self._process is None:
                path = json.dumps([each or os.getcwd() for each in sys.path])
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _START, path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is not for it
                )
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            reply = b""
            try:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                if not reply.endswith(b"\n"):  # of Ctrl-C too: a later request has its own reply
                    process.kill()
                    process.communicate()
                    self._process = None
            if self._process is not None:
                answer: dict[str, Any] = json.loads(reply)
                return answer
            if process.returncode == -signal.SIGPROF:
                return {}
        return {"error": f"the process that renders it ended with {process.returncode}"}


_processes: dict[int, TemplateProcess] = {}
_works_here = False


def template_process() -> TemplateProcess:
    """That of this process; what is forked gets one of its own."""
    return _processes.setdefault(os.getpid(), TemplateProcess())


def render_here() -> None:
    """Have this process, which prepares data for another one, render by itself: that is faster."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    global _works_here
    signal.signal(signal.SIGPROF, give_up)
    _works_here = True


def serve() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whoever ignored it
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no reply
    for line in os.fdopen(0, "rb"):
        replies.write(json.dumps(_reply_to(line)).encode() + b"\n")
        replies.flush()


def _reply_to(line: bytes, wall_seconds: float = 0) -> dict[str, Any]:
    """The text and its marks, or the error; nothing where a bound is exceeded."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    refusals = (
        *(TemplateError, ArithmeticError, AttributeError, ImportError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    )
    request = json.loads(line)
    messages, variables = request.pop("messages"), request.pop("variables")
    try:
        with _bounded(wall_seconds):
            texts, marks = render_jinja_template(conversations=[messages], **request, **variables)
    except refusals as error:
        return {"error": str(error)[:2000] or type(error).__name__}
    except (MemoryError, TimeoutError):
        return {}
    if len(texts[0]) > MOST_CHARACTERS:
        return {}
    return {"text": texts[0], "marks": marks[0] if marks else []}


@contextmanager
def _bounded(wall_seconds: float = 0) -> Iterator[None]:
    """Bounds time and memory within.

    What takes too long ends the process, or raises where :func:`render_here` said so; there a
    single operation of Python's own that takes ``wall_seconds`` ends the process.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    on_linux = os.path.exists("/proc/self/statm")
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    try:
        if on_linux:
            with open("/proc/self/statm", encoding="ascii") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            # A limit below 0 is none.
            most = min([used + MEMORY, *(each for each in before if each >= 0)])
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        yield
    finally:
        if on_linux:
            resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
