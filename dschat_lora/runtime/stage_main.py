"""The main function of a stage script: its processes meet, its options are checked, and it runs."""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from dschat_lora.config.options import parse_config
from dschat_lora.engine import failure_detection
from dschat_lora.engine.rendezvous import check_launch_variables
from dschat_lora.report.terminal import (
    NO_HOME,
    STDOUT,
    error_message,
    harmless,
    prepare_standard_streams,
    silence,
    words_of_limit,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
ResultT = TypeVar("ResultT")


def load_late(path: str) -> Callable[..., Any]:
    """The function or class ``MODULE:NAME`` of the package, whose module is imported here.

    In a command, what the import makes is left out of garbage collection: 400,000 objects stay.
    The collector would walk through them while they are made and when the interpreter ends,
    which took a third of a short run's time, and in each full collection. Of a Python program's
    process other objects would be left out, too.
    """
    name, _, function = path.partition(":")
    module = f"dschat_lora.{name}"
    if _is_command and module not in sys.modules:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            import_module(module)
        finally:
            gc.freeze()
            if was_enabled:
                gc.enable()
    return cast(Callable[..., Any], getattr(import_module(module), function))


def late(path: str) -> Callable[..., Any]:
    """The function ``MODULE:NAME`` of the package, whose module is imported when it is called.

    What runs a verb is heavy; so a wrong option is reported at once.
    """
    return lambda *values, **named: load_late(path)(*values, **named)


_is_command = False  # whether this process runs a command, and not a Python program


def prepare_process() -> None:
    """Make this process ready to run a command, whatever started it."""
    global _is_command
    _is_command = True
    prepare_standard_streams()
    plain = warnings.formatwarning
    package = str(Path(__file__).parents[1])

    def in_one_line(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        ours = filename.startswith(package)
        return f"note: {message}\n" if ours else plain(message, category, filename, lineno, line)

    warnings.formatwarning = in_one_line
    try:
        check_launch_variables()
    except ValueError as error:
        fail(str(error))


_MOST_WORDS = 4000  # characters of a message


def fail(message: str, *, code: int = 2) -> NoReturn:
    """End the process, and all others of the run, with one line on stderr from one of them."""
    words = harmless(" ".join(message.split()))
    if len(words) > _MOST_WORDS:  # a name without end may stand first, or last
        words = f"{words[: _MOST_WORDS // 2]} ... {words[-_MOST_WORDS // 2 :]}"
    if not failure_detection.fail(words, code):
        with suppress(OSError):  # the exit code says it where nobody can be told
            sys.stderr.write(f"error: {words}\n")
            sys.stderr.flush()
    raise SystemExit(code)


def hush_libraries() -> None:
    """Have no warnings of libraries that nobody here can act on.

    DeepSpeed writes its own to the standard output, which results go to; bitsandbytes names, on a
    CPU, a package that nothing here needs; huggingface_hub tells of each attempt to connect, and
    raises an error after the last one.
    """
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops", "huggingface_hub.utils._http"):
        getLogger(name).addFilter(lambda record: record.levelno >= ERROR)


def run_main(
    config_class: type[ConfigT],
    check: Callable[[ConfigT], ConfigT],
    main: Callable[[ConfigT], object],
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
    examples: str | None = None,
    read_file: Callable[[str], Mapping[str, object]] | None = None,
    as_script: bool = False,
) -> None:
    """Parse, check, run; a user's mistake ends as one line on stderr and exit code 2.

    The last six arguments are those of :func:`dschat_lora.config.options.parse_config`. ``check``
    finds mistakes before anything heavy is imported, and returns the resolved config.
    The processes of a launch go on together, once all have found their options in order.
    """
    prepare_process()
    try:
        failure_detection.join()
        config = parse_config(
            config_class,
            argv,
            description=description,
            program=program,
            examples=examples,
            read_file=read_file,
            as_script=as_script,
        )
        config = check(config)
    except (ValueError, OSError) as error:
        fail(error_message(error))
    except RecursionError:
        fail("a given file contains lists or objects nested too deeply")
    except RuntimeError as error:
        if words := words_of_limit(error):
            fail(words)
        raise
    failure_detection.wait_until_all_are_ready()
    main(config)


def exits(program: Callable[[ConfigT], ResultT]) -> Callable[[ConfigT], ResultT]:
    """A run's program as a command's: an error ends the process, and all others of the run.

    What a user can cause is one line, unless DSCHAT_LORA_TRACEBACK is set; a fault of this package
    shows its place.
    """

    def main(config: ConfigT) -> ResultT:
        try:
            return program(config)
        except BaseException as error:
            if not os.environ.get("DSCHAT_LORA_TRACEBACK"):
                words = error_message(error)
                if isinstance(error, ValueError):
                    fail(words)
                if isinstance(error, KeyboardInterrupt):
                    fail("stopped by SIGINT", code=130)
                # Types of libraries that are not imported here.
                known = type(error).__name__ in ("SafetensorError", "OutOfMemoryError")
                if known or isinstance(error, OSError):
                    fail(words, code=1)
                if limit := words_of_limit(error):
                    fail(limit, code=1)
            tell_others(error)
            raise

    return main


def tell_others(error: BaseException) -> None:
    """Let the other processes of a run hear of the error that ends this one; they end, too."""
    if isinstance(error, SystemExit):
        failure_detection.fail(None, error.code if isinstance(error.code, int) else 1)
    else:
        failure_detection.fail(f"{type(error).__name__}: {error}", 1)


@contextmanager
def ended_in_one_line(*, stopped: str = "stopped") -> Iterator[None]:
    """End the process in one line on stderr where something expected ends the block.

    A user's mistake has exit code 2, an error of the disk, a full GPU or a limit of the system 1,
    Ctrl-C 130 with the words ``stopped``. A reader of the standard output who has read enough is no
    error.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail(stopped, code=130)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and error.filename == str(STDOUT):
            silence(1)
            return
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)
    except Exception as error:
        # Types of libraries that are not imported here.
        if type(error).__name__ == "OutOfMemoryError":
            fail("the GPU is full: lower --per_device_eval_batch_size or the lengths", code=1)
        if type(error).__name__ == "SafetensorError":
            fail(f"a file of weights is damaged: {error}", code=1)
        if words := words_of_limit(error):
            fail(words, code=2 if words == NO_HOME else 1)
        raise
