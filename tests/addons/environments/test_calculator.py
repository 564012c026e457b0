"""The calculator of the toy world."""

import re

from dschat_lora.addons.environments.calculator import calculate, dialogues, is_right, questions


def test_questions_are_sums_of_numbers_of_two_digits_and_those_of_their_seed():
    rows = questions(50, seed=3)
    assert rows == questions(50, seed=3) != questions(50, seed=4)
    for row in rows:
        (message,) = row["prompt"]
        first, second = re.findall(r"\b\d\d\b", message["content"])
        assert message["role"] == "user"
        assert int(row["answer"]) == int(first) + int(second)


def test_every_second_dialogue_asks_the_calculator_and_is_right():
    rows = [row["messages"] for row in dialogues(40, seed=1)]
    assert [len(messages) for messages in rows] == [4, 2] * 20
    for question, call, reply, answer in rows[::2]:
        assert calculate([call["content"]]) == [reply]
        sum_ = str(sum(map(int, re.findall(r"\b\d\d\b", question["content"]))))
        assert is_right([answer["content"]], [sum_]) == [1.0]
    assert all(calculate([answer["content"]]) == [None] for _, answer in rows[1::2])


def test_the_calculator_answers_a_whole_question_alone():
    asked = [" 34 plus 58?", "34 plus 58", "It is 34 plus 58?", "The sum is 92."]
    reply = {"role": "user", "content": "34 plus 58 is 92."}
    assert calculate(asked) == [reply, None, None, None]
    assert is_right([" The sum is 92.", "The sum is 92", "92"], ["92"] * 3) == [1.0, 0.0, 0.0]
