"""Files that other people made, against every place that reads files: bombs, lies, what never ends.

``ATTACKS`` is the table: a name, what builds the file and gives the call that reads it, and what is
said. Each is refused by one ValueError that holds these words, in time and memory that are bounded,
or, where nothing is said, read. The dear ones run where DSCHAT_LORA_TESTS=all.
"""

import contextlib
import gzip
import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.checkpoint.adapter_config import verify_adapter
from dschat_lora.checkpoint.history import step_directory
from dschat_lora.checkpoint.manifest import (
    _canonical,
    _own_sha256,
    safetensors_header,
    verify,
    write_manifest,
)
from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import parse_config, read_mapping
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data import template_process
from dschat_lora.data.chat import make_chat
from dschat_lora.data.prepare import prepare
from dschat_lora.data.readers import iter_file
from dschat_lora.data.sources import find_source
from dschat_lora.data.templates import read_chat_template
from dschat_lora.data.workers import map_in_order
from dschat_lora.engine.ds_config import read_deepspeed_json
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import load_causal_lm, load_config, load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.runtime.checks import check_adapter_files, model_fields
from dschat_lora.runtime.resume import settle
from helpers.addons import of_addon
from helpers.attacks import ESCAPES, has_control, seen
from helpers.spread import ALL
from helpers.step1 import write_adapter_config

SECONDS = 60  # of the clock, which a busy machine stretches
MEMORY = 1500 * 2**20  # bytes that a bomb may take: a row of 32 MiB is read, decoded and parsed


class Attack(NamedTuple):
    """A file, what reads it, and what is said of it."""

    name: str
    build: Callable[[Path], Callable[[], object]]
    says: str = ""  # a pattern; empty: it is read rightly
    dear: bool = False  # runs where everything does
    bomb: bool = False  # in a process of its own, whose memory is limited


ATTACKS: list[Attack] = []


DESCRIBE = of_addon("inspect.describe:describe")
READ_ROLLOUTS = of_addon("report.rollouts:read_rollouts")


def attacks(family, cases, *, dear=(), bombs=()):
    """Add ``cases``, name -> (what builds it, what is said)."""
    for name, (build, says) in cases.items():
        ATTACKS.append(Attack(f"{family}: {name}", build, says, name in dear, name in bombs))


# ---------------------------------------------------------------------------- data


def packed(name, *parts):
    """A .gz file of (bytes, how often); read row by row."""

    def build(directory):
        with gzip.open(directory / name, "wb", compresslevel=1) as file:
            for part, times in parts:
                block = part * max(1, min(times, 2**20 // len(part)))
                for _ in range(max(1, times * len(part) // len(block))):
                    file.write(block)
        return partial(rows, directory / name)

    return build


def written(name, content):
    """A file of bytes or text; read row by row."""

    def build(directory):
        content_bytes = content if isinstance(content, bytes) else content.encode()
        (directory / name).write_bytes(content_bytes)
        return partial(rows, directory / name)

    return build


def rows(path):
    """Every row; the first problem of one is raised, as preparation does."""
    for row in iter_file(path):
        if row.problem is not None:
            raise ValueError(f"{row.location}: {row.problem}")


def zipped(directory):
    with zipfile.ZipFile(directory / "a.jsonl", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x", "a" * 2**20)
    return partial(rows, directory / "a.jsonl")


def zstd(directory):
    with pyarrow.output_stream(str(directory / "a.jsonl.zst"), compression="zstd") as file:
        for _ in range(80):
            file.write(b"a" * 2**20)
    return partial(rows, directory / "a.jsonl.zst")


def parquet(table, **options):
    def build(directory):
        pyarrow.parquet.write_table(table(), directory / "a.parquet", compression="zstd", **options)
        return partial(rows, directory / "a.parquet")

    return build


def arrow(table, change=lambda content: content):
    def build(directory):
        path, options = directory / "a.arrow", pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, table().schema, options=options) as writer,
        ):
            writer.write_table(table())
        path.write_bytes(change(path.read_bytes()))
        return partial(rows, path)

    return build


def repeated(count, size):
    """A column of one text, kept once and referred to ``count`` times."""
    indices = pyarrow.array([0] * count, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * size]))


def repeated_in_one_row(count=100_000, size=100_000):
    inner = pyarrow.StructArray.from_arrays([repeated(count, size)], ["content"])
    offsets = pyarrow.array([0, 1, count], pyarrow.int32())
    return pyarrow.table({"messages": pyarrow.ListArray.from_arrays(offsets, inner)})


def lying_offsets(directory):
    table = pyarrow.table({"text": ["aaaa"] * 10})
    path = directory / "a.arrow"
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    honest = (4).to_bytes(4, "little") + (8).to_bytes(4, "little")
    lie = (2**30).to_bytes(4, "little") + (8).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(honest, lie, 1))
    return partial(rows, path)


def not_utf8():
    column = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    return pyarrow.table({"text": column})


