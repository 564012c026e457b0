"""When a training loop evaluates, and when it gives up steps that change no weight."""

import json
import math
from types import SimpleNamespace

import pytest
import scipy.stats
import torch

from dschat_lora.runtime.loop import EvalResults, Progress, TrainingLoop, small_data_warning


def steps_made(skips, *, steps, interval=0, per_epoch=100, scales_loss=False):
    """Steps at which a run evaluates, of whose steps ``skips`` are skipped."""
    evaluated, progress = [], Progress()
    checkpointer = SimpleNamespace(
        is_stopping=lambda requests, last: False,
        after_step=lambda step, requests, *, skipped, last: False,
        broken_weight=lambda: None,
        last_good=lambda: "There is no checkpoint yet",
    )
    loop = TrainingLoop(
        SimpleNamespace(
            num_iterations=steps, iterations_per_epoch=per_epoch, eval_interval=interval
        ),
        progress,
        evaluate=evaluated.append,
        evaluated_up_to=lambda: progress.step - 1,
        checkpointer=checkpointer,
        log=SimpleNamespace(say=print, expect=lambda total, done: None),
    )
    loop.begin()
    for step in range(1, steps + 1):
        progress.count_step(skipped=step in skips)
        loop.after_iteration([], skipped=step in skips, scales_loss=scales_loss)
    return evaluated


@pytest.mark.parametrize(
    ("interval", "per_epoch", "expected"),
    [(0, 100, [0, 7]), (3, 100, [0, 3, 6, 7]), (0, 2, [0, 2, 4, 6, 7]), (-1, 2, [0, 7])],
    ids=["start and end", "interval", "epochs", "not epochs"],
)
def test_evaluations_are_at_the_start_each_interval_and_epoch_and_the_end(
    interval, per_epoch, expected
):
    assert steps_made((), steps=7, interval=interval, per_epoch=per_epoch) == expected


@pytest.mark.parametrize(
    ("skips", "steps", "scales_loss", "words"),
    [
        ((2, 3, 4), 9, False, "stopped at step 4: the gradient was not finite 3 times in a row"),
        ((1,), 1, False, "stopped at step 1: the gradient was not finite once"),
        ((1, 2), 2, True, "stopped at step 2: the gradient was not finite 2 times in a row"),
    ],
    ids=["three in a row", "the only step", "all steps, while a loss scale falls"],
)
def test_a_run_whose_gradient_stays_infinite_is_given_up(skips, steps, scales_loss, words):
    with pytest.raises(ValueError, match=words):
        steps_made(skips, steps=steps, scales_loss=scales_loss)


@pytest.mark.parametrize(
    ("skips", "scales_loss"),
    [((2, 3, 5, 6, 8, 9), False), ((2, 3, 4, 5, 6), True)],
    ids=["never three in a row", "a loss scale that falls"],
)
def test_a_run_with_skipped_steps_goes_on(skips, scales_loss):
    assert steps_made(skips, steps=9, scales_loss=scales_loss) == [0, 9]


def test_the_change_of_the_same_samples_has_the_error_of_a_paired_t_test(monkeypatch):
    """Also after a resumption; not where other samples count, or may be in another order."""
    lines = []
    run = SimpleNamespace(
        log=SimpleNamespace(
            write=lambda kind, step, metrics: lines.append(metrics), say_metrics=str
        )
    )
    before = torch.tensor([1.0, math.nan, 2.0, 4.0, 8.0])
    after = torch.tensor([1.5, math.nan, 2.25, 4.0, 9.0])
    judged = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    first = EvalResults(run, lambda step, metrics: "")
    first.add(0, {"reward": 3.75}, {"reward": before, "judge": judged})
    first.add(5, {"reward": 0.0}, {"reward": before.flip(0), "judge": judged})
    state = json.loads(json.dumps(first.state()))

    def resumed():
        again = EvalResults(run, lambda step, metrics: "")
        again.restore(state)
        assert {*again.by_step} == {0, 5}
        again.add(9, {"reward": 4.1875}, {"reward": after, "judge": before})
        return lines[-1]

    known = ~before.isnan()
    t = scipy.stats.ttest_rel(after[known], before[known]).statistic
    restored = resumed()
    assert restored.keys() == {"reward", "reward_change_standard_error"}
    change = float((after - before)[known].mean())
    assert change / restored["reward_change_standard_error"] == pytest.approx(t)
    assert lines[0].keys() == {"reward"}  # the first changes nothing
    assert lines[1].keys() == {"reward", "judge_change_standard_error"}
    monkeypatch.setattr("dschat_lora.runtime.loop.world_size", lambda: 2)
    assert resumed().keys() == {"reward"}
    state.pop("first")  # as an earlier version left it
    assert resumed().keys() == {"reward"}


@pytest.mark.parametrize(
    ("rows", "batch", "accumulation", "epochs", "least", "advice"),
    [
        # One packed row: no batch is smaller.
        (1, 16, 1, 1, 1, "1 optimizer step an epoch, and the run 1: "
         "--num_train_epochs 60 makes 60"),
        (3, 16, 1, 1, 2, "1 optimizer step an epoch, and the run 1: "
         "--num_train_epochs 30 --per_device_train_batch_size 2 makes 60"),
        # 50 / 2 = 25 steps; 3 x 25 = 75.
        (50, 16, 1, 1, 2, "4 optimizer steps an epoch, and the run 4: "
         "--num_train_epochs 3 --per_device_train_batch_size 2 makes 75"),
        (19, 1, 8, 20, 1, None),
        (19, 1, 8, 19, 1, "3 optimizer steps an epoch, and the run 57: "
         "--gradient_accumulation_steps 1 makes 361"),
        (999, 16, 8, 1, 2, "8 optimizer steps an epoch, and the run 8: "
         "--gradient_accumulation_steps 1 makes 63"),
        (1000, 16, 8, 1, 2, None),
        (1000, 64, 1, 1, 2, "16 optimizer steps an epoch, and the run 16: "
         "--num_train_epochs 2 --per_device_train_batch_size 32 makes 64"),
        (19, 1, 1, 3, 1, "19 optimizer steps an epoch, and the run 57: "
         "--num_train_epochs 4 makes 76"),
        (20, 1, 1, 1, 1, None),
        (3, 16, 1, 60, 1, None),
        (3, 16, 1, 0, 1, None),
        (0, 16, 1, 1, 1, None),
    ],
)  # fmt: skip
def test_small_data_gets_the_epochs_and_batch_that_make_sixty_steps(
    rows, batch, accumulation, epochs, least, advice
):
    said = small_data_warning(
        rows,
        "rows",
        lambda size, times: math.ceil(rows / (size * times)),
        epochs=epochs,
        size="per_device_train_batch_size",
        batch=batch,
        least=least,
        accumulation=accumulation,
    )
    few = ", too few to learn much; "
    assert said == (advice and f"{rows:,} rows make {advice}".replace(": ", few))
