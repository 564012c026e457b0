"""--offload_activations beside the options that decide whether blocks are recomputed."""

import pytest

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import DpoStageConfig
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.validation import with_recomputation

ACTOR, CRITIC = "actor_gradient_checkpointing", "critic_gradient_checkpointing"


def one(line):
    config = with_recomputation(parse_config(DpoStageConfig, line.split()))
    return config.model.gradient_checkpointing


def roles(line):
    config = with_recomputation(parse_config(RlhfConfig, line.split()))
    return config.actor.gradient_checkpointing, config.critic.gradient_checkpointing


def test_auto_is_on_where_inputs_are_to_be_on_the_host_and_stays_auto_otherwise():
    assert one("--offload_activations") is True
    assert one("") == "auto"
    assert one("--no-gradient_checkpointing") is False
    assert roles("--offload_activations") == (True, True)
    assert roles("") == ("auto", "auto")
    assert roles(f"--offload_activations --no-{CRITIC}") == (True, False)
    assert roles(f"--offload_activations --no-{ACTOR}") == (False, True)


def test_a_run_without_recomputed_blocks_is_refused():
    with pytest.raises(ValueError, match="--offload_activations .*--no-gradient_checkpointing"):
        one("--offload_activations --no-gradient_checkpointing")
    with pytest.raises(ValueError, match=f"--no-{ACTOR} --no-{CRITIC} recomputes none; drop one"):
        roles(f"--offload_activations --no-{ACTOR} --no-{CRITIC}")
    with pytest.raises(ValueError, match=f" but --no-{ACTOR} recomputes none"):
        roles(f"--offload_activations --algorithm rloo --num_generations 2 --no-{ACTOR}")
