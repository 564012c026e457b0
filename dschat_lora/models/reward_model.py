"""Pretrained decoders with a scalar head, which score a sequence at its last token."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_lora.algos.segments import Spans
from dschat_lora.checkpoint.score_class import HEAD
from dschat_lora.config.groups import ModelConfig
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import replace_part, seeded_generator
from dschat_lora.lora.parallel import group_of
from dschat_lora.lora.trained import TrainedModule
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.composite import auto_class, check_alone
from dschat_lora.models.four_bit_base import four_bits_of, hold_four_bits, take_kind
from dschat_lora.models.loading import (
    attention_errors,
    build_without_values,
    check_loaded,
    complete,
    hub_errors,
    load_options,
    only_errors,
    share_parameters,
)
from dschat_lora.models.stored_weights import load_parts

_HEAD_PARAMETERS = (f"{HEAD}.weight", f"{HEAD}.bias")


def load_reward_model(
    path: str,
    model_config: PretrainedConfig,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    seed: int | None,
    meta: bool,
    base: PreTrainedModel | None = None,
    group: TensorGroup | None = None,
) -> PreTrainedModel:
    """The pretrained model with one score instead of next-token logits.

    A head that the files lack is drawn from N(0, 1 / (H + 1)), from ``seed`` alone; None asks for
    a model that has one. With ``base``, a model that is loaded already, its weights below the head
    are used, and its head too if it has one. ``group`` divides the model, but for the head; the
    other arguments are those of :func:`~dschat_lora.models.loading.load_causal_lm`.

    Raises:
        ValueError: if it cannot be loaded, has several labels, has its head elsewhere, or has
            none and ``seed`` is None.
    """
    model_config.num_labels = 1
    options = load_options(config, dtype)
    missing: set[str] = set()
    kind = take_kind(model_config, path)
    four_bits = four_bits_of(kind, config)
    with hub_errors("--model_name_or_path", path, "model"), attention_errors(model_config, config):
        build = partial(auto_class(model_config, "SEQ_CLS").from_config, model_config, **options)
        if base is not None:
            model = _with_score(build_without_values(build, None, meta=True))
            missing = _share_backbone(model, base)
        elif meta or group is not None or kind is not None or four_bits is not None:
            model = _with_score(build_without_values(build, group, meta=meta))
            if four_bits is not None:
                hold_four_bits(model, path, four_bits)
            if not meta:
                missing = load_parts(model, path, new=_HEAD_PARAMETERS)
                check_alone(model)
        else:
            model, missing = _read(path, model_config, options)
            check_alone(model)
    if f"{HEAD}.weight" in missing:
        if seed is None:
            raise ValueError(
                f"--model_name_or_path {path} is not a reward model: it has no {HEAD} head"
            )
        if not model.score.weight.is_meta:
            init_head_(model.score, seed=seed)
    return complete(model, config)


def _with_score(model: PreTrainedModel) -> PreTrainedModel:
    if not isinstance(getattr(model, HEAD, None), nn.Linear):
        raise ValueError(
            f"a {model.config.model_type} model has no {HEAD!r} head that can be read at the last "
            "token; use a decoder such as OPT, GPT-2 or Llama"
        )
    return model


def _read(
    path: str, model_config: PretrainedConfig, options: dict[str, Any]
) -> tuple[PreTrainedModel, set[str]]:
    """The model in its files, and the names of what they lack."""
    with only_errors():  # it would advise to train the head that will be trained
        model, report = auto_class(model_config, "SEQ_CLS").from_pretrained(
            path,
            config=model_config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    check_loaded(_with_score(model), report["missing_keys"], new=_HEAD_PARAMETERS)
    for name, shape, *_ in report["mismatched_keys"]:
        if name.startswith(f"{HEAD}."):
            raise ValueError(f"a reward model must have one score, but it has {shape[0]}")
        raise ValueError(f"{name} has the shape {tuple(shape)}, which does not fit")
    return model, set(report["missing_keys"])


def _share_backbone(model: PreTrainedModel, base: PreTrainedModel) -> set[str]:
    """Use the weights of ``base``, which is loaded; returns the names of what it lacks."""
    names = {id(module): name for name, module in model.named_modules()}
    replace_part(model, names[id(model.base_model)], share_parameters(base.base_model))
    if hasattr(base, HEAD):
        setattr(model, HEAD, share_parameters(base.score))
        return set()
    embedding = base.get_input_embeddings().weight
    if not embedding.is_meta:
        setattr(model, HEAD, model.score.to_empty(device=embedding.device))
    return {f"{HEAD}.weight"}


@torch.no_grad()
def init_head_(head: nn.Linear, *, seed: int) -> None:
    """Draw the weights from N(0, 1 / (H + 1)) (arXiv:2009.01325, appendix B.1), no bias."""
    values = torch.empty(head.weight.shape)
    values.normal_(std=(head.in_features + 1) ** -0.5, generator=seeded_generator(seed, HEAD))
    head.weight.copy_(values)
    if head.bias is not None:
        head.bias.zero_()


@torch.no_grad()
def zero_head_(model: PreTrainedModel) -> None:
    """Set the head that trains to 0, so that every score is exactly 0.

    A critic that starts as a language model then predicts nothing until its head has learnt: so
    it is in openai/lm-human-preferences, the code of arXiv:1909.08593.
    """
    for parameter in _trained_layer(model.score).parameters():
        parameter.zero_()


class RewardModel(BackboneModel):
    """A model with a scalar head that returns scores at given positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head = ScoreHead(model.score, group_of(model))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor,
        score_positions: Tensor,
        spans: Spans | None = None,
    ) -> Tensor:
        """(K,) fp32 scores at (K,) places; the other arguments as in ``PairBatch``.

        Without a place the graph still spans the model.
        """
        hidden = self.backbone(input_ids, position_ids, segment_ids, branch_ids, spans)
        return self.head(hidden.flatten(0, 1)[score_positions])


class ScoreHead(nn.Module):
    """The scalar head, computed in float32: 16-bit scores of like answers would be equal.

    The head's layer lends its parameters, so that ZeRO 3 gathers them for this module. It is
    whole on every rank of a group that divides the model, and stays the same there.
    """

    def __init__(self, head: nn.Module, group: TensorGroup | None = None) -> None:
        super().__init__()
        self._alike = (lambda x: x) if group is None else group.alike
        layer = _trained_layer(head)
        self.weight = layer.get_parameter("weight")
        self.bias = layer._parameters.get("bias")

    def forward(self, hidden: Tensor) -> Tensor:
        """(K,) scores of (K, H) hidden states."""
        weight = self._alike(self.weight).float()
        bias = None if self.bias is None else self._alike(self.bias).float()
        return nn.functional.linear(hidden.float(), weight, bias).squeeze(-1)


def _trained_layer(head: nn.Module) -> nn.Module:
    return head.trained if isinstance(head, TrainedModule) else head