LARGE = r"the row holds more than 33,554,432 bytes; divide it into several"
DEEP = "(it is )?nested too deeply"
MILLIONS = 40 * 2**20
attacks(
    "data",
    {
        "one packed line": (packed("a.jsonl.gz", (b"a", MILLIONS)), rf"a\.jsonl\.gz:1: {LARGE}"),
        "packed blank lines": (packed("a.jsonl.gz", (b"\n", 2 * 2**20)), rf"gz:10\d+: {LARGE}"),
        "packed white space": (packed("a.json.gz", (b"[", 1), (b" ", 2**28)), r"a\.json\.gz:1: "),
        "packed string": (
            packed("a.json.gz", (b'[{"text": "', 1), (b"a", MILLIONS)),
            r"a\.json\.gz:1: .*the value is longer than 33,554,432 characters",
        ),
        "packed document": (packed("a.txt.gz", (b"a b ", MILLIONS // 4)), rf"txt\.gz:1: {LARGE}"),
        "packed cell": (packed("a.csv.gz", (b'text\n"', 1), (b"a", MILLIONS)), rf"gz:2: {LARGE}"),
        "packed cells": (packed("a.csv.gz", (b"text\n", 1), (b",", MILLIONS)), rf"gz:2: {LARGE}"),
        "a packed gigabyte of rows": (
            packed("a.jsonl.gz", (b'{"text": "%s"}\n' % (b"a" * 10_000), 110_000)),
            r"a\.jsonl\.gz holds more than 200 times its size when unpacked",
        ),
        "zstd": (zstd, rf"a\.jsonl\.zst:1: {LARGE}"),
        "zip": (zipped, r"a\.jsonl:1: not UTF-8"),
        "no gzip": (written("a.jsonl.gz", "{}\n"), r"a\.jsonl\.gz cannot be read: Not a gzipped"),
        "no zstd": (written("a.jsonl.zst", "{}\n"), r"a\.jsonl\.zst cannot be read: ZSTD"),
        "cut gzip": (
            written("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9)[:-9]),
            r"a\.jsonl\.gz cannot be read: Compressed file ended before",
        ),
        "a line of 100 MB": (
            written("a.jsonl", b'{"text": "' + b"word " * (20 * 2**20)),
            rf"a\.jsonl:1: {LARGE}",
        ),
        "a column of one text": (
            parquet(lambda: pyarrow.table({"text": repeated(20_000, 5_000_000)})),
            r"a\.parquet holds more than 200 times its size",
        ),
        "a row of one text": (parquet(repeated_in_one_row), rf"a\.parquet:2: {LARGE}"),
        "beginnings that are shared": (
            parquet(
                lambda: pyarrow.table({"text": ["a" * 1_000_000] * 1200}),
                use_dictionary=False,
                column_encoding={"text": "DELTA_BYTE_ARRAY"},
            ),
            r"a\.parquet holds more than 200 times its size",
        ),
        "an arrow dictionary": (
            arrow(lambda: pyarrow.table({"text": repeated(2_000, 40_000_000)})),
            rf"a\.arrow:1: {LARGE}",
        ),
        "arrow offsets that lie": (lying_offsets, r"a\.arrow cannot be read: .*out of bounds"),
        "parquet that is not UTF-8": (parquet(not_utf8), r"a\.parquet cannot be read: .*UTF8"),
        "parquet of noise": (
            written("a.parquet", b"PAR1" + b"\xff" * 100 + b"PAR1"),
            r"a\.parquet cannot be read: ",
        ),
        "a footer that lies": (
            written("a.parquet", b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"),
            r"a\.parquet cannot be read: ",
        ),
        "an arrow file of noise": (
            written("a.arrow", b"ARROW1\0\0" + b"\xff" * 100 + b"ARROW1"),
            r"a\.arrow cannot be read: ",
        ),
        "an arrow stream of noise": (
            written("a.arrow", b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"\xff" * 100),
            r"a\.arrow cannot be read: ",
        ),
        "NUL": (written("a.jsonl", bytes(1000)), r"a\.jsonl:1: not valid JSON"),
        "NUL in a text": (written("a.jsonl", '{"text": "a\\u0000b"}\n'), ""),
        "UTF-16 lines": (written("a.jsonl", "{}\n".encode("utf-16")), r"a\.jsonl:1: not UTF-8"),
        "UTF-16 list": (written("a.json", "[{}]".encode("utf-16")), r"a\.json is not UTF-8"),
        "UTF-16 table": (written("a.csv", "a\nb\n".encode("utf-16")), r"a\.csv:1: not valid CSV"),
        "UTF-16 text": (written("a.txt", "a b".encode("utf-16")), r"a\.txt:1: not UTF-8"),
        "deep lists": (written("a.json", '[{"text": ' + "[" * 100_000), rf"a\.json:1: .*{DEEP}"),
        "deep objects": (written("a.json", '{"text": ' + '{"a":' * 99_999), rf"json:1: .*{DEEP}"),
        "deep lines": (written("a.jsonl", "[" * 100_000), rf"a\.jsonl:1: {DEEP}"),
        "a number of 100,000 digits": (
            written("a.json", '[{"n": ' + "1" * 100_000 + "}]"),
            r"a\.json:1: .*Exceeds the limit",
        ),
        "a quote that is never closed": (
            written("a.csv", 'text\n"' + "a\n" * 1_100_000),
            rf"a\.csv:\d+: {LARGE}",
        ),
    },
    dear={"packed white space", "a packed gigabyte of rows", "a column of one text"}
    | {"beginnings that are shared", "a line of 100 MB", "packed blank lines", "packed cells"}
    | {"packed string", "packed document", "packed cell", "a quote that is never closed"},
    bombs={"one packed line", "packed string", "packed document", "packed cell", "packed cells"}
    | {"a packed gigabyte of rows", "zstd", "a line of 100 MB", "a column of one text"}
    | {"a row of one text", "beginnings that are shared", "an arrow dictionary"}
    | {"arrow offsets that lie", "packed white space"},
)


@cache
def bundled_tokenizer():
    return load_tokenizer(str(BUNDLED_MODEL), ModelConfig())


def prepared(row):
    """One row, prepared for step 1."""

    def build(directory):
        (directory / "a.jsonl").write_text(json.dumps(row) + "\n")
        config = DataConfig(data_path=(str(directory / "a.jsonl"),))
        options = {"phase": 1, "seed": 0, "eos_id": 2, "cache_dir": directory / "cache"}
        return partial(prepare, config, bundled_tokenizer(), **options)

    return build


def nested(depth=900):
    value = []
    for _ in range(depth):
        value = [value]
    return value


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": nested()}}}
attacks(
    "rows",
    {
        "a column nested deeply": (prepared({"text": "a b c", "more": nested()}), ""),
        "content nested deeply": (
            prepared({"messages": [{"role": "user", "content": nested()}]}),
            r"a\.jsonl:1: `messages` item 1: part 1 of 'content' must be",
        ),
        "tools nested deeply": (
            prepared({"messages": TURNS, "tools": [{"x": nested()}]}),
            r"a\.jsonl:1: ",
        ),
        "arguments nested deeply": (
            prepared({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [CALL]}]}),
            r"a\.jsonl:1: ",
        ),
        "tools as deep text": (
            prepared({"messages": TURNS, "tools": "[" * 100_000}),
            r"a\.jsonl:1: `tools` must be a list of JSON schemas",
        ),
        "variables as deep text": (
            prepared({"messages": TURNS, "chat_template_kwargs": "[" * 100_000}),
            r"a\.jsonl:1: `chat_template_kwargs` must be a JSON object",
        ),
        "half a character": (prepared({"text": "a \ud800"}), r"a\.jsonl:1: .*half a character"),
        "a name of a megabyte": (prepared({"k" * 2**20: 1}), r"(?s)a\.jsonl:1: row has .{,2000}$"),
        "100,000 names": (prepared(dict.fromkeys(map(str, range(10**5)))), r"a\.jsonl:1: row has"),
    },
)


# ---------------------------------------------------------------------------- files that are none


def put(kind, path):
    """Something else than a file that can be read, under a name."""
    contents = {
        "text nested deeply": b'{"a":' * 100_000,
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "NUL": bytes(100),
    }
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "a socket":
        parent = os.open(path.parent, os.O_RDONLY)  # a path of its own would be too long
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"/proc/self/fd/{parent}/{path.name}")
        os.close(parent)
    elif kind == "2 GiB of zeros":
        with path.open("wb") as file:
            file.truncate(2**31)
    else:
        path.write_bytes(contents[kind])


KINDS = (
    *("a pipe", "/dev/zero", "a directory", "a link to itself", "a socket", "2 GiB of zeros"),
    *("text nested deeply", "UTF-16", "NUL"),
)


def option_file(name, read):
    def build(kind, directory):
        put(kind, directory / name)
        return partial(read, str(directory / name))

    return build


def adapter_part(name):
    def build(kind, directory):
        put(kind, write_adapter_config(directory / "adapter") / name)
        return partial(read_whole_adapter, directory / "adapter")

    return build


def read_whole_adapter(path):
    check_adapter_files(find_model(str(path)))
    return read_adapter(path)


def model_part(name, read):
    def build(kind, directory):
        copy_model(directory / "model")
        put(kind, directory / "model" / name)
        return partial(read, directory / "model")

    return build


def copy_model(path):
    shutil.copytree(BUNDLED_MODEL, path)
    return path


def load(path):
    """The model as a stage loads it, after its checks."""
    model_fields(find_model(str(path)))
    settings = load_config(str(path), ModelConfig())
    return load_causal_lm(str(path), settings, ModelConfig(), dtype=torch.float32, meta=False)


def index_alone(kind, directory):
    copy_model(directory / "model")
    (directory / "model" / "model.safetensors").unlink()
    put(kind, directory / "model" / "model.safetensors.index.json")
    return partial(load, directory / "model")


def checkpoint_part(name):
    def build(kind, directory):
        path = step_directory(directory / "out", 5)
        path.mkdir(parents=True)
        (path / "state.json").write_text("{}")
        write_manifest(path, kind="checkpoint")
        put(kind, path / name)
        argv = ["--output_dir", str(directory / "out"), "--resume_from_checkpoint", "latest"]
        return lambda: settle(parse_config(SupervisedConfig, argv), stage="sft")

    return build


def report_part(name, read_run):
    """Reports tell in a note what they could not read."""

    def build(kind, directory):
        (directory / "run.json").write_text("{}")
        (directory / "metrics.jsonl").write_text("{}\n")
        put(kind, directory / name)

        def read():
            notes = read_run(directory).notes
            raise ValueError("; ".join(note for note in notes if name in note))

        return read

    return build


READERS = {
    "config": (option_file("run.yaml", partial(read_mapping, label="run.yaml")), r"run\.yaml"),
    "DeepSpeed JSON": (option_file("ds.json", read_deepspeed_json), r"ds\.json"),
    "chat template": (option_file("chat.jinja", read_chat_template), r"chat\.jinja"),
    "data file": (
        option_file("a.jsonl", lambda path: [rows(p) for p in find_source("data", path).files]),
        r"a\.jsonl",
    ),
    "adapter_config.json": (adapter_part("adapter_config.json"), r"adapter"),
    "adapter weights": (adapter_part("adapter_model.safetensors"), r"adapter"),
    "adapter manifest": (adapter_part("manifest.json"), r"manifest\.json"),
    "model config": (model_part("config.json", load), r"model"),
    "index of weights": (index_alone, r"model"),
    "checkpoint manifest": (checkpoint_part("manifest.json"), r"manifest\.json"),
    "state.json": (checkpoint_part("state.json"), r"state\.json"),
    **{
        f"{name} of a report": (report_part(name, read_run), re.escape(name))
        for name in ("run.json", "metrics.jsonl")
        for read_run in of_addon("report.run_data:read_run")
    },
}
# What is read as it is: a text of zeros is a template without messages, a sparse file is long.
SOON = ("config", "DeepSpeed JSON", "chat template", "adapter manifest", "adapter_config.json")
for reader, (build, says) in READERS.items():
    for kind in KINDS:
        ATTACKS.append(
            Attack(
                f"{reader}: {kind}",
                partial(build, kind),
                says,
                dear=kind == "2 GiB of zeros" or (reader not in SOON and kind not in KINDS[:3]),
                bomb=kind in ("/dev/zero", "2 GiB of zeros"),
            )
        )


# ---------------------------------------------------------------------------- YAML


def mapping(text):
    def build(directory):
        (directory / "run.yaml").write_text(text)
        return partial(read_mapping, str(directory / "run.yaml"), label="run.yaml")

    return build


MERGES = ["a0: &a0 {x: 1}"]
MERGES += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)]
LISTS = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
LISTS += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 6)]
MANY = r"run\.yaml cannot be read: it holds more than 100,000 values"
TYPED = r"run\.yaml cannot be read: (could not determine a constructor for|'x' is neither)"
attacks(
    "YAML",
    {
        "mappings nested deeply": (mapping("{a: " * 50_000), rf"run\.yaml .*{DEEP}"),
        "lists of lists": (mapping("\n".join(LISTS)), MANY),
        "mappings merged": (mapping("\n".join(MERGES)), MANY),
        "an alias of itself": (mapping("data_path: &a [*a]"), MANY),
        "120,000 values": (mapping("a: [" + "x," * 120_000 + "]"), MANY),
        "a megabyte": (mapping("a: " + "x" * 2**20), r"run\.yaml .*more than 262,144 bytes"),
        "no number": (mapping("seed: !!float ''"), TYPED),
        "a call": (mapping("seed: !!python/object/apply:os.system ['touch ran']"), TYPED),
        "a function": (mapping("seed: !!python/name:os.system"), TYPED),
        "no date": (mapping("seed: 2024-99-99"), None),  # texts until an option reads them
        "100,000 digits": (mapping("seed: " + "1" * 100_000), None),
        "no base64": (mapping("seed: !!binary '====x'"), r"run\.yaml cannot be read: "),
        "two documents": (mapping("a: 1\n---\nb: 2"), r"run\.yaml cannot be read: expected a sin"),
        "NUL": (mapping("seed: 1\0"), r"run\.yaml cannot be read: "),
        "a name that is a list": (mapping("? [a]\n: b"), r"run\.yaml cannot be read: "),
        "a tag in disguise": (
            mapping("%TAG ! tag:yaml.org,2002:python/\n---\nseed: !object/apply:os.system ['ls']"),
            r"run\.yaml cannot be read: could not determine a constructor",
        ),
    },
    dear={"120,000 values"},
)


