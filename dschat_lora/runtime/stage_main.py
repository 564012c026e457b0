"""The main function of a stage script: its processes meet, its options are checked, and it runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dschat_lora.config.options import fail, parse_config
from dschat_lora.engine import peers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


def run_main(
    config_class: type[ConfigT],
    check: Callable[[ConfigT], ConfigT],
    main: Callable[[ConfigT], None],
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Parse, check, run; a user's mistake ends as one line on stderr and exit code 2.

    ``check`` finds mistakes before anything heavy is imported, and returns the resolved config.
    The processes of a launch go on together, once all have found their options in order.
    """
    try:
        peers.join()
        config = check(parse_config(config_class, argv, description=description, program=program))
    except (ValueError, OSError) as error:
        fail(str(error))
    except RecursionError:
        fail("a file that was named holds lists or objects nested too deeply")
    peers.wait_until_all_are_ready()
    main(config)
