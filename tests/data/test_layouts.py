"""Rows as published data sets have them."""

import copy

import pytest

from dschat_lora.config.data import COLUMNS, parse_columns
from dschat_lora.data.layouts import to_canonical
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.rows import EmptyRowError, RowOptions, parse_row, require_usable


def said(role, content):
    return {"role": role, "content": content}


def turn(speaker, value):
    return {"from": speaker, "value": value}


S, U, A, U2, A2 = (
    said("system", "s"),
    said("user", "u"),
    said("assistant", "a"),
    said("user", "u2"),
    said("assistant", "a2"),
)
SPEAKERS = (
    "human, user, gpt, chatgpt, bing, bard, assistant, function_call, tool_call, system, "
    "developer, tool, observation, function, function_response, tool_response"
)
CANONICAL = ("text", "prompt", "completion", "messages", "chosen", "rejected", "label")


def parsed(values, *columns):
    """Type, layout and the columns of the type."""
    before = copy.deepcopy(values)
    row = parse_row(RawRow("f:1", values), RowOptions(parse_columns(columns)))
    assert values == before, "the raw row, which a reward function reads, is as it was"
    own = {name: value for name, value in row.values.items() if name in CANONICAL}
    return row.kind, row.layout, own


def reason(values, *columns, kind=None, unpaired="refuse"):
    options = RowOptions(parse_columns(columns), unpaired)
    with pytest.raises(RowError) as error:
        require_usable(parse_row(RawRow("f:1", values), options), kind, options)
    return str(error.value)


# ---------------------------------------------------------------------------- the types themselves


@pytest.mark.parametrize(
    "row",
    [
        {"text": "t"},
        {"prompt": "p"},
        {"prompt": [U]},
        {"prompt": "p", "completion": "c"},
        {"prompt": [S, U], "completion": [A]},
        {"messages": [S, U, A]},
        {"chosen": "pa", "rejected": "pb", "margin": 1},
        {"chosen": [U, A], "rejected": [U, A2]},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": [U, A, U], "chosen": [A], "rejected": [A2]},
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"id": 7, "score": 0.5, "system": "s", "input": "i", "output": "o", "answer": "a"},
        {"context": "c", "options": ["a"], "tools": [], "history": []},
    ],
)
def test_rows_of_the_types_themselves_are_taken_as_they_are(row, more):
    values, layout = to_canonical(row | more)
    assert (values, layout) == (row | more, "")


@pytest.mark.parametrize(
    "more",
    [
        {"conversations": [turn("human", "u"), turn("gpt", "a")]},
        {"instruction": "i", "output": "o"},
        {"question": "q", "answer": "a"},
    ],
)
@pytest.mark.parametrize("row", [{"prompt": "p"}, {"prompt": "p", "completion": "c"}])
def test_a_prompt_is_not_passed_over_for_a_layout(row, more):
    assert to_canonical(row | more) == (row | more, "")


@pytest.mark.parametrize(
    "more",
    [
        {"conversations": "a table of them"},
        {"conversations": []},
        {"instruction": 3, "output": "o"},
        {"question": "q", "answer": "a"},
        {"instruction": "i"},
    ],
)
def test_a_text_beside_what_is_no_layout_is_a_text(more):
    assert to_canonical({"text": "t"} | more) == ({"text": "t"} | more, "")


# ---------------------------------------------------------------------------- conversations


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "u", "output": "a"}, [U, A]),
        ({"instruction": "u", "input": "", "output": "a", "system": ""}, [U, A]),
        ({"instruction": "u", "input": "i", "output": "a"}, [said("user", "u\ni"), A]),
        ({"instruction": "", "input": "u", "output": "a", "system": "s"}, [S, U, A]),
        (
            {"instruction": "u2", "output": "a2", "history": [["u", "a"]], "system": "s"},
            [S, U, A, U2, A2],
        ),
    ],
)
def test_alpaca_is_a_conversation_with_the_input_on_a_line_below_the_instruction(row, messages):
    assert parsed(row) == ("conversation", "alpaca", {"messages": messages})