# ---------------------------------------------------------------------------- weights


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def header(head, data=bytes(8), length=None):
    """A safetensors file with a header of our own, read by all that read adapters and models."""

    def build(directory):
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        size = (len(text) if length is None else length).to_bytes(8, "little")
        adapter = write_adapter_config(directory / "adapter")
        lora = directory / "lora.safetensors"
        for path in (adapter / "adapter_model.safetensors", lora):
            path.write_bytes(size + text + data)

        def read():
            calls = [(each, lora) for each in of_addon("loralib.lora_only:read_lora_only")]
            for call, where in ((read_adapter, adapter), *calls):
                with pytest.raises(ValueError, match=r"\.safetensors"):
                    call(where)
            safetensors_header(adapter / "adapter_model.safetensors")
            verify_adapter(adapter)

        return read

    return build


HEADERS = {
    "a length of 2^63": header(b"{}", length=2**63),
    "a length beyond the file": header(b"{}", length=1000),
    "no header": header(b"", b"", 0),
    "a tensor beyond the file": header(
        {"a": {**TENSOR, "shape": [10**11], "data_offsets": [0, 4 * 10**11]}}
    ),
    "tensors that overlap": header({"a": TENSOR, "b": TENSOR}),
    "bytes of no tensor": header({"a": TENSOR}, bytes(80)),
    "a shape of other bytes": header({"a": {**TENSOR, "shape": [4]}}),
    "a product that overflows": header({"a": {**TENSOR, "shape": [2**32] * 3}}),
    "a negative size": header({"a": {**TENSOR, "shape": [-2]}}),
    "negative offsets": header({"a": {**TENSOR, "data_offsets": [-8, 0]}}),
    "a shape of text": header({"a": {**TENSOR, "shape": "x"}}),
    "a shape of a number": header({"a": {**TENSOR, "shape": 5}}),
    "a shape of shapes": header({"a": {**TENSOR, "shape": [[2]]}}),
    "no shape": header({"a": {**TENSOR, "shape": None}}),
    "a scalar of 8 bytes": header({"a": {**TENSOR, "shape": []}}),
    "a type of a number": header({"a": {**TENSOR, "dtype": 5}}),
    "an unknown type": header({"a": {**TENSOR, "dtype": "Q9"}}),
    "no offsets": header({"a": {"dtype": "F32", "shape": [2]}}),
    "metadata that are a list": header({"__metadata__": [1], "a": TENSOR}),
    "UTF-16": header('{"a": 1}'.encode("utf-16")),
    "objects nested deeply": header(b'{"a":' * 50_000),
}
attacks("header", {name: (build, r"\.safetensors") for name, build in HEADERS.items()})


