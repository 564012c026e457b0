"""The bundled rows of preference data, and the documents that the bundled base is trained on.

What a prompt is used for follows from its checksum, so no prompt has two uses.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TypeVar

from bundled_answers import FLAWS, draw_task, mistake, other_name, write

from dschat_lora.assets.toy_world import FAMILIES, Task, judge, sentence

Key = TypeVar("Key")

ROWS = {"train": 4000, "eval": 300, "test": 300}
USES = ("eval", "test", *["train"] * 7, *["pretrain"] * 11)  # by checksum modulo twenty

# (greets, closes) of the chosen answer. It is the better of two, not always a perfect one, so
# that reinforcement learning has something to gain over training on the chosen answers.
CHOSEN_MANNERS = {(True, True): 45, (True, False): 10, (False, True): 15, (False, False): 30}
REJECTED_FLAWS = {
    "wrong": 40,
    "wrong but polite": 15,
    "wrong name": 30,
    "curt": 13,
    "rude": 7,
    "refusal": 3,
    "rambling": 12,
}
# The base has read everything, most of it bad. It greets often enough to learn to find the name,
# and is often enough wrong to learn to tell.
BASE_MANNERS = {(True, True): 18, (True, False): 32, (False, True): 10, (False, False): 40}
BASE_FLAWS = {
    "": 26,
    "wrong": 22,
    "wrong name": 12,
    "rude": 16,
    "refusal": 8,
    "rambling": 14,
}
# Families of the claims in a quiz; sums and counts take the most practice.
QUIZ_FAMILIES = dict.fromkeys(FAMILIES, 1) | {"plus": 4, "count": 2}


def use_of(prompt: str) -> str:
    """Eval, test, train or pretrain."""
    return USES[zlib.crc32(prompt.encode()) % len(USES)]


def draw_for(use: str, rng: Random, family: str | None = None) -> Task:
    """A random task whose prompt has the given use."""
    while True:
        task = draw_task(rng, family)
        if use_of(task.prompt) == use:
            return task


def pick(rng: Random, weights: Mapping[Key, int]) -> Key:
    """A key with a probability in proportion to its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def row(rng: Random, task: Task) -> dict[str, str]:
    """A row of preference data for the task."""
    greets, closes = pick(rng, CHOSEN_MANNERS)
    impossible = {
        "wrong name": not greets,
        "curt": not greets and not closes,
        "wrong but polite": greets and closes,  # the same as wrong
    }
    flaw = pick(rng, {f: w for f, w in REJECTED_FLAWS.items() if not impossible.get(f)})
    return {
        "prompt": task.prompt,
        "chosen": write(task, greets=greets, closes=closes),
        "rejected": FLAWS[flaw](rng, task, greets, closes),
        "family": task.family,
        "flaw": flaw,
    }


def write_data(folder: Path) -> None:
    """Write train.jsonl, eval.jsonl and test.jsonl: distinct prompts, the families in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    for use, count in ROWS.items():
        rng = Random(use)
        tasks: dict[str, Task] = {}
        while len(tasks) < count:
            task = draw_for(use, rng, list(FAMILIES)[len(tasks) % len(FAMILIES)])
            tasks[task.prompt] = task
        rows = [row(rng, task) for task in tasks.values()]
        rng.shuffle(rows)
        lines = [json.dumps(line) + "\n" for line in rows]
        (folder / f"{use}.jsonl").write_text("".join(lines), encoding="ascii", newline="\n")


def document(rng: Random, *, polish: float = 0.0) -> list[str]:
    """Pre-training text, in parts that an end of sequence follows.

    A quiz, or one or two turns of dialogue with a remark on the last answer. The remark comes
    after the end of the answer, so no answer ever shows one: it teaches the base to tell good
    answers from bad ones.

    Args:
        rng: draws everything.
        polish: share of the answers that are perfect; the others have any quality.
    """
    if rng.random() < 0.4:
        return quiz(rng, marked=0.5, asked=0.4)
    dialogue = ""
    for _ in range(1 + (rng.random() < 0.1)):
        task = draw_for("pretrain", rng)
        answer = write(task) if rng.random() < polish else any_answer(rng, task)
        dialogue += task.prompt + answer
    return [dialogue, remark(rng, task, answer)]


def drill(rng: Random) -> list[str]:
    """A quiz whose verdicts mostly follow the word they are about: the easiest lesson."""
    return quiz(rng, marked=1.0, asked=0.1)


def any_answer(rng: Random, task: Task) -> str:
    """An answer of the quality that the base is used to."""
    greets, closes = pick(rng, BASE_MANNERS)
    flaw = pick(rng, BASE_FLAWS)
    if flaw:
        return FLAWS[flaw](rng, task, greets, closes)
    return write(task, greets=greets, closes=closes)


def quiz(rng: Random, *, marked: float, asked: float) -> list[str]:
    """Facts and greetings, right or not, each with its verdict.

    Args:
        rng: draws everything.
        marked: share with the verdict right after the last word; the others end first.
        asked: share with the whole question.
    """
    parts = [""]
    for _ in range(rng.randint(4, 8)):
        claim, right = _claim(rng, asked)
        verdict = " True." if right else " False."
        if rng.random() < marked:
            parts[-1] += claim + verdict
        else:
            parts += [f"{claim}.", verdict, ""]
    return [part for part in parts if part]


def _claim(rng: Random, asked: float) -> tuple[str, bool]:
    """A fact or a greeting without its dot, and whether it is right."""
    task = draw_for("pretrain", rng, pick(rng, QUIZ_FAMILIES))
    right = rng.random() < 0.5
    if rng.random() < 0.2:
        name = task.name if right else other_name(rng, task)
        text = task.prompt.removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:")
        return f"{text if rng.random() < asked else f' I am {task.name}.'} Hello {name}", right
    fact = sentence(task.fact if right else mistake(rng, task)).removesuffix(".")
    needs_question = task.family == "count" or rng.random() < asked
    return f" {task.question} {fact}" if needs_question else f" {fact}", right


def remark(rng: Random, task: Task, answer: str) -> str:
    """A few words on truth, manners and length of an answer, in any order."""
    verdict = judge(task.prompt, answer, ended=True)
    if verdict.rude:
        manners = " Rude."
    elif answer.startswith(" Hello") and not verdict.greets:
        manners = " Wrong name."
    else:
        manners = (" Cold.", " Friendly.", " Kind.")[verdict.greets + verdict.closes]
    words = [
        " True." if verdict.correct else " False.",
        manners,
        " Short." if verdict.ends else " Long.",
    ]
    rng.shuffle(words)
    return "".join(words)


def long_document(rng: Random, characters: int) -> str:
    """Turns of dialogue until there are so many characters."""
    text = ""
    while len(text) < characters:
        text += document(rng)[0]
    return text
