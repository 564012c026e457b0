"""Rewards that ask something outside: a server, a judge behind an OpenAI endpoint, Python."""

import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from dschat_lora.config.files import MOST_TYPED_BYTES, read_text
from dschat_lora.report.terminal import say_once

# That servers may take; of a remote reward model as in OpenRLHF.
JUDGE_SECONDS, REMOTE_SECONDS = 120.0, 180.0
RUBRIC = """You grade the answer of an assistant.

The conversation:
{prompt}

The answer to be graded:
{response}

Is the answer right, complete and to the point? Reply with a number from 0 (worthless) to 10
(perfect), and nothing else."""
LogMetric = Callable[[str, float], None]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_OF_TEN = re.compile(r"\s*(?:/|out of|of)\s*10\b")


def _post(
    url: str, asked: object, headers: Mapping[str, str] | None = None, *, seconds: float
) -> Any:
    """The JSON that a server answers to JSON; ``asked`` None gets without asking anything."""
    data = None if asked is None else json.dumps(asked).encode()
    request = Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urlopen(request, timeout=seconds) as answer:
        return json.load(answer)


@dataclass(frozen=True)
class RemoteReward:
    """Scores by an HTTP server, asked as OpenRLHF asks a remote reward model.

    Texts are posted as JSON; the answer is a JSON object with as many ``rewards``.
    """

    url: str
    takes_lists = True
    sees_media = False

    @property
    def reward_name(self) -> str:
        """The last part of the address, its name in metrics."""
        return self.url.rstrip("/").rpartition("/")[2]

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]
    ) -> dict[str, Any]:
        """What the server returns.

        Raises:
            RuntimeError: if it cannot be reached, or returns no JSON object.
        """
        asked = {"query": queries, "prompts": prompts, "labels": labels}
        try:
            answer = _post(self.url, asked, seconds=REMOTE_SECONDS)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{self.url} returned no scores: {error}") from error
        if not isinstance(answer, dict):
            raise RuntimeError(f"{self.url} returned a {type(answer).__name__}, and no JSON object")
        return answer


@dataclass(frozen=True)
class Judge:
    """Scores by a model behind an OpenAI-compatible endpoint, from 0 to 1.

    In the rubric ``{prompt}``, ``{response}`` and any ``{column}`` of the data stand for their
    values. The last number of the reply, from 0 to 10, is the score. The same question is asked
    once. ``OPENAI_API_KEY`` is sent if it is set.
    """

    url: str  # such as http://127.0.0.1:8000/v1
    model: str | None  # None: the first that the endpoint lists
    rubric: str
    _asked: dict[bytes, "asyncio.Future[float | None]"] = field(
        default_factory=dict, compare=False, repr=False
    )
    sees_media = False

    async def __call__(
        self,
        response: str,
        messages: list[dict[str, Any]],
        row: Mapping[str, Any],
        log_metric: LogMetric,
    ) -> float | None:
        """The score; None for a reply without a number from 0 to 10, which ``log_metric`` counts.

        Raises:
            RuntimeError: if the endpoint cannot be reached or answers with an error.
        """
        conversation = "\n\n".join(f"{m['role']}: {_shown(m)}" for m in messages[:-1])
        values = {**row, "prompt": conversation, "response": response}
        question = re.sub(
            r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], self.rubric
        )
        key = hashlib.blake2b(question.encode(errors="replace"), digest_size=16).digest()
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(asyncio.to_thread(self._score, question))
        try:
            score = await self._asked[key]
        except Exception:
            self._asked.pop(key, None)  # another try may go better
            raise
        log_metric("judge_unreadable", float(score is None))
        return score

    def _score(self, question: str) -> float | None:
        asked = {
            "model": self.model or self._ask("models", None)["data"][0]["id"],
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }
        said = self._ask("chat/completions", asked)["choices"][0]["message"]["content"]
        numbers = _NUMBER.findall(_OF_TEN.sub("", said or ""))
        score = float(numbers[-1]) if numbers else -1.0
        return score / 10 if 0 <= score <= 10 else None

    def _ask(self, path: str, asked: object) -> Any:
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            return _post(f"{self.url}/{path}", asked, headers, seconds=JUDGE_SECONDS)
        except HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise RuntimeError(f"the judge {self.url} answers {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the judge {self.url} cannot be reached: {error}") from error


