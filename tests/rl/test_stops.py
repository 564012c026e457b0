"""What ends a response: tokens by their texts, and strings in the text of several tokens."""

from types import SimpleNamespace

import pytest

from dschat_lora.generation.stops import end_of_text, stop_ids

TEXTS = {3: "Yes", 4: ".", 5: "\n", 6: "Hum", 7: "an", 8: ":"}


def decode(ids):
    return "".join(TEXTS[each] for each in ids)


@pytest.mark.parametrize(
    ("tokens", "strings", "expected"),
    [
        ([3, 4, 5, 6, 7, 8, 3], ["\nHuman:"], 6),
        ([3, 4, 5, 6, 7, 8, 3], ["\nHum", "Human"], 4),
        ([3, 4, 5], ["Yes"], 1),
        ([3, 4, 5], ["\n"], 3),
        ([6, 3, 7], ["Human"], None),
        ([3, 4], [], None),
        ([], ["Yes"], None),
    ],
)
def test_text_ends_with_the_token_that_completes_a_string(tokens, strings, expected):
    assert end_of_text(tokens, strings, decode) == expected


class Tokenizer:
    """Ends in token 2, without a chat template."""

    eos_token_id = 2

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [9] if text == "<end>" else [3, 4]


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, [2, 9]), (2, [2, 9]), (7, [2, 7, 9]), ([7, 8], [2, 7, 8, 9])],
)
def test_end_tokens_are_those_of_tokenizer_generation_config_and_user(
    monkeypatch, configured, expected
):
    monkeypatch.setattr("dschat_lora.generation.stops.end_ids", lambda tokenizer: [2])
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert stop_ids(Tokenizer(), model, ["<end>"]) == expected


def test_a_stop_token_of_several_tokens_is_refused(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.stops.end_ids", lambda tokenizer: [2])
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    with pytest.raises(ValueError, match="--stop_tokens 'Human:' is 2 tokens of the actor's"):
        stop_ids(Tokenizer(), model, ["Human:"])
