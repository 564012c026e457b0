"""Environments that are functions, which answer the actor's last turn."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dschat_lora.data.messages import Message, check_message
from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import first_of_model, raise_together, tensor_rank
from dschat_lora.rl.draw.player import Key
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.user_functions import UserFunction

ResultT = TypeVar("ResultT")


class EnvironmentFailedError(UserFunctionError):
    """The environment failed; the cause is its error. Raised on every rank."""

    what = "an environment"


def asked_together(ask: Callable[[], ResultT]) -> ResultT:
    """What an environment says on this rank; call on every rank.

    Raises:
        EnvironmentFailedError: if it fails on one.
    """
    try:
        return raise_together(ask)
    except Exception as error:
        raise EnvironmentFailedError from error


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

        def replies() -> list[list[Message]]:
            return [*map(self._messages, self._said(own, places[: len(own)]) if own else ())]

        return first_of_model(asked_together(replies))

    def _said(self, responses: Sequence[Response], places: Sequence[int]) -> list[object]:
        return self.call(responses)

    def begin(
        self, prompts: Sequence[PromptSample], mine: Iterable[int], num_generations: int, key: Key
    ) -> list[PromptSample]:
        """The prompts of episodes that are to begin; a function changes none."""
        return list(prompts)

    def label(self) -> str | None:
        """The name of the reward that it gives; a function gives none."""
        return None

    def made(self) -> Mapping[int, object] | None:
        """What reward functions see beside each response, by its place; of a function nothing."""
        return None

    def rewards(self, places: Sequence[int]) -> list[float | None]:
        """Rewards of episodes that are over; a function gives none."""
        return [None] * len(places)

    def _messages(self, reply: object) -> list[Message]:
        """The messages of what the function returned for one response."""
        messages = [] if reply is None else reply if isinstance(reply, list) else [reply]
        where = f"--{self.option} {self.name}"
        for number, message in enumerate(messages, start=1):
            check_message(f"{where}: message {number} that it returned", message)
            if message["role"] == "assistant":
                raise ValueError(
                    f"{where} returned a message with role 'assistant', which is the actor's; use "
                    "'user' or 'tool'"
                )
        try:
            return json.loads(json.dumps(messages, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} returned a value that JSON cannot represent: {error}"
            ) from error
