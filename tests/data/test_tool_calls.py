"""Tool calls as models of each family write them."""

import json

import pytest

from data.chat_tokenizers import build_chat_tokenizer
from dschat_lora.data.chat import Chat
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
