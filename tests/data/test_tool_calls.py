"""Tool calls as models of each family write them."""

import json

import pytest

from data.chat_tokenizers import build_chat_tokenizer
from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.data.chat import Chat
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.tool_calls import ToolCall, parse_tool_calls

ADD = ToolCall("add", {"a": 1, "b": [2, {"c": "}"}]})
ARGUMENTS = json.dumps(ADD.arguments)
FORMS = {
    "hermes": (f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>', ""),
    "cut at its end": (f'so <tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}', "so"),
    "with thoughts": (
        f'<think>\nadd\n</think>\n\n<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}'
        "</tool_call><|im_end|>",
        "<think>\nadd\n</think>\n\n<|im_end|>",
    ),
    "arguments as text": (
        "<tool_call>" + json.dumps({"name": "add", "arguments": ARGUMENTS}) + "</tool_call>",
        "",
    ),
    "qwen3 coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        '[2, {"c": "}"}]\n</parameter>\n</function>\n</tool_call>',
        "",
    ),
    "llama 3": (f'{{"name": "add", "parameters": {ARGUMENTS}}}<|eot_id|>', ""),
    "llama 3.1": (f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}<|eom_id|>', ""),
    "mistral": (f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]</s>', ""),
    "mistral 11": (f"I add. [TOOL_CALLS]add{ARGUMENTS}</s>", "I add."),
    "mistral 13": (f"[TOOL_CALLS]add[CALL_ID]x1[ARGS]{ARGUMENTS}</s>", ""),
    "gpt-oss": (
        "<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "<|channel|>analysis<|message|>add<|end|>",
    ),
    "gpt-oss, recipient first": (
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}"
        "<|call|>",
        "",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_with_its_arguments(form):
    text, beside = FORMS[form]
    assert parse_tool_calls(text) == (beside, [ADD])


def test_several_calls_keep_their_order():
    one, two = ({"name": n, "arguments": {"x": n}} for n in "fg")
    expected = [ToolCall("f", {"x": "f"}), ToolCall("g", {"x": "g"})]
    hermes = "".join(f"<tool_call>{json.dumps(each)}</tool_call>\n" for each in (one, two))
    assert parse_tool_calls(hermes) == ("", expected)
    assert parse_tool_calls(f"[TOOL_CALLS]{json.dumps([one, two])}")[1] == expected
    mistral = (
        f"[TOOL_CALLS]f{json.dumps(one['arguments'])}[TOOL_CALLS]g{json.dumps(two['arguments'])}"
    )
    assert parse_tool_calls(mistral)[1] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 + 1 is 2",
        '{"answer": 3}',
        "{",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        "[TOOL_CALLS] none",
        "[TOOL_CALLS]f{",
        "<|channel|>commentary to=functions.f<|message|>{<|call|>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text(text):
    assert parse_tool_calls(text) == (text, [])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_6", "llama3_1", "gptoss"])
def test_what_a_template_writes_is_read_back(name):
    """For the families whose calls are read: the answer that their template makes of a call."""
    tokenizer = build_chat_tokenizer(name)
    chat = Chat(tokenizer, tokenizer.eos_token)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = chat.render([question], add_generation_prompt=True)
    whole = chat.render([question, answer], add_generation_prompt=False)
    start = len(before) if whole.startswith(before) else whole.index("?") + 1
    assert parse_tool_calls(whole[start:])[1] == [ToolCall("add", {"a": 1, "b": "two"})]