@cache
def hidden_size():
    return json.loads((BUNDLED_MODEL / "config.json").read_text())["hidden_size"]


LAYER = "base_model.model.model.decoder.layers.0.self_attn.q_proj"


def factors(a=None, b=None, layer=LAYER):
    size = hidden_size()
    a, b = torch.zeros(4, size) if a is None else a, torch.zeros(size, 4) if b is None else b
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}


def adapter(tensors=None, **fields):
    """An adapter on the bundled model, with other tensors or settings."""

    def build(directory):
        path = write_adapter_config(directory / "adapter", **fields)
        save_file(factors() if tensors is None else tensors(), path / "adapter_model.safetensors")
        return partial(read_whole_adapter, path)

    return build


NAN, INF, HUGE = float("nan"), float("inf"), 10**400
SETTINGS = {
    "sound": (adapter(), ""),
    "a rank of 10^9": (adapter(r=10**9), r"must be \(1000000000, n\) for rank 1000000000"),
    "alpha NaN": (adapter(lora_alpha=NAN), r"lora_alpha is nan, which is beyond fp32"),
    "alpha inf": (adapter(lora_alpha=INF), r"lora_alpha is inf, which is beyond fp32"),
    "alpha of 400 digits": (
        adapter(lora_alpha=HUGE),
        r"lora_alpha is 10+\.\.\.0+, which is beyond fp32",
    ),
    "dropout NaN": (adapter(lora_dropout=NAN), r"lora_dropout must be in \[0, 1\)"),
    "dropout 5": (adapter(lora_dropout=5), r"lora_dropout must be in \[0, 1\)"),
    "dropout of 400 digits": (adapter(lora_dropout=HUGE), r"lora_dropout must be in"),
    "layers that are a number": (adapter(target_modules=5), r"target_modules must be"),
    "layers of all types": (adapter(target_modules=["q_proj", 5]), r"names modules by text, got 5"),
    "saved modules of all types": (adapter(modules_to_save=[{}]), r"names modules by text, got \{"),
    "rank_pattern 10^9": (adapter(rank_pattern={"q_proj": 10**9}), r"for rank 1000000000"),
    "alpha_pattern NaN": (
        adapter(alpha_pattern={"q_proj": NAN}),
        r"alpha_pattern of 'q_proj' must",
    ),
    "alpha_pattern inf": (
        adapter(alpha_pattern={"q_proj": INF}),
        r"alpha_pattern of 'q_proj' must",
    ),
    "a base above": (adapter(base_model_name_or_path="../../etc"), r"the base .*/etc"),
    "a base in /etc": (adapter(base_model_name_or_path="/etc"), r"/etc of the adapter .*holds no"),
    "a base in /dev/zero": (adapter(base_model_name_or_path="/dev/zero"), r"names /dev/zero"),
    "a base at an address": (adapter(base_model_name_or_path="http://x/y"), r"names http://x/y"),
    "a base that is an option": (adapter(base_model_name_or_path="--seed"), r"names --seed"),
    "a base of NUL": (adapter(base_model_name_or_path="a\0b"), r"the base of the adapter"),
    "a base of a number": (adapter(base_model_name_or_path=5), r"base_model_name_or_path must be"),
    "a kind of a number": (adapter(peft_type=5), r"peft_type 5 is not supported"),
    "a start of a list": (adapter(init_lora_weights=[1]), r"init_lora_weights \[1\] is not supp"),
}
attacks("adapter", SETTINGS)
WEIGHTS = {
    "inf": (lambda: factors(None, torch.full((hidden_size(), 4), INF)), "lora_B holds values that"),
    "doubles beyond floats": (
        lambda: factors(torch.full((4, hidden_size()), 1e300, dtype=torch.float64)),
        "lora_A holds values that are not finite",
    ),
    "whole numbers": (
        lambda: factors(torch.zeros(4, hidden_size(), dtype=torch.int64)),
        r"torch\.int64, which is not valid for a weight",
    ),
    "complex numbers": (
        lambda: factors(torch.zeros(4, hidden_size(), dtype=torch.complex64)),
        r"torch\.complex64, which is not valid for a weight",
    ),
    "no values": (lambda: factors(torch.zeros(0, hidden_size())), r"must be \(4, n\) for rank 4"),
    "a scalar": (lambda: factors(torch.zeros(())), r"must be \(4, n\) for rank 4, got \(\)"),
    "three sides": (
        lambda: factors(torch.zeros(4, hidden_size(), 1)),
        r"lora_A of .* has 1 inputs",
    ),
    "another width": (lambda: factors(torch.zeros(4, hidden_size() + 1)), r"of another base"),
    "a name in /etc": (
        lambda: {"/etc/passwd.lora_A.weight": torch.zeros(4, hidden_size())},
        r"unexpected tensor '/etc/passwd",
    ),
    "no name": (lambda: {"": torch.zeros(4)}, r"unexpected tensor ''"),
    "a name that clears the screen": (
        lambda: {"a\x1b[2J.lora_A.weight": torch.zeros(4)},
        r"unexpected tensor 'a\\x1b\[2J",
    ),
}
attacks("factors", {name: (adapter(make), says) for name, (make, says) in WEIGHTS.items()})


