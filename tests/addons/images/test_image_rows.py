"""Rows with pictures in every form that people write them in, and what is wrong with others."""

import base64
import json
import os
import subprocess
import sys
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from dschat_lora.addons.images.pictures import Picture
from dschat_lora.addons.images.rows import with_pictures
from dschat_lora.config.data import parse_columns
from dschat_lora.data.readers import RawRow, RowError, iter_file, iter_rows
from dschat_lora.data.rows import RowOptions, parse_row
from dschat_lora.data.sources import DataSource

HERE = {"type": "image"}


def text(content):
    return {"type": "text", "text": content}


def u(content, **keys):
    return {"role": "user", "content": content, **keys}


def a(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def png(colour, mode="RGB"):
    buffer = BytesIO()
    Image.new(mode, (3, 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = png("red"), png("blue")
RED64, BLUE64 = (base64.b64encode(each).decode() for each in (RED, BLUE))
URI = f"data:image/png;base64,{RED64}"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, data in (("red.png", RED), ("sub/blue.png", BLUE), ("c,:d.png", RED)):
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def parse(folder):
    """Values of a row of a file in the folder, as the trunk parses it."""

    def parse(row, *, allow_urls=False, columns=(), line=1):
        (folder / "rows.jsonl").touch()
        options = RowOptions(
            parse_columns(columns),
            media=SimpleNamespace(row=partial(with_pictures, allow_urls=allow_urls)),
        )
        return parse_row(RawRow(f"{folder}/rows.jsonl:{line}", row), options).values

    return parse


# ----------------------------------------------------------------------------- forms of a picture


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("red.png", "red.png"),
        ("sub/../sub/blue.png", "sub/blue.png"),
        ("c,:d.png", "c,:d.png"),
        ("{folder}/red.png", "red.png"),
        ("file://{folder}/sub/blue.png", "sub/blue.png"),
        ("FILE://{folder}/c%2C%3Ad.png", "c,:d.png"),
        ("~/red.png", "red.png"),
        (Path("red.png"), "red.png"),
        ({"path": "red.png", "bytes": None}, "red.png"),
        (URI, RED),
        (URI.replace("data:", "DATA:"), RED),
        (URI[:60] + "\n" + URI[60:], RED),
        (RED64, RED),
        ({"base64": RED64}, RED),
        ({"bytes": RED, "path": "gone.png"}, RED),
        ({"bytes": RED64, "path": None}, RED),
        ({"url": URI, "detail": "low"}, RED),
        ({"type": "base64", "media_type": "image/png", "data": RED64}, RED),
        (RED, RED),
        (bytearray(RED), RED),
        (np.str_("red.png"), "red.png"),
        (pa.scalar(RED), RED),
        (pa.scalar({"bytes": None, "path": "red.png"}), "red.png"),
    ],
)
def test_each_form_of_a_picture_is_a_file_or_its_bytes(parse, folder, monkeypatch, given, found):
    monkeypatch.setenv("HOME", str(folder))
    given = given.replace("{folder}", str(folder)) if isinstance(given, str) else given
    wanted = Picture(data=found) if isinstance(found, bytes) else Picture(str(folder / found))
    for column, value in (("images", [given]), ("image", given), ("image", [given])):
        assert parse({"prompt": "<image> q", column: value})["images"] == (wanted,)


@pytest.mark.parametrize("values", [np.array(["red.png", "red.png"]), ("red.png", "red.png")])
def test_a_column_may_be_an_array_or_a_tuple(folder, values):
    row = with_pictures({"text": "<image><image>", "images": values}, ["text"], folder)
    assert row["images"] == (Picture(str(folder / "red.png")),) * 2


def test_urls_are_pictures_if_they_are_allowed(parse):
    row = {"prompt": "<image>?", "image": "HTTPS://a.b/c.png"}
    assert parse(row, allow_urls=True)["images"] == (Picture(url="HTTPS://a.b/c.png"),)


def test_a_pil_image_is_a_picture_itself(parse):
    image = Image.new("RGB", (2, 2))
    (picture,) = parse({"prompt": "<image>?", "image": image})["images"]
    assert picture.image is image


# --------------------------------------------------------------------------------- forms of a row


def chat(*messages, **columns):
    return {"messages": [*messages], **columns}


def shares(*said):
    """Turns of a human and a model, as ShareGPT has them."""
    return [{"from": ("human", "gpt")[n % 2], "value": each} for n, each in enumerate(said)]


SYSTEM, BOTH = {"role": "system", "content": "s"}, ["red.png", "sub/blue.png"]
ONE = [u([HERE, text("What?")]), a("A cat.")]
TWO = [u([HERE, text("a\n"), HERE, text(" b")]), a("yes"), u("And?"), a("no")]
SHARES = shares("<image>a\n<image> b", "yes", "And?", "no")
CALL = a(None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
TOOLS = [CALL, {"role": "tool", "content": "r"}, a("A cat.")]
OTHERS = [{**SYSTEM, "content": [HERE, text("s")]}, u("1"), a([text("2"), HERE]), u("3"), a("4")]
FOUR = [u([text("1"), HERE]), a("2"), u([HERE, text("3")]), a("4")]
FORMS = {
    "transformers: bare parts": ({"messages": ONE, "images": ["red.png"]}, ONE, "r"),
    "column of one": ({"messages": ONE, "image": "red.png"}, ONE, "r"),
    "parts with text keys of Parquet": (
        chat(
            u([{"text": "Q\n", "type": "text", "index": None}, {**HERE, "index": 0}]),
            a([{"text": "A", "type": "text", "index": None}]),
            images=["red.png"],
        ),
        [u([text("Q\n"), HERE]), a([{"text": "A", "type": "text", "index": None}])],
        "r",
    ),
    "two bare parts in two messages": (chat(*FOUR, images=["sub/blue.png", "red.png"]), FOUR, "br"),
    **{
        f"transformers: {key}": (chat(u([{**HERE, key: value}, text("What?")]), ONE[1]), ONE, kind)
        for key, value, kind in [
            ("image", "red.png", "r"),
            ("path", "red.png", "r"),
            ("url", "red.png", "r"),
            ("url", URI, "R"),
            ("base64", RED64, "R"),
            ("image", {"bytes": RED, "path": None}, "R"),
            ("value", "red.png", "r"),
            ("bytes", RED, "R"),
            ("source", {"type": "base64", "media_type": "image/png", "data": RED64}, "R"),
        ]
    },
    **{
        name: (chat(u(parts), ONE[1]), ONE, "R")
        for name, parts in {
            "datasets": [{**HERE, "bytes": RED, "path": "gone.png"}, text("What?")],
            "OpenAI": [{"type": "image_url", "image_url": {"url": URI}}, text("What?")],
            "OpenAI: responses": [
                {"type": "input_image", "image_url": URI, "detail": "auto"},
                {"type": "input_text", "text": "What?"},
            ],
        }.items()
    },
    "LLaMA-Factory: OpenAI with values": (
        chat(
            u([{"type": "image_url", "value": "red.png"}, {"type": "text", "value": "What?"}]),
            a([{"type": "text", "value": "A cat."}]),
        ),
        [ONE[0], a([text("A cat.")])],
        "r",
    ),
    "LLaMA-Factory: messages": (chat(u("<image>a\n<image> b"), *TWO[1:], images=BOTH), TWO, "rb"),
    "LLaMA-Factory: ShareGPT": ({"conversations": SHARES, "images": BOTH}, TWO, "rb"),
    **{
        f"LLaVA: {said!r}": (
            {"id": "1", "image": "red.png", "conversations": shares(said, "A cat.")},
            [u(parts), ONE[1]],
            "r",
        )
        for said, parts in [
            ("<image>\nWhat?", [HERE, text("\nWhat?")]),
            ("What?\n<image>", [text("What?\n"), HERE]),
        ]
    },
    "LLaMA-Factory: Alpaca": (
        {"instruction": "Look:", "input": "<image>", "output": "A cat.", "images": ["red.png"]},
        [u([text("Look:\n"), HERE]), a("A cat.")],
        "r",
    ),
    "ms-swift: objects": (
        chat(u("<image>What?"), a("A cat."), images=[{"bytes": RED, "path": None}]),
        ONE,
        "R",
    ),
    "ms-swift: a path alone": (chat(u("<image>What?"), a("A cat."), images="red.png"), ONE, "r"),
    "ms-swift: a system message and calls": (
        chat(SYSTEM, u("<image>What?"), *TOOLS, images=["red.png"]),
        [SYSTEM, ONE[0], *TOOLS],
        "r",
    ),
    "TRL: plain text": (chat(u("What?"), a("A cat."), images=["red.png"]), ONE, "r"),
    "TRL: two of plain text behind a system message": (
        chat(SYSTEM, u("1"), a("2"), u("3"), a("4"), images=BOTH),
        [SYSTEM, u([HERE, HERE, text("1")]), a("2"), u("3"), a("4")],
        "rb",
    ),
    "TRL: the first user message that is text": (
        chat(u([text("1")]), a("2"), u("3"), a("4"), images=["red.png"]),
        [u([text("1")]), a("2"), u([HERE, text("3")]), a("4")],
        "r",
    ),
    "TRL: parts of their own, and others of the column": (
        chat(u([HERE, {**HERE, "image": URI}, HERE, text("?")]), a("b"), images=BOTH),
        [u([HERE, HERE, HERE, text("?")]), a("b")],
        "rRb",
    ),
    "a question": ({"image": "red.png", "question": "What?", "answer": "A cat."}, ONE, "r"),
    "beside columns that are not read": (
        {"messages": ONE, "prompt": "<image><image>", "completion": "<image>", "image": "red.png"},
        ONE,
        "r",
    ),
    "pictures of other roles": (chat(*OTHERS, images=BOTH), OTHERS, "rb"),
}


def pictures(folder, kinds):
    files = {"r": "red.png", "b": "sub/blue.png"}
    return tuple(
        Picture(data=RED) if kind == "R" else Picture(str(folder / files[kind])) for kind in kinds
    )


@pytest.mark.parametrize("name", FORMS)
def test_messages_in_each_form_become_one(parse, folder, name):
    row, messages, kinds = FORMS[name]
    before = repr(row)
    values = parse(row)
    assert values["messages"] == messages
    assert values["images"] == pictures(folder, kinds)
    assert "image" not in values
    assert repr(row) == before  # of which the caller may make other things


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "<image> What?", "completion": " A cat."}, "r"),
        ({"prompt": "What? <image>"}, "r"),
        ({"text": "<image><image> a pair"}, "rb"),
        ({"prompt": "1 <image> 2 <image>", "chosen": "a", "rejected": "b"}, "rb"),
        ({"prompt": "<image>", "completion": "a", "label": True}, "r"),
    ],
)
def test_signs_of_plain_text_stay(parse, folder, row, found):
    names = {"r": "red.png", "b": "sub/blue.png"}
    values = parse({**row, "images": [names[kind] for kind in found], "id": 7})
    assert values == {**row, "id": 7, "images": pictures(folder, found)}


