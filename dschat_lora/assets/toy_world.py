r"""Toy world: questions of a few families whose answers a rule can judge.

A prompt is ``\n\nHuman: <question>\n\nAssistant:``, and the question names who asks. The perfect
answer is `` Hello Anna, <fact>. I hope this helps!`` and then the end of the sequence. The judge
reads all it needs from the prompt.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from random import Random


def _words(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> dict[str, str]:
    """``a-b, c-d`` as the dict of a to b and c to d."""
    return dict(pair.split("-") for pair in text.split(", "))


NAMES = _words(
    "Anna Ben Carla David Emma Felix Gina Henry Ida Jack "
    "Kate Leo Mia Nick Olga Paul Rosa Sam Tina Victor"
)
INTRODUCTIONS = (
    "My name is {name}. {question}",
    "I am {name}. {question}",
    "{question} Thanks, {name}.",
)
CLOSING = "I hope this helps!"
RUDE_REMARKS = ("What a silly question.", "Why do you ask me?", "Go away.")
_ONE_WAY = _pairs(
    "hot-cold, big-small, fast-slow, old-young, happy-sad, light-dark, wet-dry, high-low, "
    "hard-soft, rich-poor, early-late, full-empty, clean-dirty, strong-weak, thick-thin, "
    "loud-quiet, open-closed, sweet-sour"
)
OPPOSITES = _ONE_WAY | {b: a for a, b in _ONE_WAY.items()}
COLOURS = _pairs(
    "the sky-blue, grass-green, snow-white, coal-black, a banana-yellow, a tomato-red, "
    "a carrot-orange, milk-white, a lemon-yellow, a cherry-red, a leaf-green, the night-black, "
    "the sea-blue, a frog-green, blood-red, a pumpkin-orange"
)
CATEGORIES = {
    thing: kind
    for kind, things in {
        "an animal": "a dog, a cat, a horse, a cow, a pig, a sheep, a mouse, a lion",
        "a fruit": "an apple, a pear, a plum, a grape, a peach, a mango",
        "a tool": "a hammer, a saw, a drill, a spade, a rake, an axe",
        "a vehicle": "a car, a bus, a train, a ship, a truck, a bike",
    }.items()
    for thing in things.split(", ")
}
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
WORDS = _words("cat sun tree book lamp fish door star bread river stone cup")

Slots = tuple[str, ...]  # what fills the gaps of a question
Solution = tuple[str, list[str]]  # the right answer and the plausible wrong ones


def _entries(table: dict[str, str]) -> tuple[Callable[[Random], Slots], Callable[[str], Solution]]:
    """Draw and solve of a family that asks for the values of a table."""
    values = sorted(set(table.values()))
    return (
        lambda rng: (rng.choice(list(table)),),
        lambda key: (table[key], [v for v in values if v not in (key, table[key])]),
    )


def _successor(word: str) -> Solution:
    cycle = DAYS if word in DAYS else MONTHS
    right = cycle[(cycle.index(word) + 1) % len(cycle)]
    return right, [w for w in cycle if w not in (word, right)]


def _sum(first: str, second: str) -> Solution:
    right = int(first) + int(second)
    return str(right), [str(right + d) for d in (-3, -2, -1, 1, 2, 3) if right + d > 0]


def _sorted(digits: str) -> Solution:
    first, *others = [" ".join(order) for order in permutations(sorted(digits.split()))]
    return first, others


def _count(words: str) -> Solution:
    right = len(words.split())
    return str(right), [str(n) for n in range(2, 6) if n != right]


@dataclass(frozen=True)
class Family:
    """One kind of question."""

    questions: tuple[str, ...]  # ways to ask, with a gap {} for each slot
    statement: str  # how the answer is stated; {answer} is the gap for it
    draw: Callable[[Random], Slots]
    solve: Callable[..., Solution]  # raises KeyError or ValueError on slots it does not know


FAMILIES = {
    "opposite": Family(
        ("What is the opposite of {}?", "Tell me the opposite of {}."),
        "the opposite of {} is {answer}",
        *_entries(OPPOSITES),
    ),
    "colour": Family(
        ("What is the colour of {}?", "Tell me the colour of {}."),
        "the colour of {} is {answer}",
        *_entries(COLOURS),
    ),
    "category": Family(
        ("What kind of thing is {}?", "Tell me what {} is."),
        "{} is {answer}",
        *_entries(CATEGORIES),
    ),
    "next": Family(
        ("What comes after {}?", "Tell me what comes after {}."),
        "{answer} comes after {}",
        lambda rng: (rng.choice(DAYS + MONTHS),),
        _successor,
    ),
    "larger": Family(
        ("Which is larger, {} or {}?", "Tell me the larger of {} and {}."),
        "the larger number is {answer}",
        lambda rng: tuple(map(str, rng.sample(range(1, 21), 2))),
        lambda a, b: (max(a, b, key=int), [min(a, b, key=int)]),
    ),
    "plus": Family(
        ("What is {} plus {}?", "Add {} and {}."),
        "{} plus {} is {answer}",
        lambda rng: tuple(str(rng.randint(1, 9)) for _ in range(2)),
        _sum,
    ),
    "sort": Family(
        ("Sort these numbers: {}.", "Put these numbers in order: {}."),
        "the sorted numbers are {answer}",
        lambda rng: (" ".join(map(str, rng.sample(range(1, 10), 3))),),
        _sorted,
    ),
    "count": Family(
        ("How many words are here: {}?", "Count these words: {}."),
        "the number of words is {answer}",
        lambda rng: (" ".join(rng.sample(WORDS, rng.randint(2, 5))),),
        _count,
    ),
}


@dataclass(frozen=True)
class Task:
    """A prompt with what right and wrong answers to it state."""

    family: str  # key of FAMILIES
    name: str  # who asks
    question: str
    prompt: str  # the question with an introduction, as the model reads it
    fact: str  # the right statement, without capital and dot
    mistakes: tuple[str, ...]  # plausible wrong ones, in the same form


def draw_task(rng: Random, family: str | None = None) -> Task:
    """A random task, of the given family or of any."""
    kind = FAMILIES[family or rng.choice(list(FAMILIES))]
    question = rng.choice(kind.questions).format(*kind.draw(rng))
    text = rng.choice(INTRODUCTIONS).format(name=rng.choice(NAMES), question=question)
    return parse(f"\n\nHuman: {text}\n\nAssistant:")


def parse(prompt: str) -> Task:
    """The task that a prompt poses.

    Raises:
        ValueError: if it is no question of this world.
    """
    for introduction in INTRODUCTIONS:
        shell = f"\n\nHuman: {introduction}\n\nAssistant:"
        found = re.fullmatch(_pattern(shell), prompt)
        if found:
            return _solve(prompt, found["name"], found["question"])
    raise ValueError(f"prompt {prompt!r} is not of this world; its form is that of draw_task")


def _solve(prompt: str, name: str, question: str) -> Task:
    for family, kind in FAMILIES.items():
        for template in kind.questions:
            found = re.fullmatch(_pattern(template), question)
            if found:
                slots = found.groups()
                try:
                    right, wrong = kind.solve(*slots)
                except (KeyError, ValueError) as error:
                    raise ValueError(f"{question!r} asks for something unknown") from error
                facts = [kind.statement.format(*slots, answer=answer) for answer in (right, *wrong)]
                return Task(family, name, question, prompt, facts[0], tuple(facts[1:]))
    raise ValueError(f"question {question!r} is of no family; there are {sorted(FAMILIES)}")


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a template; unnamed gaps take letters, digits and spaces."""
    gaps = {"{}": r"([\w ]+)", "{name}": r"(?P<name>\w+)", "{question}": "(?P<question>.+)"}
    parts = re.split(r"(\{\w*\})", template)
    return re.compile("".join(gaps.get(part, re.escape(part)) for part in parts))