def test_alpaca_is_richer_than_the_text_that_some_copies_have_too():
    row = {"instruction": "u", "input": "", "output": "a", "text": "Below is an instruction ..."}
    assert parsed(row)[:2] == ("conversation", "alpaca")


@pytest.mark.parametrize(
    ("speakers", "roles"),
    [
        (["human", "gpt"], ["user", "assistant"]),
        (["system", "user", "assistant"], ["system", "user", "assistant"]),
        (["human", "chatgpt", "human", "bing"], ["user", "assistant"] * 2),
        (["human", "gpt", "observation", "gpt"], ["user", "assistant", "tool", "assistant"]),
        (["human", "gpt", "tool", "bard"], ["user", "assistant", "tool", "assistant"]),
    ],
)
@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_speakers_of_sharegpt_have_their_roles(speakers, roles, keys):
    said_by = [
        dict(zip(keys, (speaker, f"{i}"), strict=True)) for i, speaker in enumerate(speakers)
    ]
    expected = [said(role, f"{i}") for i, role in enumerate(roles)]
    row = {"id": 7, "conversations": said_by}
    assert parsed(row) == ("conversation", "sharegpt", {"messages": expected})


def test_a_system_column_heads_a_conversation_that_has_none():
    turns = [turn("human", "u"), turn("gpt", "a")]
    assert parsed({"conversations": turns, "system": "s"})[2] == {"messages": [S, U, A]}
    own = [turn("system", "s"), *turns]
    assert parsed({"conversations": own, "system": "other"})[2] == {"messages": [S, U, A]}


def test_messages_of_either_form_may_have_the_nulls_of_the_other():
    nulls = {"from": None, "value": None, "role": None, "content": None}
    mixed = [nulls | turn("human", "u"), nulls | A]
    row = {"conversations": mixed}
    assert [(each["role"], each["content"]) for each in parsed(row)[2]["messages"]] == [
        ("user", "u"),
        ("assistant", "a"),
    ]


def test_a_function_call_is_a_tool_call_and_tools_are_read():
    call = '{"name": "add", "arguments": {"a": 1}}'
    values, layout = to_canonical(
        {
            "conversations": [turn("human", "u"), turn("function_call", call)],
            "tools": '[{"name": "add"}]',
        }
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert layout == "sharegpt"
    assert values["tools"] == [{"name": "add"}]
    assert values["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        (
            {"conversations": [turn("human", "u"), turn("gpt", "a")]},
            ["messages=conversations"],
            [U, A],
        ),
        ({"dialogue": [turn("human", "u"), turn("gpt", "a")]}, ["conversations=dialogue"], [U, A]),
        ({"dialogue": [U, A]}, ["messages=dialogue"], [U, A]),
        ({"dialogue": [U, A], "prompt": "own"}, ["conversations=dialogue"], [U, A]),
        ({"instruction": "u", "response": "a", "prompt": "own"}, ["output=response"], [U, A]),
        ({"question": "u", "reply": "a", "prompt": "own"}, ["answer=reply"], [U, A]),
        ({"instruction": "u", "response": "a"}, ["output=response"], [U, A]),
        (
            {"context": "c", "question": "q", "answer": "a"},
            ["instruction=context", "input=question", "output=answer"],
            [said("user", "c\nq"), A],
        ),
        ({"q": "u", "a": "a", "sys": "s"}, ["question=q", "answer=a", "system=sys"], [S, U, A]),
    ],
)
def test_columns_of_a_conversation_may_have_other_names(row, columns, expected):
    kind, _, values = parsed(row, *columns)
    assert (kind, values) == ("conversation", {"messages": expected})


def test_a_question_with_its_answer_is_a_conversation():
    row = {"question": "u", "answer": "a", "id": 3}
    assert parsed(row) == ("conversation", "question-answer", {"messages": [U, A]})


