"""A causal language model as a policy: log-probability and entropy at each response token."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_lora.algos.logprobs import linear_logprobs_entropy, token_entropy, token_logprobs
from dschat_lora.algos.segments import Spans
from dschat_lora.models.causal_lm import LinearHead, LMHeadModel


class Policy(LMHeadModel):
    """Log-probabilities and entropies of given tokens, without ever holding all logits."""

    def __init__(self, model: PreTrainedModel, *, entropy_trains: bool = False) -> None:
        """Wrap ``model``; ``entropy_trains`` gives entropies a gradient, for a second pass."""
        super().__init__(model)
        self.head = PolicyHead(
            model.get_output_embeddings(), model.config.vocab_size, entropy_trains=entropy_trains
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        logit_positions: Tensor,
        target_ids: Tensor,
        temperature: float,
        spans: Spans | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(N,) fp32 log-probabilities and entropies in nats, of logits over ``temperature`` > 0.

        The (B, T) ids are those of a ``Batch``, as are the (N,) ``logit_positions`` in the
        flattened (B T), and ``target_ids``, the tokens that follow there.
        """
        rows = input_ids, position_ids, segment_ids, None, spans
        if self.full_logits:
            logits = self.logits(logit_positions, *rows).float() / temperature
            return token_logprobs(logits, target_ids), token_entropy(logits)
        hidden = self.backbone(*rows)
        return self.head(hidden.flatten(0, 1)[logit_positions], target_ids, temperature)


class PolicyHead(LinearHead):
    """The output embedding as log-probabilities and entropies, chunk by chunk."""

    def __init__(self, head: nn.Module, vocab_size: int, *, entropy_trains: bool) -> None:
        super().__init__(head, vocab_size)
        self.entropy_trains = entropy_trains

    def forward(  # type: ignore[override]
        self, hidden: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Both (N,) of (N,) tokens after (N, H) hidden states."""
        if self.plain and not (self.weight.requires_grad or self.entropy_trains):
            bias = self.bias
            if temperature != 1:
                hidden = hidden / temperature
                bias = None if bias is None else bias / temperature
            hidden = self._shared(hidden)
            return linear_logprobs_entropy(hidden, self.weight, bias, tokens, part=self.part)
        parts = self._by_chunks(self._both, hidden, tokens, temperature)
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _both(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self._logits(hidden).float() / temperature
        return token_logprobs(logits, tokens), token_entropy(logits)
