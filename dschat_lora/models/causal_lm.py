"""A causal language model in training: loss, log-probabilities, entropies, without full logits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dschat_lora.algos.logprobs import (
    MAX_CHUNK_LOGITS,
    GroupSums,
    VocabularyPart,
    head_logits,
    linear_cross_entropy,
    linear_logprobs,
    linear_logprobs_entropy,
    token_entropy,
    token_logprobs,
)
from dschat_lora.algos.segments import Spans
from dschat_lora.lora.model import ACTIVE_EXPERTS
from dschat_lora.lora.parallel import ParallelLinear, Shard, Split
from dschat_lora.models.architecture_checks import check_architecture, head_is_linear
from dschat_lora.models.backbone import BackboneModel

T = TypeVar("T")
Rows = tuple[Tensor, Tensor, Tensor, Tensor | None, Spans | None]  # as for the backbone
# Of router logits, numbers of experts and of those that a token has, and the mask of padding.
Balancing = Callable[[tuple[Tensor, ...], int, int, Tensor | None], Tensor]
_BALANCE = "load_balancing_loss_func"  # of a module of transformers that has experts


class LMHeadModel(BackboneModel):
    """A causal language model whose head is run apart from its backbone.

    ``full_logits`` takes the model's own logits instead, for architectures that transform them
    after the head.
    """

    full_logits = False

    def logits(self, logit_positions: Tensor, *rows: *Rows) -> Tensor:
        """(N, V) of the model's own head; the rows are as for the backbone."""
        inputs, count, places = self.backbone.prepare(*rows)
        with fp32_logits(self.model):
            logits = self.model(**inputs).logits[:, :count].flatten(0, 1)
        if places is not None:
            logit_positions = torch.searchsorted(places, logit_positions)
        return logits[logit_positions]

    def before_head(self, logit_positions: Tensor, *rows: *Rows) -> Tensor:
        """(N, H) hidden states that the head reads, or (N, V) where ``full_logits`` are taken."""
        if self.full_logits:
            return self.logits(logit_positions, *rows)
        hidden: Tensor = self.backbone(*rows).flatten(0, 1)[logit_positions]
        return hidden


def balancing_loss(model: PreTrainedModel, coefficient: float) -> Balancing | None:
    """The load-balancing loss that transformers has for the type of ``model``; None without one.

    Raises:
        ValueError: if it is to have a ``coefficient``, and there is none.
    """
    loss: Balancing | None = getattr(sys.modules[type(model).__module__], _BALANCE, None)
    if coefficient and loss is None:
        raise ValueError(
            f"--router_aux_loss_coef {coefficient:g}: {type(model).__name__} has no "
            "load-balancing loss in transformers; drop the option"
        )
    return loss


