"""A calculator for the toy world: sums that the bundled model cannot do, and a tool that can.

A question is ``What is 34 plus 58?``. An assistant may guess, or ask the calculator with
``34 plus 58?``; it is told ``34 plus 58 is 92.`` and answers ``The sum is 92.``
"""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from dschat_lora.assets.toy_world import INTRODUCTIONS, NAMES

Message = dict[str, str]
_CALL = re.compile(r"(\d+) plus (\d+)\?")


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of ``prompt``, a message list, and ``answer``: sums of two numbers of two digits."""
    rng, rows = Random(seed), []
    for _ in range(count):
        first, second = rng.randint(10, 99), rng.randint(10, 99)
        text = rng.choice(INTRODUCTIONS).format(
            name=rng.choice(NAMES), question=f"What is {first} plus {second}?"
        )
        rows.append({"prompt": [_message("user", text)], "answer": str(first + second)})
    return rows


def dialogues(count: int, seed: int) -> list[dict[str, list[Message]]]:
    """Rows of ``messages`` that show the calculator in use; every second one guesses instead."""
    rng, rows = Random(f"dialogues {seed}"), []
    for number, row in enumerate(questions(count, seed)):
        question, answer = row["prompt"][0], row["answer"]
        asked = re.search(r"\d+ plus \d+", question["content"])
        assert asked is not None
        if number % 2:
            turns = [_message("assistant", f"The sum is {rng.randint(20, 198)}.")]
        else:
            turns = [
                _message("assistant", f"{asked[0]}?"),
                _message("user", f"{asked[0]} is {answer}."),
                _message("assistant", f"The sum is {answer}."),
            ]
        rows.append({"messages": [question, *turns]})
    return rows


def calculate(responses: Sequence[str]) -> list[Message | None]:
    """The sum that a response asks for, as an ``--environment``; any other ends the episode."""
    calls = [_CALL.fullmatch(response.strip()) for response in responses]
    return [
        _message("user", f"{call[1]} plus {call[2]} is {int(call[1]) + int(call[2])}.")
        if call
        else None
        for call in calls
    ]


def is_right(responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 where the last turn states the sum, else 0, as a ``--reward_function``."""
    pairs = zip(responses, answer, strict=True)
    return [float(response.strip() == f"The sum is {right}.") for response, right in pairs]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
