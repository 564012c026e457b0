"""Runs of step 3 that a guard ends, whose entropy is steered, or whose critic learns first."""

import re

import pytest

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, brevity, numbers
from dschat_lora.config.addons import provided
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.watch.diagnostics import Diagnostics

OPTIONS = {
    **ROLLOUTS,
    **{"max_steps": 5, "eval_prompts": 0, "kl_budget": 1e-3, "rewards": [brevity]},
    **{"actor_lora_dim": 4, "actor_lora_learning_rate": 1e-2},
}


@pytest.mark.stage
def test_a_guard_stops_a_run_at_a_checkpoint_from_which_it_goes_on(tmp_path, capsys):
    whole = dl.rlhf(data=ROWS, **OPTIONS)
    (warned,) = [line for line in whole.metrics if "--kl_budget" in line.get("message", "")]
    assert whole.status == "finished"
    assert 0 < warned["step"] < 5
    home = {"output_dir": tmp_path / "out"}
    run = dl.rlhf(data=ROWS, **{**OPTIONS, "quiet": False}, guard="stop", **home)
    assert run.status == "stopped"
    assert run.record["status"] == f"stopped by --guard stop at step {warned['step']}"
    said = " ".join(capsys.readouterr().out.split())
    assert "is above --kl_budget 0.001" in said
    assert f"stopped by --guard stop after step {warned['step']}; go on with: " in said
    assert numbers(run) == numbers(whole)[: len(run.metrics)]
    assert not (tmp_path / "out" / "actor").exists()
    rest = dl.rlhf(data=ROWS, **OPTIONS, guard="warn", resume="latest", **home)
    assert rest.status == "finished"
    assert numbers(rest) == numbers(whole)


@pytest.mark.thorough
@pytest.mark.stage
def test_a_guard_stops_a_resumed_run_at_the_evaluation_that_its_stop_came_before(
    tmp_path, monkeypatch
):
    options = {**OPTIONS, "kl_budget": 0.0, "max_steps": 3, "output_dir": tmp_path / "out"}
    options |= {"eval_prompts": 2, "eval_interval": 1, "guard": "stop"}
    at_one = [lambda event, step, metrics: "stop" if step == 1 else None]
    assert dl.rlhf(data=ROWS, **options, callbacks=at_one).status == "stopped"

    def evaluation(self, metrics):
        self.failed = True
        return ["a held-out measure fell"]

    monkeypatch.setattr(Diagnostics, "evaluation", evaluation)
    run = dl.rlhf(data=ROWS, **options, resume="latest")
    assert run.record["status"] == "stopped by --guard stop at step 1"


@pytest.mark.thorough
@pytest.mark.stage
def test_an_entropy_is_steered_by_its_bonus_and_a_stopped_run_steers_on(tmp_path):
    """A target that no policy reaches raises the weight, one below all of them never acts."""
    options = {**OPTIONS, "kl_budget": 0.0, "max_steps": 3}
    high = dl.rlhf(data=ROWS, **options, target_entropy=50.0)
    steps = [line for line in high.metrics if line["kind"] == "train"]
    assert [line["entropy_coef"] for line in steps] == pytest.approx([0.005, 0.01, 0.015])
    plain = dl.rlhf(data=ROWS, **options)
    assert plain.metrics[1]["policy_loss"] - steps[1]["policy_loss"] == pytest.approx(
        0.005 * steps[1]["entropy"], rel=0.1
    )
    low = dl.rlhf(data=ROWS, **options, target_entropy=1e-9, entropy_coef=0.02)
    found = [line["entropy_coef"] for line in low.metrics if line["kind"] == "train"]
    assert found == [0.0, 0.0, 0.0]
    stop = [lambda event, step, metrics: "stop" if step == 1 else None]
    home = {"output_dir": tmp_path / "out", "target_entropy": 50.0}
    dl.rlhf(data=ROWS, **options, callbacks=stop, **home)
    assert numbers(dl.rlhf(data=ROWS, **options, resume="latest", **home)) == numbers(high)


@pytest.mark.stage
def test_while_the_critic_warms_up_the_actor_stays_as_it_was():
    options = {"algorithm": "ppo", "num_generations": 1, "kl_budget": 0.0, "max_steps": 3}
    run = dl.rlhf(data=ROWS, **{**OPTIONS, **options}, critic_warmup_iterations=1)
    steps = [line for line in run.metrics if line["kind"] == "train"]
    assert [line["grad_norm"] is None for line in steps] == [True, False, False]
    assert all(line["critic_grad_norm"] > 0 for line in steps)
    # of the policy that answers: as the reference is, until it has learnt
    assert [abs(line["kl"]) < 1e-6 for line in steps] == [True, True, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_budget": -1.0}, "--kl_budget must be >= 0, got -1.0"),
        ({"kl_budget": 2.0, "guard": "off"}, "the reference, which --guard off does not watch: "),
        *(
            ({"kl_budget": 2.0, "algorithm": name}, f"which --algorithm {name} does not watch")
            for name in provided("algorithm")
        ),
    ],
)
def test_budgets_that_nothing_watches_are_refused(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        PpoConfig(**options)