class CausalLMLoss(LMHeadModel):
    """A causal language model that returns the summed loss of a batch.

    Hidden states of supervised positions alone reach the output head, a chunk at a time. Labels are
    smoothed in training alone, where ``router_aux_loss_coef`` times the load-balancing loss of the
    model's experts is added for each supervised token, and NEFTune's noise to embeddings.

    Raises:
        ValueError: if the model has no such loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        label_smoothing: float = 0.0,
        router_aux_loss_coef: float = 0.0,
        neftune_noise_alpha: float = 0.0,
    ) -> None:
        super().__init__(model)
        self.noise_alpha = neftune_noise_alpha
        if neftune_noise_alpha:
            model.get_input_embeddings().register_forward_hook(self.backbone.add_noise)
        self.label_smoothing, self.router_aux_loss_coef = label_smoothing, router_aux_loss_coef
        self._balance = balancing_loss(model, router_aux_loss_coef)
        self.head = LinearHead(model.get_output_embeddings(), model.config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        logit_positions: Tensor,
        target_ids: Tensor,
        spans: Spans | None = None,
        groups: GroupSums | None = None,
    ) -> Tensor:
        """Summed cross-entropy, fp32 scalar in nats; the other arguments as in ``Batch``.

        ``groups`` of targets get their own sums.
        """
        smoothing = self.label_smoothing if self.training else 0.0
        self.backbone.noise_alpha = self.noise_alpha if self.training else 0.0
        rows = input_ids, position_ids, segment_ids, None, spans
        if self.full_logits:
            logits = self.logits(logit_positions, *rows)
            if groups is not None:
                groups.add(slice(None), token_logprobs(logits.detach(), target_ids))
            return summed_cross_entropy(logits, target_ids, smoothing)
        self.backbone.records_routers = balances = self.training and self.router_aux_loss_coef > 0
        hidden = self.backbone(*rows)
        # Without a supervised position the graph still spans the model: every rank and every
        # micro-batch must run the same backward hooks.
        supervised = hidden.flatten(0, 1)[logit_positions]
        loss: Tensor = self.head(supervised, target_ids, smoothing, groups)
        loss = loss + 0.0 * hidden[:, 0].float().sum()
        if not balances or self._balance is None:
            return loss
        scores, config = self.backbone.router_logits, self.model.config
        has_padding = len(scores[0]) == segment_ids.numel()  # else it was not computed
        mask = (segment_ids > 0).long() if has_padding else None
        active = next(n for name in ACTIVE_EXPERTS if (n := getattr(config, name, None)))
        balance = self._balance(scores, scores[0].shape[-1], active, mask)
        return loss + len(target_ids) * (self.router_aux_loss_coef * balance)


class CausalLMLogprobs(LMHeadModel):
    """A causal language model that returns log-probabilities of given tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head = LogprobHead(model.get_output_embeddings(), model.config.vocab_size)

    def fit_to_architecture(self, vocab_size: int, device: torch.device) -> None:
        """Have masks and logits made as this architecture needs them; call on every rank."""
        report = check_architecture(self.backbone, vocab_size=vocab_size, device=device)
        self.backbone.own_mask |= not report.packing_is_exact
        linear = head_is_linear(self.model, vocab_size=vocab_size, device=device)
        self.full_logits |= not linear

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor,
        logit_positions: Tensor,
        target_ids: Tensor,
        spans: Spans | None = None,
    ) -> Tensor:
        """(N,) fp32 log-probabilities in nats; all arguments as in ``PairBatch``.

        Without a token to predict the graph still spans the model.
        """
        rows = input_ids, position_ids, segment_ids, branch_ids, spans
        if self.full_logits:
            return token_logprobs(self.logits(logit_positions, *rows), target_ids)
        hidden = self.backbone(*rows)
        return self.head(hidden.flatten(0, 1)[logit_positions], target_ids)


