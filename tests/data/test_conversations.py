"""Rows of messages as samples: ends, thoughts, tools, columns, pairs, prompts and splits."""

import json

import pytest
from chat_tokenizers import build_chat_tokenizer
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.config.data import DataConfig
from dschat_lora.data.chat import Chat, Span, end_tokens
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.messages import tool_schemas
from dschat_lora.data.prepare import prepare, preview
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import answers_of, to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.templates import BUILT_IN_TEMPLATE, read_chat_template
from dschat_lora.data.tokenize import TokenRule, tokenize

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
TURNS = [USER, ANSWER, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def records(values, tokenizer, *, kind="samples", **variables):
    chat = Chat(tokenizer, tokenizer.eos_token, variables)
    return to_records(parse_row(RawRow("f:1", values)), chat, kind)


def texts(values, name, **options):
    found = records(values, build_chat_tokenizer(name), **options)
    return [(record.prompt, record.completion) for record in found]


def tokens(values, name, *, end=None, train_on_prompt=False):
    """(text read, text learnt) of each sample."""
    tokenizer = build_chat_tokenizer(name)
    rule = TokenRule(end or tokenizer.eos_token_id, 10**6, "drop", train_on_prompt)
    results = tokenize(records(values, tokenizer), make_encoder(tokenizer), rule)
    samples = [result.sample for result in results]
    decode = tokenizer.decode
    return [(decode(s.input_ids), decode(s.labels[s.labels != -100])) for s in samples]


def chatml(*turns, open_as=""):
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    return text + f"<|im_start|>assistant\n{open_as}"


def test_history_is_read_without_thoughts_and_each_thought_learnt_once():
    messages = [USER, THOUGHT, {"role": "user", "content": "r"}, {**THOUGHT, "content": "b"}]
    assert texts({"messages": messages}, "qwen3") == [
        (chatml(("user", "q")), "<think>\nhm\n</think>\n\na<|im_end|>"),
        (
            chatml(("user", "q"), ("assistant", "a"), ("user", "r")),
            "<think>\nhm\n</think>\n\nb<|im_end|>",
        ),
    ]


def test_a_switched_off_thought_belongs_to_the_prompt():
    expected = [(chatml(("user", "q"), open_as="<think>\n\n</think>\n\n"), "a<|im_end|>")]
    row = {"messages": [USER, ANSWER]}
    assert texts(row, "qwen3", enable_thinking=False) == expected
    column = {"chat_template_kwargs": {"enable_thinking": False}}
    assert texts(row | column, "qwen3", enable_thinking=True) == expected
    assert texts(row | {"chat_template_kwargs": '{"enable_thinking": false}'}, "qwen3") == expected
    # An absent value in a column of objects is none.
    assert texts(row | {"chat_template_kwargs": {"enable_thinking": None}}, "qwen3") != expected


def test_nothing_follows_an_end_token_of_the_template_but_end_of_sequence_a_plain_text():
    row = {"messages": [USER, ANSWER]}
    (read, learnt), *_ = tokens(row, "qwen2_5")
    assert learnt == "a<|im_end|>"
    assert read.endswith("a<|im_end|>")
    # A template whose answers have no end: as before.
    assert tokens(row, "glm4moe")[0][1] == "\na<|endoftext|>"
    plain = {"prompt": "q", "completion": "a<|im_end|>"}
    assert tokens(plain, "qwen2_5") == [("qa<|im_end|><|endoftext|>", "a<|im_end|><|endoftext|>")]


def test_a_conversation_s_closing_token_does_not_split_it():
    assert tokens({"messages": TURNS}, "phi3") == [
        (
            "<|user|>\nq<|end|>\n<|assistant|>\na<|end|>\n"
            "<|user|>\nr<|end|>\n<|assistant|>\nb<|end|>\n<|endoftext|>",
            "a<|end|>b<|end|>\n<|endoftext|>",
        )
    ]


def test_an_answer_that_changes_what_precedes_it_follows_the_prompt_that_the_model_sees():
    """GPT-OSS forgets a call's thought once the final answer is there."""
    call = {"role": "assistant", "thinking": "hm", "tool_calls": [CALL]}
    tool = {"role": "tool", "content": "5"}
    found = texts({"messages": [USER, call, tool, {**ANSWER, "thinking": "ah"}]}, "gptoss")
    prompt, answer = found[1]
    said = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
    said += '{"x": "y"}<|call|>'
    thought = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
    result = '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"5"<|end|>'
    assert prompt.endswith(f"{thought}{said}{result}<|start|>assistant")
    assert answer == (
        "<|channel|>analysis<|message|>ah<|end|>"
        "<|start|>assistant<|channel|>final<|message|>a<|return|>"
    )


@pytest.mark.parametrize("form", [CALL["function"]["arguments"], '{"x": "y"}'])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3", '{"name": "f", "arguments": {"x": "y"}}'),
        ("llama3_1", '{"name": "f", "parameters": {"x": "y"}}'),
        ("glm4moe", "<arg_key>x</arg_key>\n<arg_value>y</arg_value>"),
        ("deepseekv3", 'f\n```json\n{"x": "y"}\n```'),
        ("gptoss", '<|message|>{"x": "y"}<|call|>'),
    ],
)
@pytest.mark.parametrize("content", [None, ""])
def test_arguments_are_written_alike_as_an_object_and_as_its_json(name, written, form, content):
    calls = [{"type": "function", "function": {"name": "f", "arguments": form}}]
    row = {"messages": [USER, {"role": "assistant", "content": content, "tool_calls": calls}]}
    ((_, answer),) = texts(row, name)
    assert written in answer


