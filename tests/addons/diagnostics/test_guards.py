"""Runs of step 3 that a guard ends."""

import pytest

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, brevity, numbers
from dschat_lora.addons.diagnostics.diagnostics import Diagnostics

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
    assert f"stopped by --guard stop after step {warned['step']}; resume with: " in said
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

    def after_evaluation(self, metrics):
        self.failed = True
        return ["a held-out measure fell"]

    monkeypatch.setattr(Diagnostics, "after_evaluation", after_evaluation)
    run = dl.rlhf(data=ROWS, **options, resume="latest")
    assert run.record["status"] == "stopped by --guard stop at step 1"
