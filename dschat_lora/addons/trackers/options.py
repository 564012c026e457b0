"""Options of trackers, which get the numbers of metrics.jsonl too."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dschat_lora.config.options import option
from dschat_lora.config.parser import COMPATIBILITY, LOGGING

if TYPE_CHECKING:
    from dschat_lora.config.stages import StageConfig
    from dschat_lora.report.log import Sink

TrackerName = Literal["none", "tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class TrackerOptions:
    """Which trackers get the numbers, and where TensorBoard's are."""

    report_to: tuple[TrackerName, ...] = option(
        ("none",),
        help="trackers to which metrics are also reported\none or several; their own variables, "
        "such as WANDB_MODE=offline, apply",
        section=LOGGING,
        replaces=("enable_tensorboard", "tensorboard_path"),
    )
    enable_tensorboard: bool = option(
        False,
        help="same as --report_to tensorboard",
        section=COMPATIBILITY,
        replaces=("report_to",),
    )
    tensorboard_path: str | None = option(
        None,
        help="directory for TensorBoard files; default: OUTPUT_DIR/tensorboard",
        section=LOGGING,
        runs="file",
        replaces=("report_to",),
    )

    def __post_init__(self) -> None:
        if len(self.report_to) > 1 and "none" in self.report_to:
            raise ValueError(
                f"--report_to {' '.join(self.report_to)}: none cannot be combined with others"
            )

    def check(self, config: "StageConfig") -> "StageConfig":
        """The config with DeepSpeed-Chat's spelling folded in; packages must be there.

        Raises:
            ValueError: naming the option and the package.
        """
        names = dict.fromkeys(name for name in self.report_to if name != "none")
        if self.enable_tensorboard or self.tensorboard_path:
            names["tensorboard"] = None
        for name in names:
            spec = importlib.util.find_spec(name)
            # Without an origin it is a directory of that name, such as the one wandb writes.
            if spec is None or spec.origin is None:
                typed = f"--report_to {name}" if name in self.report_to else "--enable_tensorboard"
                raise ValueError(f"{typed} needs a package: pip install 'dschat_lora[{name}]'")
        own = replace(
            self, report_to=tuple(names) or ("none",), enable_tensorboard="tensorboard" in names
        )
        options: Any = config
        return replace(options, addons=replace(options.addons, trackers=own))

    def sinks(self, directory: Path, options: Mapping[str, Any]) -> "Sequence[Sink]":
        """The trackers of a run that writes to a directory, by all its options."""
        from dschat_lora.addons.trackers.trackers import RunTracker, TensorBoard

        board = Path(self.tensorboard_path or directory / "tensorboard")
        return [
            TensorBoard(board) if name == "tensorboard" else RunTracker(name, directory, options)
            for name in self.report_to
            if name != "none"
        ]
