"""What files say of their messages: which are learnt, calls in older forms, and what is no text."""

import json

import pytest
from chat_tokenizers import build_chat_tokenizer
from hand_tokenizers import build_byte_tokenizer
from row_table import TABLE

from dschat_lora.config.data import DataConfig
from dschat_lora.data.audit import DataAudit
from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.prepare import prepare
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.record_files import RowCounts, RowReader
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import RowOptions, parse_row
from dschat_lora.data.tokenize import TokenRule, tokenize

# The three ways in which answers are found, in templates as short as can be.
TURN = "{{ m.role[0] }}:{{ m.content }}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}a:{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}" + TURN + ";{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
BY_TURNS = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# An answer is written otherwise once others follow.
BY_ANSWERS = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{{ '.' if loop.last and m.role == 'assistant' }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def u(content, **keys):
    return {"role": "user", "content": content, **keys}


def a(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def share(speaker, value, **keys):
    return {"from": speaker, "value": value, **keys}


def call(name="f", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tokenizer_of(template):
    if "{" not in template:
        return build_chat_tokenizer(template)
    return build_byte_tokenizer(chat_template=template)


def records(row, template, *, kind="samples", **options):
    tokenizer = tokenizer_of(template)
    parsed = parse_row(RawRow("f:1", row), RowOptions(**options))
    return to_records(parsed, Chat(tokenizer, tokenizer.eos_token), kind)


def shown(row, template, **options):
    """Each sample, what is learnt of it in brackets."""
    return [
        "".join(f"[{span.text}]" if span.target else span.text for span in record.spans)
        for record in records(row, template, **options)
    ]


def refusal(row, template=BY_TURNS, **options):
    with pytest.raises(RowError) as error:
        records(row, template, **options)
    return str(error.value)


# ---------------------------------------------------------------------------- weights


def weighed(*pairs):
    """Question and answer n of each pair, with the keys of the answer."""
    return [m for n, keys in enumerate(pairs, 1) for m in (u(f"q{n}"), a(f"a{n}", **keys))]


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        ({"messages": weighed({"weight": 0}, {})}, [2]),
        ({"messages": weighed({"weight": 0.0}, {"weight": 1.0})}, [2]),
        ({"messages": weighed({"loss_weight": 0}, {"loss_weight": 1})}, [2]),
        ({"messages": weighed({"train": False}, {"train": True})}, [2]),
        ({"messages": weighed({"training": False}, {})}, [2]),
        ({"messages": weighed({"loss": False}, {"loss": None})}, [2]),
        ({"messages": weighed({}, {"weight": "0"})}, [1]),
        ({"messages": weighed({}, {"train": "False"}, {"weight": float("nan")})}, [1, 3]),
        ({"messages": weighed({"weight": ""}, {"loss_scale": 0}, {})}, [1, 3]),
        ({"messages": weighed({"weight": 0}, {}, {"weight": 0}, {})}, [2, 4]),
        ({"messages": weighed({"weight": 0}, {"weight": 0}, {})}, [3]),
        ({"messages": weighed({"weight": 1}, {"train": "1"})}, [1, 2]),
        # of others than the assistant, no weight is no wish, and OpenAI's 1 is none either
        ({"messages": [u("q1", weight=1), a("a1"), u("q2", loss=0), a("a2", weight=0)]}, [1]),
        (
            {
                "conversations": [
                    share("human", "q1", weight=None),
                    share("gpt", "a1", weight=0),
                    share("human", "q2"),
                    share("gpt", "a2", weight=1),
                ]
            },
            [2],
        ),
        ({"conversations": weighed({"weight": 0}, {})}, [2]),
        ({"prompt": [u("q1")], "completion": weighed({"weight": 0}, {})[1:]}, [2]),
    ],
)
def test_an_answer_of_weight_0_is_read_not_learnt(row, learnt):
    """By marks, turn by turn, and answer by answer, where it is no sample of its own."""
    turns = [(f"u:q{n};a:", f"a{n};", n in learnt) for n in range(1, max(learnt) + 1)]
    whole = "".join(asks + (f"[{says}]" if is_learnt else says) for asks, says, is_learnt in turns)
    assert shown(row, MARKED) == shown(row, BY_TURNS) == [whole]
    alone = []
    for n in learnt:
        history = "".join(asks + says for asks, says, _ in turns[: n - 1])
        alone.append(f"{history}u:q{n};a:[a{n}.;]")
    assert shown(row, BY_ANSWERS) == alone
    (prompt,) = records(row, BY_TURNS, kind="prompts")
    assert prompt.prompt == whole[: whole.rindex("[")].replace("[", "").replace("]", "")


def test_tokens_of_an_answer_of_weight_0_have_no_loss():
    """Those that transformers' mask has beyond the learnt answer's are the other one's."""
    tokenizer = build_chat_tokenizer("qwen2_5_training")
    row = {"messages": [u("2+2?"), a("Five.", weight=0), u("Sure?"), a("Four.")]}
    encoded = tokenizer.apply_chat_template(
        [{k: m[k] for k in ("role", "content")} for m in row["messages"]],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (record,) = records(row, "qwen2_5_training")
    rule = TokenRule(tokenizer.eos_token_id, 10**6, "drop", False)
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    ids, sample = encoded["input_ids"], result.sample
    assert sample.input_ids.tolist() == ids
    both = [i for i, marked in enumerate(encoded["assistant_masks"]) if marked]
    learnt = sample.supervised.nonzero()[0].tolist()
    assert tokenizer.decode(ids[learnt[0] : learnt[-1] + 1]) == "\nFour.<|im_end|>\n"
    assert tokenizer.decode([ids[i] for i in both if i not in learnt]) == "\nFive.<|im_end|>\n"
    assert set(learnt) < set(both)


def test_a_row_whose_every_answer_has_weight_0_is_refused():
    assert refusal({"messages": weighed({"weight": 0})}).startswith(
        "f:1: every answer has weight 0; "
    )


def test_weights_of_a_pair_s_history_are_no_part_of_its_prompt():
    history = weighed({"weight": 0})
    pair = {"chosen": [*weighed({}), u("q"), a("a")], "rejected": [*history, u("q"), a("b")]}
    for row in (pair, {"prompt": [*history, u("q")], **pair}):
        (record,) = records(row, BY_TURNS, kind="pairs")
        assert (record.prompt, record.rejected) == ("u:q1;a:a1;u:q;a:", "b;")
    pair = {"prompt": history, "chosen": [a("a")], "rejected": [a("b")]}
    assert records(pair, BY_TURNS, kind="pairs")[0].prompt == "u:q1;a:a1;a:"
    (record,) = records({"prompt": [*history, u("q")], "completion": [a("a")]}, BY_TURNS)
    assert record.left_out == ()  # what a prompt says is not learnt in any case


def test_answers_side_by_side_are_told_apart_by_their_ends():
    template = MARKED.replace("a:{% generation %}", "{% generation %}a:")
    template = template.partition("{% if add")[0]  # no prompt for an answer
    row = {"messages": [u("q"), a("x"), a("y", weight=0), a("z")]}
    assert shown(row, template) == ["u:q;[a:x;]a:y;[a:z;]"]


def test_what_says_what_is_learnt_does_not_reach_the_template():
    template = BY_TURNS.replace("a:", "a{{ m.keys() | sort | join('-') }}:", 1)
    row = {"messages": [u("q", loss=0), a("x", weight=0, name="n"), a("y", train=True)]}
    assert shown(row, template) == ["u:q;acontent-name-role:x;a[content-role:y;]"]


def test_marks_that_cannot_be_told_apart_are_refused():
    template = MARKED.replace("a:{% gen", "a:{{ loop.length }}{% gen")
    message = refusal({"messages": weighed({}, {"weight": 0}, {})}, template)
    assert "message 4 has weight 0, but the chat template renders earlier turns diff" in message


# ---------------------------------------------------------------------------- calls in older forms

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = json.dumps({"name": "f", "arguments": {"x": 1}})
RESULT = {"role": "tool", "content": "7"}
NOW = [u("q"), {"role": "assistant", "content": None, "tool_calls": [call(x=1)]}, RESULT, a("b")]


def value(text, kind="text"):
    return {"type": kind, "value": text}


@pytest.mark.parametrize(("row", "messages"), TABLE["older_calls"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_training"])
def test_a_call_in_an_older_form_is_learnt_as_one_of_today(row, messages, name):
    column = "conversations" if "from" in row[0] else "messages"
    tools = json.dumps(TOOLS)
    assert shown({column: row, "tools": tools}, name) == shown(
        {"messages": messages, "tools": TOOLS}, name
    )


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ((), ["developer", "tool", "observation"]),
        (("tool", "system"), ["system", "tool", "tool"]),
        (("observation", "developer"), ["developer", "observation", "observation"]),
        (("tool", "observation", "developer", "system"), ["developer", "tool", "observation"]),
        # a template that knows it and refuses it
        (("tool", "system", "observation!"), ["system", "tool", "tool"]),
    ],
)
def test_a_role_that_a_template_does_not_know_is_the_one_that_it_has_for_it(named, written):
    """Unless it writes any role, and knows none."""
    knows = "".join(
        "{% if m.role == '" + role.strip("!") + "' %}"
        "{{ raise_exception('no') if '!' in '" + role + "' }}{% endif %}"
        for role in named
    )
    template = (
        "{% for m in messages %}" + knows + "{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    row = [
        {"role": "developer", "content": "s"},
        u("q"),
        NOW[1],
        RESULT,
        {**RESULT, "role": "observation"},
        a("b"),
    ]
    system, *results = written
    (text,) = shown({"messages": row}, template)
    before, call_and_results = text.split("user:q;assistant:")
    assert before == f"{system}:s;"
    said = "".join(f"{role}:7;" for role in results)
    assert call_and_results == f"[f;]{said}assistant:[b;]"


def test_functions_of_openai_s_older_format_are_tools():
    functions = [TOOLS[0]["function"]]
    expected = shown({"messages": NOW, "tools": TOOLS}, "qwen2_5")
    assert shown({"messages": NOW, "functions": functions}, "qwen2_5") == expected
    assert shown({"messages": NOW, "functions": json.dumps(functions)}, "qwen2_5") == expected
    for row in ({"text": "t"}, {"prompt": "p", "chosen": "a", "rejected": "b"}):
        assert records({**row, "functions": ["f"]}, BY_TURNS)  # of another meaning


def test_a_pair_of_llama_factory_is_a_preference():
    pair = {
        f"{name}_messages": [
            {"role": "user", "content": [value("q")], "loss_weight": 0.0},
            a([value(text)], loss_weight=1.0),
        ]
        for name, text in (("chosen", "good"), ("rejected", "bad"))
    }
    (record,) = records(pair, BY_TURNS, kind="pairs")
    assert (record.prompt, record.completion, record.rejected) == ("u:q;a:", "good;", "bad;")
    assert parse_row(RawRow("f:1", pair)).described == "preference (llama-factory)"


# ---------------------------------------------------------------------------- what is left out

PICKY = (
    "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }};"
    "{% elif m.role == 'assistant' %}a:{{ m.content }}"
    "{% if m.tool_calls and tools %}{{ m.tool_calls[0].function.name }}{% endif %};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SECOND_LEFT_OUT = PICKY.replace("{% if m", "{% if loop.index == 2 %}{% elif m", 1)
WITH_TOOLS = PICKY.replace("{% for", "{{ tools }}{% for", 1)


@pytest.mark.parametrize(
    ("row", "template", "reason"),
    [
        # what it says is elsewhere in the text as well
        ([u("7?"), NOW[1], RESULT, a("7")], WITH_TOOLS, "message 3, of role 'tool'"),
        (
            [u("q"), {"role": "critic", "content": "q"}, a("q")],
            PICKY,
            "message 2, of role 'critic'",
        ),
        ([u("f"), NOW[1], a("f")], PICKY, "the call of 'f' in message 2"),
        (
            [u("q"), a("f", tool_calls=[call(), call()]), a("f")],
            WITH_TOOLS,
            "the call of 'f' in mess",
        ),
        ([u("q"), u("q"), a("q")], SECOND_LEFT_OUT, "message 2, of role 'user'"),
    ],
)
def test_a_message_that_a_template_leaves_out_is_refused(row, template, reason):
    tools = TOOLS if template is WITH_TOOLS else None
    assert reason in refusal({"messages": row, "tools": tools}, template)


def test_what_a_template_leaves_out_by_choice_is_counted_and_said():
    system, thought = {"role": "system", "content": "s"}, {"reasoning_content": "hm"}
    rows = [
        [system, u("q"), a("b")],
        [system, u("q"), a("b", **thought), u("q"), a("b", **thought)],
        [u("q"), a("<think>hm</think>b")],
        [u("q"), a("b", weight=0, reasoning_content=""), u("q"), a("<think>\n\n</think>b")],
    ]
    template = PICKY.replace("a:{{ m.content }}", "a:{{ m.content.split('</think>')[-1] }}")
    tokenizer, counts = build_byte_tokenizer(chat_template=template), RowCounts()
    reader = RowReader(RowOptions(), Chat(tokenizer, "</s>"), "samples", skips=False)
    for messages in rows:
        reader.records(RawRow("f:1", {"messages": messages, "tools": TOOLS}), counts)
    assert counts.left_out == {
        "tools, by the chat template": 4,
        "system messages, by the chat template": 2,
        "thoughts, by the chat template": 2,
        "answers of weight 0, from the loss": 1,
    }
    made = dict.fromkeys(DataAudit.__dataclass_fields__, 0)
    made |= {"rows_by_type": {}, "bad_row_examples": (), "length_quantiles": {}, "chat_rows": {}}
    audit = DataAudit(**made | {"left_out": {"tools, by the chat template": 4000, "x": 1}})
    assert "left out     tools, by the chat template (4,000 rows); x (1 row)" in audit.lines()


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        (
            [{"messages": [u("q"), {**RESULT, "content": c}, a("b")]} for c in ("", "7")],
            "message 2",
        ),
        ([{"messages": [u("q"), a("b", tool_calls=c)]} for c in ([], [call()])], "the call of 'f'"),
        (
            [
                {"messages": [u("q"), a("b", tool_calls=[call()] * n)], "tools": TOOLS}
                for n in (1, 2)
            ],
            "the call of 'f'",
        ),
        ([{"messages": [u("q"), a("b")], "tools": tools} for tools in ([], TOOLS)], "tools, "),
        ([{"messages": [u("q"), a("b", thinking=t)]} for t in ("", "hm")], "thoughts, "),
        (
            [
                {"messages": [u("q"), a("b", thinking="hm")], "chat_template_kwargs": {"keep": k}}
                for k in (True, False)
            ],
            "thoughts, ",
        ),
        ([{"messages": [u("q"), a(text)]} for text in ("b", "<think>hm</think>b")], "thoughts, "),
    ],
)
def test_a_row_of_another_shape_is_looked_at_anew(rows, lost):
    said = "a:{{ m.thinking if keep }}{{ m.content.split('</think>')[-1] }}"
    template = PICKY.replace("a:{{ m.content }}", said)
    chat = Chat(build_byte_tokenizer(chat_template=template), "</s>")
    reader, counts = RowReader(RowOptions(), chat, "samples", skips=True), RowCounts()
    before = [0, 0]
    for place, row in enumerate(rows):
        reader.records(RawRow("f:1", row), counts)
        before[place] = sum(lost in text for text in [*counts.left_out, *counts.examples])
    assert before == [0, 1]


def test_pairs_and_prompts_are_looked_at_as_well(jsonl, tmp_path):
    system, thought = {"role": "system", "content": "s"}, a("b", thinking="hm")
    pair = {"prompt": [u("q")], "chosen": [a("a")], "rejected": [thought]}
    (record,) = records(pair, PICKY, kind="pairs")
    assert record.left_out == ("thoughts, by the chat template",)
    for row in ({"prompt": [system, u("q")]}, {"messages": [system, u("q"), thought]}):
        (record,) = records(row, PICKY, kind="prompts")
        assert record.left_out == ("system messages, by the chat template",)
    (*_, record) = records({"messages": [u("q"), a("a"), u("q"), thought]}, BY_ANSWERS)
    assert record.left_out == ("thoughts, by the chat template",)
    train = [{"messages": [system, u(f"q{n}"), a("b")]} for n in range(3)]
    config = DataConfig(
        data_path=(str(jsonl(train)),),
        eval_data_path=(str(jsonl([{"messages": [u("r"), thought]}], "eval.jsonl")),),
    )
    tokenizer = build_byte_tokenizer(chat_template=PICKY)
    audit = prepare(config, tokenizer, phase=1, seed=0, eos_id=2, cache_dir=tmp_path).audit
    assert audit.left_out == {"system messages, by the chat template": 3}


@pytest.mark.parametrize(
    ("name", "lost"),
    [("qwen3", []), ("qwen3_training", []), ("llama3_1", ["thoughts", "text beside tool calls"])],
)
def test_a_thought_that_an_answer_alone_has_is_not_left_out(name, lost):
    call_beside = a("so", tool_calls=[call(x=1)])
    row = [u("q"), a("b", reasoning_content="hm"), u("q"), call_beside, RESULT, a("b")]
    (first, *_) = records({"messages": row, "tools": TOOLS}, name)
    assert list(first.left_out) == [f"{each}, by the chat template" for each in lost]


# ---------------------------------------------------------------------------- what is no text


@pytest.mark.parametrize(
    ("column", "content"),
    [
        *[(name, ["a"]) for name in ("images", "videos", "audios")],
        *[("image", "a.png"), ("video", {"path": "a"}), ("audio", {"array": [0.5], "path": None})],
    ],
)
@pytest.mark.parametrize(
    "row", [{"text": "t"}, {"messages": [u("q"), a("b")]}, {"prompt": "p", "completion": "c"}]
)
def test_a_row_with_more_than_text_is_refused(row, column, content):
    plural = column.removesuffix("s") + "s"
    reason = f"f:1: `{column}` is not empty; only text is trained on, without {plural}"
    assert refusal({**row, column: content}) == reason
    for nothing in (None, "", [], [None], {"bytes": None, "path": None}, float("nan")):
        assert len(records({**row, column: nothing}, BY_TURNS)) == 1
    sign = f"<{column.removesuffix('s')}>"
    (name, text), *_ = row.items()
    marked = {name: f"{sign}{text}" if isinstance(text, str) else [u(f"a {sign}"), a("b")]}
    assert len(records({**row, **marked}, BY_TURNS)) == 1  # a word as any other
    reason = f"f:1: a text has {sign}, and `{column}` is empty; only text is supported"
    assert refusal({**row, **marked, column: []}) == reason
