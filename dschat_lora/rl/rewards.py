"""Rewards of responses: by functions of the user and by a reward model; combined and shaped."""

import concurrent.futures
import importlib
import inspect
import json
import math
import reprlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, soft_overlong_punishment
from dschat_lora.algos.segments import to_device
from dschat_lora.config.held import held_object, is_held
from dschat_lora.data.tool_calls import parse_answer
from dschat_lora.engine.distributed import (
    gather_texts,
    raise_together,
    rank,
    sum_over_processes,
    world_size,
)
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.terminal import note
from dschat_lora.rl.batch import Response
from dschat_lora.rl.builtin_rewards import builtin_function, is_builtin, is_remote
from dschat_lora.rl.config import RewardsConfig
from dschat_lora.rl.coroutines import in_thread, run_together
from dschat_lora.rl.external_rewards import RemoteReward
from dschat_lora.runtime.checks import working_directory


class UserFunctionError(Exception):
    """A function of the user's failed; the cause is its error. Raised on every rank."""

    what = "a function"


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


@dataclass
class RewardLog:
    """What reward functions log beside their scores, by the arguments of TRL's functions."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, dict[int, Any]] = field(default_factory=dict)  # by identity of the response

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number, whose mean over calls and ranks is a metric of the iteration."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def log_extra(self, responses: Sequence[Response], column: str, values: Sequence[Any]) -> None:
        """Keep one value for each response, for its line among the rollouts.

        Raises:
            ValueError: if there are not as many.
        """
        if len(values) != len(responses):
            raise ValueError(
                f"log_extra({column!r}, ...) got {len(values)} values for {len(responses)} "
                "responses; give a list of one for each"
            )
        kept = self.columns.setdefault(str(column), {})
        kept |= {id(each): value for each, value in zip(responses, values, strict=True)}

    def add(self, other: "RewardLog") -> None:
        """Keep what another log holds as well."""
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        for column, by_response in other.columns.items():
            self.columns.setdefault(column, {}).update(by_response)

    def take(self, responses: Sequence[Response]) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Metrics by name, and columns with an entry for each response, of all ranks; begins anew.

        Call on every rank with the same responses. An entry that nobody logged is None.

        Raises:
            RewardError: if JSON cannot hold what was logged.
        """
        numbers = {id(each): number for number, each in enumerate(responses)}
        columns = {
            column: {numbers[key]: value for key, value in kept.items() if key in numbers}
            for column, kept in self.columns.items()
        }
        try:
            logged = [self.metrics, columns]
            text = raise_together(lambda: json.dumps(logged, default=_plain))
        except Exception as error:
            raise RewardError from error
        self.metrics, self.columns = {}, {}
        values: dict[str, list[float]] = {}
        found: dict[str, list[Any]] = {}
        for metrics, shares in map(json.loads, gather_texts(text)):
            for name, own in metrics.items():
                values.setdefault(name, []).extend(own)
            for column, share in shares.items():
                entries = found.setdefault(column, [None] * len(responses))
                for number, value in share.items():
                    entries[int(number)] = value
        return {name: sum(own) / len(own) for name, own in sorted(values.items())}, found


