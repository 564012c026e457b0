"""Rewards that ask something outside: a judge behind an OpenAI endpoint, or Python that runs."""

import asyncio
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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

JUDGE_SECONDS = 120.0
RUBRIC = """You grade the answer of an assistant.

The conversation:
{prompt}

The answer to be graded:
{response}

Is the answer right, complete and to the point? Reply with a number from 0 (worthless) to 10
(perfect), and nothing else."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


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
    _known: dict[str, float | None] = field(default_factory=dict, compare=False, repr=False)

    async def __call__(
        self, response: str, messages: list[dict[str, Any]], row: Mapping[str, Any], log_metric: Any
    ) -> float | None:
        """The score; None for a reply without a number from 0 to 10, which ``log_metric`` counts.

        Raises:
            RuntimeError: if the endpoint cannot be reached or answers with an error.
        """
        conversation = "\n\n".join(f"{m['role']}: {m.get('content')}" for m in messages[:-1])
        values = {**row, "prompt": conversation, "response": response}
        question = re.sub(
            r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], self.rubric
        )
        if question not in self._known:
            self._known[question] = await asyncio.to_thread(self._score, question)
        score = self._known[question]
        log_metric("judge_unreadable", float(score is None))
        return score

    def _score(self, question: str) -> float | None:
        model = self.model or self._ask("models", None)["data"][0]["id"]
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
        }
        said = self._ask("chat/completions", asked)["choices"][0]["message"]["content"]
        numbers = _NUMBER.findall(said or "")
        score = float(numbers[-1]) if numbers else -1.0
        return score / 10 if 0 <= score <= 10 else None

    def _ask(self, path: str, asked: object) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if asked is None else json.dumps(asked).encode()
        try:
            with urlopen(
                Request(f"{self.url}/{path}", data, headers), timeout=JUDGE_SECONDS
            ) as got:
                return json.load(got)
        except HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise RuntimeError(f"the judge {self.url} answers {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the judge {self.url} cannot be asked: {error}") from error


def make_judge_reward(argument: str) -> Judge:
    """The judge of ``builtin:judge=URL``, ``URL?model=NAME`` or ``URL#RUBRIC_FILE``.

    Raises:
        ValueError: if there is no such address or file.
    """
    found = urlsplit(argument)
    if found.scheme not in ("http", "https") or not found.netloc:
        raise ValueError("give an endpoint, as in builtin:judge=http://127.0.0.1:8000/v1")
    rubric = RUBRIC
    if found.fragment:
        path = Path(found.fragment).expanduser()
        try:
            rubric = read_text(path, most=MOST_TYPED_BYTES)
        except OSError as error:
            raise ValueError(f"the rubric {path} cannot be read: {error.strerror}") from error
        if "{response}" not in rubric:
            raise ValueError(f"the rubric {path} must have {{response}} where the answer stands")
    url = urlunsplit((found.scheme, found.netloc, found.path.rstrip("/"), "", ""))
    return Judge(url, parse_qs(found.query).get("model", [None])[0], rubric)


SANDBOX_SECONDS = 10
SANDBOX_BYTES = 2**30
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
# What solution and tests may do ends here: the token shows that the tests' last line was passed.
_HARNESS = """
import sys
solution, tests, token = sys.stdin.read().split("\\0")
names = {"__name__": "solution"}
try:
    exec(compile(solution, "solution.py", "exec"), names)
    exec(compile(tests, "tests.py", "exec"), names)
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(token)
"""


@dataclass(frozen=True)
class PythonTests:
    """1 where the response's Python passes the tests of a column, else 0.

    The program is the response's last block of code, or all of it. It runs in a process of its own,
    in an empty directory, for ``SANDBOX_SECONDS`` seconds at most and ``SANDBOX_BYTES`` bytes of
    memory, without network where the system gives a process a network of its own.
    """

    column: str

    async def __call__(self, response: str, row: Mapping[str, Any]) -> float:
        """The score."""
        blocks = _BLOCK.findall(response)
        tests = row.get(self.column)
        tests = "\n".join(map(str, tests)) if isinstance(tests, list) else str(tests)
        passed = await asyncio.to_thread(run_tests, blocks[-1] if blocks else response, tests)
        return float(passed)


def run_tests(solution: str, tests: str) -> bool:
    """Whether ``tests``, Python with assertions, end well after ``solution``, in a sandbox."""
    token = secrets.token_hex(16)
    given = "\0".join([solution.replace("\0", ""), tests.replace("\0", ""), token])
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [*_without_network(), sys.executable, "-I", "-c", _HARNESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env={"PATH": os.environ.get("PATH", ""), "HOME": home, "TMPDIR": home},
            start_new_session=True,
            preexec_fn=_limit,
        )
        try:
            output = process.communicate(given.encode(), timeout=SANDBOX_SECONDS)[0]
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return output.rstrip().endswith(token.encode())


def _limit() -> None:
    """In the child: memory, CPU seconds, sizes of files, and no core dumps."""
    for what, most in (
        (resource.RLIMIT_AS, SANDBOX_BYTES),
        (resource.RLIMIT_CPU, SANDBOX_SECONDS),
        (resource.RLIMIT_FSIZE, 2**20),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


@cache
def _without_network() -> tuple[str, ...]:
    """What starts a command in a network of its own; nothing, said once, where that is refused."""
    command = ("unshare", "--map-root-user", "--net")
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False)
        if done.returncode == 0:
            return command
    say_once(
        "  note         builtin:python_tests: programs may use the network of this machine, which "
        "allows no unshare --net"
    )
    return ()
