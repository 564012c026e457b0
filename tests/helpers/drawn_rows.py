"""Rows of every recognised shape, mutated, and what a stage makes of them."""

import csv
import gzip
import json
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from hypothesis import strategies as st

from dschat_lora.config.data import COLUMNS
from dschat_lora.data.chat import make_chat
from dschat_lora.data.readers import iter_file, RawRow
from dschat_lora.data.row_reader import RowCounts, RowReader
from dschat_lora.data.rows import RowOptions

KINDS = ("samples", "pairs", "unpaired", "prompts")
MARK = re.compile(r"zq\d+zq")


class Marks:
    """Words that occur once each, to be found again in what is learnt."""

    def __init__(self):
        self._numbers = count(1)

    def word(self):
        return f"zq{next(self._numbers)}zq"

    def text(self):
        return f"say {self.word()} now"


def user(m):
    return {"role": "user", "content": m.text()}


def assistant(m):
    return {"role": "assistant", "content": m.text()}


def parts(m):
    return {"role": "user", "content": [{"type": "text", "text": m.text()} for _ in range(2)]}


def calls(m):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": m.word(), "arguments": {"a": m.word()}}}
        ],
    }


def thread(m):
    return [{"role": "system", "content": m.text()}, user(m), assistant(m), parts(m), assistant(m)]


def said(m, speaker):
    return {"from": speaker, "value": m.text()}


