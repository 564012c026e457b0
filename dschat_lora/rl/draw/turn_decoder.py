"""Turns of the actor, decoded with random numbers of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.data.samples import PromptSample
from dschat_lora.generation.sampling import Responses
from dschat_lora.rl.response.response import DecodedTurn, Response, decoded_turns


@dataclass(frozen=True)
class TurnDecoder:
    """Decodes turns of the actor, each with random numbers of its own."""

    decode: Callable[..., Any]
    key: tuple[int | str, ...]
    max_tokens: int  # of a response
    keep_logprobs: bool
    is_end: Callable[[int], bool]
    find_end: Callable[[Sequence[int]], int | None]

    def first(
        self,
        prompts: Sequence[tuple[int, PromptSample]],
        num_generations: int,
        needed: int | None = None,
    ) -> list[Response]:
        """Responses to prompts, with their numbers, prompt after prompt.

        Of those that are not to the ``needed`` prompts whose responses are the shortest, none.
        """
        found = self.ask(prompts, num_generations, needed)
        return self.answers(prompts, num_generations, found, needed)

    def ask(
        self,
        prompts: Sequence[tuple[int, PromptSample]],
        num_generations: int,
        needed: int | None = None,
    ) -> Any:
        """What the decoder makes of prompts, with their numbers."""
        copies = range(num_generations)
        more = {} if needed is None else {"needed": needed}
        return self.decode(
            [prompt.input_ids.tolist() for _, prompt in prompts],
            seeds=[[stream_seed(*self.key, n, k) for k in copies] for n, _ in prompts],
            keep_logprobs=self.keep_logprobs,
            **more,
        )

    def answers(
        self,
        prompts: Sequence[tuple[int, PromptSample]],
        num_generations: int,
        found: Responses,
        needed: int | None = None,
    ) -> list[Response]:
        """The responses to prompts that were decoded, prompt after prompt; see :meth:`first`."""
        blank = [unanswered(*each) for each in prompts for _ in range(num_generations)]
        responses = self._continued(blank, found)
        if needed is None:
            return responses
        tokens, longest = found.tokens(), dict[int, int]()
        for group in range(len(prompts)):
            own = slice(group * num_generations, (group + 1) * num_generations)
            if not any(found.cut[own]):
                longest[group] = max(map(len, tokens[own]))
        kept = {n * num_generations for n in sorted(longest, key=longest.__getitem__)[:needed]}
        return [r for n, r in enumerate(responses) if n - n % num_generations in kept]

    def next(
        self,
        copies: Sequence[tuple[int, int]],
        decoded: list[int],
        rows: Sequence[int],
        read: Sequence[Response],
        turn: int,
    ) -> list[Response]:
        """Responses that go on with a turn, of those of ``rows`` among the ``copies``.

        ``decoded`` are the rows of the turn before, and becomes those of this one.
        """
        found = self.decode(
            [[*each.prompt, *each.tokens] for each in read],
            seeds=[[stream_seed(*self.key, *copies[row], "turn", turn)] for row in rows],
            limits=[self.max_tokens - len(each.tokens) for each in read],
            # All but the last token that the actor chose.
            prefixes=[
                (decoded.index(row), len(each.prompt) + each.last_chosen)
                for row, each in zip(rows, read, strict=True)
            ],
            keep_logprobs=self.keep_logprobs,
        )
        decoded[:] = rows
        return self._continued(read, found)

    def _continued(self, responses: Sequence[Response], found: Responses) -> list[Response]:
        turns = decoded_turns(found, keep_logprobs=self.keep_logprobs)
        return [
            _with_turn(response, turn.cut(self.is_end, self.find_end))
            for response, turn in zip(responses, turns, strict=True)
        ]


def _with_turn(to: Response, turn: DecodedTurn) -> Response:
    return replace(
        to,
        tokens=(*to.tokens, *turn.tokens),
        ended=turn.ended,
        logprobs=(*to.logprobs, *turn.logprobs),
        sampler_logprobs=(*to.sampler_logprobs, *turn.sampler_logprobs),
        actor_mask=to.actor_mask and (*to.actor_mask, *(True for _ in turn.tokens)),
        undrawn=turn.undrawn,
    )


def unanswered(group: int, prompt: PromptSample) -> Response:
    ids = tuple(prompt.input_ids.tolist())
    return Response(ids, (), False, group, prompt.columns, source=prompt.source)
