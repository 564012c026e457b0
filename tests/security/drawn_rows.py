"""Rows of every recognised shape, mutated, and what a stage makes of them."""

import csv
import gzip
import json
import re
from dataclasses import dataclass
from itertools import count

import pyarrow as pa
import pyarrow.parquet
from hypothesis import strategies as st

from dschat_lora.config.data import COLUMNS
from dschat_lora.data.rows import RowOptions

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
            "modifiedtripleset": [{"subject": m.word(), "property": m.word(), "object": m.word()}],
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
    *(None, True, False, 0, 1, -1, 1.5, float("nan"), float("inf"), 10**30, -(2**63), "x" * 5000),
    *("", " ", "\n\t", "\0", "a\0b", "\ud83d", "\udc00x", "\U0001f600", "\u2028", "\ufeff"),
    *([], {}, [[]], [{}], [None], [[], []], ["a", "b"], {"role": "user"}, {"content": "x"}),
    *({"": ""}, {"role": 1, "content": "x"}, {"role": "user", "content": None}, [1, 2]),
    *({"role": "user", "content": []}, {"role": "user", "content": [{"type": "image"}]}),
    *({"role": "nobody", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": 1}),
    *({"role": "assistant", "tool_calls": [{"name": "f"}]}, {"from": 1, "value": "x"}),
    *({"from": "human", "value": None}, {"from": "gpt", "value": ""}, {"from": "me", "value": "x"}),
    *("true", "False", "1.0", "yes", "null", "{}", "[]", "[1]", "{", '[{"a": 1}]', "[" * 3000),
    *({"messages": 1}, {"tools": []}, '{"messages": 1}', "<|im_end|>", "<|endoftext|>", "</s>"),
    *("\n\nAssistant:", "\n\nHuman: x\n\nAssistant: y", "{{ 1 }}", "{% raise %}", "||"),
)


def paths_of(value, path=()):
    """Places in a value, as keys and numbers, itself first."""
    yield path
    children = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    for key, each in children:
        yield from paths_of(each, (*path, key))


def at(value, path):
    """What is in a place of a value."""
    for key in path:
        value = value[key]
    return value


def _changed(value, path, change):
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _changed(copy[path[0]], path[1:], change)
    return copy


def _without(value, key):
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if name != key}
    return [each for number, each in enumerate(value) if number != key]


@dataclass(frozen=True)
class DrawnRow:
    """A row, what its file holds, and how a stage reads it."""

    shape: str
    values: object  # None where the text is no JSON of a value that is known
    text: str
    kind: str
    template: str
    options: RowOptions
    suffix: str
    is_valid: bool  # as the shape has it, nothing changed

    def write(self, directory):
        """The file with the row alone; None where its format cannot hold it."""
        path = directory / f"row{self.suffix}"
        if self.suffix == ".csv":
            return _write_csv(path, self.values)
        if self.suffix == ".parquet":
            return _write_parquet(path, self.values)
        text = '{"entries": [' + self.text + "]}" if self.shape == "webnlg" else self.text
        data = text.encode("utf-8", "surrogatepass")
        path.write_bytes(gzip.compress(data) if self.suffix.endswith(".gz") else data)
        return path


def _write_csv(path, values):
    cells = {name: v if isinstance(v, str) else json.dumps(v) for name, v in values.items()}
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerow(cells)
    return path


def _write_parquet(path, values):
    try:
        pa.parquet.write_table(pa.Table.from_pylist([values]), path)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        return None
    return path


def kinds_of(shape):
    """What stages make of rows of a shape, most often what it is meant for."""
    if shape.startswith("kto"):
        return ("unpaired", "unpaired", "samples", "prompts")
    if shape.startswith(("pair", "ultra")):
        return ("pairs", "pairs", "samples", "prompts", "unpaired")
    if shape in ("prompt", "prompt of messages"):
        return ("prompts", "prompts", "samples")
    return ("samples", "samples", "samples", "prompts", "pairs")


