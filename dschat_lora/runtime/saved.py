"""Directories that other tools take: adapters in PEFT's layout, and transformers models."""

from pathlib import Path
from typing import Literal

from dschat_lora.checkpoint.adapter_config import (
    CONFIG_FILE,
    is_adapter_directory,
    verify_adapter,
)
from dschat_lora.checkpoint.history import is_checkpoint


def saved_directory(given: str, *, first: Literal["adapter", "model"]) -> Path:
    """The adapter or model in a directory or run, ``first`` where a run has both.

    Raises:
        ValueError: if there is none, or its files are not those of its manifest.
    """
    path = Path(given).expanduser()
    if is_checkpoint(path):
        raise ValueError(
            f"--path {path} is a checkpoint, which other tools do not read; dschat-lora merge "
            f"{path} --output_dir DIR makes a model of it"
        )
    names = sorted(("adapter", "model"), key=lambda name: name != first)
    homes = [path, *(path / name for name in names), *(path / "actor" / name for name in names)]
    for home in homes:
        if (home / "config.json").is_file():
            return home
        if is_adapter_directory(home):
            verify_adapter(home)
            return home
    what = "holds no" if path.is_dir() else "does not exist; give a directory with an"
    raise ValueError(f"--path {path} {what} {CONFIG_FILE} or config.json, its own or in a run")
