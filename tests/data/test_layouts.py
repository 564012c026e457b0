"""Rows as published data sets have them, by the table ``rows.toml``."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_table import TABLE

from dschat_lora.config.data import COLUMNS, parse_columns
from dschat_lora.data.chat import Chat
from dschat_lora.data.layouts import to_canonical
from dschat_lora.data.message_layouts import ROLES
from dschat_lora.data.messages import check_message, content_text
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import EmptyRowError, RowOptions, parse_row, require_usable
from helpers.drawing import drawing

CANONICAL = ("text", "prompt", "completion", "messages", "chosen", "rejected", "label")


def parsed(values, *columns):
    """Type, layout and the columns of the type."""
    before = copy.deepcopy(values)
    row = parse_row(RawRow("f:1", values), RowOptions(parse_columns(columns)))
    assert values == before, "the raw row, which a reward function reads, is as it was"
    own = {name: value for name, value in row.values.items() if name in CANONICAL}
    return row.kind, row.layout, own


def reason(values, *columns, kind="pairs", unpaired="refuse"):
    options = RowOptions(parse_columns(columns), unpaired)
    with pytest.raises(RowError) as error:
        require_usable(parse_row(RawRow("f:1", values), options), kind, options)
    return str(error.value)


@pytest.mark.parametrize("case", TABLE["read"])
def test_a_row_is_read_as_its_type_says(case):
    values, kind, layout, expected, *columns = case
    assert parsed(values, *columns) == (kind, layout, expected)


@pytest.mark.parametrize("case", TABLE["refused"])
def test_a_wrong_row_is_refused_by_its_place_and_its_own_column(case):
    values, message, *columns = case
    raw, options = RawRow("f:1", values), RowOptions(parse_columns(columns))
    with pytest.raises(RowError) as error:
        to_records(parse_row(raw, options), Chat(None, ""))
    assert not isinstance(error.value, EmptyRowError)
    said = str(error.value)
    if message.endswith("..."):
        assert said.startswith(f"f:1: {message[:-3]}")
    else:
        assert said == f"f:1: {message}"


@pytest.mark.parametrize(("values", "message"), TABLE["empty"])
def test_empty_rows_can_be_told_from_other_bad_rows(values, message):
    with pytest.raises(EmptyRowError) as error:
        parse_row(RawRow("f:1", values))
    assert str(error.value) == f"f:1: {message}"


@pytest.mark.parametrize("more", TABLE["beside"])
@pytest.mark.parametrize("row", TABLE["as_they_are"])
def test_rows_of_the_types_themselves_are_taken_as_they_are(row, more):
    assert to_canonical(row | more) == (row | more, "")


@pytest.mark.parametrize(
    ("row", "beside"),
    [
        ({"prompt": "p"}, "beside_a_prompt"),
        ({"prompt": "p", "completion": "c"}, "beside_a_prompt"),
        ({"text": "t"}, "beside_a_text"),
    ],
)
def test_what_a_row_asks_or_says_is_not_passed_over_for_a_layout(row, beside):
    for more in TABLE[beside]:
        assert to_canonical(row | more) == (row | more, "")


@pytest.mark.parametrize("message", TABLE["messages"])
def test_messages_of_today_are_taken(message):
    check_message("`messages` item 2", message)


def test_parts_of_media_that_are_read_hold_nothing_but_their_type():
    text = {"type": "text", "text": "a"}
    message = {"role": "user", "content": [{"type": "image"}, text]}
    check_message("m", message, ["image"])
    for part in ({"type": "image", "url": "x"}, {"type": "video"}):
        with pytest.raises(ValueError, match="^m: part 1 of 'content' is"):
            check_message("m", {"role": "user", "content": [part, text]}, ["image"])
    assert content_text(message["content"]) == "a"


# ---------------------------------------------------------------------------- one conversation

TEXTS = st.text(min_size=1, max_size=9).filter(str.strip)
SPEAKERS = {role: [name for name in ROLES if ROLES[name] == role] for role in ROLES.values()}


def sharegpt(draw, system, turns, keys):
    """Under any of a role's names; a null is in the keys of the other form."""
    nulls = dict.fromkeys(("from", "value", "role", "content")) if draw(st.booleans()) else {}
    spoken = [("system", system)] * (system is not None) + turns
    names = [draw(st.sampled_from([n for n in SPEAKERS[r] if "call" not in n])) for r, _ in spoken]
    said = [
        nulls | dict(zip(keys, (name, text), strict=True))
        for name, (_, text) in zip(names, spoken, strict=True)
    ]
    return {"conversations": said}


