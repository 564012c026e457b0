"""Names of functions, environments and servers, as options have them."""

import re
from importlib import import_module
from urllib.parse import urlsplit

from dschat_lora.config.groups import require
from dschat_lora.config.held import held_object, is_held
from dschat_lora.runtime.checks import working_directory

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ADDRESS = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
BUILTIN = "builtin:"  # before the name of a built-in reward
# Before the name of an environment of theirs.
ENVIRONMENT_LIBRARIES = ("gymnasium", "mcp", "openenv", "reasoning_gym", "verifiers")


def is_builtin(name: str) -> bool:
    """Whether ``name`` is one of ``builtin:...``."""
    return name.startswith(BUILTIN)


def is_remote(name: str) -> bool:
    """Whether ``name`` begins as the address of a server."""
    return name.startswith(("http://", "https://"))


def gives_one_reward(name: str) -> bool:
    """Whether ``name`` is of something that scores which is no module's, and has one score."""
    return is_builtin(name) or is_remote(name)


def is_address(text: str) -> bool:
    """Whether ``text`` is the address of a server."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # refuses labels above 63 characters
        return bool(_ADDRESS.fullmatch(text) and host and parts.port != 0)
    except ValueError:
        return False


def check_name(option: str, name: str) -> None:
    """Refuse what names no function; built-in ones are rewards."""
    scores = option not in ("environment", "agent", "parts")
    if scores and is_builtin(name):
        return
    allowed = "module:function such as my_rewards:is_right"
    usable = bool(_FUNCTION.fullmatch(name))
    if option == "environment":
        library, _, rest = name.partition(":")
        usable = bool(rest) if library in ENVIRONMENT_LIBRARIES else usable
        allowed += f", or LIBRARY:NAME of {', '.join(ENVIRONMENT_LIBRARIES)}"
    elif scores:
        usable = usable or is_remote(name)
        allowed += ", or the address of a server that scores"
    require(usable, option, name, allowed)


def is_function_name(name: str) -> bool:
    """Whether ``name`` is written as ``module:object``."""
    return bool(_FUNCTION.fullmatch(name))


def load_object(option: str, name: str) -> object:
    """What ``module:object`` or an object of Python stands for; the module is imported.

    None if the module has no such object.

    Raises:
        ValueError: if there is no such module, or it cannot be imported.
    """
    if is_held(name):
        return held_object(name, option)
    module, _, attribute = name.partition(":")
    with working_directory():
        try:
            return getattr(import_module(module), attribute, None)
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"--{option} {name} cannot be imported: {error}") from error
