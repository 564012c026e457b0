"""Names that modules had: imports, command lines and checkpoints of users may have them."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
# By the old name the modules that have what was in it, or the package that has its modules; names
# begin behind that of this package. addons/ has a table of its own.
OLD_NAMES = {
    "engine.adamw": "engine.build",
    "engine.linear": "engine.zero",
    "generation.search": "generation.greedy",
    "pipeline.launch": "commands.launch",
    "rl.algorithms": "rl.options.algorithms config.prompts",
    "rl.batch": "rl.response.batch rl.response.response",
    "rl.config": "rl.options.config rl.options.names",
    "rl.coroutines": "rl.response.coroutines",
    "rl.draw.order": "rl.draw.source",
    "rl.draw.turn_decoder": "rl.draw.player rl.response.response",
    "rl.dynamic_sampling": "rl.learn.dynamic_sampling",
    "rl.ema": "models.average",
    "rl.engines": "rl.learn.engines rl.loop.build",
    "rl.evaluation": "rl.loop.evaluation",
    "rl.experience": "rl.learn.experience rl.score.scores rl.learn.engines",
    "rl.inputs": "rl.options.inputs rl.options.names",
    "rl.learn.ema": "models.average",
    "rl.learn.network": "rl.learn.engines",
    "rl.memory": "rl.loop.memory rl.draw.own_engine",
    "rl.metrics": "rl.watch.metrics rl.loop.parts",
    "rl.pretraining": "rl.learn.pretraining rl.loop.build",
    "rl.response.messages": "rl.response.response",
    "rl.response.transfer": "rl.response.response",
    "rl.rewards": "rl.score.user_functions rl.response.errors rl.response.response rl.score.scores",
    "rl.role_config": "rl.options.role_config",
    "rl.roles": "rl.learn.roles rl.learn.engines",
    "rl.rollout": "rl.draw.generator rl.draw.own_engine generation.stops rl.draw.source "
    "rl.response.response",
    "rl.score.reward_functions": "rl.score.scores",
    "rl.score.shaping": "rl.score.scores",
    "rl.setup": "rl.loop.setup rl.learn.roles",
    "rl.throughput": "rl.watch.throughput",
    "rl.train": "rl.loop.train",
    "rl.trainer": "rl.loop.trainer rl.loop.build rl.loop.schedule rl.loop.sampler",
    "rl.update": "rl.learn.update rl.learn.experience",
    "rl.validation": "rl.loop.validation",
    "rl.watch.rows": "rl.loop.parts",
    "supervised.pair_stages": "supervised.stages",
    "world": "assets.toy_world",
}


@cache
def _table() -> dict[str, str]:
    """``OLD_NAMES``, and those of the add-ons that are there."""
    with suppress(ModuleNotFoundError):
        return OLD_NAMES | import_module(f"{_PACKAGE}.addons.old_names").OLD_NAMES
    return OLD_NAMES


class _FormerModule(ModuleType):
    """Has the attributes of its successors, which are imported when one is asked for or set."""

    def __getattr__(self, name: str) -> object:
        if name == "__all__":
            return [each for each in dir(self) if not each.startswith("_")]
        for each in () if name.startswith("__") else self._successors():
            if hasattr(each, name):
                # Kept, so that who sets it for a while finds what to set it to again.
                return self.__dict__.setdefault(name, getattr(each, name))
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        for each in () if name.startswith("__") else self._successors():
            if hasattr(each, name):
                setattr(each, name, value)

    def __dir__(self) -> list[str]:
        return sorted({name for each in self._successors() for name in vars(each)})

    def _successors(self) -> list[ModuleType]:
        """Those that can be imported: others need a library that is not installed."""
        modules, missing = list[ModuleType](), None
        for each in _table().get(self.__name__.partition(".")[2], "").split():
            try:
                modules.append(import_module(f"{_PACKAGE}.{each}"))
            except ModuleNotFoundError as error:
                if (error.name or _PACKAGE).partition(".")[0] == _PACKAGE:
                    raise
                missing = error
        if missing is not None and not modules:
            raise missing
        return modules


class OldNames:
    """Finds modules by the names that they had, where no module has that name."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Have the import system make the module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of a former module, or of a package that had some."""
        package, _, module = name.partition(".")
        if package != _PACKAGE or module.startswith("addons"):
            return None
        is_package = any(each.startswith(f"{module}.") for each in _table())
        if module not in _table() and not is_package:
            return None
        loader: Any = self  # by its methods
        return ModuleSpec(name, loader, origin=_table().get(module), is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Let the module have what its successors have."""
        module.__class__ = _FormerModule

    def get_code(self, name: str) -> None:
        """Refuse to run the module, as ``python -m`` would.

        Raises:
            ImportError: naming its successors.
        """
        raise ImportError(f"{name} is now {_table()[name.partition('.')[2]]} in {_PACKAGE}")
