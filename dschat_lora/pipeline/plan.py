"""Memory and time of a stage before anything is loaded: models on the meta device, estimated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dschat_lora.algos.segments import causal_pairs
from dschat_lora.config.groups import is_on
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import value_shape
from dschat_lora.models.build import AdaptedModel, build_causal_lm, build_reward_model
from dschat_lora.models.loading import Tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.perf.cards import Card
from dschat_lora.perf.flops import Flops, forward_flops, step_flops
from dschat_lora.perf.memory import MemoryEstimate, parameter_bytes
from dschat_lora.perf.peak import tabled_peak
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.pipeline.stand_ins import as_planned
from dschat_lora.rl.batch import Response
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.inputs import Sources, find_sources
from dschat_lora.rl.memory import memory_plan, trained_models
from dschat_lora.rl.roles import Roles, build_roles
from dschat_lora.rl.setup import role_settings
from dschat_lora.rl.throughput import FlopCounter
from dschat_lora.runtime.memory import MemoryPlan, TrainedModel, plan_memory, trained_model
from dschat_lora.runtime.setup import engine_settings, trained_elements

# Share of a card's dense peak that training is taken to reach, and of its memory bandwidth that
# decoding is: round figures, which long rows of large models exceed.
EFFICIENCY = 0.4
BANDWIDTH_SHARE = 0.5
TRAINING, GENERATION = "training", "generation"
_ADAPTER_PARTS = ("lora_", ".trained.", "trained_bias")


@dataclass(frozen=True)
class RoleMemory:
    """Bytes on one device that a model takes, by what they hold; shared weights count once."""

    weights: int
    adapters: int
    gradients: int = 0
    moments: int = 0  # AdamW's, and fp32 copies of 16-bit weights
    activations: int = 0
    logits: int = 0  # a chunk of them, and the gradient of the hidden states
    gathered: int = 0  # whole weights at ZeRO 3
    host: int = 0  # offloaded to host memory, for this device


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device: by role, and the most in each phase."""

    roles: dict[str, RoleMemory]
    phases: dict[str, int]
    cache: int = 0  # keys and values of decoding, and weights copied for it

    @property
    def peak(self) -> int:
        """The most at a time."""
        return max(self.phases.values())


@dataclass(frozen=True)
class StepTime:
    """Work of one optimizer step of supervised training, or of one iteration of step 3."""

    tokens: int  # over all processes
    flops: float  # of one process
    decode_bytes: float  # that one process reads while it decodes

    def seconds(self, card: Card) -> float | None:
        """Its time on a card; None where the card's peak is not known."""
        peak = tabled_peak(card.name, torch.bfloat16) or tabled_peak(card.name, torch.float16)
        if peak is None or card.bandwidth is None:
            return None
        decoding = self.decode_bytes / (BANDWIDTH_SHARE * card.bandwidth)
        return self.flops / (EFFICIENCY * peak * 1e12) + decoding


class NoTokenizer:
    """Stands where only a vocabulary's size is looked at, which is the model's."""

    pad_token_id, eos_token_id = 1, 2

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class StagePlan:
    """A stage as its checks resolved it, with its models on the meta device."""

    config: Any
    models: AdaptedModel | Roles
    # phases by config, of these models
    known: dict[Any, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)

    def changed(self, config: object) -> "StagePlan":
        """The same models at other settings, which do not change what they are made of."""
        return replace(self, config=config)

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """The models that train, by role."""
        if isinstance(self.models, Roles):
            return trained_models(self.config, self.models, self.settings)
        settings = self.settings["model"]
        return {"model": trained_model(self.models, self.config, settings)}

    @property
    def settings(self) -> dict[str, EngineSettings]:
        """How the engine of each trained role is built."""
        config = self.config
        if isinstance(config, RlhfConfig):
            return role_settings(config)
        return {
            "model": engine_settings(
                config,
                dtype=config.model.dtype,
                zero_stage=config.parallel.zero_stage,
                micro_batch_size=config.batch.per_device_train_batch_size,
            )
        }

    @property
    def phases(self) -> dict[str, int]:
        """The most bytes on one device in each phase; see :attr:`memory`."""
        if self.config not in self.known:
            plan = self._memory_plan()
            self.known[self.config] = {TRAINING: plan.updating}
            if isinstance(self.models, Roles):
                decoding = plan.weights + plan.training + plan.cache
                self.known[self.config][GENERATION] = decoding
        return self.known[self.config]

    @property
    def memory(self) -> StageMemory:
        """Bytes on one device.

        Raises:
            ValueError: for an architecture that is not understood.
        """
        estimates = {name: _estimate(each) for name, each in self.trained.items()}
        models = (
            {"model": self.models} if isinstance(self.models, AdaptedModel) else self.models.models
        )
        roles = _roles({n: m.model for n, m in models.items()}, estimates, self.settings)
        return StageMemory(roles, self.phases, self._memory_plan().cache)

    def _memory_plan(self) -> MemoryPlan:
        if isinstance(self.models, Roles):
            plan = memory_plan(self.config, self.models, self.settings)
        else:
            plan = plan_memory(list(self.trained.values()))
        if plan is None:
            for each in self.trained.values():
                describe(each.model)  # says what is not understood
        assert plan is not None
        return plan

    @property
    def parameters(self) -> tuple[int, int]:
        """(all, trained) numbers, each shared one once."""
        models = self.models
        whole = models.whole() if isinstance(models, Roles) else models.model
        trained = models.trained.values() if isinstance(models, Roles) else [models]
        total = sum((value_shape(p) or p.shape).numel() for p in whole.parameters())
        return total, sum(trained_elements(each.model) for each in trained)

    @property
    def time(self) -> StepTime:
        """Work of a step or iteration whose rows are all full, and all their tokens trained on."""
        config = self.config
        if isinstance(self.models, Roles):
            return _iteration_time(config, self.models)
        return _step_time(config, self.trained["model"])


