"""Environments that are objects of a class, each through one episode at a time."""

import inspect
import json
import math
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol, SupportsFloat, cast

import numpy as np

from dschat_lora.addons.environments.addon import episode_prompt
from dschat_lora.addons.environments.environment import Environment, asked_together
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import Encoder, make_encoder
from dschat_lora.data.messages import Message
from dschat_lora.data.samples import PromptSample
from dschat_lora.data.tool_calls import ToolCall, parse_tool_calls, tool_schema
from dschat_lora.engine.distributed import gather_texts, tensor_rank
from dschat_lora.rl.draw.player import Key
from dschat_lora.rl.response.coroutines import run_together
from dschat_lora.rl.response.response import Response, as_messages, prompt_of
from dschat_lora.rl.score.user_functions import named_parameters, same_gradients, takes_all

# Methods that are no tools.
RESERVED = ("reset", "step", "get_reward", "close")


class EpisodeObject(Protocol):
    """What objects may have; ``reset`` must be there, and either ``step`` or tools."""

    reset: Callable[..., object]
    step: Callable[[Message], object]
    get_reward: Callable[[], object]
    tool_schemas: Sequence[dict[str, Any]]
    call: Callable[[str, dict[str, Any]], object]


def is_stateful(named: object) -> bool:
    """Whether ``--environment`` names a class, or a function without arguments that makes objects.

    A dict of them is one too: each row names its own in the column ``environment``.
    """
    kind = named.func if isinstance(named, partial) else named
    if inspect.isclass(kind):
        return hasattr(kind, "reset")
    if isinstance(named, Mapping):
        return True
    return inspect.isfunction(named) and not inspect.signature(named).parameters


