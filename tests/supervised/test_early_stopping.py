"""Runs that end early, runs at rates by rule, and what they say of it."""

import math

import pytest

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, SHORT, brevity, numbers
from dschat_lora.supervised.train import evaluations_since_best


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], 0),
        ([3.0], 0),
        ([3.0, 2.0, 1.0], 0),
        ([3.0, 1.0, 2.0, 1.5], 2),
        ([3.0, 1.0, 1.0], 1),  # no lower than before
        ([2.0, math.nan, 1.0, math.nan], 1),
    ],
)
def test_evaluations_are_counted_from_the_lowest_loss(losses, expected):
    assert evaluations_since_best(losses) == expected


@pytest.mark.stage
def test_a_run_ends_where_patience_does_and_stays_ended(tmp_path, capsys):
    """At a rate that spoils the model at once, the first evaluation is the best."""
    options = {**SHORT, "max_steps": 9, "eval_interval": 1, "lora_learning_rate": 3.0}
    whole = dl.sft(data=ROWS, **options)
    home = tmp_path / "out"
    early = {**options, "early_stopping_patience": 3, "output_dir": home, "quiet": False}
    run = dl.sft(data=ROWS, **early)
    evals = [line for line in run.metrics if line["kind"] == "eval"]
    assert min(evals, key=lambda line: line["loss"])["step"] == 0
    assert [line["step"] for line in evals] == [0, 1, 2, 3]
    assert run.status == "finished"
    assert run.adapter is not None
    assert numbers(run) == numbers(whole)[: len(run.metrics)]
    assert "(--early_stopping_patience 3)" in " ".join(capsys.readouterr().out.split())
    again = dl.sft(data=ROWS, resume="latest", **early)
    assert again.metrics == run.metrics


@pytest.mark.stage
def test_rates_by_rule_are_those_that_train_and_are_explained(capsys):
    options = {**SHORT, "max_steps": 1, "quiet": False, "learning_rate": "auto"}
    run = dl.sft(data=ROWS, num_warmup_steps=1, **options)
    said = " ".join(capsys.readouterr().out.split())
    assert "rate 0.00198 by --learning_rate auto: 5e-05 x (2000 / 128)^0.5" in said
    assert "the run has 1 optimizer step and --num_warmup_steps 1" in said
    assert "has no effect" not in said
    (step,) = [line for line in run.metrics if line["kind"] == "train"]
    assert step["lora_learning_rate"] == 0.0  # in warm-up
    assert run.record["rates"]["adapter"] == pytest.approx(5e-4 * (2000 / 128) ** 0.5)
    own = dl.sft(data=ROWS, lora_learning_rate=1e-4, **options)
    (step,) = [line for line in own.metrics if line["kind"] == "train"]
    assert step["lora_learning_rate"] == 1e-4
    with pytest.raises(ValueError, match="--learning_rate: must be a number or auto, got 'au'"):
        dl.sft(data=ROWS, **{**options, "learning_rate": "au"})


@pytest.mark.thorough
@pytest.mark.stage
def test_a_resumed_run_keeps_its_rates_by_rule(tmp_path):
    options = {**SHORT, "max_steps": 4, "learning_rate": "auto"}
    whole = dl.sft(data=ROWS, **options)
    home = tmp_path / "out"
    stop = [lambda event, step, metrics: "stop" if step == 2 else None]
    dl.sft(data=ROWS, output_dir=home, callbacks=stop, **options)
    rest = dl.sft(data=ROWS, output_dir=home, resume="latest", quiet=True)
    assert numbers(rest) == numbers(whole)


@pytest.mark.thorough
@pytest.mark.stage
def test_roles_of_step_3_have_rates_by_rule():
    options = {"actor_learning_rate": "auto", "actor_lora_dim": 4, "rewards": [brevity]}
    run = dl.rlhf(data=ROWS, **{**ROLLOUTS, "max_steps": 1}, **options)
    (step,) = [line for line in run.metrics if line["kind"] == "train"]
    assert step["lora_learning_rate"] == pytest.approx(0.14 * 5e-4 * (2000 / 128) ** 0.5)