# How families write a call ``f`` of a list, in short, and arguments {"b": 2.0, "a": [null, "e'"]}.
VALUES = {"b": 2.0, "a": [None, "\u00e9'"]}
AS_JSON = '{"b": 2.0, "a": [null, "\u00e9\'"]}'
QWEN3 = (
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {% if f.arguments is string %}'
    "{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}}\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
)
WRITTEN = {
    "qwen3": QWEN3,
    "hermes": (
        '<tool_call>{{ {"name": f.name, "arguments": f.arguments} | tojson }}</tool_call>',
        '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    ),
    "llama 3.1": (
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        '{"name": "f", "parameters": %s}',
    ),
    "mistral": (
        "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('9 letters') }}"
        '{% endif %}[TOOL_CALLS] [{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": %s, "id": "abcdefghi"}]',
    ),
    "gpt-oss": (
        "<|channel|>commentary to=functions.{{ f.name }} json<|message|>{{ f.arguments | tojson }}"
        "<|call|>",
        "<|channel|>commentary to=functions.f json<|message|>%s<|call|>",
    ),
    "deepseek 3": (
        "{{ 'function<sep>' + f.name + '\\n```json\\n' + f.arguments + '\\n```' }}",
        "function<sep>f\n```json\n%s\n```",
    ),
    "kimi 2": (
        "call {{ f.name }}<sep>{% if f.arguments is string %}{{ f.arguments }}{% else %}"
        "{{ f.arguments | tojson(separators=(',', ':')) }}{% endif %}",
        'call f<sep>{"b":2.0,"a":[null,"\u00e9\'"]}',
    ),
    "takes text, would write Python": (
        "function<sep>{{ f.name }}\n```json\n{{ f.arguments }}\n```",
        "function<sep>f\n```json\n%s\n```",
    ),
    "glm 4.5": (
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
        "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>2.0</arg_value>\n<arg_key>a</arg_key>\n"
        '<arg_value>[null, "\u00e9\'"]</arg_value>\n</tool_call>',
    ),
    "qwen3 coder": (
        "<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
        "{{ v | tojson }}\n</parameter>\n{% endfor %}</function>",
        "<function=f>\n<parameter=b>\n2.0\n</parameter>\n<parameter=a>\n"
        '[null, "\u00e9\'"]\n</parameter>\n</function>',
    ),
}
UNREAD = (
    "deepseek 3",
    "kimi 2",
    "takes text, would write Python",
    "glm 4.5",
)  # by parse_tool_calls


def learnt(template, *, place="c.function", **given):
    """The answer that is learnt of a row with one call."""
    turns = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        f"{{% for c in m.tool_calls or [] %}}{{% set f = {place} %}}{template}{{% endfor %}}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = Chat(build_byte_tokenizer(chat_template=turns), "</s>")
    call = {"name": "f", **given}
    if place == "c.function":
        call = {"type": "function", "id": "abcdefghi", "function": call}
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    (record,) = to_records(parse_row(RawRow("f:1", {"messages": [question, answer]})), chat)
    return record.completion.removesuffix("</s>")


@pytest.mark.parametrize("family", WRITTEN)
def test_arguments_given_as_text_are_written_as_the_object_that_they_are(family):
    template, form = WRITTEN[family]
    expected = form % AS_JSON if "%s" in form else form
    for given in (VALUES, AS_JSON, '\n{"b":2.0,"a":[null,"\\u00e9\'"]}'):
        assert learnt(template, arguments=given) == expected
    nothing = learnt(template, arguments={})
    assert "%s" not in form or nothing == form % "{}"
    for given in ({"arguments": ""}, {"arguments": " "}, {"arguments": None}, {}):
        assert learnt(template, **given) == nothing
    if family not in UNREAD:
        assert parse_tool_calls(expected)[1] == [ToolCall("f", VALUES)]
        assert parse_tool_calls(nothing)[1] == [ToolCall("f", {})]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ('{"a":1,"b":1.0,"c":-0.0,"d":1e2}', '{"a": 1, "b": 1.0, "c": -0.0, "d": 100.0}'),
        ('{"n":123456789012345678901234567890}', '{"n": 123456789012345678901234567890}'),
        ('{"z":{"y":[true,null]},"a":"1"}', '{"z": {"y": [true, null]}, "a": "1"}'),
        (r'{"a":"\u2603 <b> \" \\ \n"}', '{"a": "\u2603 <b> \\" \\\\ \\n"}'),
    ],
    ids=["numbers", "a large number", "order", "letters"],
)
def test_values_of_arguments_stay_what_they_are(given, written):
    template, form = QWEN3
    assert learnt(template, arguments=given) == form % written
    assert learnt(template, arguments=given, place="c") == form % written