@st.composite
def drawn_rows(draw, templates):
    """A row of a shape, changed up to three times, for a stage and a tokenizer's template."""
    marks, shape = Marks(), draw(st.sampled_from(sorted(SHAPES)))
    values = SHAPES[shape](marks)
    changes = draw(st.sampled_from((0, 1, 1, 1, 2, 3)))
    for _ in range(changes):
        values = draw(changed_values(values, marks))
    text = json.dumps(values, ensure_ascii=draw(st.booleans()))
    suffixes = (".jsonl", ".jsonl", ".json", ".jsonl.gz", ".csv", ".parquet")
    suffix = ".json" if shape in ("webnlg", "dart") else draw(st.sampled_from(suffixes))
    known, is_valid = values, changes == 0
    if draw(st.integers(0, 4)) == 0 and suffix not in (".csv", ".parquet"):
        text, known, is_valid = draw(changed_texts(text)), None, False
    columns = {}
    if draw(st.integers(0, 7)) == 0:
        columns = {draw(st.sampled_from(COLUMNS)): draw(st.sampled_from([*values, "no_column"]))}
    options = RowOptions(columns, draw(st.sampled_from(("refuse", "good_only", "all"))))
    kind, template = draw(st.sampled_from(kinds_of(shape))), draw(st.sampled_from(templates))
    return DrawnRow(shape, known, text, kind, template, options, suffix, is_valid)


@st.composite
def changed_values(draw, values, marks):
    """A row with one change to its values."""
    places = list(paths_of(values))
    path = draw(st.sampled_from(places[1:] or places))
    hostile = draw(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=4), st.integers()))
    change = draw(st.sampled_from(("replace", "replace", "drop", "add", "twice", "merge", "text")))
    if change == "add" or not path:
        more = ("extra", "context", "", "chat_template_kwargs", "message_id", "name", "weight")
        name = draw(st.sampled_from((*COLUMNS, *more, "reasoning_content", "tool_calls")))
        where = draw(st.sampled_from([p for p in places if isinstance(at(values, p), dict)]))
        value = draw(st.sampled_from((hostile, marks.text())))
        return _changed(values, where, lambda inner: {**inner, name: value})
    if change == "drop":
        return _changed(values, path[:-1], lambda inner: _without(inner, path[-1]))
    if change == "twice":
        return _changed(values, path, lambda value: [value, value])
    if change == "text":
        return _changed(values, path, json.dumps)
    if change == "merge":
        return {**SHAPES[draw(st.sampled_from(sorted(SHAPES)))](marks), **values}
    return _changed(values, path, lambda _: hostile)


@st.composite
def changed_texts(draw, text):
    """The text of a row with one change, which may leave no JSON."""
    change = draw(st.sampled_from(("cut", "insert", "twice", "list", "quotes", "deep", "long")))
    place = draw(st.integers(0, len(text)))
    hostile = ("\0", "\ufeff", "{", "}", '"', ",", "\n", "\r", "\\ud83d", "NaN", "\x1f", "//")
    depth = draw(st.sampled_from((10, 500, 900, 950, 980, 990, 995, 5000)))
    return {
        "cut": text[:place],
        "insert": text[:place] + draw(st.sampled_from((*hostile, "9" * 5000))) + text[place:],
        "twice": f"{text[:-1]}, {text[1:]}",  # each key
        "list": f"[{text}]",
        "quotes": text.replace('"', "'"),
        "deep": f'{text[:-1]}, "extra": {"[" * depth}{"]" * depth}}}',
        "long": text.replace("zq", "z" * 3000 + "q", 1),
    }[change]


def words_that_count(row):
    """Marked words that a stage must find, by docs/data_formats.md, in a row as its shape has it.

    Left are the rejected answer where the chosen one is learnt, what tools, calls and thoughts say,
    which templates may leave out, and the labels beside the texts.
    """
    used = dict(row.values)
    if row.kind == "samples":
        used.pop("rejected", None)
    left = ("tools", "tool_calls", "reasoning_content", "chat_template_kwargs")
    places = [path for path in paths_of(used) if not set(left) & set(path)]
    texts = [at(used, path) for path in places if isinstance(at(used, path), str)]
    return MARK.findall(" ".join(text for text in texts if not text.startswith("{")))
