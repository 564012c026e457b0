"""Values of int8, GPTQ and AWQ weights, which transformers computes with but does not unpack.

Each formula is that of the packages which write such files: bitsandbytes, GPTQModel (and AutoGPTQ
before it), AutoAWQ.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from dschat_lora.lora.layers import is_transposed

# In place of a weight files hold these. The first is there wherever a weight is quantised.
_PARTS = {
    "int8": ("weight", "SCB", "weight_format"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
# Columns of the nibbles of an int32 of AWQ, lowest first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def int8_values(codes: Tensor, absmax: Tensor, *_: Tensor) -> Tensor:
    """(out, in) values of int8 codes whose rows are scaled by (out,) largest absolute values."""
    return codes.float() * (absmax.float() / 127)[:, None]


def gptq_values(
    codes: Tensor,
    zeros: Tensor,
    scales: Tensor,
    groups: Tensor | None = None,
    *,
    bits: int = 4,
    offset: int = 1,
) -> Tensor:
    """(out, in) float32 values, ``scale * (code - zero)`` of the group of each input.

    Args:
        codes: (in * bits / 32, out) int32, consecutive inputs from the lowest bits on.
        zeros: (groups, out * bits / 32) int32, each ``offset`` less than the zero that it means.
        scales: (groups, out).
        groups: (in,) of each input; consecutive inputs by default.
        bits: 2, 4 or 8.
        offset: 1, or 0 in the second version of the format.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = 2**bits - 1
    inputs = (codes[:, None, :] >> shifts[:, None] & mask).flatten(0, 1)
    means = ((zeros[:, :, None] >> shifts & mask).flatten(1) + offset) & mask
    if groups is None:
        groups = torch.arange(len(inputs)) // (len(inputs) // len(scales))
    groups = groups.long()
    return (scales.float()[groups] * (inputs - means[groups])).t()


def awq_values(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """(out, in) float32 values, ``scale * (code - zero)`` of the group of each input.

    Args:
        codes: (in, out / 8) int32, whose nibbles are columns in an order of AWQ's own.
        zeros: (groups, out / 8) int32, likewise.
        scales: (groups, out).
    """
    shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32).argsort()

    def columns(packed: Tensor) -> Tensor:
        return (packed[:, :, None] >> shifts & 15).flatten(1)

    groups = torch.arange(len(codes)) // (len(codes) // len(scales))
    return (scales.float()[groups] * (columns(codes) - columns(zeros)[groups])).t()


def dequantizer(kind: str, settings: Mapping[str, Any], model: nn.Module) -> HfQuantizer:
    """What has transformers' rules of conversion give values of weights that are stored so.

    Args:
        kind: int8, gptq, awq, or one of which transformers gives values itself.
        settings: the ``quantization_config`` of the files.
        model: whose weights they are.
    """
    if kind not in _PARTS:
        return AutoHfQuantizer.from_config({**settings, "dequantize": True})
    functions: dict[str, Callable[..., Tensor]] = {
        "int8": int8_values,
        "gptq": partial(
            gptq_values,
            bits=int(settings.get("bits", 4)),
            offset=0 if settings.get("checkpoint_format") == "gptq_v2" else 1,
        ),
        "awq": awq_values,
    }
    return _Dequantizer(_PARTS[kind], functions[kind], model)


class _Dequantizer(HfQuantizer):  # type: ignore[misc]
    """The one of transformers' classes whose rules also reach the weights of single experts."""

    def __init__(
        self, parts: tuple[str, ...], function: Callable[..., Tensor], model: nn.Module
    ) -> None:
        super().__init__(SimpleNamespace(dequantize=True))
        self.serialized_names = {"weight": list(parts)}
        self.parts, self.function, self.model = parts, function, model

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Dequantize(ConversionOps):  # type: ignore[misc]
    def __init__(self, quantizer: _Dequantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """Values in place of the parts of each weight; one that is whole stays as it is."""
        first, *others = self.quantizer.parts
        made: dict[str, Any] = {}
        for name, tensors in input_dict.items():
            if not name.endswith(first):
                continue
            stem = name.removesuffix(first)
            more = [input_dict[stem + part] for part in others if stem + part in input_dict]
            values = [
                self.quantizer.function(*parts) if more else parts[0]
                for parts in zip(tensors, *more, strict=True)
            ]
            if stem:  # of the experts of a layer, which further operations join
                made[name] = values
            else:
                layer = self.quantizer.model.get_submodule(full_layer_name.rpartition(".")[0])
                made[full_layer_name] = (
                    values[0].t() if more and is_transposed(layer) else values[0]
                )
        return made
