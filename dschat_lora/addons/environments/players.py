"""Players: episodes with an environment, and players of the user's own."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

from dschat_lora.addons.environments.environment import Environment, asked_together
from dschat_lora.addons.environments.stateful import StatefulEnvironment, is_stateful
from dschat_lora.addons.environments.turn_tokens import TurnTokens
from dschat_lora.data.chat import Chat, make_chat
from dschat_lora.data.messages import Message
from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import max_over_ranks, raise_together, tensor_rank
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.draw.player import Beside, Draw, Key, Player
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.names import made
from dschat_lora.rl.response.response import Response, messages_after_prompt
from dschat_lora.rl.score.user_functions import check_takes_responses, find_object, same_gradients


def load_player(name: str, config: RlhfConfig, tokenizer: Tokenizer, *, max_turns: int) -> Player:
    """What ``--environment`` names, to play the rollouts.

    Raises:
        ValueError: if it names nothing that can be used, or nothing gives a reward.
    """
    rewards = config.rewards
    own: object = find_object("environment", name)
    player: Player
    if hasattr(own, "play"):
        with same_gradients():
            own = made("environment", name, own)
        player = UserPlayer(name, cast(PlaysEpisodes, own), tokenizer)
    else:
        chat = make_chat(tokenizer, config.data.data.chat_template_kwargs)
        environment = load_environment(
            name,
            tokenizer,
            chat=chat,
            max_prompt_tokens=config.data.max_prompt_seq_len,
            retries=rewards.reward_retries,
            timeout=rewards.reward_timeout,
        )
        player = Episodes(environment, TurnTokens(chat, tokenizer), max_turns)
    unscored = config.ppo.rules.learns_from_rewards and not config.is_scored
    if player.reward_name is None and unscored:
        raise ValueError(
            f"--environment {name} returns no reward (a class can, with get_reward or step): give "
            "--reward_function or --critic_model_name_or_path"
        )
    return player


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
    own = find_object(option, name)
    if not is_stateful(own):
        check_takes_responses(option, name, own, ", or have play(tasks, draw, *, key)")
        return Environment(option, name, own, tokenizer, retries=retries, timeout=timeout)
    environment = StatefulEnvironment(
        *(option, name, own, tokenizer),
        timeout=timeout,
        chat=chat,
        max_prompt_tokens=max_prompt_tokens,
    )
    environment.make_first()
    return environment


@dataclass(frozen=True)
class Episodes(Player):
    """Plays episodes: turns of the actor, with an environment's messages between them.

    An episode ends when the environment returns None. It is cut off, and does not count as ended,
    where a turn is; where the environment has more to say after ``max_turns``; and where its
    messages leave no room for another token.
    """

    environment: Environment
    turn_tokens: TurnTokens
    max_turns: int

    @property
    def reward_name(self) -> str | None:
        """The environment's."""
        return self.environment.label()

    @property
    def beside(self) -> Beside | None:
        """The objects of an environment with state."""
        made = self.environment.made()
        return None if made is None else Beside("environments", made)

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
            longer = raise_together(partial(self._with_replies, episodes, answered))
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
        self, episodes: Sequence[Response], replies: Mapping[int, Sequence[Message]]
    ) -> dict[int, Response]:
        """The episodes that have replies with these behind them, by their numbers."""
        longer = {}
        for number, reply in replies.items():
            response = episodes[number]
            said = messages_after_prompt(response, self.environment.tokenizer.decode)
            earlier = json.dumps([*said, *reply], ensure_ascii=False).encode()
            read = response.read(self.turn_tokens(response, reply))
            longer[number] = replace(read, episode=replace(response.episode, earlier=earlier))
        return longer


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
        drawn = self._draw(responses, limits)
        self.failed = False
        return drawn

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, to be read."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class PlaysEpisodes(Protocol):
    """What a player of the user's has."""

    def play(self, tasks: Sequence[Response], draw: UserDraw, *, key: Key) -> Sequence[Response]:
        """A response for each task."""


@dataclass(frozen=True)
class UserPlayer(Player):
    """An object of the user's with ``play(tasks, draw, *, key)``; ``draw`` is a :class:`UserDraw`.

    It returns a response for each task, in their order, made of tasks by ``draw``, ``read`` and
    ``rewarded``. Each process plays its own tasks, and may draw as often as it likes.
    """

    name: str  # module:object
    player: PlaysEpisodes
    tokenizer: Tokenizer

    @property
    def reward_name(self) -> str | None:
        """What the object says, else the name of its class."""
        name = getattr(self.player, "reward_name", type(self.player).__name__)
        return None if name is None else str(name)

    def play(self, tasks: Sequence[Response], draw: Draw, *, key: Key) -> list[Response]:
        """What the object plays; call on every rank.

        Processes that hold one model between them play once, and the others return nothing.

        Raises:
            EnvironmentFailedError: if it fails, or returns what cannot be learnt from.
        """
        draw = replace(draw, asks_once=True)
        own, played, failure = UserDraw(draw, self.tokenizer), list[Response](), None
        if tasks and tensor_rank() == 0:
            try:
                with same_gradients():
                    played = self._checked(tasks, self.player.play(tasks, own, key=key), draw)
            except (Exception, SystemExit) as error:
                if own.failed:
                    raise
                failure = error
        while max_over_ranks(0.0):  # others draw
            draw.ask(())()

        def result() -> list[Response]:
            if failure is not None:  # as an error of the program, not of an option or the disk
                raise RuntimeError(f"--environment {self.name} failed: {failure!r}") from failure
            return played

        return asked_together(result)

    def _checked(
        self, tasks: Sequence[Response], played: Sequence[Response] | None, draw: Draw
    ) -> list[Response]:
        where = f"--environment {self.name}: play"
        places = [getattr(getattr(r, "origin", None), "place", None) for r in played or ()]
        if places != [each.origin.place for each in tasks]:
            raise ValueError(
                f"{where} must return a response from draw for each of the {len(tasks)} tasks, in "
                "their order"
            )
        played = list(played or ())
        for each in played:
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
                    f"{where} gave the reward {each.episode.reward}; a reward must be a finite "
                    "number, or None to exclude the response"
                )
        return played
