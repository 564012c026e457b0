"""A model of the hub, whose positions are known only once its configuration is there."""

import json
import shutil
from types import SimpleNamespace

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.options import parse_config
from dschat_lora.rl.loop import setup as rlhf
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.supervised import setup as supervised
from helpers.step1 import checked


@pytest.fixture
def base(tmp_path):
    """A model whose file does not say its positions, which transformers takes to be 2048."""
    shutil.copytree(BUNDLED_MODEL, tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields["max_position_embeddings"]
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path.parent)


def test_rows_longer_than_the_positions_are_refused_and_do_not_fail_in_a_step(base, tmp_path):
    config = checked("--model_name_or_path", base, "--max_seq_len", 3000, "--lora_dim", 4)
    with pytest.raises(ValueError, match="--max_seq_len is 3000, but the model has 2048 positions"):
        supervised.set_up(SimpleNamespace(config=config))


def test_prompts_and_answers_longer_than_the_positions_are_refused(base):
    argv = f"""
        --actor_model_name_or_path {base} --actor_lora_dim 4 --algorithm rloo --num_generations 2
        --reward_function math:fsum --max_prompt_seq_len 3000
    """
    config = check_rlhf(parse_config(RlhfConfig, argv.split()))
    with pytest.raises(ValueError, match="--max_prompt_seq_len 3000 .* the models have 2048"):
        rlhf.set_up(SimpleNamespace(config=config))
