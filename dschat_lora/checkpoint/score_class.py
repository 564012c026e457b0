"""A sequence classifier of each decoder: transformers' own, or one made where it has none."""

import sys
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification


def register_score_class(config: PretrainedConfig) -> None:
    """Have ``AutoModelForSequenceClassification`` know a class for this kind of decoder.

    Where transformers has none, it is that of most decoders: the backbone of the language model
    and a linear layer ``score`` without bias. An encoder is left as it is.
    """
    kind = type(config)
    known = AutoModelForSequenceClassification._model_mapping
    decoders = AutoModelForCausalLM._model_mapping
    if kind in known or kind not in decoders or getattr(config, "is_encoder_decoder", False):
        return
    decoder: Any = decoders[kind]
    pretrained = _pretrained_class(decoder)
    name = pretrained.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    # transformers looks into the module of a class for what its experts can do.
    body = {
        "__module__": decoder.__module__,
        "base_model_prefix": decoder.base_model_prefix,
        "config_class": kind,
    }
    made = type(name, (GenericForSequenceClassification, pretrained), body)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)


def score_class_code(model: nn.Module) -> list[str]:
    """Python that makes the class of ``model``, if :func:`register_score_class` has made it."""
    kind: Any = type(model)
    is_own = getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
    if is_own or not isinstance(model, GenericForSequenceClassification):
        return []
    pretrained, config = _pretrained_class(kind), kind.config_class
    return [
        "from transformers.modeling_layers import GenericForSequenceClassification",
        f"from {config.__module__} import {config.__name__}",
        f"from {pretrained.__module__} import {pretrained.__name__}",
        "",
        "",
        f"class {kind.__name__}(GenericForSequenceClassification, {pretrained.__name__}):",
        f'    __module__ = "{kind.__module__}"',
        f'    base_model_prefix = "{kind.base_model_prefix}"',
        f"    config_class = {config.__name__}",
        "",
        "",
        "AutoModelForSequenceClassification.register(",
        f"    {config.__name__}, {kind.__name__}, exist_ok=True",
        ")",
    ]


def _pretrained_class(kind: type) -> type[PreTrainedModel]:
    """The class from which all models of the architecture descend."""
    return next(
        each
        for each in reversed(kind.__mro__)
        if issubclass(each, PreTrainedModel) and each is not PreTrainedModel
    )
