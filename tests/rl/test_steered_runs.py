"""Runs of step 3 whose critic learns first."""

import pytest

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, brevity

OPTIONS = {
    **ROLLOUTS,
    **{"max_steps": 5, "eval_prompts": 0, "rewards": [brevity]},
    **{"actor_lora_dim": 4, "actor_lora_learning_rate": 1e-2},
}


@pytest.mark.stage
def test_while_the_critic_warms_up_the_actor_stays_as_it_was():
    options = {"algorithm": "ppo", "num_generations": 1, "max_steps": 3}
    run = dl.rlhf(data=ROWS, **{**OPTIONS, **options}, critic_warmup_iterations=1)
    steps = [line for line in run.metrics if line["kind"] == "train"]
    assert [line["grad_norm"] is None for line in steps] == [True, False, False]
    assert all(line["critic_grad_norm"] > 0 for line in steps)
    # of the policy that answers: as the reference is, until it has learnt
    assert [abs(line["kl"]) < 1e-6 for line in steps] == [True, True, False]
