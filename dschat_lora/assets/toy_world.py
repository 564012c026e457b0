r"""Toy world: questions of a few families whose answers a rule can judge.

A prompt is ``\n\nHuman: <question>\n\nAssistant:``, and the question names who asks. The perfect
answer is `` Hello Anna, <fact>. I hope this helps!`` and then the end of the sequence. The judge
reads all it needs from the prompt.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache


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


def _successor(word: str) -> str:
    cycle = DAYS if word in DAYS else MONTHS
    return cycle[(cycle.index(word) + 1) % len(cycle)]


@dataclass(frozen=True)
class QuestionKind:
    """One kind of question."""

    questions: tuple[str, ...]  # ways to ask, with gaps {}
    statement: str  # how the answer is stated; {answer} is the gap for it
    solve: Callable[..., str]  # raises KeyError or ValueError on what it does not know


FAMILIES = {
    "opposite": QuestionKind(
        ("What is the opposite of {}?", "Tell me the opposite of {}."),
        "the opposite of {} is {answer}",
        OPPOSITES.__getitem__,
    ),
    "colour": QuestionKind(
        ("What is the colour of {}?", "Tell me the colour of {}."),
        "the colour of {} is {answer}",
        COLOURS.__getitem__,
    ),
    "category": QuestionKind(
        ("What kind of thing is {}?", "Tell me what {} is."),
        "{} is {answer}",
        CATEGORIES.__getitem__,
    ),
    "next": QuestionKind(
        ("What comes after {}?", "Tell me what comes after {}."),
        "{answer} comes after {}",
        _successor,
    ),
    "larger": QuestionKind(
        ("Which is larger, {} or {}?", "Tell me the larger of {} and {}."),
        "the larger number is {answer}",
        lambda a, b: max(a, b, key=int),
    ),
    "plus": QuestionKind(
        ("What is {} plus {}?", "Add {} and {}."),
        "{} plus {} is {answer}",
        lambda a, b: str(int(a) + int(b)),
    ),
    "sort": QuestionKind(
        ("Sort these numbers: {}.", "Put these numbers in order: {}."),
        "the sorted numbers are {answer}",
        lambda digits: " ".join(sorted(digits.split())),
    ),
    "count": QuestionKind(
        ("How many words are here: {}?", "Count these words: {}."),
        "the number of words is {answer}",
        lambda words: str(len(words.split())),
    ),
}


@dataclass(frozen=True)
class Task:
    """A prompt with what a right answer to it states."""

    family: str  # key of FAMILIES
    name: str  # who asks
    question: str
    gaps: tuple[str, ...]  # what fills those of the question
    prompt: str  # the question with an introduction, as the model reads it
    fact: str  # the right statement, without capital and dot


def parse(prompt: str) -> Task:
    """The task that a prompt poses.

    Raises:
        ValueError: if it is no question of this world.
    """
    for introduction in INTRODUCTIONS:
        shell = f"\n\nHuman: {introduction}\n\nAssistant:"
        if match := re.fullmatch(_pattern(shell), prompt):
            return _solve(prompt, match["name"], match["question"])
    raise ValueError(f"prompt {prompt!r} is not of this world; its form is that of bundled rows")


def _solve(prompt: str, name: str, question: str) -> Task:
    for family, kind in FAMILIES.items():
        for template in kind.questions:
            if match := re.fullmatch(_pattern(template), question):
                gaps = match.groups()
                try:
                    fact = kind.statement.format(*gaps, answer=kind.solve(*gaps))
                except (KeyError, ValueError) as error:
                    raise ValueError(f"{question!r} asks for something unknown") from error
                return Task(family, name, question, gaps, prompt, fact)
    raise ValueError(f"question {question!r} is of no family; there are {sorted(FAMILIES)}")


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a template; unnamed gaps take letters, digits and spaces."""
    gaps = {"{}": r"([\w ]+)", "{name}": r"(?P<name>\w+)", "{question}": "(?P<question>.+)"}
    parts = re.split(r"(\{\w*\})", template)
    return re.compile("".join(gaps.get(part, re.escape(part)) for part in parts))


def sentence(fact: str) -> str:
    """The statement with a capital and a dot."""
    return f"{fact[0].upper()}{fact[1:]}."


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