def index(names):
    """A model in several files, whose index says where each tensor is."""

    def build(directory):
        path = copy_model(directory / "model")
        (path / "model.safetensors").rename(directory / "x.safetensors")
        os.mkfifo(path / "pipe.safetensors")
        content = names if isinstance(names, dict) else {"weight_map": {"a": names}}
        (path / "model.safetensors.index.json").write_text(json.dumps(content))

        def read():
            for call in of_addon("loralib.extract:read_checkpoint"):
                with pytest.raises(ValueError, match="model"):
                    call(path)
            load(path)

        return read

    return build


INDEXES = {
    "a file above": (index("../x.safetensors"), r"'\.\./x\.safetensors' is not the name of a file"),
    "a file in /etc": (index("/etc/passwd"), r"'/etc/passwd' is not the name of a file beside it"),
    "a number": (index(5), r"5 is not the name of a file beside it"),
    "a list": (index(["a"]), r"\['a'\] is not the name of a file beside it"),
    "no name": (index(""), r"'' is not the name of a file beside it"),
    "a pipe": (index("pipe.safetensors"), r"pipe\.safetensors is not a regular file"),
    "no map": (index({}), r"it has no object weight_map"),
    "a map that is a list": (index({"weight_map": [1]}), r"it has no object weight_map"),
}
attacks("index", INDEXES)


# ---------------------------------------------------------------------------- models, tokenizers


def model(**fields):
    def build(directory):
        path = copy_model(directory / "model")
        own = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**own, **fields}))
        return partial(load, path)

    return build


UNLOADED = r"--model_name_or_path .*model: its (model|configuration) cannot be loaded: "
CONFIGS = {
    "10^9 layers": (model(num_hidden_layers=10**9), r"num_hidden_layers .* 0 to 10,000, got"),
    "100,000 layers": (model(num_hidden_layers=10**5), r"num_hidden_layers .* 0 to 10,000, got"),
    "-1 layers": (model(num_hidden_layers=-1), r"num_hidden_layers .* 0 to 10,000, got -1"),
    "10^9 labels": (model(num_labels=10**9), r"num_labels .* 0 to 10,000, got"),
    "layers of text": (model(num_hidden_layers="2"), UNLOADED),
    "10^12 tokens": (model(vocab_size=10**12), UNLOADED + "its config.json describes weights of"),
    "-5 tokens": (model(vocab_size=-5), UNLOADED + "Padding_idx"),
    "tokens of text": (model(vocab_size="x"), UNLOADED),
    "10^300 tokens": (model(vocab_size=1e300), UNLOADED),
    "a width of 10^12": (model(hidden_size=10**12), UNLOADED + "Storage size calculation"),
    "no heads": (model(num_attention_heads=0), UNLOADED + "integer division"),
    "10^12 positions": (model(max_position_embeddings=10**12), UNLOADED + "its config.json"),
    "a pad token beyond": (model(pad_token_id=10**9), UNLOADED + "Padding_idx"),
    "an unknown activation": (model(activation_function="__class__"), UNLOADED),
    "an unknown kind": (model(model_type="nope"), UNLOADED),
    "a kind that is a list": (model(model_type=["opt"]), UNLOADED),
    "an unknown type": (model(dtype="nope"), UNLOADED),
    "an unknown quantisation": (model(quantization_config=[1]), r"is quantised|cannot be loaded"),
    "code of a number": (model(auto_map=5), UNLOADED),
    "architectures that are a number": (model(architectures=5), ""),
}
attacks(
    "model",
    CONFIGS,
    dear=CONFIGS.keys() - {"10^9 layers", "-1 layers", "10^9 labels", "10^12 tokens"},
)


