"""Episodes of several turns: the actor and an environment answer each other."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import call
from dschat_lora.data.messages import Message, check_message
from dschat_lora.data.samples import PromptSample
from dschat_lora.data.templates import PROBE
from dschat_lora.engine.distributed import (
    first_of_model,
    max_over_ranks,
    raise_together,
    tensor_rank,
)
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.draw.player import Draw, Key, Player
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Response, messages_after_prompt, prompt_messages
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
        key: Key,
    ) -> list[PromptSample]:
        """The prompts of episodes that are to begin; a function changes none."""
        return list(prompts)

    def label(self) -> str | None:
        """The name of the reward that it gives; a function gives none."""
        return None

    def made(self) -> Mapping[int, Any] | None:
        """What reward functions see beside each response, by its place; of a function nothing."""
        return None

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
class Episodes(Player):
    """Plays episodes: turns of the actor, with an environment's messages between them.

    An episode ends when the environment returns None. It is cut off, and does not count as ended,
    where a turn is; where the environment has more to say after ``max_turns``; and where its
    messages leave no room for another token.
    """

    environment: Environment
    turn_tokens: "TurnTokens"
    max_turns: int

    @property
    def reward_name(self) -> str | None:
        """The environment's."""
        return self.environment.label()

    @property
    def objects(self) -> Mapping[int, Any] | None:
        """Those of an environment with state."""
        return self.environment.made()

    @property
    def asks(self) -> Sequence[Environment]:
        """The environment."""
        return (self.environment,)

    def begin(
        self, prompts: Sequence[PromptSample], mine: Iterable[int], num_generations: int, key: Key
    ) -> list[PromptSample]:
        """The prompts of episodes that are to begin."""
        return self.environment.begin(prompts, mine, num_generations, key)

    def play(self, tasks: Sequence[Response], draw: Draw, *, key: Key) -> list[Response]:
        """The episodes of this rank; call on every rank, on which turns are drawn equally often."""
        episodes, places = draw(tasks), [each.origin.place for each in tasks]
        asking = [n for n, response in enumerate(episodes) if response.ended]
        for turn in range(1, self.max_turns + 1):
            replies = self.environment.replies(
                [episodes[n] for n in asking], [places[n] for n in asking]
            )
            answered = {n: reply for n, reply in zip(asking, replies, strict=True) if reply}
            longer = raise_together(
                partial(self._with_replies, {n: (episodes[n], r) for n, r in answered.items()})
            )
            for number in answered:
                episodes[number] = replace(episodes[number], ended=False)
            if turn == self.max_turns:
                break
            read = {n: each for n, each in longer.items() if len(each.tokens) < draw.max_tokens}
            if not max_over_ranks(float(len(read))):
                break
            for number, response in zip(read, draw([*read.values()]), strict=True):
                episodes[number] = response
            asking = [number for number in read if episodes[number].ended]
        rewards = self.environment.rewards(places)
        return [each.rewarded(reward) for each, reward in zip(episodes, rewards, strict=True)]

    def _with_replies(
        self, pairs: Mapping[int, tuple[Response, Sequence[Message]]]
    ) -> dict[int, Response]:
        return {n: self._with_reply(*pair) for n, pair in pairs.items()}

    def _with_reply(self, response: Response, reply: Sequence[Message]) -> Response:
        """The response with messages of the environment behind it."""
        said = messages_after_prompt(response, self.environment.tokenizer.decode)
        earlier = json.dumps([*said, *reply], ensure_ascii=False).encode()
        longer = response.read(self.turn_tokens(response, reply))
        return replace(longer, episode=replace(response.episode, earlier=earlier))


_QUESTION: Message = {"role": "user", "content": "?"}


_THOUGHT = f"<think>\n{PROBE}\n</think>\n\n{PROBE}"


@dataclass(frozen=True)
class TurnTokens:
    """Renders what follows a turn of the actor, as tokens that go on from the actor's own.

    The actor's tokens are never made anew from text: later turns, and the update, read those that
    were sampled.
    """

    chat: Chat
    tokenizer: Tokenizer
    _checked: set[tuple[str, ...]] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, response: Response, reply: Sequence[Message]) -> list[int]:
        """Tokens of the messages that answer a response, up to where the actor speaks again.

        Raises:
            ValueError: if the chat template refuses the messages, or does not append them to what
                it made of earlier ones.
        """
        before = [
            *prompt_messages(response, self.tokenizer),
            *json.loads(response.episode.earlier or b"[]"),
        ]
        return self.following(before, reply, response.last_turn[-1:], response.row)

    def following(
        self,
        before: Sequence[Message],
        reply: Sequence[Message],
        last_token: Sequence[int],
        columns: Mapping[str, Any],
    ) -> list[int]:
        """Tokens of messages after an answer to those ``before``, which ended in ``last_token``.

        ``columns`` may have ``tools`` and ``chat_template_kwargs``.

        Raises:
            ValueError: as above.
        """
        self._check_appends(reply)
        messages, tokenizer = [*before, _turn(PROBE), *reply], self.tokenizer
        text = self.chat.with_columns(columns).render(messages, add_generation_prompt=True)
        following = text.rpartition(PROBE)[2]
        last = tokenizer.decode(list(last_token))
        # The end that the template writes was sampled already.
        if last.strip():
            following = following.removeprefix(last)
        alone, whole = call(tokenizer, [last, last + following], add_special_tokens=False)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
        return call(tokenizer, [following], add_special_tokens=False)[0]

    def _check_appends(self, reply: Sequence[Message]) -> None:
        """Refuse a template that renders earlier turns otherwise once messages of a role follow."""
        roles = tuple(message["role"] for message in reply)
        if roles in self._checked:
            return
        opening = self.chat.render([_QUESTION], add_generation_prompt=True)
        for answer in (PROBE, *([] if "</think>" in opening else [_THOUGHT])):
            exchange = [_turn(answer), *reply]
            once = self.chat.render([_QUESTION, *exchange], add_generation_prompt=True)
            twice = self.chat.render([_QUESTION, *exchange, *exchange], add_generation_prompt=True)
            if not (_begins(once, opening + answer) and _begins(twice, once + answer)):
                raise ValueError(
                    "the chat template renders an earlier answer differently once a message of "
                    f"role {' and '.join(map(repr, roles))} follows, so turns do not go on from "
                    "the tokens before: let --environment return another role, or give another "
                    "--chat_template"
                )
        self._checked.add(roles)


def _turn(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _begins(text: str, start: str) -> bool:
    """Whether a text begins so, white space aside: templates trim what they are given."""
    return "".join(text.split()).startswith("".join(start.split()))
