"""Weights read from safetensors part by part, so that no process ever holds the whole model."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.utils import cached_file

from dschat_lora.lora.model import replace_part
from dschat_lora.lora.parallel import Shard, shard_of
from dschat_lora.models.loading import check_whole

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within, modules are built with parameters on the meta device, and with real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def load_parts(model: PreTrainedModel, path: str, *, new: Collection[str] = ()) -> set[str]:
    """Fill the meta parameters of ``model`` with what this rank holds of them, on CPU.

    Args:
        model: perhaps divided by :func:`dschat_lora.models.tensor_parallel.divide`.
        path: directory or hub name.
        new: names that the files may lack; those come out uninitialised.

    Returns:
        The names that the files lacked.

    Raises:
        ValueError: if the files are no safetensors, lack a weight, or hold one of another shape.
    """
    files = _files(path)
    keys = _names_of_keys(model, files)
    missing: set[str] = set()
    for aliases in parameter_names(model):
        parameter = model.get_parameter(aliases[0])
        key = next((keys[name] for name in aliases if name in keys), None)
        if key is None:
            missing.update(aliases)
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:
            # Opened anew: pages of a file that stays open count as this process's memory.
            with safe_open(files[key], framework="pt") as file:
                value = _read(file.get_slice(key), key, shard_of(parameter), parameter)
        _fill(model, aliases, value)
    check_whole(missing, new=new)
    return missing


def parameter_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _files(path: str) -> dict[str, str]:
    """File of each key."""
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        content = json.loads(Path(index).read_text(encoding="utf-8"))
        names: dict[str, str] = content["weight_map"]
        found = {name: _cached(path, name) for name in set(names.values())}
        return {key: found[name] for key, name in names.items()}
    single = _cached(path, _SINGLE)
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _cached(path: str, name: str) -> str:
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if found is None:
        raise ValueError(
            f"there is no {name}; --tensor_parallel_size above 1 reads weights in parts, "
            "which takes safetensors files"
        )
    return str(found)


def _names_of_keys(model: PreTrainedModel, keys: Collection[str]) -> dict[str, str]:
    """Key in the files of each name in the model, by the rules of transformers."""
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    state = model.state_dict()
    found = {}
    for key in keys:
        name, converted = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if converted is not None:
            raise ValueError(
                f"{key} is stored in another form than the model's; load and save the model with "
                "transformers once, or use --tensor_parallel_size 1"
            )
        found[name] = key
    return found


def _read(piece: Any, key: str, shard: Shard | None, parameter: Tensor) -> Tensor:
    """This rank's part of a stored tensor, in the type of ``parameter``."""
    stored = torch.Size(piece.get_shape())
    wanted = parameter.shape if shard is None else shard.full_shape(parameter.shape)
    if stored != wanted:
        raise ValueError(f"{key} has the shape {tuple(stored)}, the model {tuple(wanted)}")
    if shard is None:
        return piece[:].to(parameter.dtype)
    dim = shard.dim % len(stored)
    parts = [
        piece[tuple([slice(None)] * dim + [slice(start, stop)])] for start, stop in shard.ranges()
    ]
    # Never a view of more than the part.
    return torch.cat([part.to(parameter.dtype) for part in parts], dim).contiguous()


def _fill(model: nn.Module, aliases: list[str], value: Tensor) -> None:
    """Put ``value`` in place of a meta parameter under all its names."""
    old = model.get_parameter(aliases[0])
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for name in aliases:
        replace_part(model, name, new)
