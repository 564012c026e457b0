"""Families of models against stock transformers and PEFT: a few here, all where asked for."""

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from families.checks import COMMANDS, IN_PROCESS, RL, Family
from helpers.kinds import LEFT_OUT, TYPES
from helpers.spread import ALL

# One of each way: its own attention, its own linear layers, no attention, layers beside attention
# that keep states, a body of another name.
SOME = ("diffllama", "falcon", "mamba2", "qwen3_next", "llama4_text")
# What is refused, in words of the line.
REFUSED = {(kind, "merge"): "blocks share" for kind in ("zamba", "zamba2")}
_RENAMED = ("inkling2_loop_text", "inkling2_text", "laguna")
REFUSED |= {(kind, "to_peft"): "stock PEFT drops the factors" for kind in _RENAMED}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=[k for k in TYPES if k in CAUSAL] if ALL else SOME)
def family(request, tmp_path_factory):
    launcher = request.getfixturevalue("launcher") if ALL else None
    return Family(request.param, tmp_path_factory.mktemp(request.param), launcher=launcher)


@pytest.mark.parametrize("check", IN_PROCESS, ids=lambda check: check.__name__)
def test_family_is_that_of_transformers_and_peft(family, check):
    words = REFUSED.get((family.kind, check.__name__))
    if words is None:
        check(family)
        return
    with pytest.raises((ValueError, AssertionError), match=words):
        check(family)


@pytest.mark.thorough
@pytest.mark.stage
@pytest.mark.parametrize("check", COMMANDS, ids=lambda check: check.__name__)
def test_family_runs_and_goes_on(family, check):
    check(family)


@pytest.mark.thorough
@pytest.mark.stage
def test_a_run_whose_sampler_is_another_policy_stops(launcher, tmp_path):
    family = Family("llama", tmp_path, launcher=launcher)
    grouped = ("--algorithm", "grpo", "--num_generations", "2", "--max_steps", "9")
    function = ("--reward_function", "families.checks:lengths_and_another_sampler")
    told = r"^error: .* are 0\.\d nats per token .* the run stops"
    with pytest.raises(AssertionError, match=told):
        family.command("step3_rlhf", *RL, *grouped, *function)


def test_every_causal_language_model_is_tried_or_left_out_for_a_reason():
    assert not CAUSAL.keys() - {*TYPES, *LEFT_OUT}
    assert not set(TYPES) & LEFT_OUT.keys()
    assert len(TYPES) >= 40