def build_plan(config: Any, home: Path) -> StagePlan:
    """The plan of a checked config, whose placeholders lie in ``home``.

    Of a model that is divided among tensor-parallel ranks the first one's part is built.
    """
    size = config.parallel.tensor_parallel_size
    group = None
    if size > 1:
        no_processes = cast(torch.distributed.ProcessGroup, None)
        group = TensorGroup(
            no_processes, 0, size, sequence_parallel=config.parallel.sequence_parallel
        )
    if isinstance(config, RlhfConfig):
        return StagePlan(config, _build_roles(config, home, group))
    return StagePlan(config, _build_model(config, home, group))


def _build_model(config: SupervisedConfig, home: Path, group: TensorGroup | None) -> AdaptedModel:
    build = build_reward_model if isinstance(config, RewardStageConfig) else build_causal_lm
    return build(
        as_planned(find_model(config.model.model_name_or_path), home),
        cast(Tokenizer, NoTokenizer()),
        config.model,
        config.lora,
        dtype=_dtype(config.model.dtype),
        seed=config.run.seed,
        meta=True,
        group=group,
    )


def _build_roles(config: RlhfConfig, home: Path, group: TensorGroup | None) -> Roles:
    found = find_sources(config)
    critic = None if found.critic is None else as_planned(found.critic, home)
    return build_roles(
        config,
        Sources(as_planned(found.actor, home), critic),
        cast(Tokenizer, NoTokenizer()),
        dtype=_dtype(config.load.dtype),
        meta=True,
        group=group,
    )


def _dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16)


def _estimate(trained: TrainedModel) -> MemoryEstimate:
    return trained.estimate(
        rows=trained.rows,
        length=trained.length,
        gradient_checkpointing=trained.recomputes,
        offload_activations=trained.offloads,
        zero_stage=trained.settings.zero_stage,
    )


def _roles(
    models: Mapping[str, nn.Module],
    estimates: Mapping[str, MemoryEstimate],
    settings: Mapping[str, EngineSettings],
) -> dict[str, RoleMemory]:
    """By role; what is shared belongs to the first that holds it."""
    first = next(iter(settings.values()))
    ranks = data_world_size() if first.zero_stage == 3 else 1
    moves_weights = first.zero_stage == 3 and first.offload
    seen: set[int] = set()

    def held(model: nn.Module, *, adapters: bool) -> int:
        own = ((n, p) for n, p in model.named_parameters() if id(p) not in seen)
        return parameter_bytes(p for n, p in own if _of_adapter(n) == adapters) // ranks

    found = {}
    for name, model in models.items():
        weights, adapters = (held(model, adapters=each) for each in (False, True))
        seen |= {id(p) for p in model.parameters()}
        on_host = weights + adapters if moves_weights else 0
        if moves_weights:
            weights = adapters = 0
        found[name] = RoleMemory(weights, adapters, host=on_host)
        if name in estimates:
            e = estimates[name]
            found[name] = RoleMemory(
                weights,
                adapters,
                gradients=e.gradients,
                moments=e.optimizer,
                activations=e.activations,
                logits=e.loss + e.update,
                gathered=e.gathered,
                host=on_host + _offloaded_moments(model, settings[name]),
            )
    return found


def _offloaded_moments(model: nn.Module, settings: EngineSettings) -> int:
    """Bytes of the host that offloading of AdamW's state takes: mean, square and fp32 copy."""
    if not settings.offload:
        return 0
    return 12 * trained_elements(model) // data_world_size()


def _of_adapter(name: str) -> bool:
    return any(part in name for part in _ADAPTER_PARTS)


def _step_time(config: SupervisedConfig, trained: TrainedModel) -> StepTime:
    sequences = trained.rows * trained.sequences * config.batch.gradient_accumulation_steps
    tokens = sequences * trained.length
    shape, pairs = describe(trained.model), sequences * causal_pairs(trained.length)
    sizes = {"num_tokens": tokens, "num_attended": pairs, "num_targets": tokens}
    flops = step_flops(shape, gradient_checkpointing=trained.recomputes, **sizes)
    if isinstance(config, DpoStageConfig) and config.dpo.has_reference:
        flops += forward_flops(shape, **sizes)
    shares = data_world_size()
    return StepTime(tokens * shares, flops.hardware / config.parallel.tensor_parallel_size, 0.0)


def _iteration_time(config: RlhfConfig, roles: Roles) -> StepTime:
    batch, data = config.batch, config.data
    count = batch.per_device_generation_batch_size * batch.generation_batches
    prompt, answer = (0,) * data.max_prompt_seq_len, (0,) * data.max_answer_seq_len
    responses = [Response(prompt, answer, ended=True, group=0)] * count
    counter = FlopCounter(
        roles,
        checkpointed={n: is_on(getattr(config, n).gradient_checkpointing) for n in roles.trained},
        num_generations=batch.num_generations,
        batch_size=batch.per_device_generation_batch_size,
    )
    counts = StepCounts(
        num_tokens=sum(map(len, responses)),
        num_targets=sum(each.num_actor_tokens for each in responses),
        num_attended=sum(causal_pairs(len(each)) for each in responses),
    )
    work = counter(
        responses,
        passes=config.ppo.ppo_epochs,
        extra_forward=True,
        counts=counts,
        skips_padding=True,
    )
    ranks = config.parallel.tensor_parallel_size
    return StepTime(
        sum(map(len, responses)) * data_world_size(),
        sum(work.flops.values(), Flops()).hardware / ranks,
        work.decode_bytes / ranks,
    )
