"""When a training loop evaluates, and when it gives up steps that change no weight."""

from types import SimpleNamespace

import pytest

from dschat_lora.runtime.loop import Progress, TrainingLoop


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
    [(0, 100, [0, 7]), (3, 100, [0, 3, 6, 7]), (0, 2, [0, 2, 4, 6, 7])],
    ids=["start and end", "interval", "epochs"],
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
