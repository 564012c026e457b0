"""Environments of other libraries, by their names."""

from collections.abc import Callable
from importlib import import_module

from dschat_lora.addons.environments.addon import LIBRARIES
from dschat_lora.runtime.checks import require_packages


def made_by(name: str) -> Callable[[], object]:
    """What makes environments of ``LIBRARY:NAME``, and imports the library for the first."""
    library, _, rest = name.partition(":")
    package, extra, kind = LIBRARIES[library]
    require_packages(f"--environment {name}", package, extra=extra)
    module = f"dschat_lora.addons.environments.{library}"
    return lambda: getattr(import_module(module), kind)(rest)
