"""Chat templates of today's models: what of a conversation is supervised, in how many samples."""

from dataclasses import replace
from functools import cache

import pytest
from chat_tokenizers import TEMPLATES, build_chat_tokenizer

from dschat_lora.data.chat import Chat, ends_in_words, make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.templates import read_chat_template
from dschat_lora.data.tokenize import TokenRule, tokenize
from helpers.spread import ALL

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 2}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


# (content, thought) of each answer; in "tools" the first is a call.
CASES = {
    "1 turn": ([user("One?"), assistant("First.")], [("First.", "")]),
    "3 turns": (
        [
            *(user("One?"), assistant("First.")),
            *(user("Two?"), assistant("<b>")),
            *(user("Three?"), assistant("Third.")),
        ],
        [("First.", ""), ("<b>", ""), ("Third.", "")],
    ),
    "system": (
        [
            *({"role": "system", "content": "Be brief."}, user("One?"), assistant("First.")),
            *(user("Two?"), assistant("Second.")),
        ],
        [("First.", ""), ("Second.", "")],
    ),
    "thinking": (
        [
            *(user("One?"), assistant("First.", reasoning_content="Hm 1.")),
            *(user("Two?"), assistant("Second.", reasoning_content="Hm 2.")),
        ],
        [("First.", "Hm 1."), ("Second.", "Hm 2.")],
    ),
    "tools": (
        [
            *(user("2?"), assistant(None, tool_calls=[CALL])),
            {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "5"},
            *(assistant("It is 5."), user("Sure?"), assistant("Yes.")),
        ],
        [None, ("It is 5.", ""), ("Yes.", "")],
    ),
}
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
    "{}<|im_end|>"
)
DEEPSEEK_CALL = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
    '<\uff5ctool\u2581sep\uff5c>add\n```json\n{"a": 2}\n```<\uff5ctool\u2581call\u2581end\uff5c>'
    "<\uff5ctool\u2581calls\u2581end\uff5c>" + END
)
GEMMA_CALL = "<|tool_call>call:add{{a:2}}<tool_call|>{}".format
LFM_CALL = "<|tool_call_start|>[add(a=2)]<|tool_call_end|><|im_end|>"
LLAMA_CALL = '{"name": "add", "parameters": {"a": 2}}<|eot_id|>'
ATEM_CALL = (
    ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
    '<atem:parameter name="a">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>'
)
GLM_CALL = (
    "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
# Written by hand from each family's format. By template: an answer, one with a thought, a call
# (None: the template has none), and whether several turns are one sample.
PLAIN = "{content}<|im_end|>"
FORMATS = {
    "cohere": ("{content}<|END_OF_TURN_TOKEN|>", None, None, True),
    "cohere2": ("{content}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", None, None, True),
    "deepseek_r1_distill": ("{content}" + END, None, None, False),
    "deepseekv3": ("{content}" + END, None, DEEPSEEK_CALL, False),
    "gemma": ("{content}<end_of_turn>", None, None, True),
    "gemma3": ("{content}<end_of_turn>", None, None, True),
    **{
        f"gemma4{v}": ("{content}<turn|>", None, GEMMA_CALL("<|tool_response>"), True)
        for v in ("", "_v3", "_v4")
    },
    "gemma4_v2": ("{content}<turn|>", None, GEMMA_CALL("<turn|>"), True),
    "gemma4_v5": (
        "{content}<turn|>",
        "<|channel>thought\n{thought}\n<channel|>{content}<turn|>",
        GEMMA_CALL("<|tool_response>"),
        "without thoughts",
    ),
    "diffusion_gemma": (
        "{content}<turn|>",
        "<|channel>thought\n{thought}\n<channel|>{content}<turn|>",
        GEMMA_CALL("<|tool_response>"),
        "without thoughts",
    ),
    "smolvlm": (" {content}<end_of_utterance>", None, None, True),
    "glm4moe": (
        "\n<think></think>\n{content}",
        "\n<think>{thought}</think>\n{content}",
        GLM_CALL,
        "without thoughts",
    ),
    "gptoss": (
        "<|channel|>final<|message|>{content}<|return|>",
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        "<|channel|>final<|message|>{content}<|return|>",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>',
        False,
    ),
    "idefics3": (" {content}<end_of_utterance>", None, None, True),
    "lfm2": (PLAIN, None, None, True),
    "lfm2_v2": (PLAIN, None, LFM_CALL, True),
    "llama3": ("{content}<|eot_id|>", None, None, True),
    "llama3_1": ("{content}<|eot_id|>", None, LLAMA_CALL, True),
    "llama3_2": ("{content}<|eot_id|>", None, LLAMA_CALL, True),
    "llava_next": (" {content}</s>", None, None, True),
    "muse_glimmer": (
        " to=user<|message|>{content}<|eot|>",
        " to=self<|message|>{thought}<|eom|><|start|>assistant to=user<|message|>{content}<|eot|>",
        ATEM_CALL,
        True,
    ),
    **{
        f"nemotron_3_{name}": (
            "</think>{content}<|im_end|>",
            f"{{thought}}{line}</think>{line}{{content}}<|im_end|>",
            "</think>\n" + XML.format("\n"),
            False,
        )
        for name, line in (("nano", "\n"), ("super", "\n"), ("ultra", ""), ("5_lightning", ""))
    },
    "phi3": ("{content}<|end|>", None, None, True),
    "phi3_5": ("{content}<|end|>", None, None, True),
    "qwen2_5": (PLAIN, None, HERMES, True),
    "qwen2_5_vl": (PLAIN, None, None, True),
    "qwen3_instruct_2507": (PLAIN, None, HERMES, True),
    "qwen3_vl": (PLAIN, None, HERMES, True),
    "qwen3": (
        "<think>\n\n</think>\n\n" + PLAIN,
        "<think>\n{thought}\n</think>\n\n" + PLAIN,
        "<think>\n\n</think>\n\n" + HERMES,
        False,
    ),
    "qwen3_5_nothink": (PLAIN, "{thought}\n</think>\n\n" + PLAIN, XML.format(""), False),
    **{
        name: (
            "\n</think>\n\n" + PLAIN,
            "{thought}\n</think>\n\n" + PLAIN,
            "\n</think>\n\n" + XML.format(""),
            name == "qwen3_8",
        )
        for name in ("qwen3_5_think", "qwen3_6", "qwen3_8")
    },
}
# What stands before an answer without a thought, by the beginning of a marked template's name.
EMPTY = {
    "qwen3": "<think>\n\n</think>\n\n",
    "nemotron": "<think></think>",
    "glm4moe": "<think></think>\n",
}
# Of a family's revisions, which differ little, one is enough by default.
REVISIONS = ("gemma4", "gemma4_v3", "gemma4_v4", "llama3_2", "phi3_5", "qwen3_6", "qwen2_5_vl")
REVISIONS += ("nemotron_3_super", "nemotron_3_5_lightning", "lfm2_2_5_v2", "lfm2_2_5_vl")


def is_run(name):
    known = (TEMPLATES / f"{name}.jinja").is_file()
    return known and (ALL or name.removesuffix("_training") not in REVISIONS)


FILES = sorted(TEMPLATES.glob("*.jinja"))
MARKED = [path.stem for path in FILES if "endgeneration" in path.read_text(encoding="utf-8")]
# Marked templates without a place for tools, or for a system prompt.
NO_TOOLS = ("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2")
NO_TOOLS += ("llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")
SUPPORTED = {f"{name}_training": tuple(CASES)[:-1] for name in NO_TOOLS}
SUPPORTED["gemma_training"] = ("1 turn", "3 turns", "thinking")
tokenizer_of = cache(build_chat_tokenizer)


def row_of(case, **columns):
    messages = CASES[case][0] if isinstance(case, str) else case
    columns |= {"tools": [TOOL]} if case == "tools" else {}
    return parse_row(RawRow("f:1", {"messages": messages, **columns}))


def chat_of(name):
    tokenizer = tokenizer_of(name)
    return Chat(tokenizer, tokenizer.eos_token)


def targets(records):
    return [span.text for record in records for span in record.spans if span.target]


def expected(name, case):
    plain, thinking, call, _ = FORMATS[name]
    answers = CASES[case][1]
    said = [
        call
        if answer is None
        else (thinking or plain if answer[1] else plain).format(
            content=answer[0], thought=answer[1]
        )
        for answer in answers
    ]
    if name == "glm4moe" and case != "thinking":  # the next role's marker ends a turn
        said[:-1] = [
            text + ("<|user|>" if answer else "<|observation|>")
            for text, answer in zip(said[:-1], answers[:-1], strict=True)
        ]
    if name.startswith("phi3"):
        said[-1] += "\n<|endoftext|>"  # which ends the conversation
    if (name, case) == ("diffusion_gemma", "tools"):
        said[1] = "<|turn>model\n" + said[1]  # its generation prompt has no header after a tool
    return said


@pytest.mark.parametrize("name", filter(is_run, FORMATS))
def test_each_answer_is_supervised_once_as_the_template_writes_it(name):
    is_one = FORMATS[name][3]
    for case, (_, answers) in CASES.items():
        if (case == "tools" and FORMATS[name][2] is None) or (name, case) == ("gemma", "system"):
            with pytest.raises(RowError, match="chat template"):
                to_records(row_of(case), chat_of(name))
            continue
        records = to_records(row_of(case), chat_of(name))
        assert targets(records) == expected(name, case), case
        whole = is_one is True or (is_one == "without thoughts" and case != "thinking")
        assert len(records) == (1 if whole else len(answers)), case


@pytest.mark.parametrize("name", filter(is_run, MARKED))
def test_marked_text_is_supervised_token_for_token_as_transformers_masks_it(name):
    tokenizer = tokenizer_of(name)
    for case, (messages, _) in CASES.items():
        row = row_of(case)
        if case not in SUPPORTED.get(name, CASES):
            continue
        records = to_records(row, chat_of(name))
        if name.startswith(("llava", "smolvlm", "idefics")):  # these take parts alone
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
            ]
        if name.startswith("deepseek") and case == "tools":  # needs a content
            messages = [{"content": "", **{k: v for k, v in m.items() if v}} for m in messages]
        oracle = tokenizer.apply_chat_template(
            messages,
            tools=row.values.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        rule = TokenRule(tokenizer.eos_token_id, 10**6, "drop", False)
        encoder = make_encoder(tokenizer)
        (result,) = tokenize(list(records), encoder, rule)
        every = replace(rule, train_empty_think=True)
        (whole,) = tokenize(list(records), encoder, every)
        ids, mask = oracle["input_ids"], oracle["assistant_masks"]
        wanted = [token for token, masked in zip(ids, mask, strict=True) if masked]
        assert whole.sample.labels[whole.sample.labels != -100].tolist() == wanted, case
        # What follows the last marked token is not read.
        assert whole.sample.input_ids.tolist() == ids[: len(whole.sample.input_ids)], case
        assert result.sample.input_ids.tolist() == whole.sample.input_ids.tolist(), case
        empty = next((text for start, text in EMPTY.items() if name.startswith(start)), "")
        assert tokenizer.decode(
            result.sample.labels[result.sample.labels != -100]
        ) == tokenizer.decode(wanted).replace(empty, ""), case


@pytest.mark.parametrize("name", ["cohere2_training", "gptoss"])
def test_templates_with_loop_controls_marks_and_macros_are_read_from_a_file(name):
    path = TEMPLATES / f"{name}.jinja"
    assert read_chat_template(str(path)) == path.read_text(encoding="utf-8")


WORDS = ("The answer", " 1, 2, ", "<think>\nhm")


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "phi3", "gptoss", "deepseekv3"])
def test_a_prompt_that_ends_with_the_assistants_words_is_continued_as_by_transformers(name):
    tokenizer = build_chat_tokenizer(name)
    for words in WORDS:
        prompt = [user("One?"), assistant(words)]
        expected = tokenizer.apply_chat_template(
            prompt, tokenize=False, continue_final_message=True
        )
        (record,) = to_records(parse_row(RawRow("f:1", {"prompt": prompt})), make_chat(tokenizer))
        assert record.prompt == expected
    for last in (user("One?"), {**assistant("Hm."), "tool_calls": [CALL]}, assistant("")):
        assert not ends_in_words([user("One?"), last])


def test_the_assistants_words_are_continued_in_the_built_in_format_too():
    tokenizer = build_chat_tokenizer("qwen3")
    tokenizer.chat_template = None
    chat = make_chat(tokenizer)
    text = "\n\nHuman: One?\n\nAssistant:"
    assert chat.render_prompt([user("One?"), assistant("Two")]) == f"{text} Two"
    assert chat.render_prompt([user("One?")]) == text


def test_a_template_that_leaves_out_the_words_to_be_continued_refuses_them():
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    chat = make_chat(build_chat_tokenizer("qwen3", template=template))
    with pytest.raises(ValueError, match="the final message"):
        chat.render_prompt([user("One?"), assistant("Two")])
