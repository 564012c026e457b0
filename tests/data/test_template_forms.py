"""Forms of chat templates that families use: what ends an answer, and what of it is learnt."""

from functools import cache

import pytest
from chat_tokenizers import build_tokenizer_with
from hand_tokenizers import build_byte_tokenizer, build_metaspace_tokenizer

from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.tokenize import TokenRule, tokenize

EOS = "<eos>"
ONE = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "First."}]
TWO = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Second."}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = [
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]


def by_role(*, user, said, always="", ask="", system="", tool="", call=""):
    """A template of one branch for each role; ``always`` stands behind all of it."""
    branches = {"system": system, "user": user, "tool": tool}
    body = "".join(
        f"{{% if m.role == '{role}' %}}{text.replace('$', '{{ m.content }}')}{{% endif %}}"
        for role, text in branches.items()
    )
    said = said.replace("$", "{{ m.content }}").replace(
        "CALL", "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    )
    body += f"{{% if m.role == 'assistant' %}}{said}{{% endif %}}"
    asked = f"{{% if add_generation_prompt %}}{{{{ {ask!r} }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{body}{{% endfor %}}{asked}{{{{ {always!r} }}}}"


def ended(tokens, end, *, before="", **roles):
    """A form without calls, each of whose answers ends in one token."""
    answers = [f"{before}{said}{end}" for said in ("First.", "Second.")]
    return by_role(**roles), tokens, (end,) if end != EOS else (), answers, None


LINE = "{{ '\\n' }}"  # one behind a tag is cut
NAME = "{{ c.function.name }}"
JSON = "{{ c.function.arguments | tojson }}"
THINK = "{{ m.reasoning_content or '' }}"
# By form: template, its special tokens, those that end an answer beside end-of-sequence, and what
# is learnt of ONE + TWO and of CALLS (None: it has no calls), written by hand.
FORMS = {
    "next marker": (
        by_role(
            user="<|user|>\n$",
            said="<|assistant|>\n$CALL",
            call=f"<|call|>{NAME}\n{JSON}<|/call|>",
            tool="<|observation|>\n$",
            ask="<|assistant|>",
        ),
        "<|user|> <|assistant|> <|observation|> <|call|> <|/call|>",
        ("<|user|>", "<|observation|>"),
        ["\nFirst.<|user|>", "\nSecond.<eos>"],
        ['\n<|call|>add\n{"a": 2}<|/call|><|observation|>', "\nIt is 5.<eos>"],
    ),
    "next marker, thoughts, closed calls": (
        by_role(
            user="<|user|>\n$",
            said=f"<|assistant|>\n<think>{THINK}</think>\n$CALL",
            call=f"<tool_call>{NAME}{JSON}</tool_call>",
            tool="<|observation|>$",
            ask="<|assistant|>",
        ),
        "<|user|> <|assistant|> <|observation|> <tool_call> </tool_call>",
        ("<|user|>", "<|observation|>"),
        ["\n", "First.<|user|>", "\n", "Second.<eos>"],
        ["\n", '<tool_call>add{"a": 2}</tool_call><|observation|>', "\n", "It is 5.<eos>"],
    ),
    "next marker behind a line": (
        by_role(user="<|user|> $\n", said="<|assistant|> $\n", ask="<|assistant|>"),
        "<|user|> <|assistant|>",
        ("<|user|>",),
        [" First.\n<|user|>", " Second.\n<eos>"],
        None,
    ),
    "two numbered markers": (
        by_role(user=LINE + "<reserved_1>$", said=LINE + "<reserved_2>$", ask="\n<reserved_2>"),
        "<reserved_1> <reserved_2>",
        ("<reserved_1>",),
        ["First.\n<reserved_1>", "Second.<eos>"],
        None,
    ),
    "only calls end in a marker": (
        by_role(
            user="<|user|>$<|end|>",
            said="<|assistant|>$CALL{% if not m.tool_calls %}<|end|>{% endif %}",
            call=NAME + JSON,
            tool="<|tool|>$<|end|>",
            ask="<|assistant|>",
        ),
        "<|user|> <|assistant|> <|tool|> <|end|>",
        ("<|end|>", "<|tool|>"),
        ["First.<|end|>", "Second.<|end|>"],
        ['add{"a": 2}<|tool|>', "It is 5.<|end|>"],
    ),
    "header always": (
        "<bos><|start|><|system|>Be kind.<|stop|>"
        + by_role(
            user="<|start|><|user|>$<|stop|>",
            said="<|start|><|bot|>{% if m.tool_calls %}<|act|>CALL<|/act|>{% else %}"
            "<|reply|>$<|/reply|>{% endif %}<|stop|>",
            call=NAME + JSON,
            tool="<|start|><|system|>$<|stop|>",
            always="<|start|><|bot|>",
        ),
        "<|start|> <|stop|> <|user|> <|bot|> <|system|> <|reply|> <|/reply|> <|act|> <|/act|>",
        ("<|stop|>",),
        ["<|reply|>First.<|/reply|><|stop|>", "<|reply|>Second.<|/reply|><|stop|>"],
        ['<|act|>add{"a": 2}<|/act|><|stop|>', "<|reply|>It is 5.<|/reply|><|stop|>"],
    ),
    "header always, end-of-sequence between turns": ended(
        "<|start|>",
        "<eos>",
        user="<|start|>user\n$<eos>\n",
        said="<|start|>assistant\n$<eos>\n",
        always="<|start|>assistant\n",
    ),
    "header always, words before the first": (
        "Be kind."
        + by_role(
            user="<|start|>user\n$<|stop|>",
            said="<|start|>assistant\n$<|stop|>",
            always="<|start|>assistant\n",
        ),
        "<|start|> <|stop|>",
        ("<|stop|>",),
        ["First.<|stop|>", "Second.<|stop|>"],
        None,
    ),
    "header always, a marker for each role": ended(
        "<|user|> <|assistant|> <|end|>",
        "<|end|>",
        user="<|user|>\n$<|end|>\n",
        said="<|assistant|>\n$<|end|>\n",
        always="<|assistant|>\n",
    ),
    "header always, in words": ended(
        "<|end|>",
        "<|end|>",
        user="### Instruction:\n$<|end|>\n\n",
        said="### Response:\n$<|end|>\n\n",
        always="### Response:\n",
    ),
    "header always, no end": (
        by_role(
            user="### Instruction:\n$\n\n", said="### Response:\n$\n\n", always="### Response:\n"
        ),
        "",
        (),
        ["First.", "Second.<eos>"],
        None,
    ),
    "header always, opening a thought": ended(
        "<|user|> <|assistant|> <|end|>",
        "<|end|>",
        user="<|user|>$<|end|>",
        said=f"<|assistant|><think>\n{THINK}\n</think>\n$<|end|>",
        always="<|assistant|><think>\n",
    ),
    "header never": ended(
        "<|end|>",
        "<|end|>",
        before="[assistant]",
        user="[user]$<|end|>\n",
        said="[assistant]$<|end|>\n",
    ),
    "header never, in words": (
        by_role(user="Q: $ END\n", said="A: $ END\n"),
        "",
        (),
        ["A: First. END\n", "A: Second. END\n<eos>"],
        None,
    ),
    "header if the last message asks": ended(
        "<|user|> <|assistant|> <|end|>",
        "<|end|>",
        user="<|user|>$<|end|>{% if loop.last %}<|assistant|>{% endif %}",
        said="<|assistant|>$<|end|>",
    ),
    "tags of its own for thoughts": ended(
        "<seed:bos>",
        "<eos>",
        user="<seed:bos>user\n$<eos>",
        said=f"<seed:bos>assistant\n<seed:cot>{THINK}</seed:cot>$<eos>",
        ask="<seed:bos>assistant\n",
    ),
    "empty thought without a place for another": ended(
        "<|start|> <|stop|> <|user|> <|bot|> <|THINK_START|> <|THINK_END|> <|reply|>",
        "<|stop|>",
        before="<|reply|>",
        user="<|start|><|user|>$<|stop|>",
        said="<|start|><|bot|><|THINK_START|><|THINK_END|><|reply|>$<|stop|>",
        ask="<|start|><|bot|>",
    ),
    "the end of a thought alone": ended(
        "<|User|> <|Assistant|>",
        "<eos>",
        user="<|User|>$",
        said="<|Assistant|></think>$<eos>",
        ask="<|Assistant|><think>",
    ),
    "the end of a thought alone, or a thought": ended(
        "<|User|> <|Assistant|>",
        "<eos>",
        user="<|User|>$",
        said="<|Assistant|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
        "{% endif %}</think>$<eos>",
        ask="<|Assistant|><think>",
    ),
    "thought switched off in the prompt": ended(
        "<|user|> <|assistant|> <|end|>",
        "<|end|>",
        user="<|user|>$<|end|>",
        said="<|assistant|><think>\n\n</think>\n$<|end|>",
        ask="<|assistant|><think>\n\n</think>\n",
    ),
    "odd brackets": ended(
        "]~b] [e~[",
        "[e~[",
        user="]~b]user\n$[e~[\n",
        said=f"]~b]ai\n<think>\n{THINK}\n</think>\n\n$[e~[\n",
        ask="]~b]ai\n<think>\n",
    ),
    "a token between header and text": (
        by_role(
            user="<|im_user|>user<|im_middle|>$<|im_end|>",
            said="<|im_assistant|>assistant<|im_middle|>$CALL<|im_end|>",
            call=f"<|call|>{NAME}<|arg|>{JSON}<|/call|>",
            tool="<|im_system|>tool<|im_middle|>$<|im_end|>",
            ask="<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|call|> <|arg|> "
        "<|/call|>",
        ("<|im_end|>",),
        ["First.<|im_end|>", "Second.<|im_end|>"],
        ['<|call|>add<|arg|>{"a": 2}<|/call|><|im_end|>', "It is 5.<|im_end|>"],
    ),
    "role in the user's turn": ended(
        "[INST] [/INST]", "<eos>", before=" ", user="[INST] $ [/INST]", said=" $<eos>"
    ),
}


@cache
def tokenizer_of(name):
    template, tokens, *_ = FORMS[name]
    return build_tokenizer_with(tokens.split(), eos=EOS, template=template)


def learnt(name, messages, *, kind="samples", **options):
    """(texts learnt of all samples, tokens of each) of a row."""
    tokenizer = tokenizer_of(name) if isinstance(name, str) else name
    chat = Chat(tokenizer, tokenizer.eos_token)
    row = messages if isinstance(messages, dict) else {"messages": messages}
    records = to_records(parse_row(RawRow("f:1", row)), chat, kind)
    rule = TokenRule(tokenizer.eos_token_id, 10**6, "drop", False, kind, **options)
    texts, ids = [], []
    for result in tokenize(list(records), make_encoder(tokenizer), rule):
        sample, text, last = result.sample, [], False
        for token, own in zip(sample.input_ids.tolist(), sample.supervised.tolist(), strict=True):
            if own:
                text = [*text, [token]] if not last else [*text[:-1], [*text[-1], token]]
            last = own
        texts += map(tokenizer.decode, text)
        ids.append(sample.input_ids.tolist())
    return texts, ids


@pytest.mark.parametrize("name", FORMS)
def test_each_answer_is_learnt_through_its_end_and_no_header_or_empty_thought(name):
    _, _, ends, answers, calls = FORMS[name]
    tokenizer = tokenizer_of(name)
    assert Chat(tokenizer, EOS).end_tokens == ends
    for messages, wanted in (([*ONE, *TWO], answers), (CALLS, calls)):
        if wanted is not None:
            texts, ids = learnt(name, messages)
            assert texts == wanted
            _, every = learnt(name, messages, train_empty_think=True)
            assert ids == every
            # But for the end, all of it is what the template writes.
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert text.startswith(tokenizer.decode(ids[-1]).removesuffix(EOS))


# More rows of the two kinds, and what is learnt of each, written by hand.
TOOL = CALLS[2]
GLM, COMMAND = "next marker, thoughts, closed calls", "header always"
SYSTEM = {"role": "system", "content": "Be brief."}
USED = '<tool_call>add{"a": 2}</tool_call>'
ROWS = {
    "one turn": (GLM, ONE, ["\n", "First.<eos>"]),
    "system": (GLM, [SYSTEM, *ONE, *TWO], ["\n", "First.<|user|>", "\n", "Second.<eos>"]),
    "a call at the end": (GLM, CALLS[:2], ["\n", USED + "<eos>"]),
    "a call, then its result": (GLM, CALLS[:3], ["\n", USED + "<eos>"]),
    "two results": (
        GLM,
        [*CALLS[:3], TOOL, CALLS[3]],
        ["\n", USED + "<|observation|>", "\n", "It is 5.<eos>"],
    ),
    "two calls in one": (
        GLM,
        [CALLS[0], {**CALLS[1], "tool_calls": [CALL, CALL]}, *CALLS[2:]],
        ["\n", USED * 2 + "<|observation|>", "\n", "It is 5.<eos>"],
    ),
    "two calls in turn": (
        GLM,
        [*CALLS[:3], *CALLS[1:]],
        ["\n", USED + "<|observation|>", "\n", USED + "<|observation|>", "\n", "It is 5.<eos>"],
    ),
    "words beside a call": (
        GLM,
        [CALLS[0], {**CALLS[1], "content": "So:"}, *CALLS[2:]],
        ["\n", f"So:{USED}<|observation|>", "\n", "It is 5.<eos>"],
    ),
    "a call, then a question": (
        GLM,
        [*CALLS[:2], *TWO],
        ["\n", USED + "<|user|>", "\n", "Second.<eos>"],
    ),
    "two answers running": (
        GLM,
        [*ONE, TWO[1], *CALLS],
        [
            *("\n", "First.", "\n", "Second.<|user|>"),
            *("\n", USED + "<|observation|>", "\n", "It is 5.<eos>"),
        ],
    ),
    "thoughts": (
        GLM,
        [ONE[0], {**ONE[1], "reasoning_content": "hm"}, *TWO],
        ["\n<think>hm</think>\nFirst.<|user|>", "\n", "Second.<eos>"],
    ),
    "a prompt with an answer": (
        GLM,
        {"prompt": [*ONE, TWO[0]], "completion": TWO[1:]},
        ["\n", "Second.<eos>"],
    ),
    "a question behind": (
        GLM,
        [*ONE, *TWO, ONE[0]],
        ["\n", "First.<|user|>", "\n", "Second.<eos>"],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_turn_of_a_row_ends_where_the_next_role_s_marker_or_end_of_sequence_stands(row):
    name, messages, wanted = ROWS[row]
    assert learnt(name, messages)[0] == wanted


REPLY = "<|reply|>{}<|/reply|><|stop|>".format
ALWAYS = {
    "one turn": (ONE, [REPLY("First.")]),
    "system": ([SYSTEM, *ONE, *TWO], [REPLY("First."), REPLY("Second.")]),
    "three turns": ([*ONE, *TWO, *ONE], [REPLY("First."), REPLY("Second."), REPLY("First.")]),
    "a call at the end": (CALLS[:2], ['<|act|>add{"a": 2}<|/act|><|stop|>']),
    "two calls": (
        [CALLS[0], {**CALLS[1], "tool_calls": [CALL, CALL]}, *CALLS[2:]],
        ['<|act|>add{"a": 2}add{"a": 2}<|/act|><|stop|>', REPLY("It is 5.")],
    ),
    "two results": (
        [*CALLS[:3], TOOL, CALLS[3]],
        ['<|act|>add{"a": 2}<|/act|><|stop|>', REPLY("It is 5.")],
    ),
    "two answers running": ([*ONE, TWO[1]], [REPLY("First."), REPLY("Second.")]),
    "a question behind": ([*ONE, *TWO, ONE[0]], [REPLY("First."), REPLY("Second.")]),
    "a prompt with an answer": (
        {"prompt": [*ONE, TWO[0]], "completion": TWO[1:]},
        [REPLY("Second.")],
    ),
    "a prompt with two": (
        {"prompt": ONE[:1], "completion": [ONE[1], *TWO]},
        [REPLY("First."), REPLY("Second.")],
    ),
    "the header's words": (
        [ONE[0], {**ONE[1], "content": "<|start|>"}, *TWO],
        [REPLY("<|start|>"), REPLY("Second.")],
    ),
    "white space around": (
        [ONE[0], {**ONE[1], "content": " a\n"}, *TWO],
        [REPLY(" a\n"), REPLY("Second.")],
    ),
}


@pytest.mark.parametrize("row", ALWAYS)
def test_no_header_is_learnt_though_the_template_writes_it_behind_every_text(row):
    messages, wanted = ALWAYS[row]
    assert learnt(COMMAND, messages)[0] == wanted


@pytest.mark.parametrize("name", [GLM, COMMAND])
def test_a_prompt_to_answer_ends_in_its_header_once(name):
    tokenizer = tokenizer_of(name)
    served = tokenizer.apply_chat_template(
        [*ONE, TWO[0]], tokenize=False, add_generation_prompt=True
    )
    for row in ({"messages": [*ONE, *TWO]}, {"prompt": [*ONE, TWO[0]]}):
        (record,) = to_records(parse_row(RawRow("f:1", row)), Chat(tokenizer, EOS), "prompts")
        assert record.prompt == served


def test_a_header_is_told_from_an_end_that_is_the_end_of_sequence():
    template, tokens, _, answers, _ = FORMS["header always"]
    tokenizer = build_tokenizer_with(tokens.split(), eos="<|stop|>", template=template)
    assert Chat(tokenizer, "<|stop|>").end_tokens == ()
    assert learnt(tokenizer, [*ONE, *TWO])[0] == answers


MARKED = FORMS["next marker, thoughts, closed calls"][0].replace(
    "<|assistant|>\n<think>", "<|assistant|>\n{% generation %}<think>", 1
)
MARKED = MARKED.replace(
    "{% endfor %}{% endif %}{% endfor %}",
    "{% endfor %}<|end|>{% endgeneration %}{% endif %}{% endfor %}",
    1,
)
BARE = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
HEADED = MARKED.replace("<|assistant|>\n{% generation %}", "{% generation %}<|assistant|>\n", 1)


def said(text, **keys):
    return [ONE[0], {"role": "assistant", "content": text, **keys}]


# A thought of the file is learnt as it stands there, and an empty key holds none; by messages what
# is learnt with the marks of MARKED, worked out by hand.
HELD = {
    "none": (said("a"), ["a<|end|>"]),
    "null": (said("a", reasoning_content=None), ["a<|end|>"]),
    "one": (said("a", reasoning_content="hm"), ["<think>hm</think>\na<|end|>"]),
    "empty key": (said("a", reasoning_content=""), ["a<|end|>"]),
    "one, then none": (
        [*said("a", reasoning_content="hm"), *said("b")],
        ["<think>hm</think>\na<|end|>", "b<|end|>"],
    ),
    "none, then one": (
        [*said("a"), *said("b", reasoning_content="hm")],
        ["a<|end|>", "<think>hm</think>\nb<|end|>"],
    ),
    "none, then empty key": (
        [*said("a"), *said("b", reasoning_content="")],
        ["a<|end|>", "b<|end|>"],
    ),
    "empty key, then none": (
        [*said("a", reasoning_content=""), *said("b")],
        ["a<|end|>", "b<|end|>"],
    ),
    "a call": (
        [CALLS[0], {**CALLS[1], "content": None}, *CALLS[2:]],
        ['<tool_call>add{"a": 2}</tool_call><|end|>', "It is 5.<|end|>"],
    ),
    "tags that the answer speaks of": (
        said("Write <think></think>\nfirst."),
        ["Write <think></think>\nfirst.<|end|>"],
    ),
    "white space of its own": (said("  a"), ["  a<|end|>"]),
    "one, then empty key": (
        [*said("a", reasoning_content="hm"), *said("b", reasoning_content="")],
        ["<think>hm</think>\na<|end|>", "b<|end|>"],
    ),
}


@pytest.mark.parametrize("template", [MARKED, HEADED, BARE])
@pytest.mark.parametrize("row", HELD)
def test_empty_thoughts_of_a_file_are_learnt_and_those_of_a_template_are_not(row, template):
    tokens = [*FORMS["next marker, thoughts, closed calls"][1].split(), "<|end|>"]
    tokenizer = build_tokenizer_with(tokens, eos=EOS, template=template)
    messages, wanted = HELD[row]
    texts, ids = learnt(tokenizer, messages)
    header = {MARKED: "", HEADED: "<|assistant|>\n", BARE: "\n"}[template]
    # The header, where it is learnt, is one text with what follows but for an empty thought.
    parts = [
        part
        for text in wanted
        for part in ([header + text] if text.startswith("<think>") else [header, text])
        if part
    ]
    assert texts == parts
    assert learnt(tokenizer, messages, train_empty_think=True)[1] == ids


def plain_texts(tokenizer, row, **options):
    """Tokens learnt and all tokens, decoded one by one, of a row's only sample."""
    chat = Chat(tokenizer, tokenizer.eos_token)
    (record,) = to_records(parse_row(RawRow("f:1", row)), chat)
    rule = TokenRule(tokenizer.eos_token_id, 99, "drop", False, **options)
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    ids, own = result.sample.input_ids.tolist(), result.sample.supervised.tolist()
    learnt = [token for token, is_own in zip(ids, own, strict=True) if is_own]
    return [tokenizer.convert_ids_to_tokens(each) for each in (learnt, ids)]


def test_a_token_over_the_end_of_an_empty_thought_is_learnt_and_no_other_token_made():
    template = by_role(user="u$", said="a<think></think>\n$</s>", ask="a")
    tokenizer = build_byte_tokenizer(merges=[("\u010a", "\u010a")], chat_template=template)
    row = {"messages": said("\nb")}
    learnt, ids = plain_texts(tokenizer, row)
    assert learnt == ["\u010a\u010a", "b", "</s>"]
    text = "uOne?a<think></think>\n\nb</s>"
    assert ids == tokenizer.tokenize(text) == plain_texts(tokenizer, row, train_empty_think=True)[1]


def test_an_empty_thought_in_letters_is_found_where_a_text_begins_with_a_space():
    tokenizer = build_metaspace_tokenizer(letters="One?a<thik>/b")
    tokenizer.chat_template = by_role(user="$", said="a<think></think>$</s>", ask="a")
    learnt, ids = plain_texts(tokenizer, {"messages": said("b")})
    assert learnt == ["b", "</s>"]
    assert ids == ["\u2581", *"One?a<think></think>b", "</s>"]


def test_a_system_message_that_stands_with_the_last_question_stays_in_the_prompt():
    said = "{{ messages[0].content ~ '; ' }}"
    template = by_role(
        user=f"[INST]{{% if loop.last %}}{said}{{% endif %}}$[/INST]", said=" ${{ eos_token }}"
    )
    tokenizer = build_tokenizer_with(["[INST]", "[/INST]"], eos=EOS, template=template)
    turns = [{"role": "system", "content": "Be kind."}, *ONE, *TWO]
    row = parse_row(RawRow("f:1", {"messages": turns}))
    found = to_records(row, Chat(tokenizer, EOS))
    # by hand, as the model is asked in each turn
    first, second = "[INST]Be kind.; One?[/INST]", "[INST]Be kind.; Two?[/INST]"
    assert [record.prompt for record in found] == [first, f"[INST]One?[/INST] First.{EOS}{second}"]
    assert [record.completion for record in found] == [f" First.{EOS}", f" Second.{EOS}"]
