"""Reward functions that ``--reward_function builtin:NAME`` names; each scores one response."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.config.files import read_json
from dschat_lora.runtime.checks import require_packages

PREFIX = "builtin:"
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class BuiltinReward:
    """A built-in score of one response by a column of its row, as a reward function."""

    score: Callable[[str, Any], float]  # of text, and what is wanted
    column: str  # of the data, which has what is wanted
    sees_media = False

    def __call__(self, response: str, row: Mapping[str, Any]) -> float:
        """The score."""
        return self.score(response, row.get(self.column))


def builtin_function(name: str) -> Callable[..., Any]:
    """The function of ``builtin:NAME`` or ``builtin:NAME=ARGUMENT``.

    Raises:
        ValueError: if there is none of this name, or its argument will not do.
    """
    kind, _, argument = name.removeprefix(PREFIX).partition("=")
    if kind not in BUILTINS:
        raise ValueError(
            f"--reward_function {name}: unknown built-in reward; known ones are "
            + ", ".join(PREFIX + each for each in BUILTINS)
        )
    try:
        return BUILTINS[kind](argument)
    except (ValueError, re.error) as error:
        raise ValueError(f"--reward_function {name}: {error}") from error


def exact_match(argument: str) -> BuiltinReward:
    """1 where the response is the column ``answer`` (or another) but for space around, else 0."""
    return BuiltinReward(
        lambda text, wanted: float(text.strip() == str(wanted).strip()), argument or "answer"
    )


def regex(argument: str) -> Callable[..., float]:
    """1 where the regular expression is found in the response, else 0."""
    if not argument:
        raise ValueError("give a regular expression, as in builtin:regex=^Yes")
    pattern = re.compile(argument, re.DOTALL)
    return lambda response: float(pattern.search(response) is not None)


def number_equals(argument: str) -> BuiltinReward:
    """1 where the response's last number is that of the column ``answer`` (or another), else 0."""

    def last_number(text: str) -> float | None:
        numbers = _NUMBER.findall(text)
        return float(numbers[-1].replace(",", "")) if numbers else None

    def score(text: str, wanted: object) -> float:
        answer = last_number(text)
        return float(answer is not None and answer == last_number(str(wanted)))

    return BuiltinReward(score, argument or "answer")


def length(argument: str) -> Callable[..., float]:
    """1 for a response of so many tokens, falling to 0 at none and at twice as many."""
    wanted = _whole("a number of tokens, as in builtin:length=40", argument)[0]
    # A parameter `response` says that it scores one at a time.
    return lambda response, token_ids: max(0.0, 1 - abs(len(token_ids) - wanted) / wanted)


def json_valid(argument: str) -> Callable[..., float]:
    """1 where the response is JSON, else 0."""
    return _json_reward(lambda value: True)


def json_schema(argument: str) -> Callable[..., float]:
    """1 where the response is JSON that a JSON schema, in a file, allows, else 0."""
    if not argument:
        raise ValueError("give a file, as in builtin:json_schema=schema.json")
    require_packages("builtin:json_schema", "jsonschema", extra="rewards")
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    path = Path(argument).expanduser()
    try:
        schema = read_json(path)
        validator_for(schema).check_schema(schema)
    except OSError as error:
        raise ValueError(f"{argument} cannot be read: {error.strerror}") from error
    except SchemaError as error:
        raise ValueError(f"{argument} is not a JSON schema: {error.message}") from error
    return _json_reward(validator_for(schema)(schema).is_valid)


def _json_reward(is_valid: Callable[[Any], bool]) -> Callable[..., float]:
    """1 where the response is JSON whose value is valid, else 0."""

    def score(response: str) -> float:
        try:
            return float(is_valid(json.loads(response)))
        except (ValueError, RecursionError):
            return 0.0

    return score


def math_equal(argument: str) -> BuiltinReward:
    """1 where the response's last formula equals the column ``answer`` (or another), else 0.

    Fractions, roots, units, sets and LaTeX are understood, by ``math-verify``.
    """
    require_packages("builtin:math_equal", "math_verify", extra="rewards")
    from math_verify import parse, verify

    def score(text: str, wanted: object) -> float:
        # Its limits are signals, which the main thread alone takes; in others there is
        # --reward_timeout.
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        right, said = (parse(each, parsing_timeout=limit) for each in (f"${wanted}$", text))
        return float(verify(right, said, timeout_seconds=limit))

    return BuiltinReward(score, argument or "answer")


