"""Files of GPT-2's weights: those of the hub, and full checkpoints of microsoft/LoRA.

The latter hold ``module.transformer.h.0.attn.c_attn.weight`` and, beside them, ``.lora_A`` and
``.lora_B``; the last tie ``module.lm_head.decoder.weight`` to the embedding. Files of OpenAI's
names end in ``.g``, ``.b`` and ``.w``.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dschat_lora.addons.loralib.lora_only import LoraOnly, is_factor, rank_of, read_tensors
from dschat_lora.algos.tensors import check_finite
from dschat_lora.config.groups import ModelConfig
from dschat_lora.models.loading import load_config, load_options

_BODY = "transformer."
_ENDINGS = {".g": ".weight", ".b": ".bias", ".w": ".weight"}
_HEADS = ("lm_head.weight", "lm_head.decoder.weight")
# Causal masks, which transformers makes itself.
_MASKS = (".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Gpt2Checkpoint:
    """A file of weights as read: float32, on CPU, under transformers' names."""

    path: Path
    base: dict[str, Tensor]  # empty in a file of factors alone
    factors: LoraOnly | None


def read_gpt2_checkpoint(path: Path) -> Gpt2Checkpoint:
    """The base and the LoRA factors of a file, as far as it has them.

    Raises:
        ValueError: if it is damaged or no state dict, or its head is not the embedding.
    """
    stored, settings = read_tensors(path)
    tensors = {_our_name(name): tensor for name, tensor in stored.items()}
    head = next((tensors.pop(name) for name in _HEADS if name in tensors), None)
    embedding = tensors.get(f"{_BODY}wte.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(f"{path}: the output head is not the embedding, as GPT-2's is")
    factors = {name: tensor for name, tensor in tensors.items() if is_factor(name)}
    base = {n: t for n, t in tensors.items() if n not in factors and not n.endswith(_MASKS)}
    lora = LoraOnly(path, rank_of(factors, path), factors, settings) if factors else None
    return Gpt2Checkpoint(path, base, lora)


def gpt2_with_weights(
    name: str, config: ModelConfig, checkpoint: Gpt2Checkpoint, *, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of the architecture of ``name``, a hub name or a directory, with other weights.

    Raises:
        ValueError: if ``name`` is no GPT-2, or the weights do not fit it.
    """
    settings = load_config(name, config)
    if settings.model_type != "gpt2":
        raise ValueError(
            f"--init_checkpoint {checkpoint.path} is a file of GPT-2's weights; {name} is a "
            f"{settings.model_type} model"
        )
    options = load_options(config, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, **options)
    load_base(model, checkpoint)
    return model.eval()


@torch.no_grad()
def load_base(model: nn.Module, checkpoint: Gpt2Checkpoint) -> None:
    """Copy every weight of the base into a GPT-2 of transformers without adapters.

    Raises:
        ValueError: naming the first weight that is missing, left over, of another shape or not
            finite.
    """
    own = dict(model.named_parameters())  # the tied head is the embedding
    for name, parameter in own.items():
        if name not in checkpoint.base:
            raise ValueError(f"{checkpoint.path} lacks {name}, which the model has")
        has, wants = tuple(checkpoint.base[name].shape), tuple(parameter.shape)
        if has != wants:
            raise ValueError(
                f"{checkpoint.path}: {name} is {has}, the model has {wants}; it is of another size "
                "(--model_card)"
            )
        check_finite(checkpoint.base[name], f"{checkpoint.path}: {name}")
        parameter.copy_(checkpoint.base[name])
    if unknown := sorted(checkpoint.base.keys() - own.keys()):
        raise ValueError(f"{checkpoint.path} holds {unknown[0]}, which the model does not have")


def _our_name(name: str) -> str:
    name = name.removeprefix("module.")
    for ending, ours in _ENDINGS.items():
        if name.endswith(ending):
            name = name.removesuffix(ending) + ours
    if name.startswith((_BODY, "lm_head.")):
        return name
    return _BODY + name
