"""The player that options name; players of the user's own."""

import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from dschat_lora.data.chat import Chat, make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.engine.distributed import max_over_ranks, raise_together, tensor_rank
from dschat_lora.generation.stops import end_of_text
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.draw.player import Draw, Key, OneTurn, Player
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.play.agent_programs import load_program
from dschat_lora.rl.play.environment import (
    Environment,
    EnvironmentFailedError,
    Episodes,
    TurnTokens,
)
from dschat_lora.rl.play.environment_adapters import find_adapter
from dschat_lora.rl.play.stateful_environment import StatefulEnvironment, is_stateful
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.user_functions import (
    check_takes_responses,
    find_object,
    same_gradients,
)


def load_player(config: RlhfConfig, tokenizer: Tokenizer, closing: ExitStack) -> Player:
    """What plays the rollouts of the options; ``closing`` ends what it starts.

    Raises:
        ValueError: if ``--environment`` or ``--agent`` names nothing that can be used.
    """
    batch, data, rewards = config.batch, config.data, config.rewards
    chat = make_chat(tokenizer, data.data.chat_template_kwargs)
    turn_tokens = TurnTokens(chat, tokenizer)
    is_scored = bool(rewards.reward_function)
    if (program := load_program(batch.agent, batch.agent_command, is_scored=is_scored)) is not None:
        from dschat_lora.rl.play.agent_server import AgentServer  # needs a server's libraries
        from dschat_lora.rl.play.agents import AgentLimits, Agents
        from dschat_lora.rl.play.conversations import PromptTokens

        agents = Agents(
            program,
            PromptTokens(
                chat,
                make_encoder(tokenizer),
                tokenizer,
                turn_tokens,
                limit=data.max_seq_len,
                vocabulary_size=len(tokenizer),
            ),
            AgentLimits(
                batch.agent_timeout,
                batch.agent_retries,
                batch.agent_max_calls,
                calls_at_a_time=batch.rows_decoded,
            ),
            serve=AgentServer,
            max_new_tokens=data.max_answer_seq_len,
            end_of_text=lambda stop, tokens: end_of_text(
                tokens, (*batch.stop_strings, *stop), tokenizer.decode
            ),
        )
        closing.callback(agents.close)
        return agents
    if (name := batch.environment) is None:
        return OneTurn()
    if find_adapter(name) is None and hasattr(own := find_object("environment", name), "play"):
        with same_gradients():
            return UserPlayer(name, own() if inspect.isclass(own) else own, tokenizer)
    environment = load_environment(
        name,
        tokenizer,
        chat=chat,
        max_prompt_tokens=data.max_prompt_seq_len,
        retries=rewards.reward_retries,
        timeout=rewards.reward_timeout,
    )
    return Episodes(environment, turn_tokens, batch.max_turns)


def load_environment(
    name: str,
    tokenizer: Tokenizer,
    *,
    chat: Chat,
    max_prompt_tokens: int,
    retries: int = 0,
    timeout: float = 0.0,
) -> Environment:
    """The environment behind ``module:function``, ``module:Class`` or ``LIBRARY:NAME``.

    Raises:
        ValueError: if there is none, a function takes no responses, or a class lacks methods.
    """
    option = "environment"
    found = find_adapter(name) or find_object(option, name)
    if not is_stateful(found):
        check_takes_responses(option, name, found)
        return Environment(option, name, found, tokenizer, retries=retries, timeout=timeout)
    environment = StatefulEnvironment(
        *(option, name, found, tokenizer),
        timeout=timeout,
        chat=chat,
        max_prompt_tokens=max_prompt_tokens,
    )
    environment.make_first()
    return environment


