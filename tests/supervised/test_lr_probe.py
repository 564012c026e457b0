"""``--lr_probe``: which rates it tries, what it measures, and that it leaves no trace."""

import json
import math
from types import SimpleNamespace

import pytest

import dschat_lora as dl
from api.programs import PAIRS, ROWS, SHORT, numbers
from dschat_lora.supervised import lr_probe
from dschat_lora.supervised.lr_probe import ProbedRates, climb
from helpers.step1 import checked, metrics

# A trial has 4 steps; dropout shows whether numbers are drawn as by hand.
PROBE = {**SHORT, "lr_probe": 20, "max_steps": 6, "lora_dropout": 0.1, "eval_interval": 3}


@pytest.mark.parametrize(
    ("loss_of", "tried"),
    [
        (abs, [0, 1, -1]),
        (lambda octave: abs(octave - 1), [0, 1, 2]),
        (lambda octave: abs(octave + 2), [0, 1, -1, -2, -3]),
        (lambda octave: -octave, [0, 1, 2, 3, 4]),
        (lambda octave: octave if octave < -1 else math.inf, [0, 1, -1, -2, -3]),
    ],
)
def test_trials_go_from_the_rule_to_where_the_loss_is_lower_on_neither_side(loss_of, tried):
    losses = climb(loss_of)
    assert [*losses] == tried
    assert losses == {octave: loss_of(octave) for octave in tried}


