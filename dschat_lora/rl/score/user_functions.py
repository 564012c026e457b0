"""User functions: what they are called with, and what they log."""

import concurrent.futures
import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from dschat_lora.config.addons import load, provided
from dschat_lora.config.held import is_held
from dschat_lora.config.plurals import counted
from dschat_lora.data.media import MediaReader, media_of
from dschat_lora.data.messages import MEDIA
from dschat_lora.engine.distributed import gather_texts, raise_together
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.terminal import note
from dschat_lora.rl.options.names import load_object
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Response, as_messages, messages_after_prompt, prompt_of

ResultT = TypeVar("ResultT")
OWN = ("prompts", "responses", "messages", "ended", "rows", "token_ids")
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Of these a function that is called with one response at a time gets one, by the name without s.
PLURAL = ("prompts", "responses", "completions", "rows")
# Any of these parameters says that a function scores one response at a time.
_OF_ONE = {"response", "completion"}
# One of these is what a function needs to see responses.
_SEES_RESPONSES = {*_OF_ONE, "responses", "completions", "messages"}
# Columns that are other arguments' matter, as in TRL.
_NOT_OFFERED = {"prompt", "completion", "messages", "chosen", "rejected"}
# Functions with any of these parameters see what rows hold beside text.
_SHOWS_ROWS = {"prompts", "prompt", "messages", "rows", "row", *MEDIA}
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class TrainerState:
    """How far a run is, for functions that ask for ``trainer_state``.

    Names are those of ``transformers.TrainerState``, which takes seconds to import.
    """

    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # of the run
    epoch: float = 0.0  # passes over the prompts, as a fraction
    num_train_epochs: int = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclass(frozen=True)
class DecodedResponse:
    """A response as text, as messages and as tokens, with its row of data."""

    prompt: str
    text: str  # of the last turn, without special tokens
    row_prompt: str | list[dict[str, Any]]  # as the row has it, text or messages
    turns: list[dict[str, Any]]  # messages after the prompt
    row: dict[str, Any]
    token_ids: list[int]
    group: int  # number of the prompt within the iteration
    ended: bool  # by itself

    @classmethod
    def of(cls, response: Response, tokenizer: Tokenizer, row: dict[str, Any]) -> "DecodedResponse":
        """What there is to read of a response to the prompt of a row."""
        prompt = tokenizer.decode(response.prompt)
        text = tokenizer.decode(list(response.last_turn), skip_special_tokens=True)
        turns = messages_after_prompt(response, tokenizer.decode)
        of_row = (prompt_of(row, prompt), turns, row)
        return cls(prompt, text, *of_row, list(response.tokens), response.group, response.ended)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Of prompt and response."""
        return [*as_messages(self.row_prompt), *self.turns]


@dataclass
class RewardLog:
    """What reward functions log beside their scores, by the arguments of TRL's functions."""

    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: list[tuple[str, int, Any]] = field(default_factory=list)  # by id of the response

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number, whose mean over calls and ranks is a metric of the iteration."""
        self.metrics.append((str(name), float(value)))

    def log_extra(self, responses: Sequence[Response], column: str, values: Sequence[Any]) -> None:
        """Keep one value for each response, for its line among the rollouts.

        Raises:
            ValueError: if there are not as many.
        """
        if len(values) != len(responses):
            raise ValueError(
                f"log_extra({column!r}, ...) got {len(values)} values for {len(responses)} "
                "responses; give one value for each"
            )
        for response, value in zip(responses, values, strict=True):
            self.columns.append((str(column), id(response), value))

    def take(self, responses: Sequence[Response]) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Metrics by name, and columns with an entry for each response, of all ranks; begins anew.

        Call on every rank with the same responses. An entry that nobody logged is None.

        Raises:
            RewardError: if JSON cannot hold what was logged.
        """
        places = {id(each): number for number, each in enumerate(responses)}
        own = [(column, places[key], value) for column, key, value in self.columns if key in places]

        def plain(value: object) -> object:  # that JSON lacks: numbers of an array, else text
            return value.tolist() if hasattr(value, "tolist") else str(value)

        try:
            text = raise_together(lambda: json.dumps([self.metrics, own], default=plain))
        except Exception as error:
            raise RewardError from error
        self.metrics, self.columns = [], []
        values: dict[str, list[float]] = {}
        columns: dict[str, list[Any]] = {}
        for metrics, entries in map(json.loads, gather_texts(text)):
            for name, value in metrics:
                values.setdefault(name, []).append(value)
            for column, place, value in entries:
                columns.setdefault(column, [None] * len(responses))[place] = value
        return {name: sum(own) / len(own) for name, own in sorted(values.items())}, columns


