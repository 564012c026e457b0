"""Tracebacks of the public functions, without this package's frames: user code and messages."""

import functools
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from dschat_lora.runtime.caller import is_callers

PublicT = TypeVar("PublicT", bound=Callable[..., Any])
_PACKAGE = __name__.partition(".")[0]


def api_boundary(public: PublicT) -> PublicT:
    """A function, or a class with public methods, whose errors have short tracebacks.

    An error that this package raises has none beyond the call. One of the user's own function
    begins there, any other where this package was last. DSCHAT_LORA_TRACEBACK=1 keeps all.
    """
    if inspect.isclass(public):
        for name, method in [*vars(public).items()]:
            if inspect.isfunction(method) and (name[0] != "_" or name == "__init__"):
                setattr(public, name, api_boundary(method))
        return public

    @functools.wraps(public)
    def call(*args: object, **named: object) -> object:
        handled = sys.exception()  # the caller's, which stays as it is
        try:
            return public(*args, **named)
        except BaseException as error:
            _speak_python(error)
            if not os.environ.get("DSCHAT_LORA_TRACEBACK"):
                error.__traceback__ = cast(TracebackType, error.__traceback__).tb_next
                _shorten(error, *([handled] if handled else ()))
                _render_in_ipython(error)
            raise error  # DSCHAT_LORA_TRACEBACK=1 shows every frame

    return cast(PublicT, call)


def _speak_python(error: BaseException) -> None:
    """Name arguments in place of options in the message of an error that this package raises."""
    *_, last = _entries(error.__traceback__)
    if _is_ours(last.tb_frame):
        error.args = tuple(_in_python(x) if isinstance(x, str) else x for x in error.args)


# Options that are arguments of another name, and objects of the program, in messages.
_IN_PYTHON: Sequence[tuple[str, str]] = (
    (r"--reward_function python:", "the reward function "),
    (r"--(eval_)?data_path python:", ""),
    (r"(?<![^\s(])python:(?=\w)", ""),
    (r"--reward_function\b", "rewards"),
    (r"--critic_model_name_or_path(?= must|;|,|\.|$)", "critic"),
    (r"--critic_model_name_or_path\b", "the reward model"),
    (r"--resume_from_checkpoint (latest|auto)\b", r'resume="\1"'),
    (r"--resume_from_checkpoint\b", "resume"),
)


def _in_python(message: str) -> str:
    """A message that names arguments of Python's functions where they are no options."""
    for pattern, words in _IN_PYTHON:
        message = re.sub(rf"(?<![\w/-]){pattern}", words, message)
    return message


def _shorten(error: BaseException, *done: BaseException) -> bool:
    """Shorten the tracebacks of an error and its causes; whether one has the user's code.

    Causes without it are left out, and those that are ``done``.
    """
    last = [*_entries(error.__traceback__)][-1:]
    entries = [*_entries(_without_calls(error.__traceback__))]
    ours = [n for n, each in enumerate(entries) if _is_ours(each.tb_frame)]
    users = [n for n, each in enumerate(entries) if is_callers(each.tb_frame)]
    told = not users and any(_is_told(error, each) for each in last)
    first = users[0] if users else ours[-1] if ours else 0
    error.__traceback__ = entries[first] if entries and not told else None
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    error.__cause__ = None  # which leaves out the context, too
    if cause is None or cause in done or not _shorten(cause, error, *done):
        return bool(users)
    error.__cause__ = cause
    return True


def _without_calls(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback after those entries of ``call`` that follow the first one are taken out."""
    for entry in _entries(traceback):
        while entry.tb_next and entry.tb_next.tb_frame.f_globals is globals():
            entry.tb_next = entry.tb_next.tb_next
    return traceback


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


def _is_told(error: BaseException, last: TracebackType) -> bool:
    """Whether an error comes from this package as a message: a mistake's, or by a ``raise``."""
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    mistake = isinstance(error, ValueError | OSError | KeyboardInterrupt)
    return _is_ours(last.tb_frame) and (mistake or line.lstrip().startswith("raise "))


def _render_in_ipython(error: BaseException) -> None:
    """Let IPython, which may show a notebook, leave out the frame of ``call``, too."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or hasattr(error, "_render_traceback_"):
        return

    def rendered() -> list[str]:
        # Not that of the closure: a cycle would keep the tensors of its frames.
        error = cast(BaseException, sys.exception())
        seen = type(error), error, _without_calls(error.__traceback__)
        text: list[str] = shell.InteractiveTB.structured_traceback(*seen)
        return text

    error._render_traceback_ = rendered  # type: ignore[attr-defined]
