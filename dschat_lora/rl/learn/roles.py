"""Actor, reference, critic and reward model, on one frozen base where possible."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.media import MediaReader
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import device
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.models.build import (
    AdaptedModel,
    as_trained,
    attach_media,
    build_causal_lm,
    build_reward_model,
)
from dschat_lora.models.loading import (
    PreTrainedModel,
    Tokenizer,
    load_causal_lm,
    load_config,
    share_parameters,
)
from dschat_lora.models.reward_model import load_reward_model, zero_head_
from dschat_lora.models.source import ModelSource
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.role_config import option_errors_for
from dschat_lora.runtime.setup import shard_model
from dschat_lora.runtime.validation import Sources


@dataclass(frozen=True)
class Roles:
    """The models of a run. Those on one base share its parameters."""

    actor: AdaptedModel  # trains
    reference: AdaptedModel | None  # frozen; None where something else gives its figures
    critic: AdaptedModel | None  # trains; None where responses are compared instead
    reward: AdaptedModel | None  # frozen; None where a function alone scores
    rollout: PreTrainedModel  # the actor's parameters without an engine's hooks, for generation

    @property
    def models(self) -> dict[str, AdaptedModel]:
        """All roles of the run, by name."""
        names = ("actor", "reference", "critic", "reward")
        return {n: model for n in names if (model := getattr(self, n)) is not None}

    @property
    def trained(self) -> dict[str, AdaptedModel]:
        """The roles that train, by name."""
        return {n: model for n, model in self.models.items() if n in ("actor", "critic")}

    def take(self, media: MediaReader | None, sources: Sources) -> None:
        """Have all models take what prompts hold beside text, if they do."""
        for name, each in self.models.items():
            role = "critic" if name in ("critic", "reward") else "actor"
            attach_media(each, media, sources.of(role).base)
        if media is not None:
            media.attach(self.rollout, sources.of("actor").base)

    @cached_property
    def shares_base(self) -> bool:
        """Whether actor and critic train on the same base weights."""
        if self.critic is None:
            return False
        actor = {id(p) for p in self.actor.model.parameters()}
        return any(id(p) in actor for p in self.critic.model.parameters())

    def whole(self) -> nn.Module:
        """All of them as one module, whose ``parameters()`` gives shared tensors once."""
        return nn.ModuleList([*(m.model for m in self.models.values()), self.rollout])


@dataclass(frozen=True)
class Models:
    """The roles of a run, where they come from, and how those that train are."""

    sources: Sources
    roles: Roles
    settings: dict[str, EngineSettings]  # of engines, by trained role

    def shard(self) -> None:
        """Shard what is at ZeRO 3, and move what no engine knows; call on every rank.

        Roles on one base can only be sharded together.
        """
        roles, settings = self.roles, self.settings
        models = {name: each.model for name, each in roles.models.items()}
        scorers = nn.ModuleList([models.pop(n) for n in ("critic", "reward") if n in models])
        policies = nn.ModuleList([*models.values(), roles.rollout])
        shared = {id(p) for p in policies.parameters()} & {id(p) for p in scorers.parameters()}
        if shared or "critic" not in settings:
            shard_model(roles.whole(), settings["actor"])
        else:
            shard_model(policies, settings["actor"])
            shard_model(scorers, settings["critic"])
        # Such as the rotary tables of the rollout's modules.
        roles.whole().to(device())


def build_roles(
    config: RlhfConfig,
    sources: Sources,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    meta: bool,
    group: TensorGroup | None = None,
) -> Roles:
    """Load each base once and build the roles on it; one whose weights train serves one role.

    ``dtype`` is that of the base weights, and ``meta`` makes only the shapes, on the meta device.
    Models are divided among the ranks of ``group``; without one they are whole.

    Raises:
        ValueError: if something cannot be loaded or does not fit, naming the role's option.
    """
    policy, start = sources.of("actor"), sources.of("critic")
    build = _Builder(config, tokenizer, {"dtype": dtype, "meta": meta, "group": group})
    with option_errors_for("actor"):
        base = build.base(policy) if build.is_frozen("actor") else None
        actor = build.model(policy, base)
    reference, other = None, config.reference
    if other is not None and (own_source := sources.by_role.get(other.role)) is not None:
        with option_errors_for(other.role):
            own = build.base_of(own_source, bits=other.bits)
            of = base if own == build.base_of(policy) else None
            options = other.model(config.load)
            reference = frozen(build.model(own_source, of, trained=False, options=options))
    elif other is None or not other.is_served:
        with option_errors_for("actor"):
            reference = frozen(build.model(policy, base, trained=False))
    critic = reward = None
    new_head = "critic" not in sources.by_role
    with option_errors_for("actor" if new_head else "critic"):
        has_adapter = start.adapter is not None or new_head
        alike = build.base_of(start) == build.base_of(policy)
        if not build.is_frozen("critic"):
            base = None
        elif base is None or not (has_adapter and alike):
            base = build.base(start, scores=True, seeded=has_adapter)  # an adapter has its head
        if not new_head:
            reward = frozen(build.model(start, base, scores=True, trained=False, new_head=False))
        if config.has_critic:
            critic = build.model(start, base, scores=True, new_head=new_head)
            if new_head:
                zero_head_(critic.model)
    rollout = share_parameters(actor.model)
    return Roles(actor, reference, critic, reward, rollout)


@dataclass(frozen=True)
class _Builder:
    config: RlhfConfig
    tokenizer: Tokenizer
    how: Mapping[str, Any]  # dtype, meta, group

    def is_frozen(self, role: str) -> bool:
        """Whether the base of a role never changes."""
        lora = self.config.roles[role].lora
        return lora.lora_dim > 0 and lora.only_optimize_lora

    def base_of(self, source: ModelSource, *, bits: int | None = None) -> tuple[object, ...]:
        """What models that can share a base agree in; ``bits`` are those asked for."""
        held = bits or self.config.load.base_bits or source.base_bits or 16
        return source.base, source.rope_scaling, held

    def base(
        self, source: ModelSource, *, scores: bool = False, seeded: bool = False
    ) -> PreTrainedModel:
        """A frozen base, of actor or critic; ``seeded``: its head is a new one."""
        own = self.config.roles["critic" if scores else "actor"]
        options = as_trained(own.model, source)
        seed: dict[str, Any] = {"seed": self.config.run.seed if seeded else None} if scores else {}
        load = load_reward_model if scores else load_causal_lm
        fields = load_config(source.base, options)
        return load(source.base, fields, options, **seed, **self.how).requires_grad_(False)

    def model(
        self,
        source: ModelSource,
        base: PreTrainedModel | None,
        *,
        scores: bool = False,
        trained: bool = True,
        options: ModelConfig | None = None,
        **how: bool,
    ) -> AdaptedModel:
        """The actor or, with ``scores``, the critic, or a frozen model in such a role."""
        own = self.config.roles["critic" if scores else "actor"]
        lora = own.lora if trained else LoraConfig()
        more: dict[str, Any] = {**how, **self.how, "base": base, "seed": self.config.run.seed}
        build = build_reward_model if scores else build_causal_lm
        return build(source, self.tokenizer, options or own.model, lora, **more)


def frozen(adapted: AdaptedModel) -> AdaptedModel:
    """The model with all parameters frozen, in evaluation mode."""
    adapted.model.requires_grad_(False)
    return replace(adapted, model=adapted.model.eval())