PROMPT = [u([HERE, text("What?")])]
PREFERENCES = {
    "bare parts": {"prompt": PROMPT, "chosen": [a("b")], "rejected": [a("c")]},
    "plain text": {"prompt": [u("What?")], "chosen": [a("b")], "rejected": [a("c")]},
    "sign": {"prompt": [u("<image>What?")], "chosen": [a("b")], "rejected": [a("c")]},
    "a text prompt": {"prompt": "<image>What?", "chosen": [a("b")], "rejected": [a("c")]},
    "without a prompt": {"chosen": [*PROMPT, a("b")], "rejected": [*PROMPT, a("c")]},
    "without a prompt, text": {"chosen": [u("What?"), a("b")], "rejected": [u("What?"), a("c")]},
    "UltraFeedback": {"prompt": PROMPT, "chosen": [*PROMPT, a("b")], "rejected": [*PROMPT, a("c")]},
    "LLaMA-Factory": {
        "conversations": shares("<image>What?"),
        "chosen": {"from": "gpt", "value": "b"},
        "rejected": {"from": "gpt", "value": "c"},
    },
    "a question": {"question": "What?", "chosen": "b", "rejected": "c"},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_pictures_of_preferences_stand_in_the_prompt(parse, folder, name):
    values = parse({**PREFERENCES[name], "images": ["red.png"]})
    assert values["prompt"] == PROMPT
    assert [values["chosen"], values["rejected"]] == [[a("b")], [a("c")]]
    assert values["images"] == pictures(folder, "r")


def test_a_preference_without_a_prompt_may_bring_its_picture_twice(parse):
    ask = [u([{**HERE, "image": URI}, text("What?")])]
    values = parse({"chosen": [*ask, a("b")], "rejected": [*ask, a("c")]})
    assert (values["prompt"], values["images"]) == (PROMPT, (Picture(data=RED),))


def test_a_text_preference_without_a_prompt_has_its_pictures_before_the_answers(parse, folder):
    head = "\n\nHuman: <image> What?\n\nAssistant:"
    values = parse({"chosen": f"{head} b", "rejected": f"{head} c", "image": "red.png"})
    assert (values["prompt"], values["chosen"], values["rejected"]) == (head, " b", " c")
    assert values["images"] == pictures(folder, "r")


def test_a_label_is_about_the_last_answer(parse, folder):
    values = parse({"messages": ONE, "label": True, "images": ["red.png"]})
    assert (values["prompt"], values["completion"]) == (PROMPT, [a("A cat.")])
    assert values["images"] == pictures(folder, "r")


def test_columns_by_their_names_keep_the_pictures(parse, folder):
    row = {"query": "<image>?", "reply": "b", "image": "red.png"}
    values = parse(row, columns=["prompt=query", "completion=reply"])
    assert (values["prompt"], values["images"]) == ("<image>?", pictures(folder, "r"))
    values = parse({"text": "<image> a", "pics": ["red.png"]}, columns=["images=pics"])
    assert values["images"] == pictures(folder, "r")


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a <image> sign"},
        {"messages": [u("<image>?"), a("b")]},
        {"text": "t", "images": []},
        {"text": "t", "images": None, "image": {"bytes": None, "path": None}},
        {"text": "t", "images": [None]},
        {"prompt": [u([text("q")])], "image": float("nan")},
        {"chosen": "p b", "rejected": "p c", "image": ""},
    ],
)
def test_a_row_without_pictures_stays(parse, row):
    assert parse(row) == {k: v for k, v in row.items() if k not in ("images", "image")}