@pytest.mark.parametrize("column", ["context", "choices", "options"])
def test_a_question_about_something_is_not_learnt_without_it(column):
    row = {"question": "q", "answer": "a", column: "c"}
    assert reason(row).startswith(f"f:1: row has {sorted(row)}; a row has `text`; ")


# ---------------------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    ("row", "layout", "expected"),
    [
        # ultrafeedback_binarized: the lists hold the prompt
        (
            {"prompt": "u", "chosen": [U, A], "rejected": [U, A2], "messages": [U, A]},
            "ultrafeedback",
            {"chosen": [U, A], "rejected": [U, A2], "messages": [U, A]},
        ),
        (
            {"prompt": " u2\n", "chosen": [S, U, A, U2, A], "rejected": [S, U, A, U2, A2]},
            "ultrafeedback",
            {"chosen": [S, U, A, U2, A], "rejected": [S, U, A, U2, A2]},
        ),
        (
            {"prompt": [U], "chosen": [U, A], "rejected": [U, A2]},
            "ultrafeedback",
            {"chosen": [U, A], "rejected": [U, A2]},
        ),
        # held by neither, which is refused where the answers are counted
        (
            {"prompt": [U2], "chosen": [U, A], "rejected": [U, A2]},
            "ultrafeedback",
            {"prompt": [U2], "chosen": [U, A], "rejected": [U, A2]},
        ),
        # text on one side, messages on the other
        (
            {"prompt": "u", "chosen": [A], "rejected": [A2]},
            "",
            {"prompt": [U], "chosen": [A], "rejected": [A2]},
        ),
        (
            {"prompt": [S, U], "chosen": "a", "rejected": "a2"},
            "",
            {"prompt": [S, U], "chosen": [A], "rejected": [A2]},
        ),
        # the prompt in the columns of a layout
        (
            {"system": "s", "question": "u", "chosen": "a", "rejected": "a2"},
            "question-answer",
            {"prompt": [S, U], "chosen": [A], "rejected": [A2]},
        ),
        (
            {"instruction": "u", "input": "", "chosen": "a", "rejected": "a2"},
            "alpaca",
            {"prompt": [U], "chosen": [A], "rejected": [A2]},
        ),
        (
            {
                "conversations": [turn("human", "u")],
                "chosen": turn("gpt", "a"),
                "rejected": turn("gpt", "a2"),
            },
            "sharegpt",
            {"prompt": [U], "chosen": [A], "rejected": [A2]},
        ),
        # as they are
        (
            {"chosen": "\n\nHuman: u\n\nAssistant: a", "rejected": "\n\nHuman: u\n\nAssistant: b"}
            | {"question": "u"},
            "",
            {"chosen": "\n\nHuman: u\n\nAssistant: a", "rejected": "\n\nHuman: u\n\nAssistant: b"},
        ),
        (
            {"chosen": [U, A], "rejected": [U, A2], "question": "other"},
            "",
            {"chosen": [U, A], "rejected": [U, A2]},
        ),
    ],
)
def test_pairs_have_one_prompt_of_the_answers_form(row, layout, expected):
    assert parsed(row) == ("preference", layout, expected)


def test_a_text_prompt_before_a_list_is_the_users_message():
    row = {"prompt": "u", "completion": [A]}
    assert parsed(row) == ("prompt-completion", "", {"prompt": [U], "completion": [A]})
    row = {"prompt": [S, U], "completion": "a"}
    assert parsed(row) == ("prompt-completion", "", {"prompt": [S, U], "completion": [A]})


# ---------------------------------------------------------------------------- answers with a label


@pytest.mark.parametrize(
    ("label", "good"),
    [
        *[(True, True), (1, True), (1.0, True), ("true", True), ("1", True)],
        *[(False, False), (0, False), (0.0, False), ("False", False), ("0", False)],
    ],
)
def test_an_answer_with_a_label_is_an_unpaired_preference(label, good):
    row = {"prompt": "p", "completion": "c", "label": label}
    assert parsed(row) == ("unpaired preference", "", {**row, "label": good})
    assert parsed(row)[2]["label"] is good


