"""Runs of step 3 whose entropy is steered, or whose critic learns first."""

import pytest

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, brevity, numbers

OPTIONS = {
    **ROLLOUTS,
    **{"max_steps": 5, "eval_prompts": 0, "rewards": [brevity]},
    **{"actor_lora_dim": 4, "actor_lora_learning_rate": 1e-2},
}


@pytest.mark.thorough
@pytest.mark.stage
def test_an_entropy_is_steered_by_its_bonus_and_a_stopped_run_steers_on(tmp_path):
    """A target that no policy reaches raises the weight, one below all of them never acts."""
    options = {**OPTIONS, "max_steps": 3}
    high = dl.rlhf(data=ROWS, **options, target_entropy=50.0)
    steps = [line for line in high.metrics if line["kind"] == "train"]
    assert [line["entropy_coef"] for line in steps] == pytest.approx([0.005, 0.01, 0.015])
    plain = dl.rlhf(data=ROWS, **options)
    assert plain.metrics[1]["policy_loss"] - steps[1]["policy_loss"] == pytest.approx(
        0.005 * steps[1]["entropy"], rel=0.1
    )
    low = dl.rlhf(data=ROWS, **options, target_entropy=1e-9, entropy_coef=0.02)
    coefs = [line["entropy_coef"] for line in low.metrics if line["kind"] == "train"]
    assert coefs == [0.0, 0.0, 0.0]
    stop = [lambda event, step, metrics: "stop" if step == 1 else None]
    home = {"output_dir": tmp_path / "out", "target_entropy": 50.0}
    dl.rlhf(data=ROWS, **options, callbacks=stop, **home)
    assert numbers(dl.rlhf(data=ROWS, **options, resume="latest", **home)) == numbers(high)


@pytest.mark.stage
def test_while_the_critic_warms_up_the_actor_stays_as_it_was():
    options = {"algorithm": "ppo", "num_generations": 1, "max_steps": 3}
    run = dl.rlhf(data=ROWS, **{**OPTIONS, **options}, critic_warmup_iterations=1)
    steps = [line for line in run.metrics if line["kind"] == "train"]
    assert [line["grad_norm"] is None for line in steps] == [True, False, False]
    assert all(line["critic_grad_norm"] > 0 for line in steps)
    # of the policy that answers: as the reference is, until it has learnt
    assert [abs(line["kl"]) < 1e-6 for line in steps] == [True, True, False]