@dataclass(frozen=True)
class StatefulEnvironment(Environment):
    """Objects of a user's class that answer the actor, each through one episode at a time.

    ``reset`` begins an episode, with the columns of its row as arguments; a text or list that it
    returns is added to the prompt. Then either ``step(message)`` answers each turn of the actor,
    or the object's other public methods are tools, whose type hints and docstrings the chat
    template gets as JSON schemas: TRL's ``environment_factory``. ``get_reward()``, if there is
    one, scores the episode when it is over, and so do the rewards that ``step`` returns.
    """

    chat: Chat | None = None
    max_prompt_tokens: int = 0
    # Of this process, by number of the response: objects, and rewards that ``step`` gave.
    objects: dict[int, EpisodeObject] = field(default_factory=dict, compare=False)
    _kinds: dict[int, str] = field(default_factory=dict, compare=False)
    _rewards: dict[int, float] = field(default_factory=dict, compare=False)
    _key: list[int | str] = field(default_factory=list, compare=False)  # of the rollout's draws
    _idle: dict[str, list[EpisodeObject]] = field(default_factory=dict, compare=False)
    _first: dict[str, EpisodeObject] = field(default_factory=dict, compare=False)  # by kind
    _tools: dict[str, list[dict[str, Any]]] = field(default_factory=dict, compare=False)

    @cached_property
    def _encoder(self) -> Encoder:
        return make_encoder(self.tokenizer)

    @property
    def factories(self) -> Mapping[str, Callable[[], EpisodeObject]]:
        """What makes objects, by name; a single one has the empty name."""
        return self.function if isinstance(self.function, Mapping) else {"": self.function}

    def make_first(self) -> None:
        """Make an object of each kind, to refuse early what cannot be used.

        Raises:
            ValueError: naming what is missing.
        """
        for name, factory in self.factories.items():
            with same_gradients():
                made = factory()
            self._first[name], self._idle[name] = made, [made]
            where = f"--{self.option} {self.name}: {type(made).__name__}"
            if not callable(getattr(made, "reset", None)):
                raise ValueError(f"{where} has no method reset, which starts an episode")
            if not (hasattr(made, "step") or self._schemas(name, made)):
                raise ValueError(
                    f"{where} has neither a method step(message) that replies to the actor, nor "
                    "public methods that can serve as tools"
                )

    def made(self) -> Mapping[int, EpisodeObject]:
        """The objects."""
        return self.objects

    def label(self) -> str | None:
        """The name of the reward that objects give; None if they give none."""
        for made in self._first.values():
            if hasattr(made, "get_reward") or hasattr(made, "step"):
                return str(getattr(made, "reward_name", type(made).__name__))
        return None

    def _schemas(self, kind: str, made: EpisodeObject) -> list[dict[str, Any]]:
        """JSON schemas of the tools of a kind of object; none for one with ``step``.

        Raises:
            ValueError: naming a method whose hints or docstring do not say what it takes.
        """
        if kind in self._tools:
            return self._tools[kind]
        says_itself = hasattr(made, "tool_schemas")
        schemas = list(made.tool_schemas) if says_itself else []
        for name, method in () if says_itself else self._methods(made).items():
            try:
                schemas.append(tool_schema(method))
            except ValueError as error:
                raise ValueError(
                    f"--{self.option} {self.name}: the method {name} is not a valid tool: "
                    f"{error}; give it type hints and a docstring with Args, or prefix its name "
                    "with _"
                ) from error
        self._tools[kind] = schemas
        return schemas

    @staticmethod
    def _methods(made: EpisodeObject) -> dict[str, Callable[..., Any]]:
        if hasattr(made, "step"):
            return {}
        members = inspect.getmembers(made, inspect.ismethod)
        return {n: m for n, m in members if not n.startswith("_") and n not in RESERVED}

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without the columns that ``reset`` needs.

        Raises:
            ValueError: naming both.
        """
        for made in self._first.values():
            parameters = named_parameters(made.reset).values()
            needed = (p.name for p in parameters if p.default is p.empty and p.name != "row")
            lacking = [name for name in needed if name not in columns]
            if lacking:
                raise ValueError(
                    f"--{self.option} {self.name}: reset asks for {', '.join(lacking)}; the data "
                    f"has the columns {', '.join(sorted(columns)) or '(none)'}"
                )

    def begin(
        self, prompts: Sequence[PromptSample], mine: Iterable[int], num_generations: int, key: Key
    ) -> list[PromptSample]:
        """Reset an object for each response to this process's prompts, ``mine``.

        Returns all prompts, with what ``reset`` added and the schemas of tools; call on every rank.
        Objects of one prompt's copies draw the same random numbers in ``reset``, of ``key``, so
        that their episodes begin alike.

        Raises:
            EnvironmentFailedError: if an object fails, or copies of a prompt begin otherwise.
        """
        for place, made in self.objects.items():  # those of the episodes before
            self._idle.setdefault(self._kinds[place], []).append(made)
        self.objects.clear()
        self._rewards.clear()
        self._key[:] = key
        own = list(mine) if tensor_rank() == 0 else []
        begun = asked_together(lambda: self._begun(prompts, own, num_generations, key))
        changed = dict(enumerate(prompts))
        for text in gather_texts(json.dumps(begun)):
            for number, (tokens, row) in json.loads(text).items():
                ids, columns = np.array(tokens, dtype=np.int32), json.dumps(row).encode()
                n = int(number)
                changed[n] = replace(changed[n], input_ids=ids, columns=columns)
        return [*changed.values()]

    def _begun(
        self, prompts: Sequence[PromptSample], mine: Sequence[int], num_generations: int, key: Key
    ) -> dict[int, tuple[list[int], dict[str, Any]]]:
        changed = {}
        for number in mine:
            row = json.loads(prompts[number].columns or b"{}")
            name = str(row.get("environment", "")) if isinstance(self.function, Mapping) else ""
            if name not in self.factories:
                raise ValueError(
                    f"--{self.option}: a row's environment is {name!r}; known ones are "
                    f"{', '.join(map(repr, self.factories))}"
                )
            said = []
            for copy in range(num_generations):
                idle = self._idle.setdefault(name, [])
                made = idle.pop() if idle else self.factories[name]()
                place = number * num_generations + copy
                self.objects[place], self._kinds[place] = made, name
                with _seeded(stream_seed("environment", *key, number)):
                    said += self._run([(made, _reset(made, row))])
            if any(each != said[0] for each in said):
                raise ValueError(
                    f"--{self.option} {self.name}: reset returned {said[0]!r} and "
                    f"{next(each for each in said if each != said[0])!r} for copies of one "
                    "prompt, whose responses are compared; use the module random, which has the "
                    "same seed for them, or take the values from the row"
                )
            if not isinstance(said[0], str | list | dict | None):
                raise ValueError(
                    f"--{self.option} {self.name}: reset returned a {type(said[0]).__name__}; it "
                    "must return a text, a message, a list of messages, or None"
                )
            tools = self._schemas(name, made)
            if said[0] is not None or tools:
                changed[number] = self._prompt(row, said[0], tools)
        return changed

    def _prompt(
        self, row: dict[str, Any], said: object, tools: list[dict[str, Any]]
    ) -> tuple[list[int], dict[str, Any]]:
        """Tokens of a row's prompt with what ``reset`` returned, and the row with both."""
        assert self.chat is not None
        prompt = prompt_of(row, None)
        if prompt is None:
            raise ValueError(
                f"--{self.option} {self.name} extends the prompt of a row, which must be in "
                f"`prompt` or `messages`; this row has {', '.join(row) or 'nothing'}"
            )
        if isinstance(prompt, str) and isinstance(said, str) and not tools:
            text = prompt = f"{prompt}{said}"
        else:
            prompt = [{**each} for each in as_messages(prompt)]
            stands_in = prompt == episode_prompt(row.get("episode", -1))
            if isinstance(said, list | dict):
                prompt = [*([] if stands_in else prompt), *self._messages(said)]
            elif said is not None:
                prompt[-1]["content"] = f"{'' if stands_in else prompt[-1]['content']}{said}"
            columns = {**row, "tools": tools} if tools else row
            text = self.chat.with_columns(columns).render_prompt(prompt)
        row = {**row, "prompt": prompt} | ({"tools": tools} if tools else {})
        tokens = self._encoder.encode([text])[0]
        if len(tokens) > self.max_prompt_tokens:
            raise ValueError(
                f"a prompt has {len(tokens)} tokens including the text of reset and the tools of "
                f"--{self.option} {self.name}, but --max_prompt_seq_len is "
                f"{self.max_prompt_tokens}"
            )
        return tokens, row

    def _said(self, responses: Sequence[Response], places: Sequence[int]) -> list[object]:
        turns = [
            (self.objects[place], self._turn(response, place))
            for response, place in zip(responses, places, strict=True)
        ]
        earlier = [len(each.tokens) for each in responses]
        with same_gradients():
            return self._run(turns, list(zip(places, earlier, strict=True)))

    def _run(
        self,
        work: Sequence[tuple[EpisodeObject, Coroutine[Any, Any, object]]],
        seeds: Sequence[tuple[int, int]] = (),
    ) -> list[object]:
        """What the methods of objects give, within ``--reward_timeout``.

        Those of objects with an ``async def`` all at once; others one by one, ``random`` and
        ``numpy.random`` seeded anew by each of ``seeds``.
        """

        def results() -> list[object]:
            if any(_is_async(made) for made, _ in work):
                return run_together([each for _, each in work])
            given = []
            for number, (_, each) in enumerate(work):
                seed = (*self._key, *seeds[number]) if seeds else None
                with nullcontext() if seed is None else _seeded(stream_seed("turn", *seed)):
                    given.append(run_without_loop(each))
            return given

        return self._within_time(results, len(work)) if self.timeout else results()

    async def _turn(self, response: Response, place: int) -> object:
        """What an object says to the actor's last turn."""
        made, turn = self.objects[place], list(response.last_turn)
        _, calls = parse_tool_calls(self.tokenizer.decode(turn))
        if not hasattr(made, "step"):
            return [await self._called(made, call) for call in calls]
        said: Message = {
            "role": "assistant",
            "content": self.tokenizer.decode(turn, skip_special_tokens=True),
        }
        if calls:
            said["tool_calls"] = [
                {"type": "function", "function": call._asdict()} for call in calls
            ]
        reply = await _result(made.step(said))
        if isinstance(reply, tuple):
            if len(reply) != 2:
                raise ValueError(
                    f"--{self.option} {self.name}: step returned a tuple of {len(reply)}; return "
                    "a reply, or a reply and the reward of the turn; a reply of None ends the "
                    "episode"
                )
            reply, reward = reply
            if reward is not None:
                self._rewards[place] = self._rewards.get(place, 0.0) + self._number(reward)
        return {"role": "user", "content": reply} if isinstance(reply, str) else reply

    async def _called(self, made: EpisodeObject, call: ToolCall) -> Message:
        """A tool's message; the error of a method is told to the actor, which may do better."""
        listed = hasattr(made, "tool_schemas")
        methods = {} if listed else self._methods(made)
        names = [each["function"]["name"] for each in made.tool_schemas] if listed else [*methods]
        if call.name not in names:
            content = str({"error": f"there is no tool {call.name}; there are {', '.join(names)}"})
        elif listed:
            content = str(await _result(made.call(call.name, call.arguments)))
        else:
            try:
                content = str(await _result(methods[call.name](**call.arguments)))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the actor's fault as a rule
                content = str({"error": str(error)})
        return {"role": "tool", "name": call.name, "content": content}

    def _number(self, value: object) -> float:
        try:
            number = float(cast(SupportsFloat, value))
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"--{self.option} {self.name}: an environment returned the reward {value!r}; a "
                "reward must be a finite number, or None to exclude the episode"
            )
        return number

    def rewards(self, places: Sequence[int]) -> list[float | None]:
        """What this process's objects give for episodes that are over; call on every rank.

        Raises:
            EnvironmentFailedError: if an object fails.
        """

        def scores() -> list[float | None]:
            own = [n for n in places if n in self.objects]
            scored = [(self.objects[n], _scored(self.objects[n])) for n in own]
            given = self._run(scored, [(n, -1) for n in own])
            values: dict[int, float | None] = {}
            for n, value in zip(own, given, strict=True):
                values[n] = None if value is None else self._number(value) + self._rewards.get(n, 0)
            return [values.get(n) for n in places]

        return asked_together(scores)


