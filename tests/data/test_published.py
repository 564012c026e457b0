"""The docs' options for published data sets, on a row of each as it is published."""

import re
import shlex
from pathlib import Path

import pytest
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.chat import Chat
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import config_sources, parse_row, require_usable, row_options

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "data_formats.md"
U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
WORSE = {"role": "assistant", "content": "w"}
SHAREGPT = {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "u", "input": "", "output": "a"}
HELD = {"chosen": [U, A], "rejected": [U, WORSE]}
# A row, and the beginning of what step 1 reads before the answer; the answer is "a".
CHAT = "\n\nHuman: u\n\nAssistant:"
ROWS = {
    "Alpaca": (ALPACA | {"text": "Below is an instruction ..."}, CHAT),
    "Alpaca, cleaned": (ALPACA, CHAT),
    "Dolly 15k": (
        {"instruction": "u", "context": "c", "response": "a", "category": "closed_qa"},
        "\n\nHuman: u\nc\n\nAssistant:",
    ),
    "ShareGPT, Vicuna": (SHAREGPT | {"id": "QWJhYvA_0"}, CHAT),
    "OpenHermes 2.5": (
        SHAREGPT | {"source": "airoboros2.2", "system_prompt": None, "title": None, "id": None},
        CHAT,
    ),
    "SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": "s", "weight": None},
                {"from": "human", "value": "u", "weight": 0.0},
                {"from": "gpt", "value": "a", "weight": 1.0},
            ]
        },
        "s" + CHAT,
    ),
    "OpenOrca": (
        {"id": "niv.242684", "system_prompt": "s", "question": "u", "response": "a"},
        "s" + CHAT,
    ),
    "UltraChat 200k": ({"prompt": "u", "prompt_id": "f0e3", "messages": [U, A]}, CHAT),
    "Tulu 3 SFT": ({"id": "oasst1_1", "messages": [U, A], "source": "ai2-adapt-dev/oasst1"}, CHAT),
    "SmolTalk": ({"messages": [U, A], "source": "smol-magpie-ultra"}, CHAT),
    "No Robots": (
        {"prompt": "u", "prompt_id": "2dc7", "messages": [U, A], "category": "Summarize"},
        CHAT,
    ),
    "OASST, Guanaco": ({"text": "### Human: u### Assistant: a"}, ""),
    "GSM8K, as chat": ({"question": "u", "answer": "a"}, CHAT),
    "GSM8K, as text": ({"question": "u", "answer": "a"}, "u"),
    "MetaMathQA": (
        {"type": "MATH_AnsAug", "query": "u", "original_question": "o", "response": "a"},
        CHAT,
    ),
    "TL;DR": ({"prompt": "u\n\nTL;DR:", "completion": "a"}, "u\n\nTL;DR:"),
    "WikiText 2": ({"text": " = Valkyria Chronicles III = \n"}, ""),
    "TinyStories": ({"text": "Once upon a time"}, ""),
    "HH-RLHF": ({"chosen": CHAT + " a", "rejected": CHAT + " w"}, CHAT),
    "rm-static": ({"prompt": CHAT, "response": " a", "chosen": " a", "rejected": " w"}, CHAT),
    "UltraFeedback, binarized": (
        {"prompt": "u", "prompt_id": "6999", **HELD, "messages": [U, A]}
        | {"score_chosen": 8.5, "score_rejected": 7.0},
        CHAT,
    ),
    "UltraFeedback, TRL's": (HELD | {"score_chosen": 8.5, "score_rejected": 7.0}, CHAT),
    "Tulu 3 preferences": ({"id": "1", "source": "x", "prompt": "u", **HELD}, CHAT),
    "Orca DPO pairs": (
        {"system": "s", "question": "u", "chosen": "a", "rejected": "w"},
        "s" + CHAT,
    ),
    "Orca DPO pairs, distilabel": (
        {"system": "s", "input": "u", "chosen": "a", "rejected": "w", "generations": ["a", "w"]}
        | {"order": ["chosen", "rejected"], "rating": [9.0, 7.0], "status": "unchanged"},
        "s" + CHAT,
    ),
    "Stack Exchange, paired": (
        {"qid": 1, "question": "u", "date": "2010", "metadata": [], "response_j": "a"}
        | {"response_k": "w"},
        CHAT,
    ),
    "KTO mix 14k": ({"prompt": [U], "completion": [A], "label": True}, CHAT),
}


def lines():
    """Name, type and options of each line of the table."""
    section = (
        DOCUMENT.read_text(encoding="utf-8").split("## Published data sets")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", section, re.MULTILINE)
    return [pytest.param(*row, id=row[0]) for row in rows]


def test_every_line_of_the_docs_has_a_row_here():
    assert [line.values[0] for line in lines()] == list(ROWS)


@pytest.mark.parametrize(("name", "described", "options"), lines())
def test_the_options_of_the_docs_read_the_published_row(
    name, described, options, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json").write_text("[]")
    config = parse_config(SupervisedConfig, shlex.split(options)).data
    assert config_sources(config)
    reading, (values, before) = row_options(config), ROWS[name]
    row = parse_row(RawRow("f:1", values), reading)
    assert row.described == described.split(";")[0]
    kind = "pairs" if row.kind == "preference" else "samples"
    assert require_usable(require_usable(row, kind, reading), "samples", reading) is row
    *_, record = to_records(row, Chat(build_byte_tokenizer(), "</s>"))
    assert record.prompt == before
    if row.kind != "text":
        assert record.completion.strip().removesuffix("</s>") == "a"
    if kind == "pairs":
        assert record.rejected.strip().removesuffix("</s>") == "w"
