import pytest
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.rl.response.response import prompt_of

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def records(values, chat_template=None, kind="samples"):
    chat = Chat(build_byte_tokenizer(chat_template=chat_template), "</s>")
    return to_records(parse_row(RawRow("f:1", values)), chat, kind)


def record(values, chat_template=None, kind="samples") -> TextRecord:
    (only,) = records(values, chat_template, kind)
    return only


def spans(values, chat_template=None):
    return [(span.text, span.target) for span in record(values, chat_template).spans]


def reason(values, chat_template=None):
    with pytest.raises(RowError) as error:
        record(values, chat_template)
    return str(error.value)


def test_a_text_row_is_supervised_whole():
    assert spans({"text": "abc"}) == [("abc", True)]


def test_a_completion_follows_its_prompt_as_it_is():
    row = record({"prompt": "p ", "completion": " c"})
    assert (row.prompt, row.completion, row.rejected) == ("p ", " c", None)


def test_a_prompt_alone_has_no_completion():
    row = record({"prompt": "p"})
    assert (row.prompt, row.completion) == ("p", None)


def test_a_preference_trains_on_the_chosen_answer_and_keeps_the_rejected():
    row = record({"prompt": "p", "chosen": "good", "rejected": "bad", "margin": 2})
    assert (row.prompt, row.completion, row.rejected, row.margin) == ("p", "good", "bad", 2.0)
    assert "`margin` must be a finite number, found 'two'" in reason(
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": "two"}
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (
            "\n\nHuman: q\n\nAssistant: I do",
            "\n\nHuman: q\n\nAssistant: I do not",
            ("\n\nHuman: q\n\nAssistant:", " I do", " I do not"),
        ),
        (
            "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: b",
            "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: c",
            ("\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant:", " b", " c"),
        ),
        ("the cat sat", "the cap sat", ("the", " cat sat", " cap sat")),
    ],
    ids=["answers that begin alike", "several turns", "no turns: whole words"],
)
def test_an_implicit_prompt_is_what_both_answers_share(chosen, rejected, expected):
    row = record({"chosen": chosen, "rejected": rejected})
    assert (row.prompt, row.completion, row.rejected) == expected


def test_answers_that_share_nothing_need_a_prompt():
    assert reason({"chosen": "abc", "rejected": "xyz"}) == (
        "f:1: `chosen` and `rejected` have no common prefix; give their `prompt`"
    )
    assert reason({"chosen": "\n\nAssistant:", "rejected": "\n\nAssistant: b"}) == (
        "f:1: one of `chosen` and `rejected` is empty after the shared prompt"
    )


@pytest.mark.parametrize("form", ["explicit", "implicit"])
def test_a_preference_of_message_lists_is_rendered(form):
    other = {"role": "assistant", "content": "b"}
    values = {
        "explicit": {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]},
        "implicit": {"chosen": [USER, ANSWER], "rejected": [USER, other]},
    }[form]
    row = record(values)
    assert (row.prompt, row.completion, row.rejected) == (
        "\n\nHuman: q\n\nAssistant:",
        " a</s>",
        " b</s>",
    )


def test_equal_message_lists_still_end_in_an_answer():
    row = record({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]})
    assert row.completion == row.rejected == " a</s>"


def test_a_preference_adds_one_answer():
    values = {"prompt": [USER], "chosen": [ANSWER, USER, ANSWER], "rejected": [ANSWER]}
    assert reason(values) == (
        "f:1: `chosen` must add one assistant message to the prompt, but adds ['assistant', "
        "'user', 'assistant']"
    )


def test_every_answer_of_a_conversation_is_supervised_with_its_end():
    second = {"role": "assistant", "content": "b"}
    system = {"role": "system", "content": "Be kind."}
    assert spans({"messages": [system, USER, ANSWER, USER, second]}) == [
        ("Be kind.\n\nHuman: q\n\nAssistant:", False),
        (" a</s>", True),
        ("\n\nHuman: q\n\nAssistant:", False),
        (" b</s>", True),
    ]


def test_what_follows_the_last_answer_is_left_out():
    assert spans({"messages": [USER, ANSWER, USER]}) == spans({"messages": [USER, ANSWER]})


def test_answers_in_a_message_list_prompt_are_not_supervised():
    values = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert spans(values) == [
        ("\n\nHuman: q\n\nAssistant: a</s>\n\nHuman: q\n\nAssistant:", False),
        (" a</s>", True),
    ]


def test_a_prompt_of_messages_ends_where_the_assistant_speaks():
    assert record({"prompt": [USER]}).prompt == "\n\nHuman: q\n\nAssistant:"