class Policy(LMHeadModel):
    """Log-probabilities and entropies of given tokens, without ever holding all logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        entropy_trains: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """Wrap ``model``.

        Args:
            model: whose logits they are of.
            entropy_trains: gives entropies a gradient, for a second pass.
            vocab_size: tokens that softmaxes are over, the first ones; None: all of the model's.
        """
        super().__init__(model)
        self.head = PolicyHead(
            model.get_output_embeddings(),
            model.config.vocab_size,
            entropy_trains=entropy_trains,
            of=vocab_size,
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
            return self.head.of_logits(self.logits(logit_positions, *rows), target_ids, temperature)
        hidden = self.backbone(*rows)
        return self.head(hidden.flatten(0, 1)[logit_positions], target_ids, temperature)


class LinearHead(nn.Module):
    """The output embedding, applied and reduced chunk by chunk.

    A plain linear layer lends its parameters, so that ZeRO 3 gathers them for this module; any
    other module (an adapted or separately trained head) is called under checkpointing. Where a
    plain head is divided among ranks, none forms more than its own logits.
    """

    def __init__(self, head: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.rows = max(1, MAX_CHUNK_LOGITS // vocab_size)
        self.plain = is_plain(head)
        self.split: Split | None = None
        self.part: VocabularyPart | None = None
        if is_plain(head):
            self.weight: Tensor = head.weight
            self.bias: Tensor | None = head.bias
        else:
            self.module = head
        if isinstance(head, ParallelLinear):
            self.split, self.part = head.split, vocabulary_part(head)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        groups: GroupSums | None = None,
    ) -> Tensor:
        """Summed cross-entropy of (N, H) hidden states against (N,) targets."""
        if self.plain:
            operands = self._shared(hidden), self.weight, self.bias, targets
            return linear_cross_entropy(
                *operands, label_smoothing=label_smoothing, part=self.part, groups=groups
            )

        def losses(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
            loss = summed_cross_entropy(logits, tokens, label_smoothing)
            return loss, None if groups is None else token_logprobs(logits.detach(), tokens)

        total, start = hidden.new_zeros((), dtype=torch.float32), 0
        for loss, logprobs in self._by_chunks(losses, hidden, targets):
            total = total + loss
            if groups is not None and logprobs is not None:
                groups.add(slice(start, start + len(logprobs)), logprobs)
                start += len(logprobs)
        return total

    def _by_chunks(
        self, function: Callable[[Tensor, Tensor], T], hidden: Tensor, tokens: Tensor
    ) -> Iterator[T]:
        """``function(logits, tokens)`` of chunks, whose logits are formed again for gradients."""

        def of_chunk(hidden: Tensor, tokens: Tensor) -> T:
            if not self.plain:
                return function(self.module(hidden), tokens)
            logits = whole_logits(hidden, self.weight, self.bias, self.split)
            return function(logits, tokens)

        chunks = zip(torch.split(hidden, self.rows), torch.split(tokens, self.rows), strict=True)
        for chunk in chunks:
            yield checkpoint(of_chunk, *chunk, use_reentrant=False)

    def _shared(self, hidden: Tensor) -> Tensor:
        """Hidden states of whose gradient each rank forms a part, if the head is divided."""
        return hidden if self.split is None else self.split.group.copy(hidden)


class LogprobHead(LinearHead):
    """The output embedding as log-probabilities of given tokens, chunk by chunk."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """(N,) fp32 log-probabilities of (N,) tokens after (N, H) hidden states, in nats."""
        if self.plain and not self.weight.requires_grad:
            hidden = self._shared(hidden)
            return linear_logprobs(hidden, self.weight, self.bias, tokens, part=self.part)
        # A head that trains needs what the loss makes of each value.
        return torch.cat(list(self._by_chunks(token_logprobs, hidden, tokens)))


class PolicyHead(LinearHead):
    """The output embedding as log-probabilities and entropies, chunk by chunk."""

    def __init__(
        self, head: nn.Module, vocab_size: int, *, entropy_trains: bool, of: int | None = None
    ) -> None:
        """Take softmaxes over the first ``of`` tokens of ``vocab_size``; None: over all."""
        super().__init__(head, vocab_size)
        self.entropy_trains = entropy_trains
        self.of = None if of == vocab_size else of

    def forward(  # type: ignore[override]
        self, hidden: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Both (N,) of (N,) tokens after (N, H) hidden states."""
        trains = self.plain and (self.weight.requires_grad or self.entropy_trains)
        if self.plain and self.of is None and not trains:
            bias = self.bias
            if temperature != 1:
                hidden = hidden / temperature
                bias = None if bias is None else bias / temperature
            hidden = self._shared(hidden)
            return linear_logprobs_entropy(hidden, self.weight, bias, tokens, part=self.part)

        of_chunk = partial(self.of_logits, temperature=temperature)
        logprobs, entropies = zip(*self._by_chunks(of_chunk, hidden, tokens), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def of_logits(
        self, logits: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Both of (N, V) logits."""
        logits = logits[:, : self.of].float() / temperature
        return token_logprobs(logits, tokens), token_entropy(logits)


def is_plain(head: nn.Module) -> TypeGuard[nn.Linear | ParallelLinear]:
    """Whether logits are a product with the head's own weight, which is not called for it."""
    return type(head) in (nn.Linear, ParallelLinear)


@contextmanager
def fp32_logits(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model's own head computes 16-bit weights by :func:`head_logits`, as losses do.

    What the model does to its logits is then done in fp32. A head that losses call, adapted or
    quantised, stays as it is.
    """
    head = model.get_output_embeddings()
    if not is_plain(head) or head.weight.dtype.itemsize > 2:
        yield
        return
    split = head.split if isinstance(head, ParallelLinear) else None
    module: nn.Module = head
    before = vars(module).get("forward")
    module.forward = lambda x: whole_logits(x, head.weight, head.bias, split)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, split: Split | None
) -> Tensor:
    """(..., V) logits of (..., H) hidden states, of a divided head all of them on every rank."""

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return head_logits(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))

    return product(hidden, bias) if split is None else split.around(hidden, product, bias)


def summed_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """fp32 scalar in nats, of (N, V) logits against (N,) targets."""
    return nn.functional.cross_entropy(
        logits.float(), targets, reduction="sum", label_smoothing=label_smoothing
    )


def vocabulary_part(head: ParallelLinear) -> VocabularyPart:
    """What this rank holds of a divided output head."""
    shard = Shard(head.split.group, 0, head.split.blocks)
    ((start, stop),) = shard.ranges()
    most = max(b - a for rank in range(shard.group.size) for a, b in shard.ranges(rank))
    return VocabularyPart(start, stop, most, shard.group.sum, shard.group.max)