# A valid row of each shape.
SHAPES = {
    "text": lambda m: {"text": m.text()},
    "prompt-completion": lambda m: {"prompt": m.text(), "completion": " " + m.text()},
    "message prompt": lambda m: {"prompt": [user(m)], "completion": [assistant(m)]},
    "text prompt, messages": lambda m: {"prompt": m.text(), "completion": [assistant(m)]},
    "messages, text answer": lambda m: {"prompt": [user(m)], "completion": m.text()},
    "messages": lambda m: {"messages": thread(m)},
    "tools": lambda m: {
        "messages": [user(m), calls(m), {"role": "tool", "content": m.text()}, assistant(m)],
        "tools": [{"type": "function", "function": {"name": m.word(), "parameters": {}}}],
    },
    "tools as text": lambda m: {
        "messages": [user(m), assistant(m)],
        "tools": json.dumps([{"type": "function", "function": {"name": m.word()}}]),
    },
    "thoughts": lambda m: {
        "messages": [user(m), {**assistant(m), "reasoning_content": m.text()}],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "sharegpt": lambda m: {
        "system": m.text(),
        "conversations": [said(m, "human"), said(m, "gpt"), said(m, "user"), said(m, "gpt")],
    },
    "sharegpt roles": lambda m: {"conversations": [user(m), assistant(m)]},
    "sharegpt calls": lambda m: {
        "conversations": [
            said(m, "human"),
            {"from": "function_call", "value": json.dumps({"name": m.word(), "arguments": {}})},
            said(m, "observation"),
            said(m, "gpt"),
        ]
    },
    "alpaca": lambda m: {"instruction": m.text(), "input": m.text(), "output": m.text()},
    "alpaca history": lambda m: {
        "instruction": m.text(),
        "output": m.text(),
        "system": m.text(),
        "history": [[m.text(), m.text()]],
    },
    "question": lambda m: {"question": m.text(), "answer": m.text(), "system": m.text()},
    "pair": lambda m: {"prompt": m.text(), "chosen": " " + m.text(), "rejected": " " + m.text()},
    "pair margin": lambda m: {
        **{"prompt": m.text(), "chosen": " " + m.text(), "rejected": " " + m.text()},
        "margin": 0.5,
    },
    "pair alone": lambda m: (
        lambda start: {"chosen": start + m.text(), "rejected": start + m.text()}
    )(f"\n\nHuman: {m.text()}\n\nAssistant: "),
    "pair of messages": lambda m: (
        lambda start: {"chosen": [*start, assistant(m)], "rejected": [*start, assistant(m)]}
    )([user(m)]),
    "ultrafeedback": lambda m: (
        lambda asked: {
            "prompt": asked["content"],
            "chosen": [asked, assistant(m)],
            "rejected": [asked, assistant(m)],
        }
    )(user(m)),
    "pair of a question": lambda m: {
        **{"question": m.text(), "chosen": m.text(), "rejected": m.text(), "system": m.text()}
    },
    "pair of conversations": lambda m: {
        "conversations": [said(m, "human")],
        "chosen": said(m, "gpt"),
        "rejected": said(m, "gpt"),
    },
    "pair of instructions": lambda m: {
        **{"instruction": m.text(), "input": m.text(), "chosen": m.text(), "rejected": m.text()}
    },
    "kto": lambda m: {"prompt": m.text(), "completion": m.text(), "label": True},
    "kto bad": lambda m: {"prompt": [user(m)], "completion": [assistant(m)], "label": "0"},
    "kto messages": lambda m: {"messages": [user(m), assistant(m)], "label": 1},
    "prompt": lambda m: {"prompt": m.text()},
    "prompt of messages": lambda m: {"prompt": [user(m)]},
    "token ids": lambda m: {"context": [40, 41], "completion": [42, 43, 2]},
    "webnlg": lambda m: {
        "1": {
            "modifiedtripleset": [
                {"subject": m.word(), "property": m.word(), "object": m.word()}
            ],
            "category": "A",
            "lexicalisations": [{"comment": "good", "lex": m.text()}],
        }
    },
    "dart": lambda m: {
        "tripleset": [[m.word(), m.word(), m.word()]],
        "annotations": [{"source": "s", "text": m.text()}],
    },
}
HOSTILE = (
    *(None, True, False, 0, 1, -1, 1.5, float("nan"), float("inf"), 10**30, -(2**63)),
    *("", " ", "\n\t", "\0", "a\0b", "\ud83d", "\udc00x", "\U0001f600", "\u2028", "\ufeff", "x" * 5000),
    *([], {}, [[]], [{}], [None], [[], []], ["a", "b"], {"role": "user"}, {"content": "x"}),
    *({"": ""}, {"role": 1, "content": "x"}, {"role": "user", "content": None}, [1, 2]),
    *({"role": "user", "content": []}, {"role": "user", "content": [{"type": "image"}]}),
    *({"role": "nobody", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": 1}),
    *({"role": "assistant", "tool_calls": [{"name": "f"}]}, {"from": 1, "value": "x"}),
    *({"from": "human", "value": None}, {"from": "nobody", "value": "x"}, {"from": "gpt", "value": ""}),
    *("true", "False", "1.0", "yes", "null", "{}", "[]", "[1]", "{", '[{"a": 1}]', "[" * 3000),
    *({"messages": 1}, {"tools": []}, '{"messages": 1}', "<|im_end|>", "<|endoftext|>", "</s>"),
    *("\n\nAssistant:", "\n\nHuman: x\n\nAssistant: y", "{{ 1 }}", "{% raise %}", "||", "assistant"),
)


def _paths(value, path=()):
    """Places in a value, itself first."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _paths(each, (*path, number))


def _changed(value, path, change):
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _changed(copy[path[0]], path[1:], change)
    return copy


@dataclass(frozen=True)
class DrawnRow:
    """A row, its text as JSON, and how it is read."""

    shape: str
    text: str  # JSON, or what was made of it
    values: object  # None where the text is no longer that of a value
    mutated: bool
    kind: str
    template: str
    options: RowOptions
    suffix: str


@st.composite
def drawn_rows(draw, templates=("built-in",)):
    """A row of a shape, mutated up to three times, for a stage."""
    marks = Marks()
    shape = draw(st.sampled_from(sorted(SHAPES)))
    values = SHAPES[shape](marks)
    mutations = draw(st.integers(0, 3))
    for _ in range(mutations):
        values = _mutated(draw, values, marks)
        if not isinstance(values, dict):
            break
    text = json.dumps(values, ensure_ascii=draw(st.booleans()))
    mutated, known = mutations > 0, values
    if draw(st.integers(0, 5)) == 0:
        text, mutated, known = _mutated_text(draw, text), True, None
    columns = {}
    if draw(st.integers(0, 5)) == 0 and isinstance(values, dict) and values:
        columns = {draw(st.sampled_from(COLUMNS)): str(draw(st.sampled_from(sorted(values, key=str))))}
    options = RowOptions(columns, draw(st.sampled_from(("refuse", "good_only", "all"))))
    suffix = draw(st.sampled_from((".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz")))
    if shape in ("webnlg", "dart"):
        suffix = ".json"
    return DrawnRow(
        shape,
        text,
        known,
        mutated,
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(templates)),
        options,
        suffix,
    )


def _mutated(draw, values, marks):
    kind = draw(st.sampled_from(("replace", "replace", "drop", "add", "nest", "wrap", "twin", "merge")))
    paths = list(_paths(values))
    path = draw(st.sampled_from(paths))
    hostile = draw(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=4), st.integers(), st.floats()))
    if kind == "replace":
        return _changed(values, path or paths[-1], lambda _: hostile)
    if kind == "drop" and path:
        return _changed(
            values,
            path[:-1],
            lambda inner: (
                {k: v for k, v in inner.items() if k != path[-1]}
                if isinstance(inner, dict)
                else [v for n, v in enumerate(inner) if n != path[-1]]
            ),
        )
    if kind == "add":
        name = draw(st.sampled_from((*COLUMNS, "extra", "context", "", "chat_template_kwargs", "message_id", "name", "reasoning_content", "weight")))
        value = hostile if draw(st.booleans()) else marks.text()
        places = [p for p in paths if isinstance(_at(values, p), dict)]
        where = draw(st.sampled_from(places)) if places else ()
        return _changed(values, where, lambda inner: {**inner, name: value} if isinstance(inner, dict) else inner)
    if kind == "nest":
        depth = draw(st.sampled_from((1, 3, 100, 400, 900, 960, 980, 990, 2000)))

        def deeper(value):
            for _ in range(min(depth, 900)):
                value = [value]
            return value

        return _changed(values, path or paths[-1], deeper)
    if kind == "wrap":
        return _changed(values, path, lambda value: {"text": value} if path else value)
    if kind == "merge":
        other = SHAPES[draw(st.sampled_from(sorted(SHAPES)))](marks)
        return {**other, **values}
    return _changed(values, path, lambda value: [value, value] if path else value)


def _at(values, path):
    for key in path:
        values = values[key]
    return values


def _mutated_text(draw, text):
    kind = draw(st.sampled_from(("cut", "insert", "twice", "array", "swap", "deep", "long")))
    at = draw(st.integers(0, len(text)))
    if kind == "cut":
        return text[:at]
    if kind == "insert":
        return text[:at] + draw(st.sampled_from(("\0", "\ufeff", "{", "}", '"', ",", "\n", "\r", "\\ud83d", "NaN", "\x1f", "//", "9" * 5000))) + text[at:]
    if kind == "twice":  # a key twice in the object
        return text[:-1] + ", " + text[1:] if text.startswith("{") and len(text) > 2 else text
    if kind == "array":
        return f"[{text}]"
    if kind == "deep":
        n = draw(st.sampled_from((10, 500, 900, 950, 980, 990, 995, 5000)))
        return text[:-1] + ', "extra": ' + "[" * n + "]" * n + "}" if text.startswith("{") else text
    if kind == "long":
        return text.replace("zq", "z" * 3000 + "q", 1)
    return text.replace('"', "'", 1)


def write_row(path, row):
    """A file with the row alone; returns whether its format holds it."""
    if row.suffix in (".jsonl", ".json", ".jsonl.gz"):
        text = row.text if row.suffix == ".json" else row.text.replace("\n", " ")
        if row.shape == "webnlg" and row.values is not None:
            text = '{"entries": [' + text + "]}"
        data = text.encode("utf-8", "surrogatepass") + b"\n"
        path.write_bytes(gzip.compress(data) if row.suffix.endswith(".gz") else data)
        return True
    if not isinstance(row.values, dict) or not row.values:
        return False
    if row.suffix == ".csv":
        cells = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.values.items()}
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.DictWriter(file, list(cells))
            writer.writeheader()
            writer.writerow(cells)
        return True
    try:
        pa.parquet.write_table(pa.Table.from_pylist([row.values]), path)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError, RecursionError):
        return False
    return True


def read_row(path, row, chat):
    """The records of a file of one row, or the error."""
    reader = RowReader(row.options, chat, row.kind, skips=False)
    found = []
    for raw in iter_file(path):
        found += reader.records(raw, RowCounts())[0]
    return found