def test_tools_reach_the_template_as_a_list_or_as_its_json():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"messages": [USER, ANSWER]}
    ((prompt, _),) = texts(row | {"tools": tools}, "qwen3")
    assert json.dumps(tools[0]) in prompt
    assert texts(row | {"tools": json.dumps(tools)}, "qwen3")[0][0] == prompt
    for same in ([json.dumps(tools[0])], [tools[0]["function"]]):
        assert texts(row | {"tools": same}, "qwen3")[0][0] == prompt
    for none in ([], ""):
        assert texts(row | {"tools": none}, "qwen3") == texts(row, "qwen3")
        assert tool_schemas(none) is None  # some templates ask whether tools are none


def test_a_thought_that_the_built_in_format_has_no_place_for_is_told():
    (record,) = records({"messages": [USER, ANSWER | {"thinking": "t"}]}, build_byte_tokenizer())
    assert record.left_out == ("thoughts, by the chat template",)


def test_parts_of_a_tool_s_result_are_its_text_where_a_template_takes_those_of_the_user_alone():
    call = {"function": {"name": "f", "arguments": {}}}
    asked = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    for name in ("glm4moe", "qwen3_vl"):
        of_parts, of_text = (
            texts({"messages": [*asked, {"role": "tool", "content": result}, ANSWER]}, name)
            for result in (parts, "42")
        )
        assert of_parts == of_text


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "smolvlm", "lfm2"])
def test_content_may_be_text_or_its_parts_whichever_the_template_takes(name):
    parts = [
        {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TURNS
    ]
    assert texts({"messages": parts}, name) == texts({"messages": TURNS}, name)
    assert "a" in texts({"messages": TURNS}, name)[0][1] + texts({"messages": TURNS}, name)[0][0]


def test_marks_split_at_a_prompt_leave_its_answers_untrained():
    tokenizer = build_byte_tokenizer(chat_template=MARKED)
    (record,) = records({"prompt": TURNS[:3], "completion": TURNS[3:]}, tokenizer)
    read = "<user>q<assistant>a</s><user>r<assistant>"
    assert record.spans == (Span(read, False), Span("b</s>", True))
    (whole,) = records({"messages": TURNS}, tokenizer)
    assert [span.text for span in whole.spans if span.target] == ["a</s>", "b</s>"]
    assert (whole.method, whole.end) == ("marks", "none")


def test_marks_that_leave_out_the_end_are_followed_to_the_letter():
    template = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")
    tokenizer = build_byte_tokenizer(chat_template=template)
    (record,) = records({"messages": TURNS}, tokenizer)
    (result,) = tokenize([record], make_encoder(tokenizer), TokenRule(2, 99, "drop", False))
    labels = result.sample.labels
    assert tokenizer.decode(labels[labels != -100]) == "ab"


@pytest.mark.parametrize("name", ["qwen3_5_nothink", "nemotron_3_nano", "qwen2_5"])
def test_both_answers_of_a_pair_follow_one_prompt(name):
    """Even where a thought in one of them changes how the template opens an answer."""
    pair = {"prompt": TURNS[:3], "chosen": [THOUGHT], "rejected": TURNS[3:]}
    (record,) = records(pair, build_chat_tokenizer(name), kind="pairs")
    ((prompt, chosen),) = texts({"prompt": TURNS[:3], "completion": [THOUGHT]}, name)
    ((other, rejected),) = texts({"prompt": TURNS[:3], "completion": TURNS[3:]}, name)
    assert record.prompt + record.completion == prompt + chosen
    assert record.prompt + record.rejected == other + rejected
    tokenizer = build_chat_tokenizer(name)
    rule = TokenRule(tokenizer.eos_token_id, 10**6, "drop", False, "pairs")
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    assert tokenizer.decode(result.sample.chosen) == prompt + chosen
    assert tokenizer.decode(result.sample.rejected) == other + rejected
    assert result.ended


THINK = "<think>\n\n</think>\n\n"
HELD = {"role": "assistant", "content": THINK + "b"}


@pytest.mark.parametrize(
    ("answers", "train_empty_think", "scored"),
    [
        (["a", "b"], False, ["a", "b"]),
        (["a", "b"], True, [THINK + "a", THINK + "b"]),
        ([THOUGHT, "b"], False, ["<think>\nhm\n</think>\n\na", THINK + "b"]),
        (["a", HELD], False, [THINK + "a", THINK + "b"]),
    ],
    ids=["both without", "asked for", "one with", "one of the file"],
)
@pytest.mark.parametrize("kind", ["pairs", "unpaired"])
def test_an_empty_thought_before_both_answers_is_of_the_prompt(
    kind, answers, train_empty_think, scored
):
    tokenizer = build_chat_tokenizer("qwen3")
    chosen, rejected = (
        [{"role": "assistant", "content": each} if isinstance(each, str) else each]
        for each in answers
    )
    pair = {"prompt": [USER], "chosen": chosen, "rejected": rejected}
    found = records(pair, tokenizer, kind=kind)
    if kind == "unpaired":
        good, bad = answers_of(*found)
        found = [good._replace(mismatched=bad.completion)]
    rule = TokenRule(
        tokenizer.eos_token_id, 10**6, "drop", False, kind, train_empty_think=train_empty_think
    )
    (result,) = tokenize(found, make_encoder(tokenizer), rule)
    sample = result.sample
    prompt = len(sample.prompt)
    names = ("chosen", "rejected") if kind == "pairs" else ("input_ids", "mismatched")
    own, other = (getattr(sample, name) for name in names)
    ends = [text + "<|im_end|>" for text in scored]
    assert [tokenizer.decode(ids[prompt:]) for ids in (own, other)] == ends
    written = "<think>\nhm\n</think>\n\na" if chosen == [THOUGHT] else THINK + "a"
    assert tokenizer.decode(own) == chatml(("user", "q"), open_as=written + "<|im_end|>")


def test_an_empty_thought_is_of_the_answer_where_the_mismatched_one_has_none():
    tokenizer = build_chat_tokenizer("qwen3")
    row = {"prompt": [USER], "completion": [ANSWER], "label": True}
    (record,) = records(row, tokenizer, kind="unpaired")
    rule = TokenRule(tokenizer.eos_token_id, 10**6, "drop", False, "unpaired")
    other = "<think>\nhm\n</think>\n\nb<|im_end|>"
    (result,) = tokenize([record._replace(mismatched=other)], make_encoder(tokenizer), rule)
    sample = result.sample
    assert tokenizer.decode(sample.input_ids[sample.prompt_length :]) == THINK + "a<|im_end|>"
    assert tokenizer.decode(sample.mismatched_ids) == other


def test_the_preview_shows_an_empty_thought_as_not_supervised(jsonl):
    tokenizer = build_chat_tokenizer("qwen3_5_think")
    config = DataConfig(data_path=(str(jsonl([{"messages": [USER, ANSWER]}])),))
    (shown,) = preview(config, tokenizer, eos_id=tokenizer.eos_token_id, kind="samples")
    ids, supervised = shown.sequences["sample"]
    assert tokenizer.decode(ids) == chatml(("user", "q"), open_as=THINK + "a<|im_end|>")
    assert supervised == [0] * (len(ids) - 2) + [1, 1]


def test_an_empty_thought_that_the_file_holds_is_learnt():
    assert tokens({"messages": [USER, HELD]}, "qwen3")[0][1] == THINK + "b<|im_end|>"
    without = {**HELD, "content": "b", "reasoning_content": ""}  # as tables fill a column
    assert tokens({"messages": [USER, without]}, "qwen3")[0][1] == "b<|im_end|>"


@pytest.mark.parametrize("name", ["deepseekv3", "nemotron_3_nano", "qwen3", "gptoss", "glm4moe"])
def test_a_prompt_to_answer_is_the_one_that_a_server_would_render(name):
    tokenizer = build_chat_tokenizer(name)
    served = tokenizer.apply_chat_template(TURNS[:3], tokenize=False, add_generation_prompt=True)
    for row in (
        {"messages": TURNS},
        {"prompt": TURNS[:3]},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": TURNS[:3], "chosen": TURNS[3:], "rejected": [ANSWER]},
    ):
        (record,) = records(row, tokenizer, kind="prompts")
        assert record.prompt == served


def test_with_train_on_prompt_what_samples_of_a_row_share_is_learnt_once():
    (_, first), (_, second) = tokens({"messages": TURNS}, "qwen3", train_on_prompt=True)
    think = "<think>\n\n</think>\n\n"
    assert first == chatml(("user", "q"), open_as=think + "a<|im_end|>")[len("<|im_start|>") :]
    assert second == think + "b<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` must be a JSON object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "has 'tokenize', which is not a variable"),
        ({"tools": "add"}, "`tools` must be a list of JSON schemas, found add"),
        ({"tools": [{"name": "f"}]}, "the built-in chat format has no place for tools"),
    ],
)
def test_columns_that_no_template_can_use_are_refused(row, message):
    with pytest.raises(RowError, match="f:1: ") as error:
        records({"messages": [USER, ANSWER]} | row, build_byte_tokenizer())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", ("<|im_end|>",)),
        ("phi3", ("<|end|>",)),
        ("gptoss", ("<|return|>", "<|call|>")),
        ("gemma4_v5", ("<turn|>", "<|tool_response>")),
        ("cohere2", ("<|END_OF_TURN_TOKEN|>",)),
        ("glm4moe_training", ("<|user|>", "<|observation|>")),
        ("deepseekv3", ()),
        ("llava_next", ()),
        ("glm4moe", ("<|user|>", "<|observation|>")),
    ],
)
def test_end_tokens_are_those_that_a_template_ends_answers_and_calls_with(name, ends):
    assert end_tokens(build_chat_tokenizer(name)) == ends


