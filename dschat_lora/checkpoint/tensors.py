"""safetensors files: write, with errors of the disk as OSError, and read by key."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from dschat_lora.algos.finite import check_finite


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors to one file.

    Raises:
        OSError: if the disk refuses; safetensors has an error of its own for that.
    """
    with writing(path):
        save_file(dict(tensors), path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside the block an error of safetensors is one of the disk that refuses ``path``."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


class TensorFiles:
    """The tensors of several files by key, read when asked for."""

    def __init__(self, paths: list[Path]) -> None:
        files: list[tuple[Path, Any]] = [(path, safe_open(path, framework="pt")) for path in paths]
        self._owner = {key: each for each in files for key in each[1].keys()}  # noqa: SIM118

    def read(self, key: str) -> Tensor:
        """One tensor, on CPU.

        Raises:
            ValueError: if it is not finite.
        """
        path, file = self._owner[key]
        tensor: Tensor = file.get_tensor(key)
        check_finite(tensor, f"{path}: {key}")
        return tensor


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of the same bytes for the same content.

    The library itself writes several fields of metadata in random order.
    """
    data = save(dict(tensors))
    start = 8 + int.from_bytes(data[:8], "little")
    header = {"__metadata__": dict(metadata)} | json.loads(data[8:start])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(memoryview(data)[start:])
