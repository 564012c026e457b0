"""The environment of an actor: a user's function that answers its turns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.data.messages import Message, check_message
from dschat_lora.engine.collectives import gather_texts, raise_together
from dschat_lora.engine.distributed import grid, rank, tensor_rank
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.rl.batch import Response
from dschat_lora.rl.user_functions import UserFunction, UserFunctionError, find_function

OPTION = "environment"


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

    def replies(self, responses: Sequence[Response]) -> list[list[Message]]:
        """The messages that follow each of this rank's responses, none where its episode ends.

        Call on every rank. Processes that hold one model between them ask once.

        Raises:
            EnvironmentFailedError: if the function fails or returns something else.
        """
        own = responses if tensor_rank() == 0 else ()
        try:
            replies = raise_together(lambda: self._replies(own))
        except Exception as error:
            raise EnvironmentFailedError from error
        if grid() is None:
            return replies
        texts = gather_texts(json.dumps(replies))
        found: list[list[Message]] = json.loads(texts[rank() - tensor_rank()])
        return found

    def _replies(self, responses: Sequence[Response]) -> list[list[Message]]:
        if not responses:
            return []
        return [self._messages(reply) for reply in self.call(responses)]

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


def load_environment(
    name: str, tokenizer: Tokenizer, *, retries: int = 0, timeout: float = 0.0
) -> Environment:
    """The environment behind ``module:function``.

    Raises:
        ValueError: if there is no such function, or it takes no responses.
    """
    function = find_function(OPTION, name)
    return Environment(OPTION, name, function, tokenizer, retries=retries, timeout=timeout)