def test_the_built_in_format_saved_as_a_template_renders_the_text_that_trained(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = build_byte_tokenizer(bos=True)
    system = {"role": "system", "content": "Be {kind}."}
    (record,) = records({"messages": [system, *TURNS]}, tokenizer)
    tokenizer.chat_template = BUILT_IN_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert stock.apply_chat_template([system, *TURNS], tokenize=False) == (
        "Be {kind}.\n\nHuman: q\n\nAssistant: a</s>\n\nHuman: r\n\nAssistant: b</s>"
    )
    text = "".join(span.text for span in record.spans)
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TURNS]
    assert records({"messages": parts}, tokenizer) == records({"messages": TURNS}, tokenizer)
    assert stock.apply_chat_template([system, *TURNS], tokenize=False) == text
    prompt = stock.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "\n\nHuman: q\n\nAssistant:"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{% for m in messages %}", "is not a Jinja template: line 1: Unexpected end of template"),
        ("{{ message }}", "must be a Jinja template that renders `messages`"),
    ],
)
def test_a_file_that_is_no_chat_template_is_refused(tmp_path, text, message):
    path = tmp_path / "chat.jinja"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="--chat_template ") as error:
        read_chat_template(str(path))
    assert message in str(error.value)


@pytest.fixture
def prepared(run):
    """What a file is prepared as for a family's template."""

    def call(path, name, **options):
        tokenizer = build_chat_tokenizer(name)
        more = {"eos_id": tokenizer.eos_token_id, "max_seq_len": 500}
        return run(path, tokenizer=tokenizer, **more | options)

    return call


