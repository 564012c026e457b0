"""Episodes of several turns: the actor and an environment answer each other."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dschat_lora.data.messages import Message
from dschat_lora.engine.collectives import max_over_ranks, raise_together
from dschat_lora.rl.batch import Response
from dschat_lora.rl.environment import Environment
from dschat_lora.rl.reward_arguments import messages_after_prompt
from dschat_lora.rl.turns import TurnTokens

# Numbers of responses, these with their environment's messages read, and the number of the turn.
NextTurn = Callable[[Sequence[int], Sequence[Response], int], list[Response]]


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

    def play(
        self,
        responses: Sequence[Response],
        next_turn: NextTurn,
        *,
        max_tokens: int,
    ) -> list[Response]:
        """The episodes that begin with this rank's first turns; call on every rank.

        ``next_turn`` returns responses with the actor's next turn; it is called equally often on
        every rank. An episode has at most ``max_tokens`` after its prompt.
        """
        episodes = list(responses)
        asking = [n for n, response in enumerate(episodes) if response.ended]
        for turn in range(1, self.max_turns + 1):
            replies = self.environment.replies([episodes[n] for n in asking])
            answered = [(n, reply) for n, reply in zip(asking, replies, strict=True) if reply]
            pairs = [(episodes[n], reply) for n, reply in answered]
            longer = raise_together(partial(self._with_replies, pairs))
            for number, _ in answered:
                episodes[number] = replace(episodes[number], ended=False)
            if turn == self.max_turns:
                break
            found = zip((n for n, _ in answered), longer, strict=True)
            read = {n: each for n, each in found if len(each.tokens) < max_tokens}
            if not max_over_ranks(float(len(read))):
                break
            next_turns = next_turn(list(read), list(read.values()), turn + 1)
            for number, response in zip(read, next_turns, strict=True):
                episodes[number] = response
            asking = [number for number in read if episodes[number].ended]
        return episodes

    def _with_replies(self, pairs: Sequence[tuple[Response, Sequence[Message]]]) -> list[Response]:
        return [self._with_reply(*pair) for pair in pairs]

    def _with_reply(self, response: Response, reply: Sequence[Message]) -> Response:
        """The response with messages of the environment behind it."""
        tokens = self.turn_tokens(response, reply)
        said = messages_after_prompt(response, self.environment.tokenizer)
        mask = response.actor_mask or (True,) * len(response.tokens)
        return replace(
            response,
            tokens=(*response.tokens, *tokens),
            actor_mask=(*mask, *(False for _ in tokens)),
            earlier=json.dumps([*said, *reply], ensure_ascii=False).encode(),
        )
