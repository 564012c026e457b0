"""Weights read from files one by one, so that no process ever holds the whole model."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
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

from dschat_lora.algos.finite import check_finite
from dschat_lora.checkpoint.manifest import weight_map
from dschat_lora.checkpoint.tensors import save_tensors
from dschat_lora.engine.distributed import device
from dschat_lora.lora import nf4
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.parallel import Shard, group_of, shard_of
from dschat_lora.models.loading import check_whole

_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"
_PACKED = f".{nf4.STATE_KEY}"


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
        model: perhaps divided by :func:`dschat_lora.models.tensor_parallel.divide`, perhaps with
            layers that are to hold 4 bits: their weights are quantised as they are read, unless
            the files hold them so.
        path: directory or hub name.
        new: names that the files may lack; those come out uninitialised.

    Returns:
        The names that the files lacked.

    Raises:
        ValueError: if the files lack a weight, or hold one of another shape or one that is not
            finite, or the model is divided and they are no safetensors.
    """
    files = _files(path, pickled=group_of(model) is None)
    parts = [key for key in files if f"{key.rpartition('.weight.')[0]}.weight{_PACKED}" in files]
    keys = _names_of_keys(model, files.keys() - set(parts))
    missing: set[str] = set()
    for aliases in parameter_names(model):
        parameter = model.get_parameter(aliases[0])
        key = next((keys[name] for name in aliases if name in keys), None)
        if key is None:
            missing.update(aliases)
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:
            value = _value(files, key, parameter)
        _fill(model, aliases, value)
    check_whole(missing, new=new)
    return missing


def parameter_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def read_weights(model: PreTrainedModel, path: str) -> Callable[[str], Tensor]:
    """A function that reads a weight by its name in ``model``, as the files at ``path`` hold it."""
    files = _files(path, pickled=True)
    keys = _names_of_keys(model, files)

    def read(name: str) -> Tensor:
        with _opened(files[keys[name]]) as tensors:
            weight: Tensor = tensors.get_slice(keys[name])[:]
        return weight

    return read


def other_tensors(model: PreTrainedModel, path: str) -> dict[str, Tensor]:
    """What the files at ``path`` hold beside the weights of ``model``, by key.

    Raises:
        ValueError: if some of it is quantised: beside whole weights it could not be read.
    """
    files = _files(path, pickled=True)
    state = model.state_dict()
    keys = [key for key, (name, _) in _names(model, files).items() if name not in state]
    if quantised := [key for key in keys if key.endswith(_PACKED)]:
        raise ValueError(f"{path} holds {quantised[0]} in 4 bits, which fits no merged model")
    return {key: _tensor(files, key) for key in keys}


def add_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put further tensors into a saved model, in a file of their own."""
    if not tensors:
        return
    index, single = directory / (_SAFETENSORS + _INDEX), directory / _SAFETENSORS
    if single.is_file():
        with _opened(str(single)) as stored:
            names = dict.fromkeys(stored.keys(), "model-text.safetensors")
        single.rename(directory / "model-text.safetensors")
    else:
        names = dict(weight_map(index))
    save_tensors(tensors, directory / "model-rest.safetensors")
    names |= dict.fromkeys(tensors, "model-rest.safetensors")
    size = sum((directory / name).stat().st_size for name in set(names.values()))
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2))


def packed_layers(model: PreTrainedModel, path: str) -> list[str]:
    """Names of the layers of ``model`` whose weights the files at ``path`` hold in NF4."""
    files = _files(path, pickled=True)
    names = _names_of_keys(model, [key for key in files if f"{key}{_PACKED}" in files])
    return [name.removesuffix(".weight") for name in names]


def _files(path: str, *, pickled: bool) -> dict[str, str]:
    """File of each key."""
    for single in (_SAFETENSORS, *([_PICKLE] if pickled else [])):
        if (index := cached(path, single + _INDEX)) is not None:
            names = weight_map(Path(index))
            found = {name: cached(path, name) for name in set(names.values())}
            if lacking := sorted(name for name, file in found.items() if file is None):
                raise ValueError(f"there is no {lacking[0]}")
            return {key: str(found[name]) for key, name in names.items()}
        if (file := cached(path, single)) is not None:
            with _opened(file) as tensors:
                return dict.fromkeys(tensors.keys(), file)
    if pickled:
        raise ValueError(f"there is neither {_SAFETENSORS} nor {_PICKLE}")
    raise ValueError(
        f"there is no {_SAFETENSORS}; --tensor_parallel_size above 1 reads weights in parts, "
        "which takes safetensors files"
    )


def cached(path: str, name: str) -> str | None:
    """Where a file of a directory or a hub name lies; None where it has none."""
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else str(found)


class _Pickled(dict[str, Tensor]):
    """The tensors of a pickle, by the methods of an open safetensors file."""

    get_tensor = get_slice = dict.__getitem__


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    """The tensors of a file, which it maps: pages of one that stays open count as memory."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    else:
        yield _Pickled(torch.load(file, map_location="cpu", mmap=True, weights_only=True))


