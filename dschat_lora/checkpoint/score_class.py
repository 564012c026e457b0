"""A sequence classifier of each decoder: transformers' own, or one made where it has none."""

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
    decoder = decoders[kind]
    assert isinstance(decoder, type)
    pretrained = _pretrained_class(decoder)
    name = pretrained.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    # transformers looks into the module of a class for what its experts can do.
    body = {"__module__": decoder.__module__, "base_model_prefix": decoder.base_model_prefix}
    made = type(name, (GenericForSequenceClassification, pretrained), body)
    AutoModelForSequenceClassification.register(kind, made)


def score_class_code(model: object) -> list[str]:
    """Python that registers the class of ``model`` anew, if it is one that was made here."""
    kind = type(model)
    if not isinstance(model, GenericForSequenceClassification) or hasattr(
        __import__(kind.__module__, fromlist=[kind.__name__]), kind.__name__
    ):
        return []
    pretrained = _pretrained_class(kind).__name__
    return [
        "from transformers.modeling_layers import GenericForSequenceClassification",
        f"from {kind.__module__} import {pretrained}",
        "",
        "",
        f"class {kind.__name__}(GenericForSequenceClassification, {pretrained}):",
        f"    __module__ = {pretrained}.__module__",
        f'    base_model_prefix = "{kind.base_model_prefix}"',
        "",
        "",
        "AutoModelForSequenceClassification.register(",
        f"    {pretrained}.config_class, {kind.__name__}",
        ")",
    ]


def _pretrained_class(kind: type) -> type[PreTrainedModel]:
    """The class from which all models of the architecture descend."""
    return next(
        each
        for each in reversed(kind.__mro__)
        if issubclass(each, PreTrainedModel) and each is not PreTrainedModel
    )
