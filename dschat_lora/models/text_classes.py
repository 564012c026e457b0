"""Classes over text models of types that transformers has none for but in a composite model."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast

from dschat_lora.models.backbone import cache_argument


def causal_lm_over(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A causal language model over a text model of a type that transformers has none for."""
    base = _pretrained(kind)

    class TextForCausalLM(base, GenerationMixin):  # type: ignore[misc, valid-type]
        config_class = kind.config_class
        base_model_prefix = "model"
        _tied_weights_keys: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.model = kind(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: Tensor | None = None,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            cache: Cache | None = None,
            past_key_values: Cache | None = None,
            logits_to_keep: int = 0,
            **inputs: object,
        ) -> CausalLMOutputWithPast:
            name = str(cache_argument(self.base_model))
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{name: past_key_values if cache is None else cache},
                **inputs,
            )
            logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
            return CausalLMOutputWithPast(logits=logits, **{name: outputs.get(name)})

    return TextForCausalLM


def reward_model_over(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A model with a score over a text model of a type that transformers has none for."""
    base = _pretrained(kind)

    class TextForSequenceClassification(GenericForSequenceClassification, base):  # type: ignore[misc, valid-type]
        def __init__(self, config: PretrainedConfig) -> None:
            base.__init__(self, config)
            self.num_labels = config.num_labels
            self.model = kind(config)
            self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
            self.post_init()

    return TextForSequenceClassification


def _pretrained(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """What a class of models has its settings from."""
    return next(each for each in kind.__mro__[1:] if issubclass(each, PreTrainedModel))