def _plain(value: Any) -> Any:
    """A value that JSON lacks, as a list of numbers if it is an array, else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


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
        column = getattr(self.function, "column", None)  # of a built-in one
        wanted = required_columns(self.function) if column is None else [column]
        lacking = [name for name in wanted if name not in columns]
        if lacking:
            raise ValueError(
                f"--{self.option} {self.name} asks for {', '.join(lacking)}; it may take prompts, "
                "responses (or completions), messages, ended, rows, token_ids, trainer_state, "
                "log_extra, log_metric, and the columns of the data: "
                f"{', '.join(sorted(columns)) or 'there are none'}"
            )

    def call(
        self,
        responses: Sequence[Response],
        state: TrainerState | None = None,
        environments: Sequence[Any] | None = None,
    ) -> list[Any]:
        """What the function returns for each response, after so many errors at most.

        Raises:
            ValueError: if it returns no list of as many.
        """
        where = f"--{self.option} {self.name}"
        single = one_at_a_time(self.function)
        parts = [[each] for each in responses] if single else [list(responses)]
        values: dict[int, Any] = {}
        logs: dict[int, RewardLog] = {}
        for tries_left in reversed(range(self.retries + 1)):
            # A call that succeeded is not made again, and what one logs that fails is not kept.
            tried = [RewardLog() for _ in parts]
            calls = calls_of(self.function, responses, self.tokenizer, state, tried, environments)
            left = {n: call for n, call in enumerate(calls) if n not in values}
            count, came = sum(len(parts[n]) for n in left), dict[int, Any]()
            scored = list(zip(parts, tried, strict=True))
            make = partial(self._make, left, came, scored, tries_left)
            failure = None
            try:
                self._within_time(make, count) if self.timeout else make()
            except Exception as error:  # noqa: BLE001 - raised unless another try goes better
                failure = error
            left.clear()  # a thread that took too long begins no further call
            values |= (done := dict(came))
            logs |= {n: tried[n] for n in done}
            if failure is None:
                break
            if tries_left:
                some = f" for {len(parts) - len(values)} of {len(parts)} responses"
                words = f"{where} failed{some if single else ''} and is tried again"
                note(f"{words}: {failure!r}")
            elif isinstance(failure, ValueError | OSError):
                # It would pass for a wrong option or a full disk, and be shown without its place.
                raise RuntimeError(f"{where} failed") from failure
            else:
                raise failure
        for _, log in sorted(logs.items()):
            self.log.add(log)
        found = [values[n] for n in range(len(parts))] if single else values[0]
        if hasattr(found, "tolist") and not isinstance(found, Tensor):
            found = found.tolist()  # an array
        is_list = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.dim() > 0)
        if not is_list or len(found) != len(responses):
            what = f"{len(found)} {self.noun}" if is_list else f"a {type(found).__name__}"
            raise ValueError(
                f"{where} returned {what} for {len(responses)} responses; it must return a list of "
                f"{self.entry}, for each"
            )
        return list(found)

    def _within_time(self, returned: Callable[[], Any], count: int) -> Any:
        future = in_thread(returned)
        try:
            return future.result(self.timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise RuntimeError(
                f"--{self.option} {self.name} took more than the {self.timeout:g} seconds of "
                f"--reward_timeout for {count} responses"
            ) from None

    def _make(
        self,
        calls: dict[int, dict[str, Any]],
        values: dict[int, Any],
        scored: Sequence[tuple[list[Response], RewardLog]],
        tries_left: int,
    ) -> None:
        """Make calls, put into ``values`` what each gives, and raise the first error after all.

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
                values[number] = self.value_of(await value, *scored[number])

        waiting = []
        with same_gradients():
            for number in list(calls):
                if number not in calls or (errors and not tries_left):
                    break
                with errors_of(number):
                    value = self.function(**calls[number])
                    if inspect.isawaitable(value):
                        waiting.append(wait_for(number, value))
                    else:
                        values[number] = self.value_of(value, *scored[number])
            if waiting:
                run_together(waiting)
        if not errors:
            return
        first = errors[min(errors)]
        if isinstance(first, SystemExit):  # it would pass for the end of the run
            raise RuntimeError(f"--{self.option} {self.name} called sys.exit") from first
        raise first

    def value_of(self, found: Any, responses: Sequence[Response], log: RewardLog) -> Any:
        """What counts of a call's result."""
        return found