def test_a_loss_that_was_not_finite_goes_through_a_checkpoint():
    found = ProbedRates({1e-3: 2.0, 2e-3: math.inf})
    state = json.loads(json.dumps({**found.state(), "losses": [2.0, "inf"]}))
    again = ProbedRates()
    again.restore(state)
    assert again == found
    assert again.best == 1e-3


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A run with a probe, and its directory."""
    home = tmp_path_factory.mktemp("probed") / "out"
    return dl.sft(data=ROWS, output_dir=home, save_interval=2, save_total_limit=0, **PROBE)


@pytest.mark.stage
def test_a_run_with_a_probe_is_the_run_of_its_rate(probed):
    found = probed.record["lr_probe"]
    by_hand = {**PROBE, "lr_probe": 0, "lora_learning_rate": found["lora_learning_rate"]}
    plain = dl.sft(data=ROWS, **by_hand)
    assert numbers(probed) == numbers(plain)
    first, *_ = [line for line in probed.metrics if line["kind"] == "train"]
    assert first["lora_learning_rate"] == found["lora_learning_rate"] != 5e-4
    assert f"{found['lora_learning_rate']:g}" in (probed.adapter / "README.md").read_text()


@pytest.mark.stage
def test_a_trial_is_the_beginning_of_a_run_at_a_constant_rate(probed):
    found = probed.record["lr_probe"]
    rates = [trial["rate"] for trial in found["trials"]]
    assert 0.00198 in rates  # the rule's
    assert found["steps"] == 4
    assert found["lora_learning_rate"] == min(found["trials"], key=lambda t: t["loss"])["rate"]
    constant = {**PROBE, "lr_probe": 0, "max_steps": 4, "lr_scheduler_type": "constant"}
    trial = found["trials"][-1]
    run = dl.sft(data=ROWS, lora_learning_rate=trial["rate"], **constant)
    losses = [line["loss"] for line in run.metrics if line["kind"] == "train"]
    assert trial["loss"] == pytest.approx((losses[2] + losses[3]) / 2, rel=1e-12)


@pytest.mark.stage
def test_a_run_that_is_resumed_keeps_the_rate_and_probes_no_more(probed, tmp_path, monkeypatch):
    monkeypatch.setattr(lr_probe, "climb", None)
    middle = probed.path / "checkpoints" / "step-00000002"
    rest = dl.sft(data=ROWS, output_dir=tmp_path / "out", resume=middle, quiet=True)
    assert numbers(rest) == numbers(probed)
    assert rest.record["lr_probe"] == probed.record["lr_probe"]


@pytest.mark.stage
@pytest.mark.thorough
def test_a_run_that_began_without_a_probe_gets_none(tmp_path):
    options = {**SHORT, "output_dir": tmp_path / "out"}
    dl.sft(data=ROWS, **options)
    with pytest.raises(ValueError, match="--lr_probe 20 is for the start of a run"):
        dl.sft(data=ROWS, resume="latest", lr_probe=20, **{**options, "max_steps": 4})


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("losses", "is_edge"), [({0: 1.0, 1: 2.0, -1: 3.0}, False), ({0: 2.0, 1: 1.0}, True)]
)
def test_rates_are_told_in_their_order_and_whether_the_best_is_the_last(
    losses, is_edge, monkeypatch, capfd
):
    monkeypatch.setattr(lr_probe, "climb", lambda loss_of: losses)
    run = dl.sft(data=ROWS, **{**PROBE, "max_steps": 1, "quiet": False})
    trials = run.record["lr_probe"]["trials"]
    assert [trial["loss"] for trial in trials] == [losses[octave] for octave in sorted(losses)]
    (line,) = [each for each in capfd.readouterr().out.splitlines() if "by --lr_probe" in each]
    assert line.endswith("by --lr_probe, the last one tried") == is_edge


@pytest.mark.stage
@pytest.mark.thorough
def test_a_probe_without_a_finite_loss_is_refused(monkeypatch):
    monkeypatch.setattr(lr_probe, "train_steps", lambda *_: [SimpleNamespace(loss=math.nan)])
    with pytest.raises(ValueError, match="--lr_probe 20: the loss was finite at none of the rates"):
        dl.sft(data=ROWS, **PROBE)


@pytest.mark.stage
@pytest.mark.thorough
def test_a_run_of_no_steps_has_no_probe():
    options = {**PROBE, "max_steps": 0, "num_train_epochs": 0}
    assert "lr_probe" not in dl.sft(data=ROWS, **options).record


CASES = [
    (1, 0, ()),
    (2, 2, ()),
    (1, 3, ()),
    (2, 0, ("--lora_dim", "0")),
    (1, 1, ("--lora_dim", "0", "--dtype", "bf16")),
    (2, 3, ("--loraplus_lr_ratio", "4", "--layerwise_lr_decay", "0.8")),
]


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.parametrize(("size", "stage", "more"), CASES)
def test_it_is_so_at_zero_stages_and_of_all_weights(launcher, tmp_path, size, stage, more):
    options = "--lora_dim 4 --max_steps 4 --per_device_train_batch_size 2 --max_seq_len 32".split()
    options += ["--zero_stage", str(stage), "--eval_iters", "1", "--sample_generations", "0", *more]
    option = "learning_rate" if "0" in more else "lora_learning_rate"

    def lines(*argv):
        running = launcher.start([*options, *argv, "--output_dir", "out"], tmp_path, ranks=size)
        assert running.wait() == [0] * size, running.output()
        return [(line["kind"], line.get("loss")) for line in metrics(tmp_path / "out")]

    probed = lines("--lr_probe", "10")
    found = json.loads((tmp_path / "out" / "run.json").read_text())["lr_probe"]
    rate = str(found[option])
    assert lines(f"--{option}", rate, "--overwrite_output_dir") == probed


@pytest.mark.stage
@pytest.mark.thorough
def test_a_reward_model_has_a_probe_too():
    options = {name: value for name, value in SHORT.items() if name != "sample_generations"}
    run = dl.reward(data=PAIRS, lr_probe=10, **options)
    rate = run.record["lr_probe"]["lora_learning_rate"]
    plain = dl.reward(data=PAIRS, lora_learning_rate=rate, **options)
    assert numbers(run) == numbers(plain)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--lr_probe", 9), "--lr_probe must be 0 or >= 10, got 9"),
        (
            ("--lr_probe", 60, "--lora_dim", 4, "--lora_learning_rate", "1e-3"),
            r"--lr_probe 60 finds the rate that --lora_learning_rate 0\.001 gives",
        ),
        (
            ("--lr_probe", 60, "--lora_dim", 4, "--lora_lr_multiplier", "10"),
            "--lr_probe 60 finds the rate that --lora_lr_multiplier 10 gives",
        ),
        (
            ("--lr_probe", 60, "--learning_rate", "1e-3"),
            r"--lr_probe 60 finds the rate that --learning_rate 0\.001 gives",
        ),
        (
            ("--lr_probe", 60, "--streaming", "--max_steps", 4),
            "--lr_probe 60 reads the first rows anew for each trial: drop --streaming",
        ),
    ],
)
def test_what_a_probe_cannot_be_with_is_refused(argv, message, first_rows):
    with pytest.raises(ValueError, match=message):
        checked(*argv)


def test_dpo_has_no_probe(tmp_path):
    with pytest.raises(ValueError, match="--lr_probe 60 is for SFT and reward models"):
        dl.dpo(data=PAIRS, lora_dim=4, lr_probe=60, output_dir=tmp_path / "out")