# ------------------------------------------------------------------------------ files of such rows


def test_parquet_of_datasets_has_its_pictures_within(folder):
    images = [[{"bytes": RED, "path": None}], [{"bytes": BLUE, "path": "b.png"}]]
    parts = [[{"type": "image", "text": None}, {"type": "text", "text": "?"}]] * 2
    table = pa.table(
        {
            "images": images,
            "prompt": [[{"role": "user", "content": each}] for each in parts],
            "completion": [[{"role": "assistant", "content": [text("b")]}]] * 2,
        }
    )
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    rows = [parse_row(raw, OPTIONS).values for raw in iter_file(folder / "rows.parquet")]
    assert [row["images"] for row in rows] == [(Picture(data=RED),), (Picture(data=BLUE),)]
    assert all(row["prompt"] == [u([HERE, text("?")])] for row in rows)


OPTIONS = RowOptions(media=SimpleNamespace(row=with_pictures))


def test_datasets_in_memory_bring_pil_images(folder):
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    data = datasets.Dataset.from_dict(
        {"prompt": ["<image>?"], "images": [[{"bytes": RED, "path": None}]]}, features=features
    )
    source = DataSource("data_path", "rows", (), rows=data)
    (row,) = [parse_row(raw, OPTIONS).values for raw in iter_rows(source)]
    assert row["images"][0].image.getpixel((0, 0)) == (255, 0, 0)
    raw = data.cast_column("images", [datasets.Image(decode=False)])
    source = DataSource("data_path", "rows", (), rows=raw)
    (row,) = [parse_row(raw, OPTIONS).values for raw in iter_rows(source)]
    assert row["images"] == (Picture(data=RED),)


