"""What decodes answers, by the methods that a server or a chat calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dschat_lora.addons.serving.endpoint.errors import TooLongError
from dschat_lora.addons.serving.endpoint.requests import AnsweringModel, AnswerOptions
from dschat_lora.addons.serving.endpoint.turns import Piece

Emit = Callable[[Piece], None]


class AnswerSource(Protocol):
    """What decodes answers."""

    def submit(self, model: Any, prompt: Sequence[int], options: AnswerOptions, emit: Emit) -> Any:
        """Have a prompt of tokens answered, by pieces given to ``emit`` from any thread.

        Raises:
            TooLongError: if the model has no room for it and its answer.
            UnsupportedError: if it has no log-probabilities, or cannot follow the grammar.
            BusyError: if too many wait.
            StoppedError: if nothing is answered any more.
        """

    def leave(self, answer: Any) -> None:
        """Stop decoding an answer that nobody reads; nothing more of it is emitted."""


def fitting(model: AnsweringModel, prompt: Sequence[int], options: AnswerOptions) -> AnswerOptions:
    """The options, with no more tokens than the model has room for.

    Raises:
        TooLongError: naming the numbers, if there is no room.
    """
    limit = model.limit
    room = limit - len(prompt)
    if not prompt:
        raise TooLongError("the prompt is empty; an answer needs a token to follow")
    if room < 1 or (room < options.max_new_tokens and not options.cut):
        answer = "an answer" if options.cut else f"{options.max_new_tokens} of the answer"
        raise TooLongError(
            f"{model.name} has room for {limit} tokens, the prompt has {len(prompt)} and asks for "
            f"{answer} too"
        )
    return replace(options, max_new_tokens=min(room, options.max_new_tokens))