def same_gradients() -> torch.set_grad_enabled:
    """A block after which gradients are taken as before, whatever code in it switched off."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


# Modules that command lines know under another name.
_MOVED = {"dschat_lora.world": "dschat_lora.assets.toy_world"}


def find_function(option: str, name: str) -> Callable[..., Any]:
    """The function behind ``module:function``; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is no such function, or it takes no responses.
    """
    function = find_object(option, name)
    check_takes_responses(option, name, function)
    return function


def find_object(option: str, name: str) -> Callable[..., Any]:
    """What ``module:name``, ``builtin:name``, an address or an object of Python stands for.

    Raises:
        ValueError: if there is nothing of that name that can be called.
    """
    if is_held(name):
        return cast(Callable[..., Any], held_object(name, option))
    if is_builtin(name):
        return builtin_function(name)
    return RemoteReward(name) if is_remote(name) else _imported(option, name)


def check_takes_responses(option: str, name: str, function: Callable[..., object]) -> None:
    """Refuse a function that takes no responses.

    Raises:
        ValueError: naming what it takes.
    """
    if not (takes_responses(named_parameters(function)) or takes_all(function)):
        raise ValueError(
            f"--{option} {name} must take responses, completions or messages (one at a time: "
            f"response or completion), it takes {inspect.signature(function)}"
        )


def _imported(option: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    with working_directory(), same_gradients():
        try:
            module = importlib.import_module(_MOVED.get(module_name, module_name))
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"--{option} {name} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--{option} {name}: {module_name} has no function {function_name}")
    found: Callable[..., Any] = function
    return found


OWN = ("prompts", "responses", "messages", "ended", "rows", "token_ids")
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Of a function that is called with one response at a time.
SINGULAR = {
    "prompts": "prompt",
    "responses": "response",
    "completions": "completion",
    "environments": "environment",
    "rows": "row",
}
# Any of these parameters says that a function scores one response at a time.
_OF_ONE = {"response", "completion", "solution_str"}
# Functions of verl get what these columns hold, or None.
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENRLHF = ("queries", "prompts", "labels")
# Columns that are other arguments' matter, as in TRL.
_NOT_OFFERED = {"prompt", "completion", "messages", "chosen", "rejected"}
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Parameters of the function but ``*more`` and ``**others``."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind not in _OPEN}


def takes_all(function: Callable[..., object]) -> bool:
    """Whether the function has ``**others``, and so takes every argument."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def takes_responses(names: Collection[str]) -> bool:
    """Whether parameters of these names are what a function needs to see responses."""
    told = _OF_ONE | {"responses", "completions", "messages", "queries"}
    return not told.isdisjoint(names)


def is_singular(function: Callable[..., object]) -> bool:
    """Whether the function takes values of one response, by its parameters' names."""
    return bool(_OF_ONE & named_parameters(function).keys())


def one_at_a_time(function: Callable[..., object]) -> bool:
    """Whether a call scores one response; OpenRLHF's get lists of one, as from OpenRLHF itself."""
    takes_lists = getattr(function, "takes_lists", False)  # a server, which OpenRLHF asks at once
    names = named_parameters(function).keys()
    return bool(_OF_ONE & names) or ("queries" in names and not takes_lists)


def required_columns(function: Callable[..., object]) -> list[str]:
    """Parameters without default that only columns of the data can fill."""
    parameters, known = named_parameters(function), {*OWN, *TRL}
    if is_singular(function):
        known = {SINGULAR.get(name, name) for name in known}
    if "solution_str" in parameters:
        known |= {*VERL}
    if "queries" in parameters:
        known |= {*OPENRLHF}
    needed = (p.name for p in parameters.values() if p.default is p.empty)
    return [name for name in needed if name not in known]


