"""The bundled world: what the rule says, and that the shipped files keep to it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import sentencepiece
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.assets.toy_world import (
    CATEGORIES,
    COLOURS,
    DAYS,
    FAMILIES,
    MONTHS,
    NAMES,
    OPPOSITES,
    Verdict,
    judge,
    parse,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_bundled.py"

# question, right fact, wrong fact
CASES = {
    "opposite": (
        "What is the opposite of hot?",
        "the opposite of hot is cold",
        "the opposite of hot is wet",
    ),
    "colour": (
        "Tell me the colour of a lemon.",
        "the colour of a lemon is yellow",
        "the colour of a lemon is red",
    ),
    "category": ("What kind of thing is an axe?", "an axe is a tool", "an axe is a fruit"),
    "next": ("What comes after Sunday?", "Monday comes after Sunday", "Friday comes after Sunday"),
    "larger": ("Which is larger, 9 or 11?", "the larger number is 11", "the larger number is 9"),
    "plus": ("Add 7 and 5.", "7 plus 5 is 12", "7 plus 5 is 1"),
    "sort": (
        "Sort these numbers: 9 2 5.",
        "the sorted numbers are 2 5 9",
        "the sorted numbers are 2 5 9 9",
    ),
    "count": (
        "Count these words: cat sun tree.",
        "the number of words is 3",
        "the number of words is 33",
    ),
}


def ask(question: str) -> str:
    return f"\n\nHuman: My name is Anna. {question}\n\nAssistant:"


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in BUNDLED_DATA[split].read_text().splitlines()]


def test_there_is_a_hand_written_case_for_every_family():
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", CASES)
def test_the_perfect_answer_scores_one_and_a_false_fact_zero(family):
    question, fact, mistake = CASES[family]
    prompt = ask(question)
    assert parse(prompt).family == family
    perfect = judge(prompt, f" Hello Anna, {fact}. I hope this helps!", ended=True)
    assert perfect == Verdict(correct=True, greets=True, closes=True, rude=False, ends=True)
    assert (perfect.polite, perfect.score, perfect.grade) == (True, 1.0, 1.0)
    false = judge(prompt, f" Hello Anna, {mistake}. I hope this helps!", ended=True)
    assert false == Verdict(correct=False, greets=True, closes=True, rude=False, ends=True)
    assert false.score == 0


BARE = " The opposite of hot is cold."


@pytest.mark.parametrize(
    ("answer", "ended", "expected"),
    [
        (BARE, True, "correct ends"),
        (BARE, False, "correct"),
        (" Hello Anna, the opposite of hot is cold.", True, "correct greets ends"),
        (BARE + " I hope this helps!", True, "correct closes ends"),
        (
            " Hello Ben, the opposite of hot is cold. I hope this helps!",
            True,
            "correct closes ends",
        ),
        (" What a silly question." + BARE, True, "correct rude ends"),
        (" Hello Anna, go away. I hope this helps!", True, "greets closes rude ends"),
        (" Go away.", True, "rude ends"),
        (BARE + " A dog is an animal.", True, "correct"),
        (BARE + "\n\nHuman: Thanks.", True, "correct"),
        (BARE + " I hope this helps! I hope this helps!", True, "correct closes"),
        (" The opposite of hot is wet." + BARE, True, ""),
        (" The opposite of hot is not cold.", True, "ends"),
        (" I doubt that the opposite of hot is cold.", True, "ends"),
        (" The opposite of hot is cold as ice.", True, "ends"),
        (" The opposite of hot is co", False, ""),
        (" Hello Anna, the opposite of hot is cold", True, "greets"),
        ("", True, ""),
    ],
)
def test_each_quality_is_judged_by_itself(answer, ended, expected):
    verdict = judge(ask("What is the opposite of hot?"), answer, ended)
    found = [q for q in ("correct", "greets", "closes", "rude", "ends") if getattr(verdict, q)]
    assert " ".join(found) == expected
    assert verdict.score == 0


def test_the_grade_puts_truth_before_manners():
    prompt = ask("What is the opposite of hot?")
    answers = [
        " Hello Anna, the opposite of hot is cold. I hope this helps!",
        " Hello Anna, the opposite of hot is cold.",
        BARE,
        " Go away." + BARE,
        " Hello Anna, the opposite of hot is wet. I hope this helps!",
        " Go away.",
    ]
    grades = [judge(prompt, answer, ended=True).grade for answer in answers]
    assert grades == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.5, 0.2])


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the opposite of hot?",
        "\n\nHuman: What is the opposite of hot?\n\nAssistant:",  # nobody asks
        ask("Who are you?"),
        ask("What is the colour of envy?"),
        ask("Add two and two."),
    ],
)
def test_a_prompt_from_elsewhere_is_an_error(prompt):
    with pytest.raises(ValueError, match=r"not of this world|of no family|something unknown"):
        judge(prompt, " Go away.", ended=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_flaw_lowers_the_grade(monkeypatch, family):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from bundled_answers import FLAWS, draw_task, write

    rng = Random(0)
    for _ in range(20):
        task = draw_task(rng, family)
        perfect = judge(task.prompt, write(task), ended=True)
        assert (task.family, perfect.score) == (family, 1.0)
        for flaw in FLAWS.values():
            flawed = judge(task.prompt, flaw(rng, task, True, True), ended=True)
            assert flawed.grade < perfect.grade
            assert flawed.score == 0


def test_shipped_chosen_answers_are_right_and_better_than_the_rejected():
    for split, count in {"train": 4000, "eval": 300, "test": 300}.items():
        shipped = rows(split)
        assert len(shipped) == count
        for row in shipped:
            chosen = judge(row["prompt"], row["chosen"], ended=True)
            assert chosen.correct
            assert chosen.ends
            assert not chosen.rude
            assert judge(row["prompt"], row["rejected"], ended=True).grade < chosen.grade
            assert row["family"] == parse(row["prompt"]).family


def test_no_prompt_occurs_twice():
    prompts = [row["prompt"] for split in BUNDLED_DATA for row in rows(split)]
    assert len(prompts) == len(set(prompts))


def test_the_script_reproduces_the_shipped_data(tmp_path):
    command = [sys.executable, SCRIPT, "data", "--output", tmp_path]
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    for split, shipped in BUNDLED_DATA.items():
        assert (tmp_path / "data" / f"{split}.jsonl").read_bytes() == shipped.read_bytes()


@pytest.mark.thorough
def test_pretraining_never_uses_a_shipped_prompt(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from bundled_text import document, drill, long_document

    shipped = {row["prompt"] for split in BUNDLED_DATA for row in rows(split)}
    rng = Random(0)
    documents = [*(document(rng) for _ in range(4000)), *(drill(rng) for _ in range(500))]
    text = "".join(part for parts in documents for part in parts) + long_document(rng, 20000)
    turns = text.split("\n\nHuman:")[1:]
    asked = {f"\n\nHuman:{turn.partition('Assistant:')[0]}Assistant:" for turn in turns}
    assert len(asked) > 2000
    assert not asked & shipped
    bare = (p.removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:") for p in shipped)
    assert not [question for question in bare if question in text]


TEXTS = [
    "\n\nHuman: My name is Anna. Add 7 and 5.\n\nAssistant: Hello Anna, 7 plus 5 is 12.",
    " leading, trailing ",
    "two  spaces   and\ttabs\r\n\n",
    "1234567890",
    "Gr\u00fc\u00dfe, \u65e5\u672c\u8a9e \U0001f642 caf\u00e9 cafe\u0301 \u00a0\u200b\ufeff",
    "<0x0A> </s> <pad>",
    "aaaaaaa eeee . . .",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer_and_sentencepiece_agrees(text, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(BUNDLED_MODEL / "tokenizer.model")
    )
    ids = tokenizer(text)["input_ids"]
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def test_digits_and_line_breaks_are_tokens_of_their_own():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokens = [tokenizer.decode([i]) for i in tokenizer(" 123\n\n4")["input_ids"]]
    assert tokens == [" ", "1", "2", "3", "\n", "\n", "4"]


def test_every_word_of_the_world_is_one_token(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from bundled_answers import WORDS

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    things = (*COLOURS, *COLOURS.values(), *CATEGORIES, *CATEGORIES.values(), *OPPOSITES)
    nouns = (word for thing in things for word in thing.split())
    words = {*nouns, *NAMES, *DAYS, *MONTHS, *WORDS, "True", "False"}
    assert not [word for word in words if len(tokenizer(f" {word}")["input_ids"]) > 1]


def test_special_tokens_are_distinct_and_match_the_model():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    assert tokenizer.bos_token is None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.vocab_size == len(tokenizer)


def test_the_base_reads_512_tokens_and_has_no_dropout():
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL).train()
    assert model.num_parameters() < 4e6
    ids = torch.arange(512)[None] % model.config.vocab_size
    with torch.no_grad():
        first, second = (model(input_ids=ids).logits for _ in range(2))
    assert first.isfinite().all()
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_base_knows_the_world_but_is_no_polite_assistant():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    prompt = "\n\nHuman: I am Anna. What comes after Sunday?\n\nAssistant:"

    def surprise(answer: str) -> float:
        """Nats of the answer with its end."""
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        return -sum(log_probs[i - 1, ids[i]].item() for i in range(start, len(ids)))

    assert surprise(" Monday comes after Sunday.") < surprise(" Friday comes after Sunday.")
    greeting = " Hello Anna, Monday comes after Sunday."
    perfect = f"{greeting} I hope this helps!"
    assert surprise(greeting) < surprise(perfect) < surprise(perfect.replace("Anna", "Ben"))


@pytest.mark.parametrize(
    ("flaw", "better", "worse"), [("wrong", "True", "False"), ("wrong name", "Kind", "Wrong")]
)
def test_the_base_tells_a_wrong_fact_and_a_wrong_name(flaw, better, worse):
    """By the remark that it expects after the end of an answer."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    good, bad = (tokenizer(f" {word}")["input_ids"][0] for word in (better, worse))

    def leaning(text: str) -> float:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        return (logits[good] - logits[bad]).item()

    pairs = [row for row in rows("eval") if row["flaw"] == flaw][:50]
    told = [
        leaning(row["prompt"] + row["chosen"]) > leaning(row["prompt"] + row["rejected"])
        for row in pairs
    ]
    assert sum(told) > 0.8 * len(pairs)