def tokenizer(edit=None, **fields):
    def build(directory):
        path = copy_model(directory / "model")
        if edit is not None:
            content = json.loads((path / "tokenizer.json").read_text())
            edit(content)
            (path / "tokenizer.json").write_text(json.dumps(content))
        settings = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**settings, **fields}))
        return partial(load_tokenizer, str(path), ModelConfig())

    return build


def added(number):
    token = {"content": "<x>", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": True, "id": number}
    return lambda content: content["added_tokens"].append(token)


def file_of(name, text):
    def build(directory):
        (copy_model(directory / "model") / name).write_text(text)
        return partial(load_tokenizer, str(directory / "model"), ModelConfig())

    return build


UNREAD = r"--model_name_or_path .*model: its tokenizer cannot be loaded: "
REGEX = {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}
TOKENIZERS = {
    "an id of 10^12": (tokenizer(added(10**12)), UNREAD),
    "a negative id": (tokenizer(added(-1)), UNREAD),
    "an id of text": (tokenizer(added("x")), UNREAD),
    "a vocabulary of texts": (tokenizer(lambda c: c["model"]["vocab"].update(x="x")), UNREAD),
    "no model": (tokenizer(lambda c: c.pop("model")), UNREAD),
    "a broken expression": (tokenizer(lambda c: c.update(normalizer=REGEX)), UNREAD),
    "an end that is a number": (tokenizer(eos_token=5), UNREAD),
    "an end that is a list": (tokenizer(eos_token=["a"]), UNREAD),
    "a class of a number": (tokenizer(tokenizer_class=5), UNREAD),
    "extra tokens of numbers": (tokenizer(extra_special_tokens={"a": 5}), UNREAD),
    "tokenizer.json a list": (file_of("tokenizer.json", "[]"), UNREAD),
    "tokenizer.json nested deeply": (file_of("tokenizer.json", '{"a":' * 100_000), UNREAD),
    "tokenizer_config.json a list": (file_of("tokenizer_config.json", "[]"), UNREAD),
    "special_tokens_map.json a list": (file_of("special_tokens_map.json", "[]"), UNREAD),
}
attacks("tokenizer", TOKENIZERS, dear=list(TOKENIZERS)[5:])


# ---------------------------------------------------------------------------- manifests, records


def manifest(files, **fields):
    def build(directory):
        path = write_adapter_config(directory / "adapter")
        write_manifest(path, kind="adapter")
        content = json.loads((path / "manifest.json").read_text())
        content = {**content, "files": {**content["files"], **files}, **fields}
        content["sha256"] = _own_sha256(content)
        (path / "manifest.json").write_bytes(_canonical(content))
        return partial(verify, path, kind="adapter")

    return build


def listing(name, size=1):
    return manifest({name: {"bytes": size, "sha256": "0" * 64}})


CARD = "adapter_config.json"
attacks(
    "manifest",
    {
        "half a character": (listing("\ud800"), r"lists '\\ud800', which names no file"),
        "a negative size": (listing(CARD, -1), r"bytes, its manifest says -1"),
        "a size of 30 digits": (listing(CARD, 10**30), r"bytes, its manifest says 10{30}"),
        "a size of text": (listing(CARD, "1"), r"lacks the size or SHA-256"),
        "a file that is a list": (manifest({"x": [1]}), r"lacks the size or SHA-256"),
        "a format of a list": (manifest({}, format=[1]), r"has format \[1\], this version reads 1"),
        "a kind of an object": (manifest({}, kind={"a": 1}), r"is of kind \{'a': 1\}, not"),
    },
)


def state(text="", **changes):
    """A checkpoint whose state says something else; read by all that read one."""

    def build(directory):
        path = step_directory(directory / "out", 5)
        path.mkdir(parents=True)
        options = {"per_device_train_batch_size": 4, "lora_dim": 4, "only_optimize_lora": True}
        identity = {"stage": "sft", "rows_per_step": 4}
        content = {"step": 5, "identity": identity, "options": {}, "config": options}
        content |= {"engines": {"model": {}}, **changes}
        (path / "state.json").write_text(text or json.dumps(content))
        write_manifest(path, kind="checkpoint")
        argv = ["--output_dir", str(directory / "out"), "--resume_from_checkpoint", str(path)]

        def read():
            for describe in DESCRIBE:
                describe(path)
            with contextlib.suppress(ValueError):
                find_model(str(path))
            settle(parse_config(SupervisedConfig, argv), stage="sft")

        return read

    return build


RANK = {"per_device_train_batch_size": 4, "lora_dim": 4, "only_optimize_lora": True}
NO_STATE = r"state\.json (is not the state of a run|of the checkpoint is damaged)"
attacks(
    "state",
    {
        "a text nested deeply": (state("[" * 100_000), NO_STATE),
        "a step of text": (state(step="5"), NO_STATE),
        "an identity of text": (state(identity="x"), NO_STATE),
        "an empty identity": (state(identity={}), NO_STATE),
        "options of a list": (state(options=[]), NO_STATE),
        "settings of text": (state(config="x"), NO_STATE),
        "empty settings": (state(config={}), NO_STATE),
        "rows of text": (state(identity={"rows_per_step": "x"}), NO_STATE),
        "rows without end": (state(identity={"rows_per_step": 10**12}), NO_STATE),
        "a batch without end": (state(config={"per_device_train_batch_size": 10**12}), NO_STATE),
        "a rank of 400 digits": (state(config={"lora_dim": HUGE}), NO_STATE),
        "engines of a number": (state(engines=5), NO_STATE),
        "a model of a number": (state(config={**RANK, "model_name_or_path": 5}), ""),
    },
)


def data_set(state=None, splits=None):
    """A directory as ``save_to_disk`` leaves it."""

    def build(directory):
        (directory / "secret").mkdir()
        (directory / "secret" / "a.jsonl").write_text('{"text": "a"}\n')
        home = directory / "set"
        home.mkdir()
        (home / "dataset_info.json").write_text("{}")
        for name, content in (("state.json", state), ("dataset_dict.json", splits)):
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (home / name).write_text(text)
        return partial(find_source, "data_path", str(home))

    return build


attacks(
    "data set",
    {
        "a file above": (
            data_set({"_data_files": [{"filename": "../secret/a.jsonl"}]}),
            r"state\.json names a\.jsonl, which does not exist",
        ),
        "files of numbers": (data_set({"_data_files": [5]}), r"state\.json has no list"),
        "a state nested deeply": (
            data_set("[" * 100_000),
            rf"state\.json cannot be read: .*{DEEP}",
        ),
        "a split above": (data_set(splits={"splits": ["../secret"]}), r"has no list of names"),
        "a split of the root": (data_set(splits={"splits": ["/"]}), r"has no list of names"),
        "a split that is above": (data_set(splits={"splits": [".."]}), r"has no list of names"),
        "splits nested deeply": (data_set(splits="[" * 100_000), rf"dataset_dict\.json .*{DEEP}"),
    },
)


def rollout_file(content):
    def build(directory):
        (directory / "rollouts.jsonl.gz").write_bytes(content())
        return partial(READ_ROLLOUTS[0], directory)

    return build


def rollout_bomb(directory):
    with gzip.open(directory / "rollouts.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(1100):
            file.write(bytes(2**20))
    return partial(READ_ROLLOUTS[0], directory)


RESPONSE = (
    '{"iteration": 1, "prompt": "a", "response": "b", "reward": 2.5, "rewards": {}, '
    '"advantage": 0, "kl": 0, "length": 1}\n'
)
ROLLOUTS = r"rollouts\.jsonl\.gz holds no responses of a run"
ROLLOUT_ATTACKS = {
    "a bomb": (rollout_bomb, ROLLOUTS + ": unpacked it holds more than 1,073,741,824"),
    "nested deeply": (rollout_file(lambda: gzip.compress(b"[" * 10**5)), ROLLOUTS),
    "a number": (rollout_file(lambda: gzip.compress(b"5")), ROLLOUTS + ": line 1 is none"),
    "a reward of 400 digits": (
        rollout_file(lambda: gzip.compress(RESPONSE.replace("2.5", "1" + "0" * 400).encode())),
        ROLLOUTS + ": line 1 is none",
    ),
    "20,000 members": (rollout_file(lambda: gzip.compress(RESPONSE.encode()) * 20_000), ""),
}
if READ_ROLLOUTS:
    attacks("rollouts", ROLLOUT_ATTACKS, dear={"a bomb"}, bombs={"a bomb"})


# ---------------------------------------------------------------------------- chat templates


def template(text):
    """A tokenizer's own template, which renders a conversation."""

    def build(directory):
        own = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
        own.chat_template = text + "{{ messages }}"
        return partial(make_chat(own).render, TURNS, add_generation_prompt=False)

    return build


DOUBLE = "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DOUBLED = "{% set n = namespace(x=['a']) %}" + DOUBLE
BOUND = r"rejects the messages: it takes more than \d+ s, 1 GiB of memory or 33,554,432 characters"
TEMPLATES = {
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        BOUND,
    ),
    "a text of 10^10": ("{{ 'a' * 10**10 }}", BOUND),
    "a text of 10^10, padded": ("{{ 'a'|center(9999999999) }}", BOUND),
    "a text of 10^10, replaced": ("{{ ('a' * 10**5)|replace('a', 'b' * 10**5) }}", BOUND),
    "a list of 10^9": ("{{ [1]|batch(999999999, 'x')|list }}", BOUND),
    "an indent of 10^9": ("{{ messages|tojson(indent=999999999) }}", BOUND),
    "50 million characters": ("{% for a in range(5000) %}{{ 'a' * 10000 }}{% endfor %}", BOUND),
    "lists in lists": (DOUBLED + "{{ n.x }}", BOUND),
    "lists in lists as JSON": (DOUBLED + "{{ n.x|tojson }}", BOUND),
    "10^9 paragraphs": ("{{ lipsum(999999999) }}", BOUND),
    "a range of 10^12": ("{{ range(10**12)|list }}", r"rejects the messages: Range too big"),
    "a macro of itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"recursion depth"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"recursion depth"),
    "a class": ("{{ messages.__class__.__mro__ }}", r"access to attribute '__class__'"),
    "the globals of a function": ("{{ lipsum.__globals__['os'] }}", r"attribute '__globals__'"),
    "the globals of a class": ("{{ cycler.__init__.__globals__ }}", r"attribute '__init__'"),
    "a format with a class": ("{{ '{0.__class__.__mro__}'.format(messages) }}", r"__class__|"),
    "a file": ("{% include '/etc/passwd' %}", r"no loader for this environment"),
    "a module": ("{% import 'os' as os %}", r"no loader for this environment"),
    "a change of the messages": ("{{ messages.append(1) }}", r"attribute 'append'"),
    "a division by zero": ("{{ 1 / 0 }}", r"rejects the messages: division by zero"),
    "no template": ("{% for %}", r"rejects the messages: Expected an expression"),
}
attacks(
    "template",
    {name: (template(text), says) for name, (text, says) in TEMPLATES.items()},
    dear={"loops in loops", "lists in lists", "lists in lists as JSON", "10^9 paragraphs"}
    | {"a text of 10^10, replaced", "50 million characters", "an indent of 10^9"}
    | {"a text of 10^10, padded", "a list of 10^9"},
)


def beyond_the_embedding(directory):
    path = copy_model(directory / "model")
    content = json.loads((path / "tokenizer.json").read_text())
    added(10**6)(content)
    (path / "tokenizer.json").write_text(json.dumps(content))
    source, options = find_model(str(path)), ModelConfig()

    def read():
        own = load_tokenizer(source.tokenizer, options)
        lora, more = LoraConfig(lora_dim=2), {"dtype": torch.float32, "seed": 0, "meta": False}
        build_causal_lm(source, own, options, lora, **more)

    return read


attacks("tokenizer", {"an id beyond the embedding": (beyond_the_embedding, r"have no embedding")})


# ---------------------------------------------------------------------------- the table is run


def limited(call):
    """What ``call`` raised, run in a process of its own that may take ``MEMORY`` more bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
        signal.alarm(SECONDS)
        with os.fdopen(writing, "w", errors="replace") as pipe:
            pipe.write(raised(call))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as pipe:
        words = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"ended by status {status}"
    return words


def raised(call):
    """The message of the ValueError of ``call``, or the name of what else it raised."""
    try:
        call()
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - that is what is tested
        return f"{type(error).__name__} instead of a ValueError: {error}"
    return ""


@pytest.fixture
def in_time():
    """Nothing hangs: a call that takes more than ``SECONDS`` is interrupted."""

    def interrupt(number, frame):
        raise AssertionError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "attack",
    ATTACKS if ALL else [each for each in ATTACKS if not each.dear][::3],
    ids=lambda each: each.name,
)
def test_a_file_is_refused_in_one_message_or_read(attack, tmp_path, in_time):
    call = attack.build(tmp_path)
    words = limited(call) if attack.bomb else raised(call)
    assert "instead of a ValueError" not in words
    assert re.search(attack.says, words) if attack.says else words == ""
    assert len(words) < 10_000


def test_the_table_names_each_attack_once():
    names = [each.name for each in ATTACKS]
    assert len(names) == len(set(names))
    assert len(names) >= 300


def test_a_template_that_exceeds_a_bound_is_not_tried_again():
    own = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    own.chat_template = "{{ 'b' * 10**10 }}{{ messages }}"
    assert re.search(
        BOUND, raised(partial(make_chat(own).render, TURNS, add_generation_prompt=False))
    )
    process = template_process.template_process()
    begun = time.monotonic()
    assert re.search(
        BOUND, raised(partial(make_chat(own).render, [*TURNS, *TURNS], add_generation_prompt=False))
    )
    assert time.monotonic() - begun < 1
    assert process._process is not None  # which still renders others
    own.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    assert make_chat(own).render(TURNS, add_generation_prompt=False) == "ab"


def test_a_process_that_cannot_render_is_no_fault_of_the_template(monkeypatch):
    monkeypatch.setattr(template_process, "_START", "raise SystemExit(3)")
    process = template_process.TemplateProcess()
    request = {"messages": TURNS, "tools": None, "variables": {}}
    for _ in range(2):
        with pytest.raises(ValueError, match="the process that renders it ended with 3"):
            process.render("{{ messages }}", request)


def test_a_template_that_exceeds_a_bound_for_many_messages_still_renders_few():
    process = template_process.TemplateProcess()
    template = "{% for m in messages %}{{ 'b' * (5 * 2**20) }}{% endfor %}"
    request = {"tools": None, "variables": {}}
    for count, is_refused in ((9, True), (1, False), (10, True), (2, False)):
        messages = [{"role": "user", "content": "a"}] * count
        if is_refused:
            with pytest.raises(ValueError, match="it takes more than"):
                process.render(template, {**request, "messages": messages})
        else:
            text, _ = process.render(template, {**request, "messages": messages})
            assert len(text) == count * 5 * 2**20


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"] if ALL else ["SIGKILL"])
def test_a_request_that_was_ended_from_outside_leaves_no_reply_to_the_next(name):
    process = template_process.TemplateProcess()

    def said(text, template="{{ messages[0].content }}"):
        messages = [{"role": "user", "content": text}]
        return process.render(template, {"tools": None, "variables": {}, "messages": messages})[0]

    assert said("a") == "a"
    if name == "SIGKILL":
        process._process.kill()
    else:
        slow = "{% for a in range(9999) %}{% for b in range(200) %}{% endfor %}{% endfor %}x"
        main = threading.main_thread().ident
        late = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT])

        def interrupted():  # here, on a busy machine too
            late.start()
            said("b", slow)
            late.join()
            time.sleep(1)

        # A shell has what it starts in the background ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted()
        finally:
            signal.signal(signal.SIGINT, before)
    assert said("c") == "c"
    assert process._endless == {}


def test_a_pipe_of_the_shell_is_read_and_another_is_not(tmp_path):
    from dschat_lora.config.files import read_text

    reading, writing = os.pipe()
    os.write(writing, b"seed: 1\n")
    os.close(writing)
    assert read_text(Path(f"/dev/fd/{reading}")) == "seed: 1\n"
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_text(tmp_path / "pipe")


def test_what_a_template_renders_is_what_transformers_makes_of_it():
    own = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    own.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim | tojson }}"
        "{% if loop.last and add_generation_prompt %}<assistant>{% endif %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "\u00e9 \U0001f600 <&>\n"}, *TURNS]
    for asked in (False, True):
        expected = own.apply_chat_template(turns, tokenize=False, add_generation_prompt=asked)
        assert make_chat(own).render(turns, add_generation_prompt=asked) == expected


def render_by(template):
    own = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    own.chat_template = template
    try:
        return make_chat(own).render(TURNS, add_generation_prompt=False)
    except ValueError as error:
        return str(error)


def test_processes_that_prepare_data_render_the_same_within_the_same_bounds(monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.5)
    templates = [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'b' * 10**10 }}",
        "{{ messages[7].content }}",
        "{{ 'b' * (40 * 2**20) }}",
    ]
    here = [render_by(each) for each in (templates[0], templates[3])]
    text, endless, large, missing, long = map_in_order(render_by, templates, workers=2)
    assert [text, missing] == here
    for refusal in (endless, large, long):
        assert "it takes more than 0.5 s, 1 GiB of memory or 33,554,432 characters" in refusal


# ---------------------------------------------------------------------------- terminals


def test_control_characters_of_a_message_do_not_reach_the_terminal(capsys):
    from dschat_lora.runtime.stage_main import fail

    with pytest.raises(SystemExit):
        fail(f"a file named {ESCAPES}")
    words = seen(capsys)
    assert "\\u001b[2J" in words
    assert not has_control(words)


def test_control_characters_of_answers_do_not_reach_the_terminal(capsys, monkeypatch):
    import sys

    from dschat_lora.supervised.inference import output_file

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with output_file(None) as file:
        file.write(f"an answer {ESCAPES}\n")
    words = seen(capsys)
    assert "[2J" in words
    assert not has_control(words)


def test_the_json_that_is_printed_can_be_read_with_its_control_characters(capsys):
    from dschat_lora.report.terminal import print_json

    text = "\x1b[2J\x07\x9b31m\x7f\u00e9"
    print_json({"a": text})
    assert json.loads(seen(capsys)) == {"a": text}
