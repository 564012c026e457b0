"""Rollout engines by name, what each says of itself, and those of users."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dschat_lora.config.groups import require
from dschat_lora.rl.options.names import called, is_address, is_own, load_object, made, of_addons


class EngineError(Exception):
    """No server is left that draws responses, or they cannot."""


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
    make: str = ""  # makes it of an EngineSite
    start: str = ""  # of a config, its sources and the run, before models take memory
    check_options: str = ""  # of a config and the inputs, without torch; raises ValueError
    own: Any = None  # a user's class or object
    exact: bool = False  # its log-probabilities are those of the code that trains
    in_process: bool = True  # it draws in the processes that train
    needs_whole_weights: bool = False  # of the actor, on each device
    takes_adapter: bool = False  # it gets the actor's adapter, beside a base that does not change
    batches_itself: bool = True  # it takes all responses of an iteration at once
    same_model: bool = False  # its log-probabilities must be near those of the actor
    can_run_ahead: bool = False  # it goes on with the weights that it has while the actor trains
    gives_up: bool = False  # it takes ``needed``, and draws no more once so many prompts are whole
    about: Callable[[Any], str] | None = None  # what the start-up says, of the config's rollouts

    @property
    def decodes_actor(self) -> bool:
        """Whether an engine of the package computes here, with the actor's own modules."""
        return self.own is None and self.in_process and self.same_model

    def check(self, config: Any, inputs: Any) -> None:
        """Refuse options that the engine does not take.

        Raises:
            ValueError: naming the option.
        """
        if self.check_options:
            called(self.check_options)(config, inputs)
        elif hasattr(self.own, "check"):
            engine_object(self.own).check(config)

    def prepare(self, config: Any, sources: Any, run: Any) -> Any:
        """What has to be there before models take memory; None where nothing has, or will run."""
        if not self.start or run.directory is None:
            return None
        return called(self.start)(config, sources, run)

    def bytes_beside_training(self, config: Any) -> int:
        """Bytes of a device that it takes while the actor trains, as far as it knows."""
        if not hasattr(self.own, "bytes_beside_training"):
            return 0
        return int(engine_object(self.own).bytes_beside_training(config))


ENGINES = {
    "own": EngineFacts(
        make="dschat_lora.rl.draw.own_engine:OwnEngine",
        exact=True,
        batches_itself=False,
        same_model=True,
        gives_up=True,
    ),
    "transformers": EngineFacts(
        "its continuous batching",
        make="dschat_lora.rl.draw.transformers_engine:transformers_engine",
        needs_whole_weights=True,
        same_model=True,
    ),
    "vllm": EngineFacts(
        "which the run starts beside itself",
        make="dschat_lora.rl.draw.vllm_server:vllm_engine",
        start="dschat_lora.rl.draw.vllm_server:start_vllm",
        check_options="dschat_lora.rl.draw.engine_checks:check_vllm",
        in_process=False,
        takes_adapter=True,
        same_model=True,
        can_run_ahead=True,
        gives_up=True,
        about=lambda rollouts: (
            f"vLLM takes up to {rollouts.vllm_gpu_memory_utilization:.0%} of each GPU's memory"
            f"{'' if rollouts.rollouts_ahead else ' while it draws'}, or of the host's"
        ),
    ),
}
ADDRESSES = EngineFacts(
    "vLLM, SGLang or `dschat-lora serve`",
    make="dschat_lora.rl.draw.server_engine:engine_of_addresses",
    check_options="dschat_lora.rl.draw.engine_checks:check_servers",
    in_process=False,
    takes_adapter=True,
    same_model=True,
    can_run_ahead=True,
    gives_up=True,
)
ENGINES_HELP = (
    f"what draws responses: {', '.join(ENGINES)}, servers or module:Class\n"
    + "; ".join(f"{name}, {each.help}" for name, each in ENGINES.items() if each.help)
    + f"; servers ({ADDRESSES.help}) that take adapters at run time, by their addresses with "
    "commas between them, such as http://127.0.0.1:8000; or module:Class of your own"
)


def engine_facts(name: str) -> EngineFacts:
    """What the engine of ``--rollout_engine`` says of itself; a user's is imported.

    Raises:
        ValueError: if there is none of that name, or it has no method ``draw``.
    """
    if not is_own("rollout_engine", name):
        return ENGINES.get(name, ADDRESSES)
    own: Any = load_object("rollout_engine", name)
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
    """Refuse what is no engine of the package, an add-on or a user, nor addresses of servers."""
    own = name in ENGINES or is_own("rollout_engine", name)
    is_known = own or all(map(is_address, server_addresses(name)))
    allowed = (
        f"{', '.join([*ENGINES, *of_addons('rollout_engine')])}, "
        "or addresses of servers such as http://127.0.0.1:8000, with "
        f"commas between them ({ADDRESSES.help}), or module:Class of your own"
    )
    require(is_known, "rollout_engine", name, allowed)


def server_addresses(name: str) -> tuple[str, ...]:
    """Addresses of the servers that are named, without the path ``/v1``."""
    given = (each.strip().rstrip("/") for each in name.split(","))
    return tuple(dict.fromkeys(each.removesuffix("/v1").rstrip("/") for each in given))


_objects: dict[
    type, Any
] = {}  # of users' classes, from the check of options until a run takes them


def engine_object(own: Any, *, is_taken: bool = False) -> Any:
    """A user's engine: the object, or one of the class, which is made once for a run.

    Raises:
        ValueError: if the class takes arguments.
    """
    if not isinstance(own, type):
        return own
    found = _objects.pop(own, None) or made("rollout_engine", own.__name__, own)
    if not is_taken:
        _objects[own] = found
    return found
