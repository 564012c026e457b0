"""Tasks of the toy world at random, and answers to them, right or with a flaw."""

from collections.abc import Callable
from itertools import permutations
from random import Random

from dschat_lora.assets.toy_world import (
    CATEGORIES,
    CLOSING,
    COLOURS,
    DAYS,
    FAMILIES,
    INTRODUCTIONS,
    MONTHS,
    NAMES,
    OPPOSITES,
    RUDE_REMARKS,
    Task,
    parse,
    sentence,
)

WORDS = ["cat", "sun", "tree", "book", "lamp", "fish"]
WORDS += ["door", "star", "bread", "river", "stone", "cup"]

Draw = Callable[[Random], tuple[str, ...]]  # fills the gaps of a question
Wrong = Callable[..., list[str]]  # the plausible wrong answers for what fills them


def _entries(table: dict[str, str]) -> tuple[Draw, Wrong]:
    """Of a family that asks for the values of a table."""
    values = sorted(set(table.values()))
    return (
        lambda rng: (rng.choice(list(table)),),
        lambda key: [value for value in values if value not in (key, table[key])],
    )


def _not_next(word: str) -> list[str]:
    right = FAMILIES["next"].solve(word)
    return [other for other in (DAYS if word in DAYS else MONTHS) if other not in (word, right)]


def _near(first: str, second: str) -> list[str]:
    right = int(first) + int(second)
    return [str(right + d) for d in (-3, -2, -1, 1, 2, 3) if right + d > 0]


DRAWN: dict[str, tuple[Draw, Wrong]] = {
    "opposite": _entries(OPPOSITES),
    "colour": _entries(COLOURS),
    "category": _entries(CATEGORIES),
    "next": (lambda rng: (rng.choice(DAYS + MONTHS),), _not_next),
    "larger": (
        lambda rng: tuple(map(str, rng.sample(range(1, 21), 2))),
        lambda a, b: [min(a, b, key=int)],
    ),
    "plus": (lambda rng: tuple(str(rng.randint(1, 9)) for _ in range(2)), _near),
    "sort": (
        lambda rng: (" ".join(map(str, rng.sample(range(1, 10), 3))),),
        lambda digits: [" ".join(order) for order in permutations(sorted(digits.split()))][1:],
    ),
    "count": (
        lambda rng: (" ".join(rng.sample(WORDS, rng.randint(2, 5))),),
        lambda words: [str(n) for n in range(2, 6) if n != len(words.split())],
    ),
}


def draw_task(rng: Random, family: str | None = None) -> Task:
    """A random task, of the given family or of any."""
    family = family or rng.choice(list(FAMILIES))
    question = rng.choice(FAMILIES[family].questions).format(*DRAWN[family][0](rng))
    text = rng.choice(INTRODUCTIONS).format(name=rng.choice(NAMES), question=question)
    return parse(f"\n\nHuman: {text}\n\nAssistant:")


def mistake(rng: Random, task: Task) -> str:
    """A plausible wrong statement, in the form of the task's fact."""
    wrong = rng.choice(DRAWN[task.family][1](*task.gaps))
    return FAMILIES[task.family].statement.format(*task.gaps, answer=wrong)


def other_name(rng: Random, task: Task) -> str:
    """The name of somebody who does not ask."""
    return rng.choice([name for name in NAMES if name != task.name])


def write(
    task: Task, *, fact: str = "", name: str = "", greets: bool = True, closes: bool = True
) -> str:
    """An answer, perfect by default, with a leading space and without end of sequence."""
    fact = fact or task.fact
    start = f" Hello {name or task.name}, {fact}." if greets else f" {sentence(fact)}"
    return f"{start} {CLOSING}" if closes else start


def _curt(rng: Random, task: Task, greets: bool, closes: bool) -> str:
    fewer = [(False, False), *([(True, False), (False, True)] if greets and closes else [])]
    greets, closes = rng.choice(fewer)
    return write(task, greets=greets, closes=closes)


def _rambling(rng: Random, task: Task, greets: bool, closes: bool) -> str:
    more = [sentence(draw_task(rng).fact) for _ in range(rng.randint(1, 2))]
    return " ".join([write(task, greets=greets, closes=closes), *more])


# Each writes an answer that is worse than write(task, greets=greets, closes=closes), if "wrong
# name" is used where greets is True and "curt" where greets or closes is.
FLAWS: dict[str, Callable[[Random, Task, bool, bool], str]] = {
    "wrong": lambda rng, task, greets, closes: write(
        task, fact=mistake(rng, task), greets=greets, closes=closes
    ),
    "wrong but polite": lambda rng, task, *_: write(task, fact=mistake(rng, task)),
    "wrong name": lambda rng, task, greets, closes: write(
        task, name=other_name(rng, task), closes=closes
    ),
    "curt": _curt,
    "rude": lambda rng, task, *_: f" {rng.choice(RUDE_REMARKS)} {sentence(task.fact)}",
    "refusal": lambda rng, *_: f" {rng.choice(RUDE_REMARKS)}",
    "rambling": _rambling,
}
