"""A sequence classifier of each decoder: transformers' own, or one made where it has none."""

import sys
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification

HEAD = "score"  # of a classifier


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
    decoder: type[PreTrainedModel] = decoders[kind]
    pretrained = _pretrained_class(decoder)
    name = _score_class_name(pretrained)
    prefix = decoder.base_model_prefix
    # transformers looks into the module of a class for what its experts can do.
    body = {
        "__module__": decoder.__module__,
        # Llama 4 has that of a whole with vision.
        "base_model_prefix": "model" if prefix == "language_model" else prefix,
        "config_class": kind,
    }
    made = type(name, (GenericForSequenceClassification, pretrained), body)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)


def score_class_code(model: Any) -> list[str]:
    """Python that makes the class of a reward model, empty where transformers has it.

    Of the text model of a composite one that is a class of the whole, and empty too where none can
    be made so.
    """
    if not isinstance(model, GenericForSequenceClassification):
        return []
    kind: Any = type(model)
    name, prefix = kind.__name__, kind.base_model_prefix
    if hasattr(model, "on_meta"):
        whole: Any = model.on_meta()
        kind, prefix = type(whole), "model"
        # Of some classes transformers renames what files hold by the name of the class.
        is_renamed = get_checkpoint_conversion_mapping(kind.__name__) is not None
        has_body = isinstance(getattr(whole, prefix, None), PreTrainedModel)
        if hasattr(whole, "score") or is_renamed or not has_body:
            return []
        name = _score_class_name(_pretrained_class(kind))
    elif getattr(sys.modules[kind.__module__], name, None) is kind:
        return []
    pretrained, config = _pretrained_class(kind), kind.config_class
    return [
        "from transformers.modeling_layers import GenericForSequenceClassification",
        f"from {config.__module__} import {config.__name__}",
        f"from {pretrained.__module__} import {pretrained.__name__}",
        "",
        "",
        f"class {name}(GenericForSequenceClassification, {pretrained.__name__}):",
        f'    __module__ = "{kind.__module__}"',
        f'    base_model_prefix = "{prefix}"',
        f"    config_class = {config.__name__}",
        "",
        "",
        "AutoModelForSequenceClassification.register(",
        f"    {config.__name__}, {name}, exist_ok=True",
        ")",
    ]


def _score_class_name(pretrained: type[PreTrainedModel]) -> str:
    return pretrained.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"


def _pretrained_class(kind: type) -> type[PreTrainedModel]:
    """The class from which all models of the architecture descend."""
    return next(
        each
        for each in reversed(kind.__mro__)
        if issubclass(each, PreTrainedModel) and each is not PreTrainedModel
    )
