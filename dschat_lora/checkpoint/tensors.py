"""Tensors to and from safetensors files, with disk errors as the errors of the disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one file.

    Args:
        tensors: contiguous, on CPU.
        path: of the file.

    Raises:
        OSError: if the disk refuses; safetensors has an error of its own for that.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


class TensorFiles:
    """The tensors of several files by key, read when asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._owner = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118

    def read(self, key: str) -> Tensor:
        """One tensor, on CPU."""
        tensor: Tensor = self._owner[key].get_tensor(key)
        return tensor