def write(
    task: Task, *, fact: str = "", name: str = "", greets: bool = True, closes: bool = True
) -> str:
    """An answer, perfect by default, with a leading space and without end of sequence."""
    fact = fact or task.fact
    start = f" Hello {name or task.name}, {fact}." if greets else f" {sentence(fact)}"
    return f"{start} {CLOSING}" if closes else start


def sentence(fact: str) -> str:
    """The statement with a capital and a dot."""
    return f"{fact[0].upper()}{fact[1:]}."


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
        task, fact=rng.choice(task.mistakes), greets=greets, closes=closes
    ),
    "wrong but polite": lambda rng, task, *_: write(task, fact=rng.choice(task.mistakes)),
    "wrong name": lambda rng, task, greets, closes: write(
        task, name=rng.choice([name for name in NAMES if name != task.name]), closes=closes
    ),
    "curt": _curt,
    "rude": lambda rng, task, *_: f" {rng.choice(RUDE_REMARKS)} {sentence(task.fact)}",
    "refusal": lambda rng, *_: f" {rng.choice(RUDE_REMARKS)}",
    "rambling": _rambling,
}


@dataclass(frozen=True)
class Verdict:
    """Verdict of the rule on an answer."""

    correct: bool  # the first thing it states is the right fact, whole
    greets: bool  # it starts with "Hello <the right name>,"
    closes: bool  # the closing wish is its last sentence
    rude: bool  # a rude remark is in it
    ends: bool  # it stopped by itself, with a full stop, after one statement at most

    @property
    def polite(self) -> bool:
        """Greets, closes and is not rude."""
        return self.greets and self.closes and not self.rude

    @property
    def score(self) -> float:
        """1 if correct, polite and properly ended, else 0: the strict measure."""
        return float(self.correct and self.polite and self.ends)

    @property
    def grade(self) -> float:
        """Quality in [0, 1]; truth counts half, so no politeness makes up for a wrong fact."""
        manners = 0.1 * self.greets + 0.1 * self.closes + 0.1 * (not self.rude)
        return 0.5 * self.correct + 0.2 * self.ends + manners