def _names_of_keys(model: PreTrainedModel, keys: Collection[str]) -> dict[str, str]:
    """Key in the files of each name in the model, by the rules of transformers."""
    found = {}
    state = model.state_dict()
    for key, (name, is_converted) in _names(model, keys).items():
        if is_converted and name in state:
            raise ValueError(
                f"{key} is stored in another form than the model's; load and save the model with "
                "transformers once, or use --tensor_parallel_size 1 and --base_bits 16"
            )
        found[name] = key
    return found


def _names(model: PreTrainedModel, keys: Collection[str]) -> dict[str, tuple[str, bool]]:
    """Of each key the name in the model, and whether several keys make a weight, or one several."""
    # The text model of a composite one is named by the rules of that.
    model = model.on_meta() if hasattr(model, "on_meta") else model
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    state, found = model.state_dict(), {}
    for key in keys:
        name, converted = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        found[key] = name, converted is not None
    return found


def _value(files: Mapping[str, str], key: str, parameter: Tensor) -> Tensor:
    """What is to stand in place of a meta parameter."""
    state = nf4.state_of(parameter)
    if state is not None and f"{key}{_PACKED}" in files:
        try:
            return nf4.from_stored(
                lambda part: _tensor(files, f"{key}{part}"),
                shape=full_shape(parameter),
                dtype=state.dtype,
                transposed=state.transposed,
            )
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    with _opened(files[key]) as tensors:
        value = _read(tensors.get_slice(key), key, shard_of(parameter), parameter)
        if state is None:
            return value
        return nf4.quantize(value, dtype=state.dtype, transposed=state.transposed, worker=device())


def _tensor(files: Mapping[str, str], key: str) -> Tensor:
    if key not in files:
        raise ValueError(f"lacks {key}")
    with _opened(files[key]) as tensors:
        found: Tensor = tensors.get_tensor(key)
    check_finite(found, key)
    return found


def _read(piece: Any, key: str, shard: Shard | None, parameter: Tensor) -> Tensor:
    """This rank's part of a stored tensor, in the type of ``parameter``, or to be quantised."""
    stored = torch.Size(piece.shape if isinstance(piece, Tensor) else piece.get_shape())
    wanted = full_shape(parameter)
    if stored != wanted:
        raise ValueError(f"{key} has the shape {tuple(stored)}, the model {tuple(wanted)}")
    if shard is None:
        whole: Tensor = piece[:]
        if nf4.state_of(parameter) is None:
            # A copy: of a pickle a view would keep the file's pages.
            whole = whole.to(parameter.dtype, copy=isinstance(piece, Tensor))
        check_finite(whole, key)
        return whole
    dim = shard.dim % len(stored)
    parts = [
        piece[tuple([slice(None)] * dim + [slice(start, stop)])] for start, stop in shard.ranges()
    ]
    # Never a view of more than the part.
    own = torch.cat([part.to(parameter.dtype) for part in parts], dim).contiguous()
    check_finite(own, key)
    return own


def _fill(model: nn.Module, aliases: list[str], value: Tensor | nn.Parameter) -> None:
    """Put ``value`` in place of a meta parameter under all its names."""
    old = model.get_parameter(aliases[0])
    if isinstance(value, nn.Parameter):  # of codes
        new = value
    else:
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
    for name in aliases:
        replace_part(model, name, new)