def calls_of(
    function: Callable[..., object],
    responses: Sequence[Response],
    tokenizer: Tokenizer,
    state: TrainerState | None = None,
    logs: Sequence[RewardLog] = (),
    environments: Sequence[Any] | None = None,
) -> list[dict[str, Any]]:
    """Keyword arguments of each call that scores the responses, with what the function takes.

    All in one call, unless the function takes one at a time; ``logs`` has one for each call. A
    function of TRL's, which takes ``completions`` and no ``responses``, gets prompts and
    completions as its data has them: text, or lists of messages.
    """
    names = named_parameters(function)
    rows: list[dict[str, Any]] = [json.loads(each.columns or b"{}") for each in responses]
    columns = dict.fromkeys(name for row in rows for name in row if name not in _NOT_OFFERED)
    turns = [list(each.last_turn) for each in responses]
    texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
    prompts = [tokenizer.decode(each.prompt) for each in responses]
    asked = [prompt_of(row, text) for row, text in zip(rows, prompts, strict=True)]
    said = [messages_after_prompt(each, tokenizer.decode) for each in responses]
    ids = [list(each.tokens) for each in responses]
    by_column = {name: [row.get(name) for row in rows] for name in columns}
    offered: dict[str, list[Any]] = by_column | {
        "prompts": prompts,
        "responses": texts,
        "completions": texts,
        "messages": [[*as_messages(p), *m] for p, m in zip(asked, said, strict=True)],
        "ended": [each.ended for each in responses],
        "rows": rows,
        "token_ids": ids,
        "completion_ids": ids,
    }
    if not {"responses", "response"} & names.keys():  # one of TRL's
        offered["prompts"] = asked
        offered["completions"] = [
            text if isinstance(prompt, str) else messages
            for prompt, text, messages in zip(asked, texts, said, strict=True)
        ]
    if environments is not None:
        offered["environments"] = list(environments)
    if "solution_str" in names:  # one of verl's
        offered |= {
            "solution_str": texts,
            "data_source": [row.get("data_source") for row in rows],
            "ground_truth": list(map(_ground_truth, rows)),
            "extra_info": [row.get("extra_info") for row in rows],
        }
    if "queries" in names:  # one of OpenRLHF's
        answers = [tokenizer.decode(list(each.tokens)) for each in responses]
        offered |= {
            "queries": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
            "prompts": prompts,
            "labels": [row.get("label", row.get("answer", "")) for row in rows],
        }
    if is_singular(function):
        whole = {SINGULAR.get(name, name): values for name, values in offered.items()}
        calls = [{name: v[i] for name, v in whole.items()} for i in range(len(responses))]
        parts = [[each] for each in responses]
    elif one_at_a_time(function):
        parts = [[each] for each in responses]
        calls = [{name: v[i : i + 1] for name, v in offered.items()} for i in range(len(responses))]
    else:
        calls, parts = [offered], [list(responses)]
    logs = logs or [RewardLog() for _ in calls]
    for call, part, log in zip(calls, parts, logs, strict=True):
        call |= {"trainer_state": state or TrainerState(), "log_metric": log.log_metric}
        call |= {"log_extra": partial(log.log_extra, part)}
    if takes_all(function):
        return calls
    return [{name: v for name, v in call.items() if name in names} for call in calls]


def _ground_truth(row: dict[str, Any]) -> Any:
    """Where verl's data has it, or in a column of that name."""
    by_rule = row.get("reward_model")
    return by_rule.get("ground_truth") if isinstance(by_rule, dict) else row.get("ground_truth")


def messages_after_prompt(response: Response, decode: Callable[..., str]) -> list[dict[str, Any]]:
    """The actor's turns, and what its environment said between them.

    A turn with tool calls, and any where the row has ``tools``, is parsed as by TRL; others are
    text as it was drawn. A bare JSON object is no call where the row has no tools.
    """
    turn = response.last_turn
    text, end = decode(list(turn), skip_special_tokens=True), len(turn)
    while end and not decode(list(turn[end - 1 : end]), skip_special_tokens=True):
        end -= 1  # special tokens that end it
    before = (*response.prompt, *response.tokens[: len(response.tokens) - len(turn)])
    in_thought = decode(list(before[-16:])).rstrip().endswith("<think>")
    said = parse_answer(decode(list(turn[:end])), in_thought=in_thought)
    has_tools = json.loads(response.columns or b"{}").get("tools")
    if not has_tools and ("tool_calls" not in said or text.lstrip().startswith("{")):
        said = {"role": "assistant", "content": text}
    return [*json.loads(response.earlier or b"[]"), said]


