"""The option that names parts of the user's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dschat_lora.config.options import option
from dschat_lora.rl.options.names import check_name
from dschat_lora.runtime.checks import check_function

if TYPE_CHECKING:
    from dschat_lora.addons.parts.parts import UserPart
    from dschat_lora.rl.loop.schedule import RlhfProgress
    from dschat_lora.rl.loop.setup import RlhfSetup
    from dschat_lora.rl.options.config import RlhfConfig


@dataclass(frozen=True)
class PartsOptions:
    """Parts of an iteration that are the user's own."""

    section = "training"

    parts: tuple[str, ...] = option(
        (),
        help="one or more module:Class whose objects are called after every step and iteration "
        "(after_step, after_iteration), for your own metrics, logs and coefficients",
        runs="object",
    )

    def __post_init__(self) -> None:
        for name in self.parts:
            check_name("parts", name)

    def check(self, config: "RlhfConfig") -> None:
        """Refuse what no module has."""
        for name in self.parts:
            check_function("parts", name)

    def before_models(self) -> None:
        """Refuse objects that have no method which is called."""
        if self.parts:
            from dschat_lora.addons.parts.parts import find_part

            for name in self.parts:
                find_part(name)

    def made_parts(self, setup: "RlhfSetup", progress: "RlhfProgress") -> "list[UserPart]":
        """The parts of a run.

        Raises:
            ValueError: if one is none, or two have one name.
        """
        if not self.parts:
            return []
        from dschat_lora.addons.parts.parts import user_parts

        return user_parts(self.parts, setup, progress)
