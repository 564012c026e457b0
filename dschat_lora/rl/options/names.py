"""Names of functions and servers, as options have them."""

import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from dschat_lora.config.addons import SEAMS, begins_values, provided, provided_name
from dschat_lora.config.groups import require
from dschat_lora.config.held import held_object, is_held, is_in_module
from dschat_lora.runtime.checks import check_function, imported

Function = Callable[..., Any] | str  # or module:function, which is imported when it is called
_ADDRESS = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
# Of options whose values are named by the seam of another one.
_SEAMS = {"judge_function": "reward_function"}
# By option the names that are the package's own, which no add-on may have.
OWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "rollout_engine": ("own",),
    "algorithm": (
        *("ppo", "rloo", "grpo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "dapo"),
        *("gspo", "cispo", "gdpo", "sapo"),
    ),
}


def of_addons(option: str) -> Mapping[str, str]:
    """``module:object`` by the names that add-ons provide for an option; judges score."""
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


def is_remote(name: str) -> bool:
    """Whether ``name`` begins as the address of a server."""
    return name.startswith(("http://", "https://"))


def gives_one_reward(name: str) -> bool:
    """Whether an add-on makes what scores of the whole ``name``, and so has one score."""
    return begins_values(addon_name("reward_function", name))


def is_address(text: str) -> bool:
    """Whether ``text`` is the address of a server."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # refuses labels above 63 characters
        return bool(_ADDRESS.fullmatch(text) and host and parts.port != 0)
    except ValueError:
        return False


def check_name(option: str, name: str) -> None:
    """Refuse what names no function."""
    names = [each for each in of_addons(option) if not begins_values(each)]
    allowed = ", ".join([*names, "module:function such as my_rewards:is_right"])
    usable = bool(addon_name(option, name)) or is_in_module(name)
    if "http://" in of_addons(option):
        allowed += ", or the address of a reward server"
    require(usable, option, name, allowed)


def called(function: Function) -> Callable[..., Any]:
    """A function, imported if it is given by name."""
    if not isinstance(function, str):
        return function
    return cast(Callable[..., Any], pkgutil.resolve_name(function))


def load_object(option: str, name: str, kind: str = "") -> object:
    """What ``module:object``, a name of an add-on or an object of Python stands for."""
    if is_held(name):
        return held_object(name, option)
    named = imported(option, object_path(option, name), kind)
    return named(name) if begins_values(addon_name(option, name)) else named


def check_scorer(option: str, name: str) -> None:
    """Refuse a name of nothing that scores, without importing a user's module."""
    if begins_values(addon_name(option, name)):
        load_object(option, name)
    else:
        check_function(option, object_path(option, name))


def made(option: str, name: str, own: object) -> object:
    """An object of the user's, or one of their class, which must take no arguments."""
    if not isinstance(own, type):
        return own
    try:
        return own()
    except TypeError as error:
        raise ValueError(
            f"--{option} {name} is called without arguments: {error}; give an object instead"
        ) from error