@pytest.mark.smoke
def test_messages_are_those_of_trl(folder, parse):
    """Of each form that TRL reads, its own function's messages, pictures in their places."""
    from trl.data_utils import prepare_multimodal_messages

    image = Image.open(BytesIO(RED))
    other = Image.open(BytesIO(BLUE))
    for messages, images in [
        ([u("What is this?")], [image]),
        ([u("Describe this image."), a("Red.")], [image]),
        ([SYSTEM, u("1"), a("2"), u("3"), a("4")], [image, other]),
        ([u([HERE, text("1"), HERE]), a("2"), u([text("3")]), a("4")], [other, image]),
        ([u([{**HERE, "image": other}, text("1"), HERE]), a([text("2")])], [image]),
    ]:
        values = parse({"messages": [*messages, u("end"), a("end")], "images": images})
        wanted, order = prepare_multimodal_messages(messages, images), []
        for message in wanted:
            for part in message["content"]:
                if part["type"] == "image":
                    order.append(part.pop("image"))
        messages_read = values["messages"][:-2]
        for message in messages_read:
            if isinstance(message["content"], str):
                message = {**message, "content": [text(message["content"])]}
            assert message == wanted.pop(0)
        assert [each.image for each in values["images"]] == order


# ------------------------------------------------------------------------------------- what is bad

