"""The roles of one engine as one module."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dschat_lora.models.causal_lm import DivergenceHead, Policy
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.rl.response.batch import ResponseBatch


class Network(nn.Module):
    """The roles of one engine; each call names the role to run."""

    roles: Mapping[str, Policy | RewardModel]

    def __init__(
        self, *, divergence: DivergenceHead | None = None, **roles: Policy | RewardModel
    ) -> None:
        """Hold the roles, and the head that compares actor and reference where one is wanted."""
        super().__init__()
        self.roles = nn.ModuleDict(roles)  # type: ignore[assignment]
        self.divergence = divergence

    def policy(self, role: str) -> Policy:
        """The actor or the reference."""
        policy = self.roles[role]
        assert isinstance(policy, Policy)
        return policy

    def forward(self, role: str, *args: Any) -> object:
        """What the role returns; of ``divergence``, :meth:`compare`."""
        return self.compare(*args) if role == "divergence" else self.roles[role](*args)

    def compare(
        self, own: ResponseBatch, read: ResponseBatch, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What :class:`~dschat_lora.models.causal_lm.DivergenceHead` returns of a batch.

        ``own`` is the batch as the actor reads it, ``read`` as the reference does.
        """
        assert self.divergence is not None
        actor, reference = self.policy("actor"), self.policy("reference")
        with torch.no_grad():
            other = reference.before_head(read.logit_positions, *read.inputs, None, read.spans)
        states = actor.before_head(own.logit_positions, *own.inputs, None, own.spans)
        return self.divergence(
            states,
            other,
            own.target_ids,
            temperature,
            are_logits=(actor.full_logits, reference.full_logits),
        )