def _shown(message: Mapping[str, Any]) -> str:
    """What a message says, and the functions that it calls."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join([*filter(None, [message.get("content")]), *calls])


def make_judge_reward(argument: str) -> Judge:
    """The judge of ``builtin:judge=URL``, ``URL?model=NAME`` or ``URL#RUBRIC_FILE``.

    Raises:
        ValueError: if there is no such address or file.
    """
    parts = urlsplit(argument)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("give an endpoint, as in builtin:judge=http://127.0.0.1:8000/v1")
    rubric = RUBRIC
    if parts.fragment:
        path = Path(parts.fragment).expanduser()
        try:
            rubric = read_text(path, most=MOST_TYPED_BYTES)
        except OSError as error:
            raise ValueError(f"the rubric {path} cannot be read: {error.strerror}") from error
        if "{response}" not in rubric:
            raise ValueError(f"the rubric {path} must have {{response}} in place of the answer")
    url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    return Judge(url, parse_qs(parts.query).get("model", [None])[0], rubric)


SANDBOX_SECONDS = 10
SANDBOX_BYTES = 2**30
_BLOCK = re.compile(r"^[ \t]*```(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
# The token goes to a descriptor of its own: neither what a program prints nor an exit before the
# end of the tests passes. It is no wall against a program that looks for it.
_HARNESS = """
import os, resource, sys, types
out, seconds, size = map(int, sys.argv[1:])
for what, most in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CPU, seconds),
                   (resource.RLIMIT_FSIZE, 2**20), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
def run():
    solution, tests, token = sys.stdin.read().split("\\0")
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(solution, "solution.py", "exec"), vars(module))
    exec(compile(tests, "tests.py", "exec"), vars(module))
    os.write(out, token.encode())
try:
    run()
except BaseException:
    os._exit(1)
os._exit(0)
"""
# Programs at a time: more would take each other's seconds.
_ROOM = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class PythonTests:
    """1 where the response's Python passes the tests of a column, else 0.

    The program is the response's last block of Python, else its last block of no language, else all
    of it. It runs in a process of its own, in an empty directory, for ``SANDBOX_SECONDS`` seconds
    at most and ``SANDBOX_BYTES`` bytes of memory, without network and other processes in sight
    where the system allows it.
    """

    column: str
    sees_media = False

    async def __call__(self, response: str, row: Mapping[str, Any]) -> float | None:
        """The score; None for a row without tests."""
        tests = row.get(self.column)
        tests = "\n".join(map(str, tests)) if isinstance(tests, list) else str(tests or "")
        if not tests.strip():
            return None
        return float(await asyncio.to_thread(run_tests, program_in(response), tests))


def program_in(response: str) -> str:
    """The Python of a response."""
    blocks = _BLOCK.findall(response)
    for languages in (("python", "py", "python3"), ("",)):
        if own := [text for language, text in blocks if language.lower() in languages]:
            return str(own[-1])
    return response


def run_tests(solution: str, tests: str) -> bool:
    """Whether ``tests``, Python with assertions, end well after ``solution``, in a sandbox."""
    token = secrets.token_hex(16)
    given = "\0".join([solution.replace("\0", ""), tests.replace("\0", ""), token])
    reader, writer = os.pipe()
    with _ROOM, tempfile.TemporaryDirectory() as home, open(reader, "rb") as passed:
        limits = map(str, (writer, SANDBOX_SECONDS, SANDBOX_BYTES))
        try:
            process = subprocess.Popen(
                [*_isolated(), sys.executable, "-I", "-c", _HARNESS, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=home,
                env={"PATH": os.environ.get("PATH", ""), "HOME": home, "TMPDIR": home},
                start_new_session=True,
                pass_fds=[writer],
            )
        finally:
            os.close(writer)
        try:
            process.communicate(given.encode(), timeout=SANDBOX_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        os.set_blocking(reader, False)  # a process that it left behind may hold the other end
        return (passed.read(len(token)) or b"") == token.encode()


@cache
def _isolated() -> tuple[str, ...]:
    """What starts a command with a network and processes of its own; nothing where it may not."""
    command = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False)
        if done.returncode == 0:
            return command
    say_once(
        "  note         builtin:python_tests: this machine does not allow unshare, so programs "
        "can use its network and leave processes running"
    )
    return ()