@dataclass(frozen=True)
class UserFunction:
    """A function that is called by keyword with those arguments that it takes.

    They are those of :func:`calls_of`. A coroutine function is waited for, all calls of a process
    at once.
    """

    noun: ClassVar[str] = "entries"  # of the list that it returns
    entry: ClassVar[str] = "one entry"

    option: str  # that names it
    name: str  # module:function
    function: Callable[..., Any]
    tokenizer: Tokenizer
    batch: str = "all"  # of a call: "all" responses of this process, or those of a "group"
    retries: int = 0  # further tries after an error
    timeout: float = 0.0  # seconds that a try may take; 0: any
    log: RewardLog = field(default_factory=RewardLog, compare=False)

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for columns which the data lacks.

        Raises:
            ValueError: naming both.
        """
        if (check := getattr(self.function, "check_columns", None)) is not None:  # a scorer's
            check(columns)
        parameters, known = named_parameters(self.function), [*OWN, *TRL]
        if is_singular(self.function):
            known = list(map(singular, known))
        known += ["state"] if is_scorer(self.function) else []
        needed = [name for name, p in parameters.items() if p.default is p.empty]
        column = getattr(self.function, "column", None)  # that it scores by
        wanted = [name for name in needed if name not in known] if column is None else [column]
        lacking = [name for name in wanted if name not in columns]
        if (all_at_once := {*OWN, *TRL} & {*lacking}) and is_singular(self.function):
            one = " and ".join(sorted(_OF_ONE & parameters.keys()))
            raise ValueError(
                f"--{self.option} {self.name} takes {one}, of one response at a time, and "
                f"{', '.join(sorted(all_at_once))}, of all; rows holds the columns of the data"
            )
        if lacking:
            raise ValueError(
                f"--{self.option} {self.name} requires {', '.join(lacking)}; available are "
                "prompts, responses (or completions), messages, ended, rows, token_ids, "
                "trainer_state, log_extra, log_metric, and the columns of the data: "
                f"{', '.join(sorted(columns)) or 'there are none'}"
            )

    def call(
        self,
        responses: Sequence[Response],
        state: TrainerState | None = None,
        beside: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Any]:
        """What the function returns for each response, after so many errors at most.

        ``beside`` are further arguments by name, which have an entry for each response.

        Raises:
            ValueError: if it returns no list of as many.
        """
        where = f"--{self.option} {self.name}"
        single, done = is_singular(self.function), dict[int, tuple[Any, RewardLog]]()
        parts = [[each] for each in responses] if single else [list(responses)]
        media = media_of(self.tokenizer) if getattr(self.function, "sees_media", True) else None
        for tries_left in reversed(range(self.retries + 1)):
            # A call that succeeded is not made again, and what one logs that fails is not kept.
            logs = [RewardLog() for _ in parts]
            calls = calls_of(self.function, responses, self.tokenizer, state, logs, beside, media)
            left = {n: (calls[n], logs[n]) for n in range(len(parts)) if n not in done}
            count, came = sum(len(parts[n]) for n in left), dict[int, Any]()
            make, failure = partial(self._make, left, came, tries_left), None
            try:
                self._within_time(make, count) if self.timeout else make()
            except Exception as error:  # noqa: BLE001 - raised unless another try goes better
                failure = error
            left.clear()  # a thread that took too long begins no further call
            done |= dict(came)
            if failure is None:
                break
            if tries_left:
                some = f" for {len(parts) - len(done)} of {counted(len(parts), 'response')}"
                note(f"{where} failed{some if single else ''} and is retried: {failure!r}")
            elif isinstance(failure, ValueError | OSError):
                # It would pass for a wrong option or a full disk, and be shown without its place.
                raise RuntimeError(f"{where} failed") from failure
            else:
                raise failure
        returned = []
        for _, (value, log) in sorted(done.items()):  # by responses, whichever came first
            returned.append(value)
            self.log.metrics += log.metrics
            self.log.columns += log.columns
        return self.entries(returned if single else returned[0], len(responses))

    def entries(self, returned: object, count: int) -> list[Any]:
        """What was returned for each of so many responses.

        Raises:
            ValueError: if that is no list of as many.
        """
        if hasattr(returned, "tolist") and not isinstance(returned, Tensor):
            returned = returned.tolist()  # an array
        what = f"a {type(returned).__name__}"
        if isinstance(returned, list | tuple) or (isinstance(returned, Tensor) and returned.dim()):
            if len(returned) == count:
                return list(returned)
            what = f"{len(returned)} {self.noun}"
        raise ValueError(
            f"--{self.option} {self.name} returned {what} for {counted(count, 'response')}; it "
            f"must return a list of {self.entry}, for each"
        )

    def _within_time(self, make: Callable[[], ResultT], count: int) -> ResultT:
        from dschat_lora.rl.response.coroutines import in_thread

        future: concurrent.futures.Future[ResultT] = in_thread(make)
        try:
            return future.result(self.timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise RuntimeError(
                f"--{self.option} {self.name} took more than the {self.timeout:g} seconds of "
                f"--reward_timeout for {counted(count, 'response')}"
            ) from None

    def _make(
        self,
        calls: dict[int, tuple[dict[str, Any], RewardLog]],
        done: dict[int, tuple[Any, RewardLog]],
        tries_left: int,
    ) -> None:
        """Make calls, put into ``done`` what each gives, and raise the first error after all.

        Where no try is left, none begins after an error.
        """
        errors: dict[int, Exception | SystemExit] = {}

        @contextmanager
        def errors_of(number: int) -> Iterator[None]:
            try:
                yield
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised below
                errors[number] = error

        async def wait_for(number: int, value: Awaitable[Any]) -> None:
            with errors_of(number):
                done[number] = await value, of[number][1]

        of, waiting = dict(calls), []
        with same_gradients():
            for number, (arguments, log) in of.items():
                if number not in calls or (errors and not tries_left):
                    break
                with errors_of(number):
                    value = self.function(**arguments)
                    if inspect.isawaitable(value):
                        waiting.append(wait_for(number, value))
                    else:
                        done[number] = value, log
            if waiting:
                from dschat_lora.rl.response.coroutines import run_together

                run_together(waiting)
        if not errors:
            return
        first = errors[min(errors)]
        if isinstance(first, SystemExit):  # it would pass for the end of the run
            raise RuntimeError(f"--{self.option} {self.name} called sys.exit") from first
        raise first


def same_gradients() -> torch.set_grad_enabled:
    """A block after which gradients are taken as before, whatever code in it switched off."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