def numbered(count):
    return [
        {"messages": [{**m, "content": m["content"] + str(i)} for m in TURNS]} for i in range(count)
    ]


def test_samples_of_a_row_are_held_out_together_and_counted(prepared, jsonl):
    path = jsonl([*numbered(20), numbered(1)[0]])
    data = prepared(path, "qwen3", eval_ratio=0.2)
    audit = data.audit
    assert (audit.train_rows, audit.train_samples) == (17, 34)
    assert (audit.eval_rows, audit.eval_samples) == (4, 8)
    assert audit.rows_by_type == {"conversation": 21}
    assert audit.duplicate_rows == 1
    assert (audit.chat_rows, audit.answer_samples) == ({"answers": 17}, 34)
    assert audit.eos_share == 1.0
    assert (
        "answers      17 rows with 34 samples, one for each answer: the chat template renders "
        "earlier turns differently when later ones follow" in audit.lines()
    )
    assert audit.empty_thoughts == 34
    assert (
        "thoughts     34 empty ones, which the chat template adds, are not trained on (use "
        "--train_empty_think to train on them)" in audit.lines()
    )
    every = prepared(path, "qwen3", eval_ratio=0.2, train_empty_think=True).audit
    # A token each: <think>, two lines, </think>, two lines.
    assert every.supervised_tokens - audit.supervised_tokens == 34 * 6
    assert (every.empty_thoughts, every.tokens) == (0, audit.tokens)
    # A template that leaves turns as they are holds out the same rows.
    plain = prepared(path, "qwen2_5", eval_ratio=0.2)
    rows = {
        name: {
            build_chat_tokenizer(name).decode(each.eval[i].input_ids).split("b")[-1].split("<")[0]
            for i in range(len(each.eval))
        }
        for name, each in (("qwen3", data), ("qwen2_5", plain))
    }
    assert plain.audit.eval_samples == 4
    assert rows["qwen2_5"] <= rows["qwen3"]


