"""Weights read from files one by one, so that no process ever holds the whole model."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_lora.algos.finite import check_finite
from dschat_lora.engine.distributed import device
from dschat_lora.lora import nf4
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.parallel import Shard, group_of, shard_of
from dschat_lora.models.loading import check_whole
from dschat_lora.models.stored_weights import StoredWeights

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    stored = StoredWeights(model, path, pickled=group_of(model) is None)
    missing: set[str] = set()
    for aliases in parameter_names(model):
        parameter = model.get_parameter(aliases[0])
        name = next((name for name in aliases if name in stored), None)
        if name is None:
            missing.update(aliases)
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:
            value = _value(stored, name, parameter)
        _fill(model, aliases, value)
    check_whole(missing, new=new)
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored.read(name))
    return missing


def parameter_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _value(stored: StoredWeights, name: str, parameter: Tensor) -> Tensor:
    """What is to stand in place of a meta parameter."""
    state = nf4.state_of(parameter)
    if state is not None and (codes := stored.packed(name, state)) is not None:
        return codes
    with stored.piece(name) as piece:
        value = _read(piece, name, shard_of(parameter), parameter)
        if state is None:
            return value
        return nf4.quantize(value, dtype=state.dtype, transposed=state.transposed, worker=device())


def _read(piece: Any, key: str, shard: Shard | None, parameter: Tensor) -> Tensor:
    """This rank's part of a stored tensor, in the type of ``parameter``, or to be quantised."""
    stored = torch.Size(piece.shape if isinstance(piece, Tensor) else piece.get_shape())
    wanted = full_shape(parameter)
    if stored != wanted:
        raise ValueError(f"{key} has the shape {tuple(stored)}, the model {tuple(wanted)}")
    if shard is None:
        whole: Tensor = piece[:]
        if whole.dtype not in (*_FLOATS, parameter.dtype):
            raise ValueError(f"{key} holds {whole.dtype} codes without scales that are known")
        if nf4.state_of(parameter) is None:
            # A copy: of a pickle a view would keep the file's pages, and unpacked values may be
            # transposed, which DeepSpeed does not broadcast.
            whole = whole.to(
                parameter.dtype,
                copy=isinstance(piece, Tensor),
                memory_format=torch.contiguous_format,
            )
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