def _is_async(made: EpisodeObject) -> bool:
    members = inspect.getmembers(made, inspect.ismethod)
    return any(inspect.iscoroutinefunction(m) for n, m in members if not n.startswith("_"))


def run_without_loop(coroutine: Coroutine[Any, Any, object]) -> object:
    """What a coroutine gives that waits for nothing, without a loop: it may start one of its own.

    Raises:
        RuntimeError: if it waits for something, or calls ``sys.exit``.
    """
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    except SystemExit as error:
        raise RuntimeError("sys.exit was called") from error
    coroutine.close()
    raise RuntimeError("a function that is not `async def` returned an awaitable")


async def _result(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


async def _reset(made: EpisodeObject, row: dict[str, Any]) -> object:
    names = named_parameters(made.reset)
    columns = {n: v for n, v in row.items() if n in names or takes_all(made.reset)}
    return await _result(made.reset(**(columns | ({"row": row} if "row" in names else {}))))


async def _scored(made: EpisodeObject) -> object:
    """What an object says of its episode; 0, beside the rewards of turns, where it has ``step``."""
    if hasattr(made, "get_reward"):
        return await _result(made.get_reward())
    return 0.0 if hasattr(made, "step") else None


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A block in which ``random`` and ``numpy.random`` begin at ``seed``."""
    before, array_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(array_before)
