"""Episodes of several turns: the actor and an environment answer each other."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dschat_lora.data.messages import Message, check_message
from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import (
    first_of_model,
    max_over_ranks,
    raise_together,
    tensor_rank,
)
from dschat_lora.rl.draw.generator import NextTurn
from dschat_lora.rl.play.turn_tokens import TurnTokens
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.messages import messages_after_prompt
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.user_functions import UserFunction


class EnvironmentFailedError(UserFunctionError):
    """The environment failed; the cause is its error. Raised on every rank."""

    what = "an environment"


@dataclass(frozen=True)
class Environment(UserFunction):
    """A user's function that answers the actor's last turn, or ends the episode.

    For each response it returns None, a message such as ``{"role": "tool", "content": "42"}``, or
    several in a list.
    """

    noun, entry = "replies", "one message, several in a list, or None to end the episode"

    def replies(self, responses: Sequence[Response], places: Sequence[int]) -> list[list[Message]]:
        """The messages that follow each of this rank's responses, none where its episode ends.

        ``places`` are the numbers of the responses among all of the rollout. Call on every rank.
        Processes that hold one model between them ask once.

        Raises:
            EnvironmentFailedError: if the function fails or returns something else.
        """
        own = responses if tensor_rank() == 0 else ()
        try:
            replies = raise_together(lambda: self._replies(own, places[: len(own)]))
        except Exception as error:
            raise EnvironmentFailedError from error
        return first_of_model(replies)

    def _replies(self, responses: Sequence[Response], places: Sequence[int]) -> list[list[Message]]:
        if not responses:
            return []
        return [self._messages(reply) for reply in self.call(responses)]

    def begin(
        self,
        prompts: Sequence[PromptSample],
        mine: Iterable[int],
        num_generations: int,
        key: tuple[int | str, ...],
    ) -> list[PromptSample]:
        """The prompts of episodes that are to begin; a function changes none."""
        return list(prompts)

    def rewards(self, places: Sequence[int]) -> list[float | None]:
        """Rewards of episodes that are over; a function gives none."""
        return [None] * len(places)

    def _messages(self, reply: Any) -> list[Message]:
        """The messages of what the function returned for one response."""
        messages = [] if reply is None else reply if isinstance(reply, list) else [reply]
        where = f"--{self.option} {self.name}"
        for number, message in enumerate(messages, start=1):
            check_message(where, f"message {number} that it returned", message)
            if message["role"] == "assistant":
                raise ValueError(
                    f"{where} returned a message of role 'assistant', which is the actor's; its "
                    "own are of 'user' or 'tool'"
                )
        try:
            text = json.dumps(messages, ensure_ascii=False, allow_nan=False).encode()
            found: list[Message] = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{where} returned what JSON cannot hold: {error}") from error
        return found


@dataclass(frozen=True)
class Episodes:
    """Plays episodes: turns of the actor, with an environment's messages between them.

    An episode ends when the environment returns None. It is cut off, and does not count as ended,
    where a turn is; where the environment has more to say after ``max_turns``; and where its
    messages leave no room for another token.
    """

    environment: Environment
    turn_tokens: TurnTokens
    max_turns: int

    def begin(
        self,
        prompts: Sequence[PromptSample],
        mine: Iterable[int],
        num_generations: int,
        key: tuple[int | str, ...],
    ) -> list[PromptSample]:
        """The prompts of episodes that are to begin."""
        return self.environment.begin(prompts, mine, num_generations, key)

    def play(
        self,
        responses: Sequence[Response],
        next_turn: NextTurn,
        *,
        max_tokens: int,
        places: Sequence[int],
    ) -> list[Response]:
        """The episodes that begin with this rank's first turns; call on every rank.

        ``next_turn`` returns responses with the actor's next turn; it is called equally often on
        every rank. An episode has at most ``max_tokens`` after its prompt. ``places`` are the
        numbers of the responses among all of the rollout.
        """
        episodes = list(responses)
        asking = [n for n, response in enumerate(episodes) if response.ended]
        for turn in range(1, self.max_turns + 1):
            replies = self.environment.replies(
                [episodes[n] for n in asking], [places[n] for n in asking]
            )
            answered = {n: reply for n, reply in zip(asking, replies, strict=True) if reply}
            pairs = [(episodes[n], reply) for n, reply in answered.items()]
            longer = raise_together(partial(self._with_replies, pairs))
            for number in answered:
                episodes[number] = replace(episodes[number], ended=False)
            if turn == self.max_turns:
                break
            found = zip(answered, longer, strict=True)
            read = {n: each for n, each in found if len(each.tokens) < max_tokens}
            if not max_over_ranks(float(len(read))):
                break
            next_turns = next_turn(list(read), list(read.values()), turn + 1)
            for number, response in zip(read, next_turns, strict=True):
                episodes[number] = response
            asking = [number for number in read if episodes[number].ended]
        rewards = self.environment.rewards(places)
        return [
            replace(each, environment_reward=reward)
            for each, reward in zip(episodes, rewards, strict=True)
        ]

    def _with_replies(self, pairs: Sequence[tuple[Response, Sequence[Message]]]) -> list[Response]:
        return [self._with_reply(*pair) for pair in pairs]

    def _with_reply(self, response: Response, reply: Sequence[Message]) -> Response:
        """The response with messages of the environment behind it."""
        tokens = self.turn_tokens(response, reply)
        said = messages_after_prompt(response, self.environment.tokenizer.decode)
        mask = response.actor_mask or (True,) * len(response.tokens)
        return replace(
            response,
            tokens=(*response.tokens, *tokens),
            actor_mask=(*mask, *(False for _ in tokens)),
            earlier=json.dumps([*said, *reply], ensure_ascii=False).encode(),
        )
