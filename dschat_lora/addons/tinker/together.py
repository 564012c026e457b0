"""Several adapters of one base in one forward and backward pass.

Each sequence is computed by itself, and each adapter's products by themselves, so that on a CPU an
adapter gets the values and gradients of a pass of its own, to the bit. What they share are the
operations in between, whose number counts where there are few tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from dschat_lora.addons.tinker.adapters import (
    Datum,
    TrainedAdapter,
    in_shapes,
    make_batch,
    numbers_on,
)
from dschat_lora.addons.tinker.bases import Base
from dschat_lora.addons.tinker.losses import DatumLoss
from dschat_lora.addons.tinker.processes import agreed
from dschat_lora.addons.tinker.shared import SharedLoraLinear
from dschat_lora.data.batch import batch_to_device
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.targets import expert_names
from dschat_lora.models.blocks import recompute_blocks
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.loading import share_parameters

# Of a pass of several on a CPU: with more, arithmetic takes the time, and caches hold less.
MAX_CPU_TOKENS = 512


@dataclass(frozen=True, eq=False)
class Portion:
    """What one adapter has in a pass of several."""

    adapter: TrainedAdapter
    examples: Sequence[Datum]
    loss: DatumLoss


class SharedBase:
    """The modules of a base under the adapters of the next pass.

    Attributes:
        works: whether such passes can be made; other architectures take one adapter at a time.
    """

    def __init__(self, base: Base) -> None:
        self._layers: dict[str, SharedLoraLinear] = {}
        self.works = not expert_names(base.model)  # whose rows are not those of the batch
        if not self.works:
            return
        self._base, model = base, share_parameters(base.model)
        for name in (*base.attention, *base.others):
            self._layers[name] = SharedLoraLinear(model.get_submodule(name))
            replace_part(model, name, self._layers[name])
        if base.recomputes:
            recompute_blocks(model)
        self._module = CausalLMLogprobs(model)
        # The layers have no parts yet, so that the base's own are tried.
        own = CausalLMLogprobs(base.model)
        own.fit_to_architecture(len(base.tokenizer), base.model.device)
        self._module.backbone.own_mask = own.backbone.own_mask
        self.works = not own.full_logits and own.backbone.skips_padding(base.model.device)

    def __call__(
        self, shares: Sequence[Portion], *, backward: bool, tokens_per_device: int
    ) -> list[tuple[float, list[Tensor]] | ValueError]:
        """What :meth:`TrainedAdapter.forward` gives each of different adapters, or raises.

        Where anything else is raised, gradients of all may be of a part of their examples.
        """
        totals, outputs = agreed(
            lambda: self._own_part(shares, tokens_per_device, backward=backward)
        )
        results: list[tuple[float, list[Tensor]] | ValueError] = []
        for share, total, logprobs in zip(shares, totals, outputs, strict=True):
            try:
                results.append(share.adapter.merged(total, logprobs, backward=backward))
            except ValueError as error:
                results.append(error)
        return results

    def _own_part(
        self, shares: Sequence[Portion], most: int, *, backward: bool
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Losses and log-probabilities of this process's examples; 0 for those of others."""
        device = self._base.model.device
        if device.type == "cpu":
            most = min(most, MAX_CPU_TOKENS)
        totals = [torch.zeros((), dtype=torch.float64, device=device) for _ in shares]
        outputs = [[torch.zeros(each.targets.shape) for each in share.examples] for share in shares]
        self._module.model.train(backward)
        try:
            with torch.set_grad_enabled(backward):
                every = [list(share.adapter.batches(share.examples)) for share in shares]
                for step in zip_longest(*every):
                    pending = [(n, numbers) for n, numbers in enumerate(step) if numbers]
                    for group in _groups(pending, shares, most):
                        self._pass(shares, group, totals, outputs, backward=backward)
        finally:
            self._module.model.eval()
        return totals, outputs

    def _pass(
        self,
        shares: Sequence[Portion],
        group: Sequence[tuple[int, Sequence[int]]],
        totals: Sequence[Tensor],
        outputs: Sequence[list[Tensor]],
        *,
        backward: bool,
    ) -> None:
        """A pass of some examples of some adapters, whose results are put in place."""
        chosen = [[shares[n].examples[k] for k in numbers] for n, numbers in group]
        adapters = [shares[n].adapter for n, _ in group]
        counts = [sum(len(each.tokens) for each in own) for own in chosen]
        modules = [dict(adapter.model.named_modules()) for adapter in adapters]
        for name, shared in self._layers.items():
            layers = [
                module if isinstance(module := own[name], LoraLinear) else None for own in modules
            ]
            shared.parts = list(zip(counts, layers, strict=True))
        examples = [each for own in chosen for each in own]
        batch = batch_to_device(make_batch(examples, self._base.pad_id), totals[0].device)
        ids = batch.input_ids, batch.position_ids, batch.segment_ids, batch.branch_ids
        hidden = self._module.backbone(*ids, batch.spans)
        hidden = hidden.flatten(0, 1)[batch.logit_positions]
        sizes = [sum(each.targets.numel() for each in own) for own in chosen]
        losses = []
        for (n, numbers), adapter, own, states, targets in zip(
            group,
            adapters,
            chosen,
            torch.split(hidden, sizes),
            torch.split(batch.target_ids, sizes),
            strict=True,
        ):
            logprobs = in_shapes(adapter.head(states, targets), [each.targets for each in own])
            losses.append(shares[n].loss(logprobs, numbers_on(states.device, own)))
            totals[n].add_(losses[-1].detach())
            for k, values in zip(numbers, logprobs, strict=True):
                outputs[n][k] = values.detach().float().cpu()
        if backward:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def _groups(
    pending: Sequence[tuple[int, Sequence[int]]], shares: Sequence[Portion], most: int
) -> list[list[tuple[int, Sequence[int]]]]:
    """Micro-batches of several adapters that fit into one pass."""
    groups: list[list[tuple[int, Sequence[int]]]] = [[]]
    tokens = 0
    for n, numbers in pending:
        own = sum(len(shares[n].examples[k].tokens) for k in numbers)
        if groups[-1] and tokens + own > most:
            groups.append([])
            tokens = 0
        groups[-1].append((n, numbers))
        tokens += own
    return groups
