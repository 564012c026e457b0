"""Names of functions, environments and servers, as options have them."""

import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from dschat_lora.config.addons import SEAMS, provided, provided_name
from dschat_lora.config.groups import require
from dschat_lora.config.held import held_object, is_held, is_in_module
from dschat_lora.runtime.checks import imported

Function = Callable[..., Any] | str  # or module:function, which is imported when it is called
_ADDRESS = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
# Of options whose values are named by the seam of another one.
_SEAMS = {"reward_gate": "reward_function", "judge_function": "reward_function"}
BUILTIN = "builtin:"  # before the name of a built-in reward
# Before the name of an environment of theirs.
ENVIRONMENT_LIBRARIES = ("gymnasium", "mcp", "openenv", "reasoning_gym", "verifiers")
# By option the names that are the package's own, which no add-on may have.
OWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "rollout_engine": ("own", "transformers", "vllm"),
    "environment": ENVIRONMENT_LIBRARIES,
    "algorithm": (
        *("ppo", "rloo", "grpo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "dapo"),
        *("gspo", "cispo", "gdpo", "sapo", "distill"),
    ),
}


def of_addons(option: str) -> Mapping[str, str]:
    """``module:object`` by the names that add-ons provide for an option; gates and judges score."""
    seam = _SEAMS.get(option, option)
    return provided(seam, *OWN_NAMES.get(seam, ())) if seam in SEAMS else {}


def addon_name(option: str, name: str) -> str:
    """That of :func:`of_addons` which ``name`` is of; empty if it is of none.

    Raises:
        ValueError: if it is of an add-on that is not installed.
    """
    seam = _SEAMS.get(option, option)
    return provided_name(seam, name, *OWN_NAMES.get(seam, ())) if seam in SEAMS else ""


def object_path(option: str, name: str) -> str:
    """``module:object`` of what an option names, an object of the user's or an add-on's."""
    return of_addons(option).get(addon_name(option, name), name)


def is_own(option: str, name: str) -> bool:
    """Whether ``name`` is of an object of the user's or an add-on's, for :func:`load_object`."""
    return is_held(name) or bool(addon_name(option, name)) or is_in_module(name)


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
    allowed = ", ".join([*of_addons(option), "module:function such as my_rewards:is_right"])
    usable = is_in_module(name) or name in of_addons(option)
    if option == "environment":
        library, _, rest = name.partition(":")
        usable = bool(rest) if library in ENVIRONMENT_LIBRARIES else usable
        allowed += f", or LIBRARY:NAME of {', '.join(ENVIRONMENT_LIBRARIES)}"
    elif scores:
        usable = usable or is_remote(name)
        allowed += ", or the address of a server that scores"
    require(usable, option, name, allowed)


def called(function: Function) -> Callable[..., Any]:
    """A function, imported if it is given by name."""
    found: Any = pkgutil.resolve_name(function) if isinstance(function, str) else function
    return cast(Callable[..., Any], found)


def load_object(option: str, name: str, kind: str = "") -> object:
    """What ``module:object``, a name of an add-on or an object of Python stands for.

    Raises:
        ValueError: if there is none.
    """
    if is_held(name):
        return held_object(name, option)
    found = imported(option, object_path(option, name), kind)
    return found(name) if addon_name(option, name).endswith(":") else found


def made(option: str, name: str, found: Any) -> Any:
    """An object of the user's, or one of their class, which is called without arguments.

    Raises:
        ValueError: if the class takes some.
    """
    if not isinstance(found, type):
        return found
    try:
        return found()
    except TypeError as error:
        raise ValueError(
            f"--{option} {name} is called without arguments: {error}; name an object instead"
        ) from error


def episode_prompt(number: int) -> list[dict[str, str]]:
    """The prompt of an episode of ``--num_prompts``, in whose place comes what ``reset`` says."""
    return [{"role": "user", "content": f"Episode {number}"}]