def alpaca(draw, system, turns, keys):
    texts = [text for _, text in turns]
    history = [list(pair) for pair in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
    row = {"instruction": texts[-2], "output": texts[-1], "history": history}
    return row if system is None else row | {"system": system}


@drawing(60)
@given(st.data())
def test_a_conversation_is_the_same_through_any_layout(data):
    system = data.draw(st.none() | TEXTS)
    texts = data.draw(st.lists(TEXTS, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
    turns = [("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]
    spoken = [("system", system)] * (system is not None) + turns
    messages = [{"role": role, "content": text} for role, text in spoken]
    keys = data.draw(st.sampled_from([("from", "value"), ("role", "content")]))
    for layout, write in (("sharegpt", sharegpt), ("alpaca", alpaca)):
        kind, name, values = parsed(write(data.draw, system, turns, keys))
        assert (kind, name) == ("conversation", layout)
        said = [(each["role"], each["content"]) for each in values["messages"]]
        assert said == [(each["role"], each["content"]) for each in messages]
    assert parsed({"messages": messages}) == ("conversation", "", {"messages": messages})
    prompt, answer = messages[:-1], messages[-1]
    for completion in ([answer], answer["content"]):
        row = {"prompt": prompt, "completion": completion}
        assert parsed(row)[2] == {"prompt": prompt, "completion": [answer]}


def test_results_of_tools_are_of_one_role():
    said = [{"from": name, "value": "5"} for name in SPEAKERS["tool"]]
    (_, _, values) = parsed({"conversations": [{"from": "human", "value": "q"}, *said]})
    assert {each["role"] for each in values["messages"][1:]} == {"tool"}


def test_a_function_call_is_a_tool_call_and_tools_are_read():
    call = '{"name": "add", "arguments": {"a": 1}}'
    said = [{"from": "human", "value": "u"}, {"from": "function_call", "value": call}]
    values, layout = to_canonical({"conversations": said, "tools": '[{"name": "add"}]'})
    function = {"name": "add", "arguments": {"a": 1}}
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    assert (layout, values["tools"]) == ("sharegpt", [{"name": "add"}])
    assert values["messages"][1] == calls | {"content": None}


# ---------------------------------------------------------------------------- labels, --columns


@pytest.mark.parametrize("good", [True, False])
def test_a_label_may_be_true_or_false_in_any_form(good):
    for label in (good, int(good), float(good), str(good), str(int(good))):
        row = {"prompt": "p", "completion": "c", "label": label}
        assert parsed(row) == ("unpaired preference", "", {**row, "label": good})
        assert parsed(row)[2]["label"] is good


def test_answers_with_a_label_are_not_quietly_learnt():
    row = {"prompt": "p", "completion": "c", "label": True}
    assert reason(row, kind="samples") == (
        "f:1: row has a `label`, so its answer may be bad; --unpaired_rows good_only trains on "
        "those with label true, all on every answer"
    )
    wrong = "found 'maybe'; --unpaired_rows all ignores it"
    for unpaired in ("refuse", "good_only"):
        message = reason({**row, "label": "maybe"}, kind="samples", unpaired=unpaired)
        assert message == f"f:1: `label` of an answer must be true or false, 1 or 0, {wrong}"
    assert "row lacks 'chosen' and 'rejected'" in reason(row, kind="pairs")
    prompt = parse_row(RawRow("f:1", {**row, "label": "maybe"}))
    assert require_usable(prompt, "prompts") is prompt
    ignored = RowOptions(unpaired="all")
    assert parse_row(RawRow("f:1", row), ignored).kind == "prompt-completion"


@pytest.mark.parametrize(
    ("margin", "kept"), [(2, 2.0), (-0.5, -0.5), (None, None), ("1.5", 1.5), ("", None)]
)
def test_a_margin_is_any_number_or_the_text_of_one_in_a_column_of_any_name(margin, kept):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "by": margin}
    options = RowOptions(parse_columns(["margin=by"]))
    (record,) = to_records(parse_row(RawRow("f:1", row), options), Chat(None, ""), "pairs")
    assert record.margin == kept


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["promt=q"], f"promt=q: 'promt' is not one of {', '.join(COLUMNS)}; did you mean prompt?"),
        (["zzz=q"], f"zzz=q: 'zzz' is not one of {', '.join(COLUMNS)}"),
        (["prompt"], "must be NAME=COLUMN, as in prompt=question, got 'prompt'"),
        (["prompt="], "must be NAME=COLUMN, as in prompt=question, got 'prompt='"),
        (["prompt=a", "prompt=b"], "names prompt twice: a and b"),
    ],
)
def test_wrong_names_are_one_line_that_says_what_is_allowed(columns, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        parse_columns(columns)
    assert str(error.value) == f"--columns {message}"
