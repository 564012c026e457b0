"""The state of a Trainer on disk: what trains, AdamW's moments, and the step."""

import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from dschat_lora.algos.tensors import check_finite
from dschat_lora.api.trainer_build import Parts
from dschat_lora.checkpoint.manifest import verify, write_manifest
from dschat_lora.checkpoint.staging import staged_directory
from dschat_lora.checkpoint.tensors import TensorFiles, save_tensors
from dschat_lora.config.files import read_json
from dschat_lora.engine.collectives import broadcast_string, raise_together
from dschat_lora.engine.distributed import rank
from dschat_lora.engine.state import EngineState

_KIND = "trainer"
_STATE = "state.json"
_SHARD_BYTES = 2**30


def save_state(parts: Parts, directory: Path, *, step: int) -> None:
    """Write the state; call on every rank.

    Raises:
        OSError: on rank 0, if the disk refuses.
        ValueError: if a weight is not finite.
    """
    state = EngineState(parts.engine, parts.adapted.model)
    content = {"step": step, "identity": parts.identity, "engine": state.facts()}
    tensors = state.tensors()

    def write() -> None:
        try:
            if rank() == 0:
                _write(directory, content, tensors)
        finally:
            for _ in tensors:  # the others wait for their part in gathering them
                pass

    raise_together(write)


def load_state(parts: Parts, directory: Path) -> int:
    """Restore the state; returns its step. Call on every rank.

    Raises:
        ValueError: if it is damaged, or of another model or adapter.
    """
    content = json.loads(
        broadcast_string(raise_together(lambda: _read(parts, directory) if rank() == 0 else ""))
    )
    paths = sorted(directory.glob("*.safetensors")) if rank() == 0 else []
    EngineState(parts.engine, parts.adapted.model).load(content["engine"], TensorFiles(paths).read)
    return int(content["step"])


def _write(directory: Path, content: object, tensors: Iterator[tuple[str, Tensor]]) -> None:
    with staged_directory(directory) as staging:
        shard: dict[str, Tensor] = {}
        number = 0
        for key, tensor in tensors:
            check_finite(tensor, f"{directory} was not written: {key}")
            if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
                number += 1
                save_tensors(shard, staging / f"model-{number:05d}.safetensors")
                shard = {}
            shard[key] = tensor
        save_tensors(shard, staging / f"model-{number + 1:05d}.safetensors")
        text = json.dumps(content, indent=1) + "\n"
        (staging / _STATE).write_text(text, encoding="utf-8")
        write_manifest(staging, kind=_KIND)


def _read(parts: Parts, directory: Path) -> str:
    if not (directory / _STATE).is_file():
        raise ValueError(f"{directory} holds nothing that a Trainer has saved")
    verify(directory, kind=_KIND)
    content = read_json(directory / _STATE)
    for what, found in content["identity"].items():
        if found != parts.identity[what]:
            raise ValueError(
                f"{directory} was saved by a Trainer with another {what} ({found}, here "
                f"{parts.identity[what]})"
            )
    return json.dumps(content)
