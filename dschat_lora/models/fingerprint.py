"""Hashes of base weights, configurations and adapters."""

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.logging import disable_progress_bar

from dschat_lora.checkpoint.quantization import located
from dschat_lora.data.encoder import describe_tokenizer
from dschat_lora.lora.layers import full_shape, state_of
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.parallel import shard_of

SAMPLED_VALUES = 4096  # of each tensor
# Fields of a configuration that change nothing of what a text model computes.
_ASIDE = ("_name_or_path", "architectures", "composite", "transformers_version", "use_cache")


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str:
    """32 hex digits that differ where the base differs in a name, a shape, a type or a value.

    Values are compared in up to ``SAMPLED_VALUES`` evenly spaced places of each tensor: enough
    to tell models apart, and quick however large they are. Adapters do not count. Call it before
    ZeRO 3 shards the model and before it is trained.

    A model that is divided among ranks is the same as the whole one; call on all of them.
    """
    adapter = adapter_parameters(model)
    return _fingerprint({n: p for n, p in model.named_parameters() if n not in adapter})


def adapter_fingerprint(model: nn.Module) -> str:
    """32 hex digits that differ where any value of the adapter does."""
    return _fingerprint(adapter_parameters(model), sampled=False)


def config_fingerprint(config: PretrainedConfig) -> str:
    """32 hex digits that differ where a configuration has the same weights compute something else.

    Dropout does not count, which is for training alone.
    """
    fields = {**config.to_dict(), "attention": config._attn_implementation}
    used = {k: v for k, v in fields.items() if k not in _ASIDE and "drop" not in k}
    text = json.dumps(used, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_fingerprint(directory: str | Path) -> str:
    """32 hex digits that differ where the files of a local model do; empty for one of the hub.

    Weights are compared by their length, and a few bytes in evenly spaced places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(directory).glob("*")):
        if path.suffix == ".json":
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            _add_samples(digest, path)
    return digest.hexdigest() if Path(directory).is_dir() else ""


def weights_fingerprint(name: str) -> str:
    """32 hex digits that differ where the weight files that transformers loads do.

    They are compared by their names, their length, and a few bytes in evenly spaced places. What a
    model is kept as beside them does not count.

    Args:
        name: directory or hub name, whose files are here.
    """
    where, more = located(name)
    known = Path(str(cached_file(where, next(iter(more.values()), "config.json"))))
    digest = hashlib.blake2b(digest_size=16)
    for path in [known] if more else _loaded_files(known.parent):
        _add_samples(digest, path)
    return digest.hexdigest()


def _loaded_files(directory: Path) -> list[Path]:
    """Weight files of the first form that transformers looks for: safetensors before torch's."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if (path := directory / name).is_file():
            if not name.endswith(".json"):
                return [path]
            parts = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
            return [directory / part for part in sorted({*parts})]
    return []


def _add_samples(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for place in range(0, size, max(1, size // 256)):
            file.seek(place)
            digest.update(file.read(SAMPLED_VALUES))


def _fingerprint(parameters: Mapping[str, Tensor], *, sampled: bool = True) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(parameters.items()):
        digest.update(f"{name} {tuple(full_shape(parameter))} {parameter.dtype}\n".encode())
        if sampled:
            values = _sample(parameter)
        else:
            shard = shard_of(parameter)
            values = parameter.detach() if shard is None else shard.whole(parameter)
        digest.update(_bytes(values))
        if (state := state_of(parameter)) is not None:
            for scales in state.tensors().values():
                digest.update(_bytes(scales))
    return digest.hexdigest()


def _bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sample(parameter: Tensor) -> Tensor:
    """Evenly spaced values of the whole tensor, as the bytes they are."""
    shape = parameter.shape if state_of(parameter) is not None else full_shape(parameter)
    shard = shard_of(parameter)
    # Odd, or a matrix as wide as a power of two would be sampled in one column alone.
    step = max(1, shape.numel() // SAMPLED_VALUES) | 1
    if shard is None:
        return parameter.detach().reshape(-1)[::step].contiguous().view(torch.uint8)
    wanted = torch.arange(0, shape.numel(), step, device=parameter.device)
    places = list(torch.unravel_index(wanted, shape))
    own = torch.zeros_like(wanted, dtype=torch.bool)
    local, begin = torch.zeros_like(wanted), 0
    along = places[shard.dim]
    for start, stop in shard.ranges():
        inside = (along >= start) & (along < stop)
        local = torch.where(inside, along - start + begin, local)
        own, begin = own | inside, begin + stop - start
    places[shard.dim] = local
    values = parameter.new_zeros(len(wanted))
    values[own] = parameter.detach()[tuple(place[own] for place in places)]
    # Each place is held by one rank, and zeros are zero bytes: the sum is a collection.
    return shard.group.sum(values.view(torch.uint8))


def saved_model(model: PreTrainedModel, tokenizer: Tokenizer) -> Path:
    """The directory of a transformers model and its tokenizer in the cache of this user.

    It is named after every value, and written once. Neither object is changed.

    Raises:
        TypeError: if they are not a model of transformers and a tokenizer.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise TypeError(
            f"model must be (model, tokenizer) of transformers, got a {type(model).__name__} first"
        )
    if hasattr(model, "peft_config"):
        raise TypeError(
            "model has a PEFT adapter: save it with save_pretrained and give its path, or call "
            "merge_and_unload first"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            "model must be (model, tokenizer) of transformers, got a "
            f"{type(tokenizer).__name__} second"
        )
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dschat_lora/models"
    directory = home / _digest(model, tokenizer)
    if directory.is_dir():
        return directory
    home.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".saving-", dir=home))
    config = copy.deepcopy(model.config)
    try:
        disable_progress_bar()  # as where models are loaded
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.chmod(0o755)
        try:
            staged.rename(directory)
        except OSError:
            if not directory.is_dir():  # another process was first
                raise
    finally:
        model.config = config  # saving notes its architecture there
        shutil.rmtree(staged, ignore_errors=True)
    return directory


def _digest(model: PreTrainedModel, tokenizer: Tokenizer) -> str:
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(name, None)
    facts = [type(model).__name__, config, describe_tokenizer(tokenizer)]
    facts.append(_fingerprint(model.state_dict(), sampled=False))
    text = json.dumps(facts, default=str, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