def judge(prompt: str, answer: str, ended: bool) -> Verdict:
    """Verdict of the rule on an answer.

    ``answer`` is the generated text without the end-of-sequence token; ``ended`` says whether that
    token was generated.

    Raises:
        ValueError: if the prompt is not of this world.
    """
    task = parse(prompt)
    text = answer.strip()
    greeting = re.match(r"Hello (\w+), ", text)
    body = text[greeting.end() if greeting else 0 :].removesuffix(CLOSING)
    statements = _statements(body)
    return Verdict(
        correct=bool(statements) and statements[0] == sentence(task.fact),
        greets=greeting is not None and greeting[1] == task.name,
        closes=text.endswith(f" {CLOSING}"),
        rude=any(remark.lower() in text.lower() for remark in RUDE_REMARKS),
        ends=ended and "\n" not in text and len(statements) <= 1 and text[-1:] in set(".!?"),
    )


def reward(prompts: Sequence[str], responses: Sequence[str], ended: Sequence[bool]) -> list[float]:
    """Grades of responses in [0, 1], as a ``--reward_function``."""
    return [judge(*each).grade for each in zip(prompts, responses, ended, strict=True)]


def rule(prompts: Sequence[str], responses: Sequence[str], ended: Sequence[bool]) -> list[float]:
    """1 for each response that passes the strict rule, else 0, as a ``--judge_function``."""
    return [judge(*each).score for each in zip(prompts, responses, ended, strict=True)]


def _statements(body: str) -> list[str]:
    """The sentences of a text but for rude remarks, each with a capital."""
    parts = re.split(r"(?<=[.!?])\s+", body.strip())
    capital = [part[0].upper() + part[1:] for part in parts if part]
    return [part for part in capital if part not in RUDE_REMARKS]