def find_function(option: str, name: str, tokenizer: Tokenizer) -> Callable[..., Any]:
    """The function behind ``module:function``; the module is imported, nothing is evaluated.

    One whose arguments an add-on knows (the seam ``reward_form``) comes as the function that the
    add-on makes of it.

    Raises:
        ValueError: if there is no such function, or it takes no responses.
    """
    function = find_object(option, name)
    if isinstance(function, type):  # of scorers
        function = cast(Callable[..., Any], function())
    for path in () if is_scorer(function) else provided("reward_form").values():
        function = load(path)(function, tokenizer) or function
    check_takes_responses(option, name, function)
    return function


def find_object(option: str, name: str) -> Callable[..., Any]:
    """What ``module:name``, a name of an add-on or an object of Python stands for.

    Raises:
        ValueError: if there is nothing of that name that can be called.
    """
    with same_gradients():
        own = load_object(option, name, "function")
    if not (is_held(name) or callable(own) or hasattr(own, "play")):
        module, _, attribute = name.partition(":")
        raise ValueError(f"--{option} {name}: {module} has no function {attribute}")
    return cast(Callable[..., Any], own)


def check_takes_responses(
    option: str, name: str, function: Callable[..., object], also: str = ""
) -> None:
    """Refuse a function that takes no responses; ``also`` says what else it may be.

    Raises:
        ValueError: naming what it takes.
    """
    if not (_SEES_RESPONSES & named_parameters(function).keys() or takes_all(function)):
        raise ValueError(
            f"--{option} {name} must take responses, completions or messages (one at a time: "
            f"response or completion){also}, it takes {inspect.signature(function)}"
        )