def test_weights_use_all_samples_of_a_row_as_often(prepared, jsonl):
    data = prepared(jsonl(numbered(10)), "qwen3", eval_ratio=0.0, data_weights=(2.0,))
    assert (data.audit.train_rows, data.audit.train_samples) == (10, 40)


def test_variables_of_the_template_make_another_entry_of_the_cache(prepared, jsonl):
    path = jsonl(numbered(4))
    keys = {
        prepared(path, "qwen3", chat_template_kwargs=text).fingerprint
        for text in (None, '{"enable_thinking": false}', '{"enable_thinking": true}')
    }
    assert len(keys) == 3


def test_a_marked_template_that_never_ends_an_answer_is_warned_about_not_refused(tmp_path, jsonl):
    template = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}")
    tokenizer = build_byte_tokenizer(chat_template=template)
    config = DataConfig(data_path=(str(jsonl(numbered(6))),), eval_ratio=0.0)
    audit = prepare(config, tokenizer, phase=1, seed=0, eos_id=2, cache_dir=tmp_path / "c").audit
    audit.check()
    assert "answers may not stop" in " ".join(audit.warnings())
    assert "answers      6 rows by the chat template's generation marks" in audit.lines()


def test_marks_side_by_side_are_one_answer():
    """Phi-3's ends in two: the turn's end, and that of the conversation."""
    (record,) = records({"messages": TURNS}, build_chat_tokenizer("phi3_training"))
    assert record.completion == "b<|end|>\n<|endoftext|>"
    assert record.prompt.endswith("r<|end|>\n<|assistant|>\n")


def test_an_answer_to_score_ends_in_its_end_token_whatever_is_marked():
    template = MARKED.replace("{% endgeneration %}", "\n{% endgeneration %}")
    tokenizer = build_byte_tokenizer(chat_template=template)
    *_, record = records({"messages": TURNS}, tokenizer, kind="pairs")
    assert record.completion == "b</s>"
