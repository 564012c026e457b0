"""Actor, reference, critic and reward model, on one frozen base where possible."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.models.build import (
    AdaptedModel,
    build_causal_lm,
    build_reward_model,
    resolve_base_bits,
)
from dschat_lora.models.causal_lm import Policy
from dschat_lora.models.loading import (
    PreTrainedModel,
    Tokenizer,
    load_causal_lm,
    load_config,
    share_parameters,
)
from dschat_lora.models.reward_model import RewardModel, load_reward_model, zero_head_
from dschat_lora.models.source import ModelSource
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.inputs import Sources
from dschat_lora.rl.role_config import RoleConfig, option_errors_for


@dataclass(frozen=True)
class Roles:
    """The models of a run. Those on one base share its parameters."""

    actor: AdaptedModel  # trains
    reference: AdaptedModel  # the actor as it was, frozen
    critic: AdaptedModel | None  # trains; None where responses are compared instead
    reward: AdaptedModel | None  # frozen; None where a function alone scores
    rollout: PreTrainedModel  # the actor's parameters without an engine's hooks, for generation

    @property
    def models(self) -> dict[str, AdaptedModel]:
        """All roles of the run, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rollout"}
        return {name: model for name, model in found.items() if model is not None}

    @property
    def trained(self) -> dict[str, AdaptedModel]:
        """The roles that train, by name."""
        return {name: m for name, m in self.models.items() if name in ("actor", "critic")}

    def whole(self) -> nn.Module:
        """All of them as one module, whose ``parameters()`` gives shared tensors once."""
        return nn.ModuleList([*(m.model for m in self.models.values()), self.rollout])


def build_roles(
    config: RlhfConfig,
    sources: Sources,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    meta: bool,
    group: TensorGroup | None = None,
) -> Roles:
    """Load each base once and build the roles on it.

    A base whose weights train serves one role alone; the frozen role of that base is a copy.
    ``dtype`` is that of the base weights, and ``meta`` makes only the shapes, on the meta device.
    Every model is divided among the ranks of ``group``; without one they are whole.

    Raises:
        ValueError: if something cannot be loaded or does not fit, naming the role's option.
    """
    build = _Builder(config, tokenizer, dtype=dtype, meta=meta, group=group)
    with option_errors_for("actor"):
        base = build.language_base(sources.actor) if build.is_frozen("actor") else None
        actor = build.policy(sources.actor, base=base)
        reference = frozen(build.policy(sources.actor, base=base, trained=False))
    critic = reward = None
    with option_errors_for("critic" if sources.critic is not None else "actor"):
        start, new_head = sources.critic or sources.actor, sources.critic is None
        has_adapter = start.adapter is not None or new_head
        alike = build.shares_bits(start, sources.actor) and start.base == sources.actor.base
        if not (base is not None and has_adapter and alike):
            frozen_base = build.is_frozen("critic")
            base = build.scored_base(start, new_head=new_head) if frozen_base else None
        elif not build.is_frozen("critic"):
            base = None
        if sources.critic is not None:
            reward = frozen(build.scorer(start, base=base, trained=False))
        if config.has_critic:
            critic = build.scorer(start, base=base, new_head=new_head)
            if new_head:
                zero_head_(critic.model)
    return Roles(actor, reference, critic, reward, share_parameters(actor.model))


@dataclass(frozen=True)
class _Builder:
    config: RlhfConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    meta: bool
    group: TensorGroup | None

    def is_frozen(self, role: str) -> bool:
        """Whether the base of a role never changes."""
        options: RoleConfig = getattr(self.config, role)
        return options.lora_dim > 0 and self.config.classic.only_optimize_lora

    def shares_bits(self, one: ModelSource, other: ModelSource) -> bool:
        """Whether the bases of two models are held in as many bits."""
        asked = self.config.load.base_bits
        return (asked or one.base_bits or 16) == (asked or other.base_bits or 16)

    def language_base(self, source: ModelSource) -> PreTrainedModel:
        model_config = resolve_base_bits(self.config.actor.model(self.config.load), source)
        return load_causal_lm(
            source.base,
            load_config(source.base, model_config),
            model_config,
            dtype=self.dtype,
            meta=self.meta,
            group=self.group,
        ).requires_grad_(False)

    def scored_base(self, source: ModelSource, *, new_head: bool) -> PreTrainedModel:
        model_config = resolve_base_bits(self.config.critic.model(self.config.load), source)
        return load_reward_model(
            source.base,
            load_config(source.base, model_config),
            model_config,
            dtype=self.dtype,
            # An adapter's head replaces this one.
            seed=self.config.run.seed if new_head or source.adapter is not None else None,
            meta=self.meta,
            group=self.group,
        ).requires_grad_(False)

    def policy(
        self, source: ModelSource, *, base: PreTrainedModel | None, trained: bool = True
    ) -> AdaptedModel:
        options = self.config.actor
        return build_causal_lm(
            source,
            self.tokenizer,
            options.model(self.config.load),
            self._lora(options) if trained else LoraConfig(),
            base=base,
            dtype=self.dtype,
            seed=self.config.run.seed,
            meta=self.meta,
            group=self.group,
        )

    def scorer(
        self,
        source: ModelSource,
        *,
        base: PreTrainedModel | None,
        trained: bool = True,
        new_head: bool = False,
    ) -> AdaptedModel:
        options = self.config.critic
        return build_reward_model(
            source,
            self.tokenizer,
            options.model(self.config.load),
            self._lora(options) if trained else LoraConfig(),
            base=base,
            new_head=new_head,
            dtype=self.dtype,
            seed=self.config.run.seed,
            meta=self.meta,
            group=self.group,
        )

    def _lora(self, options: RoleConfig) -> LoraConfig:
        return options.lora(self.config.classic.only_optimize_lora)


def frozen(adapted: AdaptedModel) -> AdaptedModel:
    """The model with all parameters frozen, in evaluation mode."""
    adapted.model.requires_grad_(False)
    return replace(adapted, model=adapted.model.eval())


class Network(nn.Module):
    """The roles of one engine; each call names the role to run."""

    roles: Mapping[str, Policy | RewardModel]

    def __init__(self, **roles: Policy | RewardModel) -> None:
        super().__init__()
        self.roles = nn.ModuleDict(roles)  # type: ignore[assignment]

    def policy(self, role: str) -> Policy:
        """The actor or the reference."""
        policy = self.roles[role]
        assert isinstance(policy, Policy)
        return policy

    def forward(self, role: str, *args: object) -> object:
        """What the role returns."""
        return self.roles[role](*args)
