"""Verdict on runs: what counts as a change, and what looks wrong."""

import pytest

from dschat_lora.addons.report.run_data import RunData
from dschat_lora.addons.report.verdict import changes_of, cost, doubts, outcome_of, what_was_trained


def rewards(before, after, error, **more):
    """A finished run whose held-out reward went so."""
    evals = [
        {"step": step, "reward": value, "reward_standard_error": error}
        for step, value in ((0, before), (10, after))
    ]
    for name, values in more.items():
        for line, value in zip(evals, values, strict=True):
            line |= {name: value, f"{name}_standard_error": error}
    return RunData("rlhf", {"status": "finished"}, evals=evals)


# The difference of two means of standard error 0.3 and 0.4 has one of 0.5.
@pytest.mark.parametrize(
    ("after", "outcome", "words"),
    [
        (2.1, "learned", ["1", "2.1", "+1.10\u00a0\u00b1\u00a00.50"]),
        (1.9, "unclear", ["1", "1.9", "+0.90\u00a0\u00b1\u00a00.50 (within noise)"]),
        (-0.1, "worse", ["1", "-0.1", "-1.10\u00a0\u00b1\u00a00.50"]),
    ],
)
def test_a_change_counts_beyond_twice_its_standard_error(after, outcome, words):
    run = rewards(1.0, after, 0.3)
    run.evals[1]["reward_standard_error"] = 0.4
    (change,) = changes_of(run)
    assert change.outcome == outcome == outcome_of(run)
    assert change.row == ["reward", *words]


def test_the_same_prompts_before_and_after_are_compared_as_pairs():
    run = rewards(1.0, 1.8, 0.3)  # as others 0.8 / 0.42 = 1.9 standard errors
    assert outcome_of(run) == "unclear"
    run.evals[1]["reward_change_standard_error"] = 0.24
    (change,) = changes_of(run)
    assert change.outcome == "learned"
    assert change.words == "+0.80\u00a0\u00b1\u00a00.24"


def test_accuracy_has_the_binomial_standard_error_in_percent():
    evals = [{"step": s, "accuracy": a, "samples": 100} for s, a in ((0, 0.5), (5, 0.9))]
    (change,) = changes_of(RunData("reward", evals=evals))
    # sqrt(5.0^2 + 3.0^2)
    assert change.row == ["accuracy", "50%", "90%", "+40.0\u00a0\u00b1\u00a05.8%"]


def test_divergence_and_length_are_told_and_are_no_verdict():
    evals = [
        {"step": s, "kl": -s / 2 if s else 0, "response_length": 9.0 - s, "reward": 1}
        for s in (0, 2)
    ]
    run = RunData("rlhf", {"status": "finished"}, evals=evals)
    assert [change.row for change in changes_of(run)] == [
        ["reward", "1", "1", "0"],  # and not "within noise"
        ["KL to the reference", "0", "-1", "-1 (an estimate, which may be below 0)"],
        ["response length", "9", "7", "-2"],
    ]
    assert outcome_of(run) == "unclear"


@pytest.mark.parametrize(
    ("judge", "outcome"), [((0.5, 0.1), "mixed"), ((0.5, 0.55), "learned"), ((0.1, 0.5), "learned")]
)
def test_a_reward_that_rises_while_the_judge_falls_is_not_called_learning(judge, outcome):
    assert outcome_of(rewards(1.0, 3.0, 0.05, judge=judge)) == outcome


@pytest.mark.parametrize(
    ("status", "perplexity", "outcome"),
    [
        ("finished", (2.0, 1.9), "learned"),  # a lower one is better
        ("finished", (2.0, 2.1), "worse"),
        ("finished", (2.0, 2.001), "unclear"),
        ("finished", (2.0,), "unknown"),
        ("running", (2.0, 1.9), "running"),
        ("failed: x", (2.0, 1.9), "failed"),
        ("interrupted by SIGTERM", (2.0, 1.9), "failed"),
    ],
)
def test_a_finished_run_is_judged_by_its_first_and_its_last_evaluation(status, perplexity, outcome):
    evals = [{"step": step, "perplexity": value} for step, value in enumerate(perplexity)]
    assert outcome_of(RunData("sft", {"status": status}, evals=evals)) == outcome


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            RunData("sft", evals=[{"step": s, "loss": v} for s, v in enumerate([3, 1, 1.1])]),
            "Held-out loss was lowest, 1, at step 1 and is 1.1 at the end",
        ),
        (RunData("sft", train=[{"step": 1, "skipped": True}] * 3), "3 steps changed no weight"),
        (
            RunData("rlhf", train=[{"step": s, "truncated_fraction": 0.5} for s in range(9)]),
            "50% of the last responses are cut off: raise --max_answer_seq_len",
        ),
        (
            RunData(
                "rlhf",
                train=[{"step": 1, "truncated_fraction": 0.9}],
                events=[{"step": 1, "message": "80% of the last responses are cut off: raise"}],
            ),
            "80% of the last responses are cut off: raise",
        ),
        (
            RunData("sft", {"data": {"audit": {"train_rows": 10, "eval_samples": 0}}}),
            "No row is held out",
        ),
        (
            RunData("sft", {"status": "failed: OSError: full"}),
            "The run ended early: failed: OSError: full",
        ),
    ],
)
def test_what_looks_wrong_is_said_once(run, text):
    (said,) = (each for each, _ in doubts(run))
    assert said.startswith(text)


def test_a_sound_run_raises_no_doubt():
    evals = [{"step": s, "loss": v} for s, v in enumerate([3.0, 1.0, 1.01])]
    audit = {"train_rows": 100, "eval_samples": 5, "dropped_rows": 10}
    facts = {"status": "finished", "data": {"audit": audit}}
    train = [{"step": 1, "skipped": False, "truncated_fraction": 0.2}]
    assert doubts(RunData("sft", facts, train=train, evals=evals)) == []


def test_cost_and_subject_are_told_in_numbers():
    config = {"actor_model_name_or_path": "out/sft", "actor_lora_dim": 4, "algorithm": "grpo"}
    audit = {"train_samples": 4000, "kind": "prompts", "eval_samples": 1, "eval_rows": 1}
    facts = {"config": config, "data": {"audit": audit}}
    facts["phases"] = {"training": {"seconds": 60, "flops": 3e12}}
    train = [
        {"step": 20, "iteration": 5, "time": 90.0, "epoch": 0.5, "peak_memory_bytes": 3 * 2**29}
    ]
    run = RunData("rlhf", facts, train=train)
    assert what_was_trained(run) == (
        "GRPO, LoRA of rank 4 on out/sft, 4,000 prompts (1 row held out), 5 iterations, "
        "20 optimizer steps, 0.5 epochs"
    )
    assert cost(run) == "1.5 min, 3 TFLOP, peak memory 1.50 GiB per device"