def prompt_messages(response: Response, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    row = json.loads(response.columns or b"{}")
    return as_messages(prompt_of(row, tokenizer.decode(response.prompt)))


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def prompt_of(row: dict[str, Any], text: str | None) -> Any:
    """The prompt as the row has it, text or messages; ``text`` where it has another shape.

    Of messages with answers it is what the model reads: all before the last answer.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    given = prompt if isinstance(prompt, list) else []
    more = row.get("completion" if given else "messages")
    if not (given or isinstance(more, list)):
        return text
    messages = [*given, *(more if isinstance(more, list) else [])]
    answers = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
    return messages[: max(len(given), *answers[-1:])] if answers else messages


class RewardError(UserFunctionError):
    """A reward function failed; the cause is its error. Raised on every rank."""

    what = "a reward function"


@dataclass(frozen=True)
class RewardFunction(UserFunction):
    """A user's function that scores responses.

    It returns a list of as many numbers, or None for a response that is not to count; a number
    where it takes one response at a time.
    """

    noun, entry = "scores", "one number, or None"

    @property
    def label(self) -> str:
        """Its name in metrics."""
        if is_remote(self.name):
            return self.name.rstrip("/").rpartition("/")[2]
        return self.name.partition(":")[2].partition("=")[0]

    def value_of(self, found: Any, responses: Sequence[Response], log: RewardLog) -> Any:
        """The scores; of a dict, as from verl's and OpenRLHF's functions, the rest is logged."""
        scores = found.get("score", found.get("rewards")) if isinstance(found, dict) else None
        if scores is not None:
            own = ("score", "rewards", "scores", "extra_logs")
            more = {name: value for name, value in found.items() if name not in own}
            for name, value in {**more, **(found.get("extra_logs") or {})}.items():
                value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
                if isinstance(value, int | float):
                    log.log_metric(name, value)
                elif isinstance(value, list | tuple | Tensor) and len(value) == len(responses):
                    log.log_extra(responses, name, list(value))
                else:
                    log.log_extra(responses, name, [value] * len(responses))
            found = scores
        # OpenRLHF's functions return lists of one.
        lists = "queries" in named_parameters(self.function) and one_at_a_time(self.function)
        return found[0] if lists and hasattr(found, "__len__") and len(found) == 1 else found

    def __call__(
        self,
        responses: Sequence[Response],
        device: torch.device,
        state: TrainerState | None = None,
        objects: Mapping[int, Any] | None = None,
    ) -> Tensor:
        """(N,) fp32 scores on every rank, NaN for None; each rank scores some. On every rank.

        No response is scored twice, whatever the ranks hold: a function may answer differently.
        With ``objects`` of a stateful environment each rank scores the responses whose it holds.

        Raises:
            ValueError: if the function returns something else.
        """
        by_group = self.batch == "group"
        places = [each.group if by_group else n for n, each in enumerate(responses)]
        mine = [n for n, place in enumerate(places) if place % world_size() == rank()]
        if objects is not None:
            mine = [n for n in range(len(responses)) if n in objects]
        mine = [n for n in mine if not responses[n].failure]
        own = [responses[n] for n in mine]
        # One rank's failure is everybody's: the first rank says what it was.
        made = None if objects is None else [objects[n][0] for n in mine]
        values = raise_together(
            lambda: self._scores(own, by_group=by_group, state=state, objects=made)
        )
        scores = [0.0] * len(responses)
        for number, value in zip(mine, values, strict=True):
            scores[number] = value
        return torch.tensor(sum_over_processes(scores), device=device).float()

    def own_scores(self, responses: Sequence[Response]) -> list[float]:
        """Scores of responses of this process, NaN for None.

        Raises:
            ValueError: if the function returns something else.
        """
        return self._scores(list(responses), by_group=False, state=None)

    def _scores(
        self,
        responses: list[Response],
        *,
        by_group: bool,
        state: TrainerState | None,
        objects: Sequence[Any] | None = None,
    ) -> list[float]:
        groups = dict.fromkeys(each.group if by_group else 0 for each in responses)
        scores: dict[int, float] = {}
        for group in groups:
            chosen = [n for n, r in enumerate(responses) if not by_group or r.group == group]
            part = [responses[n] for n in chosen]
            found = self.call(part, state, objects and [objects[n] for n in chosen])
            values = (self._number(*pair) for pair in zip(found, part, strict=True))
            scores |= dict(zip(chosen, values, strict=True))
        return [scores[n] for n in range(len(responses))]

    def _number(self, value: Any, response: Response) -> float:
        if value is None:
            return math.nan
        try:
            number = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.inf
        if not abs(number) <= torch.finfo(torch.float32).max:  # in which scores are kept
            prompt = shortened(self.tokenizer.decode(response.prompt))
            raise ValueError(
                f"--{self.option} {self.name} returned {reprlib.repr(value)} for the prompt "
                f"{prompt!r}; scores are finite numbers, or None for a response that is not to "
                "count (they are kept in fp32, which ends at 3.4e38)"
            )
        return number


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"...{text[-most:]}"


@dataclass(frozen=True)
class RewardFunctions:
    """Functions that score every response, each with a weight; none where a model alone scores."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    model_weight: float = 1.0  # of the reward model, where there is one
    log: RewardLog = field(default_factory=RewardLog)  # of all functions
    environment: str | None = None  # the name of the reward that an environment gives, if any
    objects: Mapping[int, Any] | None = None  # a stateful environment's, by number of the response
    gates: tuple[RewardFunction, ...] = ()  # where one scores 0 or less, the sum is at most 0

    @property
    def logs(self) -> bool:
        """Whether a function may log anything, by its parameters."""
        return any(
            takes_all(each.function)
            or not {"log_extra", "log_metric", "solution_str", "queries"}.isdisjoint(
                named_parameters(each.function)
            )
            for each in (*self.functions, *self.gates)
        )

    def __call__(
        self, responses: Sequence[Response], device: torch.device, state: TrainerState | None = None
    ) -> dict[str, Tensor]:
        """(N,) scores on every rank by the function's name, not weighted; call on every rank.

        Raises:
            RewardError: if a function fails or returns something else than scores.
        """
        try:
            return {
                label: each(responses, device, state, self.objects)
                for label, each in self.by_label().items()
            }
        except Exception as error:
            raise RewardError from error

    def total(self, rewards: "dict[str, Tensor]", model: Tensor | None) -> Tensor:
        """(N,) weighted sum of the functions' scores and the reward ``model``'s, if there is one.

        A function's NaN is left out; the sum is NaN where nothing else came. Where a gate is
        closed it is at most 0.
        """
        labels = list(self.by_label())
        weights = dict(zip(labels, self.weights, strict=False))
        if self.environment is not None:
            weights[self.environment] = 1.0
        total = torch.zeros_like(next(iter(rewards.values())))
        scored = torch.zeros_like(total, dtype=torch.bool)
        if model is not None:
            total, scored = self.model_weight * model, ~scored
        for label, weight in weights.items():
            missing = rewards[label].isnan()
            total = total + torch.where(missing, 0, weight * rewards[label])
            scored = scored | ~missing
        for label in labels[len(self.functions) :]:
            total = torch.where(rewards[label] <= 0, total.clamp(max=0), total)
        return total.masked_fill(~scored, torch.nan)

    def by_label(self) -> dict[str, RewardFunction]:
        """The functions by name, those of one name numbered from the second on."""
        found: dict[str, RewardFunction] = {}
        for each in (*self.functions, *self.gates):
            label, number = each.label, 2
            while label in (*found, self.environment, "reward_model"):
                label, number = f"{each.label}_{number}", number + 1
            found[label] = each
        return found


def load_functions(config: RewardsConfig, tokenizer: Tokenizer) -> RewardFunctions:
    """The functions of ``--reward_function`` with their weights, and those of ``--reward_gate``.

    Raises:
        ValueError: if one cannot be used.
    """
    log = RewardLog()
    functions, gates = (
        tuple(
            load_function(
                option,
                name,
                tokenizer,
                batch=config.reward_batch,
                retries=config.reward_retries,
                timeout=config.reward_timeout,
                log=log,
            )
            for name in getattr(config, option)
        )
        for option in ("reward_function", "reward_gate")
    )
    weights = config.reward_weights or (1.0,) * len(functions)
    return RewardFunctions(
        functions,
        weights[: len(functions)],
        weights[len(functions)] if len(weights) > len(functions) else 1.0,
        log,
        gates=gates,
    )


def load_function(
    option: str,
    name: str,
    tokenizer: Tokenizer,
    *,
    batch: str = "all",
    retries: int = 0,
    timeout: float = 0.0,
    log: RewardLog | None = None,
) -> RewardFunction:
    """The function behind ``module:function``; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is no such function, or it takes no responses.
    """
    function = find_function(option, name)
    log = log or RewardLog()
    return RewardFunction(option, name, function, tokenizer, batch, retries, timeout, log)


# Scores that the scale of --reward_scaling initial is taken from, at least. The standard error of
# a deviation from n scores is about 1 / sqrt(2 n) of it: 18 % of 16 scores, 9 % of 64.
INITIAL_SCORES = 64


def shaped_rewards(
    scores: Tensor, ended: Tensor, moments: RunningMoments, config: RewardsConfig
) -> tuple[Tensor, RunningMoments]:
    """Rewards from scores, and the moments with these scores counted.

    Scaled, then clipped, then lowered where the response was cut off. Scaling by the scores of
    the first iterations, as many as have ``INITIAL_SCORES``, is that of arXiv:1909.08593, section
    2.2: mean 0 and variance 1 under the policy before it is trained. ``scores`` are (N,) unscaled
    ones, NaN for a response that does not count, ``ended`` (N,) bool, and ``moments`` of all
    scores before, or of the first ones.
    """
    if config.reward_scaling == "running" or (
        config.reward_scaling == "initial" and moments.count < INITIAL_SCORES
    ):
        moments = moments.updated(scores[~scores.isnan()])
    if config.reward_scaling == "initial":
        scores = rescale_values(moments, scores)
    elif config.reward_scaling == "running":
        scores = scores / moments.std
    if config.clip_reward_value:
        limit = config.clip_reward_value
        scores = scores.clamp(-limit, limit)
    return scores - config.missing_eos_penalty * ~ended, moments


def rescale_values(moments: RunningMoments, values: Tensor) -> Tensor:
    return (values - moments.mean) / moments.std


def clipped_rewards(rewards: Tensor, ended: Tensor, config: RewardsConfig) -> Tensor:
    """(N,) bool, which of :func:`shaped_rewards` are at a bound of the clip."""
    before = rewards + config.missing_eos_penalty * ~ended
    limit = config.clip_reward_value
    return before.abs() >= limit if limit else torch.zeros_like(ended)


def punish_overlong(
    rewards: Tensor, lengths: Sequence[int], *, longest: int, config: RewardsConfig
) -> Tensor:
    """(N,) rewards, lowered for responses of ``lengths`` tokens that come near the ``longest``."""
    punishment = soft_overlong_punishment(
        torch.tensor(lengths), max_length=longest, cache=config.soft_overlong_tokens
    )
    return rewards + to_device(punishment.float(), rewards.device)
