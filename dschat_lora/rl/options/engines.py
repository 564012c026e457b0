"""Rollout engines by name, what each says of itself, and those of users."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.addons import installed, load
from dschat_lora.config.groups import require
from dschat_lora.rl.options.names import addon_name, called, is_own, load_object, made

if TYPE_CHECKING:
    from dschat_lora.runtime.run import OpenRun


class EngineError(Exception):
    """Responses cannot be drawn: what is told in one line."""


def are_logprobs(values: object) -> bool:
    """Whether a reply has a list of finite log-probabilities here."""
    return isinstance(values, list) and all(
        isinstance(value, int | float) and -sys.float_info.max <= value <= 1e-3 for value in values
    )


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself; the defaults are those of anybody's.

    Functions of the package are named as ``module:function``.
    """

    help: str = ""
    # Of a name that ends in a colon: what its values are called, how they are written, and
    # whether something is one.
    values: str = ""
    hint: str = ""
    takes: Callable[[str], bool] = lambda value: True
    make: str = ""  # makes it of an EngineSite
    start: str = ""  # of a config, its sources and the run, before models take memory
    check_options: str = ""  # of a config and the inputs, without torch; raises ValueError
    own: object = None  # a user's class or object
    exact: bool = False  # its log-probabilities are those of the code that trains
    in_process: bool = True  # it draws in the processes that train
    needs_whole_weights: bool = False  # of the actor, on each device
    takes_adapter: bool = False  # it gets the actor's adapter, beside a base that does not change
    batches_itself: bool = True  # it takes all responses of an iteration at once
    same_model: bool = False  # its log-probabilities must be near those of the actor
    can_run_ahead: bool = False  # it goes on with the weights that it has while the actor trains

    @property
    def decodes_actor(self) -> bool:
        """Whether the package's own decoder computes here, with the actor's own modules."""
        return self is ENGINES["own"]

    def check(self, config: object, inputs: object) -> None:
        """Refuse options, an ``RlhfConfig``, that the engine does not take."""
        if self.check_options:
            called(self.check_options)(config, inputs)
        elif hasattr(self.own, "check"):
            cast(Any, engine_object(self.own)).check(config)

    def prepare(self, config: object, sources: object, run: "OpenRun[Any]") -> object:
        """What has to be there before models take memory; None where nothing has, or will run."""
        if not self.start or run.directory is None:
            return None
        return called(self.start)(config, sources, run)

    def bytes_beside_training(self, config: object) -> int:
        """Bytes of a device that it takes while the actor trains, as far as it knows."""
        if not hasattr(self.own, "bytes_beside_training"):
            return 0
        return int(cast(Any, engine_object(self.own)).bytes_beside_training(config))


ENGINES = {
    "own": EngineFacts(
        make="dschat_lora.rl.draw.own_engine:OwnEngine",
        exact=True,
        batches_itself=False,
        same_model=True,
    )
}


def known_engines() -> dict[str, EngineFacts]:
    """What engines by name say of themselves; those of another package are not imported for it."""
    known = dict(ENGINES)
    for addon in installed().values():
        for name, path in addon.provides.get("rollout_engine", {}).items():
            facts = load(path) if addon.name in ADDONS else EngineFacts()
            known[name] = facts(name) if callable(facts) else facts
    return known


def engines_help() -> str:
    """The help of ``--rollout_engine``."""
    known = {n: each for n, each in known_engines().items() if n in ENGINES or each.help}
    names = dict.fromkeys(each.values or name for name, each in known.items())
    helps = (e.help if e.values else f"{n}, {e.help}" for n, e in known.items() if e.help)
    more = "".join(f"{each}; " for each in dict.fromkeys(helps))
    return (
        f"engine that generates responses: {', '.join(names)} or module:Class\n{more}or your own "
        "module:Class"
    )


def engine_facts(name: str) -> EngineFacts:
    """What the engine of ``--rollout_engine`` says of itself; a user's is imported.

    Raises:
        ValueError: if there is none of that name, or it has no method ``draw``.
    """
    if name in ENGINES:
        return ENGINES[name]
    own = load_object("rollout_engine", name)
    if isinstance(own, EngineFacts):
        return own
    if not callable(getattr(own, "draw", None)):
        raise ValueError(f"--rollout_engine {name} has no method draw(asked, sampling)")
    # The switches, but no names of functions of the package.
    names = [each.name for each in fields(EngineFacts) if each.type is bool]
    switches = {each: getattr(own, each) for each in names if hasattr(own, each)}
    for switch, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"--rollout_engine {name}: {switch} is True or False, got {value!r}")
    return EngineFacts(own=own, **switches)


def check_engine(name: str) -> None:
    """Refuse what is no engine of the package, an add-on or a user, naming those that there are."""
    known, of_addon = known_engines(), addon_name("rollout_engine", name)
    is_known = name in ENGINES or is_own("rollout_engine", name)
    if of_addon:
        is_known = known[of_addon].takes(name)
    shown = dict.fromkeys(each.hint or name for name, each in known.items())
    require(is_known, "rollout_engine", name, f"{', '.join(shown)}, or your own module:Class")


# Of users' classes, from the check of options until a run takes them.
_objects: dict[type, object] = {}


def engine_object(own: object, *, is_taken: bool = False) -> object:
    """A user's engine: the object, or one of the class, which is made once for a run."""
    if not isinstance(own, type):
        return own
    engine = _objects.pop(own, None) or made("rollout_engine", own.__name__, own)
    if not is_taken:
        _objects[own] = engine
    return engine
