"""Rollouts that servers draw while earlier iterations train, off-policy by a bounded number."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.draw.engine import Pending, RolloutError
from dschat_lora.rl.draw.source import Draws
from dschat_lora.rl.response.response import Response, response_from_json, responses_as_json

# Begins on the responses of an iteration; what it returns waits for them.
Begin = Callable[[Draws, int], Pending[list[Response]]]


@dataclass
class _Rollout:
    version: int  # iterations that the adapter has learnt from
    wait: Pending[list[Response]]


@dataclass
class RolloutsAhead:
    """Responses of the coming iterations; part of the run's checkpoints. Call on every rank.

    Those of iteration k are drawn by the adapter that has learnt from k - ``most`` iterations, or
    none, whatever takes how long. A checkpoint waits for what has been begun and holds it, so that
    a resumed run learns from the same responses.

    Args:
        most: iterations whose responses are begun before theirs.
        num_iterations: of the run, as far as is known.
        iteration: the one that is next, counted from 0.
        draws_of: what is drawn for an iteration.
    """

    name: ClassVar[str] = "rollouts_ahead"
    most: int
    num_iterations: Callable[[], int]
    iteration: Callable[[], int]
    draws_of: Callable[[int], Draws]
    begin: Begin
    _begun: dict[int, _Rollout] = field(default_factory=dict)  # by iteration

    def __call__(self) -> list[Response]:
        """The responses of the present iteration, once those of later ones are begun.

        Raises:
            RolloutError: if they could not be drawn.
        """
        now = self.iteration()
        for each in range(now, now + self.most + 1):
            # To read the prompts of the one before may have said that it is the last.
            if each < self.num_iterations() and each not in self._begun:
                self._begun[each] = _Rollout(now, self.begin(self.draws_of(each), each))
        # What is drawn stays until the iteration is whole, for the checkpoint of one that fails.
        self._begun = {n: rollout for n, rollout in self._begun.items() if n >= now}
        return self._drawn(now)

    def state(self) -> dict[str, Any]:
        """Responses that were not learnt from yet; what could not be drawn is left out."""
        begun = {}
        for number in sorted(n for n in self._begun if n >= self.iteration()):
            # Told where the iteration begins, if servers are still gone.
            with suppress(RolloutError):
                begun[str(number)] = {
                    "version": self._begun[number].version,
                    "prompts": _digest(self.draws_of(number).prompts),
                    "responses": responses_as_json(dict(enumerate(self._drawn(number)))),
                }
        return begun

    def restore(self, state: dict[str, Any]) -> None:
        for number, each in state.items():
            prompts = self.draws_of(int(number)).prompts
            # Options may have changed since.
            too_old = int(number) - each["version"] > self.most
            if too_old or each["prompts"] != _digest(prompts):
                continue
            fields = json.loads(each["responses"]).values()
            responses = [response_from_json(f, prompts[f["group"]].columns) for f in fields]
            self._begun[int(number)] = _Rollout(each["version"], partial(list, responses))

    def _drawn(self, number: int) -> list[Response]:
        rollout = self._begun.pop(number)  # what fails is not waited for again, but drawn anew
        responses = [each.drawn_by(rollout.version) for each in rollout.wait()]
        self._begun[number] = _Rollout(rollout.version, partial(list, responses))
        return responses


def _digest(prompts: Sequence[PromptSample]) -> str:
    """16 hex digits that differ where any prompt does."""
    ids = json.dumps([each.input_ids.tolist() for each in prompts])
    return hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()
