"""Functions of the user's that see responses: how they are found and called."""

import asyncio
import concurrent.futures
import importlib
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from dschat_lora.config.held import held_object, is_held
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.report.terminal import note
from dschat_lora.rl.batch import Response
from dschat_lora.rl.builtin_rewards import builtin_function, is_builtin
from dschat_lora.rl.reward_arguments import (
    calls_of,
    is_singular,
    named_parameters,
    required_columns,
    takes_responses,
)
from dschat_lora.runtime.checks import working_directory


class UserFunctionError(Exception):
    """A function of the user's failed; the cause is its error. Raised on every rank."""

    what = "a function"


@dataclass(frozen=True)
class UserFunction:
    """A function that is called by keyword with those arguments that it takes.

    They are those of :func:`dschat_lora.rl.reward_arguments.calls_of`. A coroutine function is
    waited for, all calls of a process at once.
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

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for columns which the data lacks.

        Raises:
            ValueError: naming both.
        """
        lacking = [name for name in self._columns() if name not in columns]
        if lacking:
            raise ValueError(
                f"--{self.option} {self.name} asks for {', '.join(lacking)}; it may take prompts, "
                "responses (or completions), messages, ended, rows, token_ids, and the columns of "
                f"the data: {', '.join(sorted(columns)) or 'there are none'}"
            )

    def _columns(self) -> list[str]:
        column = getattr(self.function, "column", None)
        return required_columns(self.function) if column is None else [column]

    def call(self, responses: Sequence[Response]) -> list[Any]:
        """What the function returns for each response, after so many errors at most.

        Raises:
            ValueError: if it returns no list of as many.
        """
        found: Any = self._tried(responses)
        if hasattr(found, "tolist") and not isinstance(found, Tensor):
            found = found.tolist()  # an array
        is_list = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.dim() > 0)
        if not is_list or len(found) != len(responses):
            what = f"{len(found)} {self.noun}" if is_list else f"a {type(found).__name__}"
            raise ValueError(
                f"--{self.option} {self.name} returned {what} for {len(responses)} responses; "
                f"it must return a list of {self.entry}, for each"
            )
        return list(found)

    def _tried(self, responses: Sequence[Response]) -> object:
        for _ in range(self.retries):
            try:
                return self._within_time(responses)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                note(f"--{self.option} {self.name} failed and is tried again: {error!r}")
        try:
            return self._within_time(responses)
        except (ValueError, OSError) as error:
            # It would pass for a wrong option or a full disk, and be shown without its place.
            raise RuntimeError(f"--{self.option} {self.name} failed") from error

    def _within_time(self, responses: Sequence[Response]) -> object:
        if not self.timeout:
            return self._returned(responses)
        future: concurrent.futures.Future[object] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self._returned(responses))
            except Exception as error:  # noqa: BLE001 - raised again by result()
                future.set_exception(error)

        # A daemon: a call that never returns must not keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
        try:
            return future.result(self.timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise RuntimeError(
                f"--{self.option} {self.name} took more than the {self.timeout:g} seconds of "
                f"--reward_timeout for {len(responses)} responses"
            ) from None

    def _returned(self, responses: Sequence[Response]) -> object:
        try:
            with same_gradients():
                return self._called(responses)
        except SystemExit as error:  # it would pass for the end of the run
            raise RuntimeError(f"--{self.option} {self.name} called sys.exit") from error

    def _called(self, responses: Sequence[Response]) -> object:
        calls = calls_of(self.function, responses, self.tokenizer)
        found = [self.function(**call) for call in calls]
        if any(inspect.isawaitable(each) for each in found):

            async def all_found() -> list[Any]:
                return list(await asyncio.gather(*found))

            # In a thread of its own: a notebook runs a loop in this one.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return self._one_or_all(pool.submit(asyncio.run, all_found()).result())
        return self._one_or_all(found)

    def _one_or_all(self, found: list[Any]) -> Any:
        return found if is_singular(self.function) else found[0]


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
    if is_held(name):
        function = cast(Callable[..., Any], held_object(name, option))
    else:
        function = builtin_function(name) if is_builtin(name) else _imported(option, name)
    parameters = inspect.signature(function).parameters.values()
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not (takes_responses(named_parameters(function)) or is_open):
        raise ValueError(
            f"--{option} {name} must take responses, completions or messages (one at a time: "
            f"response or completion), it takes {inspect.signature(function)}"
        )
    return function


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
