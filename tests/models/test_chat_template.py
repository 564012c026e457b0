"""The chat template of a loaded tokenizer, and the tokens at which generation stops."""

from types import SimpleNamespace
from unittest import mock

import pytest
from transformers import GenerationConfig

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.groups import ModelConfig
from dschat_lora.data.templates import BUILT_IN_TEMPLATE
from dschat_lora.models.loading import end_ids, load_tokenizer, stop_at
from dschat_lora.rl.loop.build import make_generator

EOS, UNK = 2, 0
ENDS_IN_UNK = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|unk|>\n{% endfor %}"


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(ENDS_IN_UNK, encoding="utf-8")
    return str(path)


def test_a_tokenizer_without_template_is_given_the_built_in_one():
    tokenizer = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    assert tokenizer.chat_template == BUILT_IN_TEMPLATE
    assert end_ids(tokenizer) == [EOS]


def test_the_file_of_the_option_comes_before_a_saved_template(template, tmp_path):
    tokenizer = load_tokenizer(str(BUNDLED_MODEL), ModelConfig(chat_template=template))
    assert tokenizer.chat_template == ENDS_IN_UNK
    assert end_ids(tokenizer) == [EOS, UNK]
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"), ModelConfig())
    assert again.chat_template == ENDS_IN_UNK
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages }}", encoding="utf-8")
    config = ModelConfig(chat_template=str(other))
    assert load_tokenizer(str(tmp_path / "saved"), config).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("known", "ids", "expected"),
    [
        (2, [2], 2),
        (None, [2], None),
        (None, [2, 0], [2, 0]),
        (2, [2, 0], [2, 0]),
        ([5, 2], [2, 0], [5, 2, 0]),
        ([5, 0, 2], [2, 0], [5, 0, 2]),
    ],
)
def test_end_tokens_are_added_to_those_that_a_model_stops_at(known, ids, expected):
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=known))
    stop_at(model, ids)
    assert model.generation_config.eos_token_id == expected


def test_rollouts_stop_at_every_end_token(template):
    tokenizer = load_tokenizer(str(BUNDLED_MODEL), ModelConfig(chat_template=template))
    with (
        mock.patch("dschat_lora.rl.loop.build.Generator") as generator,
        mock.patch("dschat_lora.rl.loop.build.make_engine") as make_engine,
    ):
        setup = mock.MagicMock(tokenizer=tokenizer)
        setup.models.roles.actor.model.generation_config.eos_token_id = None
        make_generator(setup, mock.MagicMock())
    assert generator.call_args.kwargs["eos_ids"] == {EOS, UNK}
    assert make_engine.call_args.args[0].ends == {EOS, UNK}
