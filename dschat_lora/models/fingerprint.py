"""What a model's base weights are, as one hash."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dschat_lora.lora.model import adapter_parameters

SAMPLED_VALUES = 4096  # of each tensor


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str:
    """32 hex digits that differ where the base differs in a name, a shape, a type or a value.

    Values are looked at in up to ``SAMPLED_VALUES`` evenly spaced places of each tensor: enough
    to tell models apart, and quick however large they are. Adapters do not count.

    Args:
        model: whole, before ZeRO 3 shards it, and before it is trained.
    """
    adapter = adapter_parameters(model)
    return _fingerprint({n: p for n, p in model.named_parameters() if n not in adapter})


def adapter_fingerprint(model: nn.Module) -> str:
    """32 hex digits that differ where any value of the adapter does."""
    return _fingerprint(adapter_parameters(model), sampled=False)


def _fingerprint(parameters: Mapping[str, nn.Parameter], *, sampled: bool = True) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(parameters.items()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        values = _sample(parameter) if sampled else parameter.detach().cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Evenly spaced values, as the bytes they are, on CPU."""
    flat = tensor.detach().reshape(-1)
    # Odd, or a matrix as wide as a power of two would be looked at in one column alone.
    step = max(1, flat.numel() // SAMPLED_VALUES) | 1
    return flat[::step].cpu().contiguous().view(torch.uint8)
