"""Which adapter draws the responses of which iteration, and what a checkpoint keeps of them."""

import json
import math

import pytest
import torch
from dschat_lora.rl.draw.rollouts_ahead import RolloutsAhead

from dschat_lora.data.samples import PromptSample
from dschat_lora.report.log import jsonable
from dschat_lora.rl.draw.engine import RolloutError
from dschat_lora.rl.draw.source import Draws
from dschat_lora.rl.response.response import Response


class Run:
    """A run whose servers are functions: ``told`` is what they were asked and gave, in order."""

    def __init__(self, most, iterations=6, prompts=2):
        self.iteration, self.told, self.down = 0, [], False
        self.count, self.iterations, self.last = prompts, iterations, None
        self.ahead = RolloutsAhead(
            most, lambda: self.iterations, lambda: self.iteration, self.draws_of, self.begin
        )

    def draws_of(self, iteration):
        if iteration == self.last:  # which shows when its prompts are read
            self.iterations = iteration + 1
        ids = torch.tensor([iteration])
        prompts = [PromptSample(ids, f'{{"row": {n}}}'.encode()) for n in range(self.count)]
        return Draws(prompts, iter(()))

    def begin(self, draws, iteration):
        version, waits = self.iteration, [True]
        self.told.append(("begin", iteration, version))

        def wait():
            assert waits.pop(), "waited for a second time"
            if self.down:
                raise RolloutError from OSError("no server is left")
            self.told.append(("wait", iteration))
            return [
                Response((iteration,), (version, n), True, n, each.columns, (math.nan, -0.5))
                for n, each in enumerate(draws.prompts)
            ]

        return wait

    def play(self, iterations):
        """(iteration, the version that drew it) of so many iterations."""
        versions = []
        for _ in range(iterations):
            responses = self.ahead()
            assert {each.prompt for each in responses} == {(self.iteration,)}
            assert all(each.origin.policy_version == each.tokens[0] for each in responses)
            assert [each.columns for each in responses] == [b'{"row": 0}', b'{"row": 1}']
            versions.append((self.iteration, responses[0].origin.policy_version))
            self.iteration += 1
        return versions


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("most", "versions"),
    [(1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3]), (9, [0, 0, 0, 0, 0, 0])],
)
def test_iteration_k_is_drawn_by_the_adapter_of_iteration_k_minus_n(most, versions):
    run = Run(most)
    assert run.play(6) == list(enumerate(versions))
    asked = [each[1] for each in run.told if each[0] == "begin"]
    assert asked == list(range(6))  # each once, and none after the last iteration


def test_no_iteration_is_begun_after_one_whose_prompts_were_the_last():
    run = Run(2)
    run.last = 3
    assert run.play(4) == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert [each[1] for each in run.told if each[0] == "begin"] == [0, 1, 2, 3]


def test_later_iterations_are_begun_before_the_present_one_is_waited_for():
    run = Run(1)
    run.play(2)
    assert run.told == [
        *(("begin", 0, 0), ("begin", 1, 0), ("wait", 0)),
        *(("begin", 2, 1), ("wait", 1)),
    ]


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_a_resumed_run_learns_from_what_was_begun_before_it_was_stopped(stopped):
    whole, run = Run(2), Run(2)
    expected = whole.play(6)
    versions = run.play(stopped)
    saved = json.loads(json.dumps(jsonable(run.ahead.state()), allow_nan=False))
    assert sorted(map(int, saved)) == [stopped, stopped + 1]
    resumed = Run(2)
    resumed.iteration = stopped
    resumed.ahead.restore(saved)
    responses = resumed.ahead()
    assert math.isnan(responses[0].logprobs[0])
    assert responses[0].logprobs[1] == -0.5
    assert versions + resumed.play(6 - stopped) == expected
    assert resumed.told[0] == ("begin", stopped + 2, stopped)


def test_the_iteration_that_fails_after_it_was_drawn_is_in_the_checkpoint():
    run = Run(1)
    run.play(2)
    run.ahead()  # and its reward function fails
    assert sorted(run.ahead.state()) == ["2", "3"]


def test_what_could_not_be_drawn_is_drawn_anew_by_the_adapter_of_then():
    run = Run(1)
    run.play(2)
    run.down = True
    assert run.ahead.state() == {}
    run.down = False
    assert run.play(2) == [(2, 2), (3, 2)]


def test_what_failed_is_not_waited_for_again_when_the_rest_is_saved():
    run = Run(1)
    run.play(2)
    run.down = True
    with pytest.raises(RolloutError):
        run.ahead()
    run.down = False
    assert sorted(run.ahead.state()) == ["3"]  # which was whole
    assert run.play(2) == [(2, 2), (3, 2)]


def test_responses_to_other_prompts_are_not_taken_over():
    run, resumed = Run(2), Run(2)
    run.play(3)
    resumed.iteration = 3
    of_run, shift = resumed.ahead.draws_of, 100  # as by another seed
    resumed.ahead.draws_of = lambda iteration: of_run(iteration + shift)
    resumed.ahead.restore(run.ahead.state())
    assert sorted(resumed.ahead._begun) == []


# Iterations 3 and 4 are drawn by versions 1 and 2.
@pytest.mark.parametrize(("most", "prompts", "kept"), [(2, 2, [3, 4]), (1, 2, []), (2, 3, [])])
def test_what_other_options_do_not_fit_is_not_taken_over(most, prompts, kept):
    run = Run(2)
    run.play(3)
    resumed = Run(most, prompts=prompts)
    resumed.iteration = 3
    resumed.ahead.restore(run.ahead.state())
    assert sorted(resumed.ahead._begun) == kept