def format_tags(argument: str) -> Callable[..., float]:
    """1 where the response is ``<think>...</think><answer>...</answer>``, or tags of other names.

    The tags stand once each, in this order, with nothing but space around them.
    """
    names = (argument or "think,answer").split(",")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    parts = (f"<{re.escape(name)}>.*?</{re.escape(name)}>" for name in names)
    pattern = re.compile(r"\s*" + r"\s*".join(parts) + r"\s*", re.DOTALL)

    def score(response: str) -> float:
        once = all(response.count(tag) == 1 for tag in tags)
        return float(once and pattern.fullmatch(response) is not None)

    return score


def repetition_penalty(argument: str) -> Callable[..., float]:
    """Minus the share of the response's word trigrams (or other n-grams) that came before."""
    size = _whole("a number of words", argument or "3")[0]

    def score(response: str) -> float:
        words = response.lower().split()
        grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return score


def soft_overlong(argument: str) -> Callable[..., float]:
    """DAPO's soft overlong punishment of responses near so many tokens, over the last so many."""
    numbers = _whole(
        "the maximum number of tokens and the penalized ones before it, as in 256,64", argument
    )
    if len(numbers) != 2 or numbers[1] > numbers[0]:
        raise ValueError(
            "give the maximum number of tokens and the penalized ones before it, as in 256,64"
        )
    longest, cache = numbers
    return lambda response, token_ids: min(
        0.0, max(-1.0, (longest - cache - len(token_ids)) / cache)
    )


def ifeval(argument: str) -> Callable[..., Any]:
    """The share of a row's instructions that the response follows; with ``all`` 1 for all, else 0.

    Columns ``instruction_id_list`` and ``kwargs`` are those of IFEval (arXiv:2311.07911), and
    lm-evaluation-harness checks them strictly.
    """
    if argument not in ("", "all"):
        raise ValueError(f"give no argument or all, as in builtin:ifeval=all, not {argument}")
    require_packages(
        "builtin:ifeval", "lm_eval", "langdetect", "immutabledict", "nltk", extra="evaluation"
    )
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT
    from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict

    def score(response: str, row: Mapping[str, Any]) -> float | None:
        names = row.get("instruction_id_list") or []
        if unknown := [name for name in names if name not in INSTRUCTION_DICT]:
            raise ValueError(f"instruction_id_list: IFEval has no instruction {unknown[0]!r}")
        if not names:
            return None
        given = row.get("kwargs") or [{}] * len(names)
        if len(given) != len(names):
            raise ValueError(
                f"a row has {len(names)} instructions in instruction_id_list, and "
                f"{len(given)} kwargs"
            )
        example = InputExample(0, names, str(row.get("prompt", "")), given)
        followed = test_instruction_following_strict(example, response).follow_instruction_list
        return float(all(followed)) if argument else sum(followed) / len(followed)

    score.sees_media = False  # type: ignore[attr-defined]
    return score


def judge(argument: str) -> Callable[..., Any]:
    """From 0 to 1, by a model behind an OpenAI-compatible endpoint that reads a rubric."""
    # asyncio and urllib take a while
    from dschat_lora.addons.rewards.external import make_judge_reward

    return make_judge_reward(argument)


def python_tests(argument: str) -> Callable[..., Any]:
    """1 where the response's Python passes the tests of the column ``tests`` (or another)."""
    from dschat_lora.addons.rewards.external import PythonTests  # as above

    return PythonTests(argument or "tests")


def _whole(what: str, argument: str) -> list[int]:
    try:
        numbers = [int(word) for word in argument.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"give {what}")
    return numbers


BUILTINS: Mapping[str, Callable[[str], Callable[..., Any]]] = {
    each.__name__: each
    for each in (
        *(exact_match, regex, number_equals, length),
        *(json_valid, json_schema, format_tags, repetition_penalty, soft_overlong),
        *(math_equal, judge, python_tests, ifeval),
    )
}