class UserDraw:
    """How a player of the user's draws turns of the actor, and reads and writes text.

    Attributes:
        max_tokens: of a response.
    """

    def __init__(self, draw: Draw, tokenizer: Tokenizer) -> None:
        self._draw, self._tokenizer, self.max_tokens = draw, tokenizer, draw.max_tokens
        self.failed = False  # to draw; every process knows it

    def __call__(
        self, responses: Sequence[Response], limits: Sequence[int] | None = None
    ) -> list[Response]:
        """The responses with a further turn of the actor each, all drawn at once.

        ``limits`` bound the tokens of each turn further than ``--max_answer_seq_len`` does. A
        response without room for a token stays as it is.
        """
        if wrong := [each for each in responses if not isinstance(each, Response)]:
            raise TypeError(
                f"draw takes tasks, or responses to them, not a {type(wrong[0]).__name__}"
            )
        if limits is not None and (len(limits) != len(responses) or min(limits, default=1) < 1):
            raise ValueError(f"limits are numbers >= 1, one for each of {len(responses)} responses")
        max_over_ranks(1.0)  # those that wait in UserPlayer.play draw, too
        self.failed = True
        found = self._draw(responses, limits)
        self.failed = False
        return found

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, to be read."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


@dataclass(frozen=True)
class UserPlayer(Player):
    """An object of the user's with ``play(tasks, draw, *, key)``; ``draw`` is a :class:`UserDraw`.

    It returns a response for each task, in their order, made of tasks by ``draw``, ``read`` and
    ``rewarded``. Each process plays its own tasks, and may draw as often as it likes.
    """

    name: str  # module:object
    player: Any
    tokenizer: Tokenizer

    @property
    def reward_name(self) -> str | None:
        """What the object says, else the name of its class."""
        found = getattr(self.player, "reward_name", type(self.player).__name__)
        return None if found is None else str(found)

    def play(self, tasks: Sequence[Response], draw: Draw, *, key: Key) -> list[Response]:
        """What the object plays; call on every rank.

        Processes that hold one model between them play once, and the others return nothing.

        Raises:
            EnvironmentFailedError: if it fails, or returns what cannot be learnt from.
        """
        draw = replace(draw, asks_once=True)
        own, found, failure = UserDraw(draw, self.tokenizer), list[Response](), None
        if tasks and tensor_rank() == 0:
            try:
                with same_gradients():
                    found = self._checked(tasks, self.player.play(tasks, own, key=key), draw)
            except (Exception, SystemExit) as error:
                if own.failed:
                    raise
                failure = error
        while max_over_ranks(0.0):  # others draw
            draw.ask(())()

        def played() -> list[Response]:
            if failure is not None:  # as an error of the program, not of an option or the disk
                raise RuntimeError(f"--environment {self.name} failed: {failure!r}") from failure
            return found

        try:
            return raise_together(played)
        except Exception as error:
            raise EnvironmentFailedError from error

    def _checked(self, tasks: Sequence[Response], found: Any, draw: Draw) -> list[Response]:
        where = f"--environment {self.name}: play"
        places = [getattr(getattr(r, "origin", None), "place", None) for r in found or ()]
        if places != [each.origin.place for each in tasks]:
            raise ValueError(
                f"{where} must return a response for each of the {len(tasks)} tasks, in their "
                "order: what draw makes of them"
            )
        for each in found:
            if len(each.tokens) > draw.max_tokens:
                raise ValueError(
                    f"{where} returned a response of {len(each.tokens)} tokens, "
                    f"--max_answer_seq_len is {draw.max_tokens}"
                )
            drawn = len(each.logprobs) if draw.keep_logprobs else each.num_actor_tokens
            if not drawn or drawn != each.num_actor_tokens:
                raise ValueError(
                    f"{where} returned a response of {each.num_actor_tokens} tokens of the actor, "
                    f"of which {drawn} were drawn: tokens come from draw(...) and, to be read "
                    "alone, from response.read(tokens)"
                )
            if each.episode.reward is not None and not math.isfinite(each.episode.reward):
                raise ValueError(
                    f"{where} gave the reward {each.episode.reward}; a reward is a finite number, "
                    "or None for a response that is not to count"
                )
        return list(found)