def test_a_chat_template_is_used_and_the_white_space_behind_its_end_token_is_context():
    assert spans({"messages": [USER, ANSWER, USER, ANSWER]}, CHATML) == [
        ("<user>q\n<assistant>", False),
        ("a</s>", True),
        ("\n<user>q\n<assistant>", False),
        ("a</s>", True),
    ]


def test_a_template_without_end_token_keeps_the_whole_turn():
    template = CHATML.replace("</s>", "<end>")
    assert spans({"messages": [USER, ANSWER, USER, ANSWER]}, template)[1] == ("a<end>\n", True)


def test_an_end_token_inside_an_answer_does_not_shorten_it():
    template = CHATML.replace("</s>", "<end>")
    said = {"role": "assistant", "content": "x</s>y"}
    assert spans({"messages": [USER, said]}, template)[1] == ("x</s>y<end>\n", True)


def test_answers_of_a_template_that_rewrites_earlier_turns_are_samples_of_their_own():
    """Each follows the prompt that the model sees when it speaks."""
    template = "{{ messages | length }}" + CHATML
    first, second = records({"messages": [USER, ANSWER, USER, ANSWER]}, template)
    assert first.spans == (Span("1<user>q\n<assistant>", False), Span("a</s>", True))
    assert second.spans == (
        Span("3<user>q\n<assistant>a</s>\n<user>q\n<assistant>", False),
        Span("a</s>", True),
    )
    assert (first.goes_on, second.goes_on) == (False, True)
    later = "{% if messages | length > 2 %}long{% endif %}" + CHATML
    prompts = [each.prompt[:4] for each in records({"messages": [USER, ANSWER] * 2}, later)]
    assert prompts == ["<use", "long"]


def test_a_template_that_hides_where_an_answer_begins_is_refused():
    template = "{{ messages | length }}" + CHATML.replace("add_generation_prompt", "false")
    assert reason({"messages": [USER, ANSWER]}, template) == (
        "f:1: the chat template renders what precedes message 2 differently when that message "
        "follows, so its tokens cannot be identified; give such rows as `prompt`, `completion`"
    )


def test_an_answer_that_the_template_leaves_out_is_refused():
    template = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
    said = {"role": "assistant", "content": "No."}
    assert reason({"messages": [USER, said]}, template) == (
        "f:1: the chat template omits the content of message 2"
    )


def test_a_template_that_refuses_the_messages_says_why():
    template = "{{ raise_exception('only two roles') }}"
    assert reason({"messages": [USER, ANSWER]}, template) == (
        "f:1: the tokenizer's chat template rejects the messages: only two roles"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER], "f:1: no message of role 'assistant' to train on"),
        ([ANSWER, USER], "f:1: the first message is from the assistant, without a prompt"),
        (
            [{"role": "tool", "content": "x"}, ANSWER],
            "f:1: role 'tool' has no place in the built-in chat format; use system, user or "
            "assistant, or a tokenizer with a chat template",
        ),
    ],
)
def test_conversations_without_a_lesson_are_refused(messages, message):
    assert reason({"messages": messages}) == message


def test_braces_in_messages_stay_as_they_are():
    curly = {"role": "user", "content": "{x} {}"}
    assert spans({"messages": [curly, ANSWER]})[0][0] == "\n\nHuman: {x} {}\n\nAssistant:"


def test_digests_tell_prompt_and_completion_apart():
    one = record({"prompt": "ab", "completion": "c"})
    assert one.digest() == record({"prompt": "ab", "chosen": "c", "rejected": "d"}).digest()
    assert one.digest() != record({"prompt": "a", "completion": "bc"}).digest()


@pytest.mark.parametrize("margin", [1e39, -1e39, 10**400, float("nan"), True, [1]])
def test_a_margin_that_float32_cannot_hold_is_refused(margin):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": margin}
    assert "`margin` must be a finite number" in reason(row)


SECOND, THIRD = ({"role": "assistant", "content": text} for text in "bc")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER]}, [USER]),
        ({"messages": [USER, ANSWER, USER]}, [USER]),
        ({"messages": [USER, ANSWER, SECOND]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER, USER, SECOND]}, [USER, ANSWER, USER]),
        ({"prompt": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [SECOND, USER, THIRD]},
            [USER, ANSWER, USER, SECOND, USER],
        ),
    ],
)
def test_functions_get_the_prompt_that_the_model_reads(row, expected):
    # Of a row with an answer as SFT learns it: after another answer, in a turn of its own.
    chat = Chat(build_byte_tokenizer(), "</s>")
    rendered = chat.render(expected, add_generation_prompt=True)
    assert record(row, kind="prompts").prompt == rendered
    assert prompt_of(row, None) == expected


def test_prompts_of_other_rows_are_texts():
    assert prompt_of({"prompt": "as it is", "completion": " c"}, "decoded") == "as it is"
    assert prompt_of({"instruction": "do", "output": "done"}, "decoded") == "decoded"