def test_the_label_of_a_conversation_is_of_its_last_answer():
    row = {"messages": [U, A, U2, A2], "label": False}
    expected = {"prompt": [U, A, U2], "completion": [A2], "label": False}
    assert parsed(row) == ("unpaired preference", "", expected)
    alpaca = {"instruction": "u", "output": "a", "kto_tag": True}
    expected = {"prompt": [U], "completion": [A], "label": True}
    assert parsed(alpaca, "label=kto_tag") == ("unpaired preference", "alpaca", expected)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "p", "completion": "c", "score": 1, "rating": 0}, "prompt-completion"),
        ({"prompt": "p", "completion": "c", "label": None}, "prompt-completion"),
        ({"prompt": "p", "completion": "c", "label": ""}, "prompt-completion"),
        ({"messages": [U, A], "label": 3}, "conversation"),
        ({"messages": [U, A], "label": "sports"}, "conversation"),
        ({"text": "t", "label": 1}, "text"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "label": 1}, "preference"),
        ({"prompt": "p", "label": True}, "prompt"),
    ],
)
def test_other_rows_with_a_label_or_a_number_stay_what_they_are(row, kind):
    assert parsed(row)[0] == kind


def test_answers_with_a_label_are_not_quietly_learnt():
    row = {"prompt": "p", "completion": "c", "label": True}
    assert reason(row, kind="samples") == (
        "f:1: row has a `label`, so its answer may be a bad one; --unpaired_rows good_only learns "
        "those with label true, all learns every answer"
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


# ---------------------------------------------------------------------------- --columns


@pytest.mark.parametrize(
    ("row", "columns", "kind", "expected"),
    [
        (
            {"question": "q", "answer": "a"},
            ["prompt=question", "completion=answer"],
            "prompt-completion",
            {"prompt": "q", "completion": "a"},
        ),
        ({"body": "t", "prompt": "p"}, ["text=body"], "text", {"text": "t", "prompt": "p"}),
        (
            {"question": "q", "good": "a", "bad": "b"},
            ["prompt=question", "chosen=good", "rejected=bad"],
            "preference",
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        # the column loses its own name
        ({"completion": "p"}, ["prompt=completion"], "prompt", {"prompt": "p"}),
        # its own column of that name goes
        (
            {"prompt": "own", "question": "q", "completion": "c"},
            ["prompt=question"],
            "prompt-completion",
            {"prompt": "q", "completion": "c"},
        ),
        # two change places
        (
            {"prompt": "c", "completion": "p"},
            ["prompt=completion", "completion=prompt"],
            "prompt-completion",
            {"prompt": "p", "completion": "c"},
        ),
        # a richer type of the row's own does not win over the one that is named
        (
            {"q": "q", "a": "a", "messages": [U, A], "chosen": "x", "rejected": "y"},
            ["prompt=q", "completion=a"],
            "prompt-completion",
            {"prompt": "q", "completion": "a"},
        ),
        (
            {"prompt": "p", "completion": "c", "body": "t"},
            ["text=body"],
            "text",
            {"prompt": "p", "text": "t"},
        ),
        ({"q": "q", "messages": [U, A]}, ["prompt=q"], "prompt", {"prompt": "q"}),
        # a null is absent, so that one file may hold rows of several types
        ({"q": None, "a": None, "text": "t"}, ["prompt=q", "completion=a"], "text", {"text": "t"}),
    ],
)
def test_columns_are_read_under_the_names_given(row, columns, kind, expected):
    assert parsed(row, *columns) == (kind, "", expected)


def test_margins_may_have_another_name():
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "by": 2}
    options = RowOptions(parse_columns(["margin=by"]))
    assert parse_row(RawRow("f:1", row), options).values["margin"] == 2


def test_a_row_without_a_named_column_says_which_it_has():
    assert reason({"title": "t", "body": "b"}, "prompt=question") == (
        "f:1: row lacks 'question' of --columns prompt=question; it has ['body', 'title']"
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["promt=q"], f"promt=q: 'promt' is none of {', '.join(COLUMNS)}; did you mean prompt?"),
        (["zzz=q"], f"zzz=q: 'zzz' is none of {', '.join(COLUMNS)}"),
        (["prompt"], "must be NAME=COLUMN, as in prompt=question, got 'prompt'"),
        (["prompt="], "must be NAME=COLUMN, as in prompt=question, got 'prompt='"),
        (["prompt=a", "prompt=b"], "names prompt twice: a and b"),
    ],
)
def test_wrong_names_are_one_line_that_says_what_is_allowed(columns, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        parse_columns(columns)
    assert str(error.value) == f"--columns {message}"


# ---------------------------------------------------------------------------- wrong versions


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "u", "output": 3}, "`output` must be text, found int"),
        ({"instruction": ["u"], "output": "a"}, "`instruction` must be text, found list"),
        (
            {"instruction": "u", "output": "a", "history": [["u"]]},
            "`history` must be a list of pairs of texts, a question and its answer",
        ),
        ({"conversations": "hi"}, "`conversations` must be a message list, found str"),
        (
            {"conversations": [turn("human", "u"), turn("alien", "a")]},
            f"`conversations` item 2: 'alien' is no speaker; use one of {SPEAKERS}",
        ),
        (
            {"conversations": [turn(["human"], "u")]},
            f"`conversations` item 1: ['human'] is no speaker; use one of {SPEAKERS}",
        ),
        (
            {"conversations": [turn("human", "u"), {"text": "a"}]},
            "`conversations` item 2 must have 'from' and 'value', found ['text']",
        ),
        (
            {"conversations": [turn("human", "u"), turn("gpt", None)]},
            "`conversations` item 2: 'value' must be text, found NoneType",
        ),
        (
            {"conversations": [turn("human", "u"), turn("function_call", "add(1)")]},
            "`conversations` item 2: a function call must be JSON with 'name' and 'arguments'",
        ),
        (
            {"conversations": [turn("human", "u"), turn("gpt", "a")], "tools": "["},
            "`tools` is not valid JSON (Expecting value)",
        ),
        ({"question": "q", "answer": 4}, "`answer` must be text, found int"),
        (
            {"prompt": "other", "chosen": [U, A], "rejected": [U, A2]},
            "`chosen` must be the answer to `prompt`, or begin with it; it does neither",
        ),
        (
            {"prompt": "u", "completion": [U, A]},
            "`completion` must begin with the assistant where `prompt` is text",
        ),
        (
            {"message_id": "1", "message_tree_id": "1", "role": "prompter", "text": "hi"},
            "row is one message of a tree, as in OASST; make rows with `messages` of its threads",
        ),
    ],
)
def test_a_wrong_row_of_a_layout_is_named_by_its_own_column(row, message):
    assert reason(row) == f"f:1: {message}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "u", "output": " "}, "`output` is empty"),
        ({"instruction": "", "input": "", "output": "a"}, "`instruction` is empty"),
        ({"question": "", "answer": "a"}, "`question` is empty"),
        ({"conversations": []}, "`conversations` is empty"),
        (
            {"conversations": [turn("human", "u"), turn("gpt", "")]},
            "`conversations` item 2: the answer is empty",
        ),
        ({"prompt": " ", "completion": [A]}, "`prompt` is empty"),
    ],
)
def test_empty_rows_of_a_layout_can_be_told_from_other_bad_rows(row, message):
    with pytest.raises(EmptyRowError) as error:
        parse_row(RawRow("f:1", row))
    assert str(error.value) == f"f:1: {message}"