def named_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Parameters of the function but ``*more`` and ``**others``."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind not in _OPEN}


def takes_all(function: Callable[..., object]) -> bool:
    """Whether the function has ``**others``, and so takes every argument."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def is_scorer(function: Callable[..., object]) -> bool:
    """Whether it gives rewards by the names that it has."""
    return hasattr(function, "names")


def is_singular(function: Callable[..., object]) -> bool:
    """Whether the function takes values of one response, by its parameters' names."""
    return bool(_OF_ONE & named_parameters(function).keys())


def singular(name: str, more: Collection[str] = ()) -> str:
    """The name of an argument where a function takes one response at a time."""
    return name.removesuffix("s") if name in PLURAL or name in more else name


def calls_of(
    function: Callable[..., object],
    responses: Sequence[Response],
    tokenizer: Tokenizer,
    state: TrainerState | None = None,
    logs: Sequence[RewardLog] = (),
    beside: Mapping[str, Sequence[Any]] | None = None,
    media: MediaReader | None = None,
) -> list[dict[str, Any]]:
    """Keyword arguments of each call that scores the responses, with what the function takes.

    All in one call, unless the function takes one at a time; ``logs`` has one for each call. A
    function of TRL's, which takes ``completions`` and no ``responses``, gets prompts and
    completions as its data has them: text, or lists of messages. What ``media`` reads is in them,
    and in rows, where the function may take either; responses to a prompt share it.
    """
    names, scores_by_name = named_parameters(function), is_scorer(function)
    of_trl = not {"responses", "response"} & names.keys()
    rows = [each.row for each in responses]
    shows = takes_all(function) or scores_by_name or _SHOWS_ROWS & names.keys()
    if media is not None and shows:
        rows = media.restored(rows, [each.prompt for each in responses])
    pairs = zip(responses, rows, strict=True)
    read = [DecodedResponse.of(each, tokenizer, row) for each, row in pairs]
    ids = [each.token_ids for each in read]
    columns = dict.fromkeys(name for row in rows for name in row if name not in _NOT_OFFERED)
    offered: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in columns}
    offered |= {
        "prompts": [each.row_prompt if of_trl else each.prompt for each in read],
        "responses": read if scores_by_name else [each.text for each in read],
        "completions": [
            each.turns if of_trl and not isinstance(each.row_prompt, str) else each.text
            for each in read
        ],
        "messages": [each.messages for each in read],
        "ended": [each.ended for each in read],
        "rows": rows,
        "token_ids": ids,
        "completion_ids": ids,
    }
    beside = beside or {}
    offered |= {name: list(values) for name, values in beside.items()}
    calls: list[dict[str, Any]] = [offered]
    parts = [list(responses)]
    if is_singular(function):
        places = range(len(responses))
        calls = [{singular(name, beside): v[i] for name, v in offered.items()} for i in places]
        parts = [[each] for each in responses]
    logs = logs or [RewardLog() for _ in calls]
    known = state or TrainerState()
    of_run = {"trainer_state": known} | ({"state": known} if scores_by_name else {})
    for call, part, log in zip(calls, parts, logs, strict=True):
        own = {"log_metric": log.log_metric, "log_extra": partial(log.log_extra, part)}
        call |= of_run | own
    if takes_all(function):
        return calls
    return [{name: v for name, v in call.items() if name in names} for call in calls]


class RewardError(UserFunctionError):
    """A reward function failed; the cause is its error. Raised on every rank."""

    what = "a reward function"


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"...{text[-most:]}"
