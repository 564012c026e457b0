"""safetensors files: write, with errors of the disk as OSError, and read by key."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from dschat_lora.algos.tensors import check_finite

# In what torch.save says where the disk refuses; it keeps no reason.
_OF_TORCH_SAVE = ("inline_container", "iostream error", "PytorchStreamWriter")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors to one file.

    Raises:
        OSError: if the disk refuses; safetensors has an error of its own for that.
    """
    with writing(path):
        save_file(dict(tensors), path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside the block an error of safetensors, tokenizers or torch.save is one of the disk.

    Raises:
        OSError: naming ``path``.
    """
    try:
        yield
    except Exception as error:
        if type(error) is RuntimeError and any(word in str(error) for word in _OF_TORCH_SAVE):
            raise OSError(f"{path} cannot be written: is the disk full? ({error})") from error
        # The tokenizers library has no type of its own for errors of the disk.
        if type(error) not in (Exception, SafetensorError):
            raise
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
