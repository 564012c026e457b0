"""Exponential moving average of a model's trained parameters, in fp32."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dschat_lora.engine.build import StepOutcome
from dschat_lora.engine.distributed import broadcast_, rank
from dschat_lora.engine.zero import is_sharded, own_shard, whole_of_parts, whole_of_shards
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.parallel import own_part


class Step(Protocol):
    """What optimizer steps did, by role."""

    @property
    def outcomes(self) -> Mapping[str, StepOutcome]:
        """Of those roles that took one."""


class MovingAverage:
    """``average <- decay * average + (1 - decay) * weight`` after each step that changed weights.

    Every rank averages what it holds: its shards at ZeRO 3, its part of a divided tensor, else
    the whole. Call methods on every rank.
    """

    name = "actor_ema"

    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: float) -> None:
        """Begin at the present weights."""
        self._parameters: dict[str, Any] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self._decay = decay
        averages = [w.to(torch.float32, copy=True) for w in self._weights()]
        self._averages = dict(zip(self._parameters, averages, strict=True))

    def after_step(self, result: Step) -> None:
        """Average in the weights after a step that changed those of the actor."""
        if "actor" in result.outcomes and not result.outcomes["actor"].skipped:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Average in the weights after a step."""
        weights = [w.float() for w in self._weights()]
        torch._foreach_lerp_([*self._averages.values()], weights, 1 - self._decay)

    def facts(self) -> dict[str, Any]:
        """State besides tensors: none."""
        return {}

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole fp32 average on CPU) one after another on rank 0; nothing on the others."""
        for name, parameter in self._parameters.items():
            average = self._averages[name]
            part = whole_of_shards(parameter, average) if is_sharded(parameter) else average
            whole = whole_of_parts(parameter, part)
            if rank() == 0:
                yield name, whole.to("cpu", copy=True)

    @torch.no_grad()
    def load(self, facts: dict[str, Any], read: Callable[[str], Tensor]) -> None:
        """Restore what was saved; ``read`` gives the tensor of a name, on rank 0 alone."""
        for name, parameter in self._parameters.items():
            average = self._averages[name]
            whole = torch.empty(full_shape(parameter), device=average.device)
            if rank() == 0:
                whole.copy_(read(name))
            part = own_part(parameter, broadcast_(whole))
            average.copy_(own_shard(parameter, part) if is_sharded(parameter) else part)

    def _weights(self) -> list[Tensor]:
        return [p.ds_tensor.data if is_sharded(p) else p.data for p in self._parameters.values()]