FORM = "a picture must be a path, a data URI, bytes, {'bytes': ..., 'path': ...} or a PIL image"
COUNT = "pictures: `images` has {}, `{}` places for {}; a place is {}"
PART = '{"type": "image"}'


def one(image):
    return {"prompt": "<image> q", "image": image}


def nested(depth):
    value = "red.png"
    for _ in range(depth):
        value = {"url": value}
    return value


def part(**keys):
    return chat(u([{**HERE, **keys}, text("q")]), a("b"))


def seen(content):
    return chat(u(content), a("b"), images=["red.png"])


BAD = [
    (
        one("gone.png"),
        "`image` item 1: picture 'gone.png' in '{folder}': No such file or directory",
    ),
    (one("{folder}/gone.png"), "picture '{folder}/gone.png' in '{folder}': No such file"),
    (one("sub"), "`image` item 1: picture '{folder}/sub' is a directory, no file"),
    (one("red.png/x"), "Not a directory"),
    (one("/dev/zero"), "picture '/dev/zero' is a device or the like, no file"),
    (one("pipe"), "picture '{folder}/pipe' is a device or the like, no file"),
    (one("loop"), "Too many levels of symbolic links"),
    (one("a\nb.png"), r"picture 'a\nb.png' in"),
    (one("a\0b.png"), r"picture 'a\x00b.png' in '{folder}': "),
    (one("\ud800.png"), r"picture '\ud800.png' in '{folder}': "),
    (one("x" * 9000), "File name too long"),
    (one("~nobody/a.png"), "No such file"),
    (one("https://a.b/c.png"), "'https://a.b/c.png' is a URL; --allow_image_urls downloads it"),
    (one({"url": "http://a.b"}), "picture 'http://a.b' is a URL; --allow_image_urls"),
    (one("s3://a/b.png"), "picture 's3://a/b.png' is not a file, data, http or https"),
    (one("ftp://a/b.png"), "picture 'ftp://a/b.png' is not a file, data, http or https"),
    (one("file:///gone%20.png"), "picture '/gone .png' in '{folder}': No such file"),
    (one("file://host/gone.png"), "No such file"),
    (one("data:image/png,%89PNG"), "a data URI must have base64, found 'data:image/png'"),
    (one("data:"), "a data URI must have base64, found 'data:'"),
    (one("data:image/png;base64,"), "a picture's base64 is empty"),
    (one("data:image/png;base64,????"), "a picture's base64 is broken ("),
    (one("data:image/png;base64,QUJ"), "a picture's base64 is broken ("),
    (one(RED64 + "!"), "a picture's base64 is broken ("),
    (one({"base64": "QQ="}), "a picture's base64 is broken ("),
    (one({"base64": "\u00e9"}), "a picture's base64 is broken ("),
    (one(7), f"`image` item 1: {FORM}, found int"),
    (one(True), f"{FORM}, found bool"),
    (one(3.5), f"{FORM}, found float"),
    (one([["red.png"]]), f"{FORM}, found list"),
    (one([[[0, 255, 0]]]), f"{FORM}, found list"),
    (one(["red.png", None]), f"`image` item 2: {FORM}, found NoneType"),
    (one(["red.png", ""]), f"`image` item 2: {FORM}, found ''"),
    (one(["red.png", b""]), f"`image` item 2: {FORM}, found b''"),
    (one("  "), f"{FORM}, found '  '"),
    (one(object()), f"{FORM}, found object"),
    (one({"height": 3, "width": 2}), f"{FORM}, found an object of ['height', 'width']"),
    (one({"bytes": 7}), f"{FORM}, found int"),
    (one({"bytes": [1, 2]}), f"{FORM}, found list"),
    (one({"url": {"url": 3}}), f"{FORM}, found int"),
    ({**one("red.png"), "images": ["red.png"]}, "row has pictures in `images` and in `image`"),
    ({"prompt": "q", "images": ["red.png"]}, COUNT.format(1, "prompt", 0, "<image>")),
    ({"prompt": "<image>", "images": ["red.png"] * 2}, COUNT.format(2, "prompt", 1, "<image>")),
    ({"text": "<image> <image>", "images": ["red.png"]}, COUNT.format(1, "text", 2, "<image>")),
    ({"prompt": "q", "completion": "<image>", "images": ["red.png"]}, "`completion` has a picture"),
    (chat(u([HERE, text("q")]), a("b")), COUNT.format(0, "messages", 1, PART)),
    ({"messages": ONE, "images": ["red.png"] * 2}, COUNT.format(2, "messages", 1, PART)),
    ({"messages": TWO, "images": ["red.png"]}, COUNT.format(1, "messages", 2, PART)),
    ({**part(image=URI), "images": ["red.png"]}, COUNT.format(1, "messages", 0, PART)),
    (seen([text("q")]), COUNT.format(1, "messages", 0, PART)),
    (chat(u("<image>"), a("<image>"), images=["red.png"]), COUNT.format(1, "messages", 2, PART)),
    (seen([HERE, text("<image>")]), "`messages` has parts of type 'image' and a text with <image>"),
    (part(image="gone.png"), "`messages` item 1: picture 'gone.png' in '{folder}': No such file"),
    (part(image="red.png", url=URI), "`messages` item 1: an image part has 'image' and 'url'"),
    (
        seen([HERE, {**text("q"), "image": "red.png"}]),
        "`messages` item 1: part 2 of 'content' is 'image'; only text is supported",
    ),
    (part(image=7), f"`messages` item 1: {FORM}, found int"),
    (part(text="red"), f"`messages` item 1: {FORM}, found an object of ['text']"),
    (
        chat(u([{"type": "image_url", "image_url": {"detail": "low"}}]), a("b")),
        f"`messages` item 1: {FORM}, found an object of ['detail']",
    ),
    (
        seen([HERE, {"type": "video", "video": "v.mp4"}]),
        "part 2 of 'content' is 'video'; only text is supported",
    ),
    (seen([HERE, {"type": "file"}]), "part 2 of 'content' must be"),
    (seen([HERE, "q"]), """part 2 of 'content' must be {"type": "text", "text": ...}, found str"""),
    (chat(u("q", images=["red.png"]), a("b")), "'images' is not empty"),
    (chat(u([{"image": "red.png"}]), a("b")), "is 'image'; only text is supported"),
    (chat(HERE, 7, images="red.png"), COUNT.format(1, "messages", 0, PART)),
    ({**one("red.png"), "videos": ["v.mp4"]}, "`videos` is not empty; only text is trained on"),
    (
        {**one("red.png"), "audio": {"array": [0.5]}},
        "`audio` is not empty; only text is trained on",
    ),
    ({"prompt": "<image>", "images": []}, "a text has <image>, and `images` is empty"),
    ({"prompt": "<image>", "image": None}, "a text has <image>, and `image` is empty"),
    (
        {"prompt": PROMPT, "chosen": [a([HERE])], "rejected": [a("c")], "images": ["red.png"]},
        "`chosen` has a picture; an answer is text alone",
    ),
    (
        {"prompt": "<image>", "chosen": "b", "rejected": "<image>", "image": "red.png"},
        "`rejected` has a picture; an answer is text alone",
    ),
    (
        {"chosen": "Q <image>cat", "rejected": "Q <image>dog", "image": "red.png"},
        "has a picture; an answer is text alone",
    ),
    (
        {
            "chosen": [u([{**HERE, "path": "red.png"}]), a("b")],
            "rejected": [u([{**HERE, "path": "sub/blue.png"}]), a("c")],
        },
        "`chosen` and `rejected` have no common prefix; give their `prompt`",
    ),
    (
        {"prompt": PROMPT, "completion": [a([{**HERE, "image": URI}])], "images": ["red.png"]},
        "`completion` has a picture; an answer is text alone",
    ),
    ({"prompt": 7, "image": "red.png"}, "`prompt` must be text or a message list, found int"),
    ({"text": ["<image>"], "images": ["red.png"]}, COUNT.format(1, "text", 0, PART)),
    ({"chosen": 1, "rejected": 2, "image": "red.png"}, "must be text or a message list"),
    ({"chosen": [], "rejected": [], "image": "red.png"}, "is empty after the shared prompt"),
    ({"messages": [], "image": "red.png"}, "pictures: `image` has 1, `messages` places for 0"),
    (part(image=nested(100_000)), "nested too deeply"),
    (one({"url": {"path": {"url": "gone.png"}}}), "picture 'gone.png' in '{folder}'"),
    ({"image": "red.png"}, "row has ['image']; a row has `text`;"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("row", "reason"), BAD, ids=map(str, range(len(BAD))))
def test_a_bad_row_is_one_line_with_its_file_and_number(parse, folder, row, reason):
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    if isinstance(row.get("image"), str):
        row = {**row, "image": row["image"].replace("{folder}", str(folder))}
    with pytest.raises(RowError) as error:
        parse(row, line=3)
    line = str(error.value)
    assert line.startswith(f"{folder}/rows.jsonl:3: ")
    assert reason.replace("{folder}", str(folder)) in line
    assert line.isprintable()
    assert len(line) < 900


def test_lines_of_json_are_read_as_rows_in_memory_are(folder):
    (folder / "rows.jsonl").write_text(json.dumps({**one("red.png"), "id": 1}) + "\n")
    (raw,) = iter_file(folder / "rows.jsonl")
    assert parse_row(raw, OPTIONS).values["images"] == pictures(folder, "r")


def test_rows_are_read_without_pillow_and_heavy_libraries(folder):
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from dschat_lora.addons.images.rows import with_pictures\n"
        "from dschat_lora.addons.images.pictures import open_picture\n"
        "row = {'text': '<image>', 'image': 'red.png'}\n"
        f"row = with_pictures(row, ['text'], {str(folder)!r})\n"
        "assert row['images'][0].path.endswith('/red.png')\n"
        "try: open_picture(b'x')\n"
        "except ValueError as error: print(error)\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'transformers', 'httpx'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "pictures need Pillow: pip install 'dschat_lora[images]'\n"
