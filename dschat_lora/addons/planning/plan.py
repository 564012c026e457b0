"""Memory and time of a stage before anything is loaded: models on the meta device, estimated."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dschat_lora.addons.planning.cards import Card
from dschat_lora.addons.planning.published import as_planned
from dschat_lora.algos.segments import causal_pairs
from dschat_lora.config.groups import LoadConfig, is_on
from dschat_lora.config.options import flatten, with_values
from dschat_lora.config.stages import (
    DpoStageConfig,
    StageConfig,
    SupervisedConfig,
)
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import value_shape
from dschat_lora.lora.names import is_inside
from dschat_lora.models.build import build_causal_lm, build_reward_model
from dschat_lora.models.composite import TextModel, unbuildable_left_out, whole_config
from dschat_lora.models.loading import Tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.perf.cards import tabled_peak
from dschat_lora.perf.launches import (
    EFFICIENCY,
    LAUNCH_SECONDS,
    REPLAY_SECONDS,
    PassSeconds,
    count_launches,
)
from dschat_lora.perf.memory import parameter_bytes
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import Flops, StepCounts, forward_flops, step_flops
from dschat_lora.rl.learn.experience import count_deferred
from dschat_lora.rl.learn.roles import Roles, build_roles
from dschat_lora.rl.loop.memory import memory_plan
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import find_sources
from dschat_lora.rl.response.batch import Minibatch
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.watch.throughput import FlopCounter
from dschat_lora.runtime.graphs import with_graphs
from dschat_lora.runtime.memory import MemoryPlan, TrainedModel, plan_memory
from dschat_lora.runtime.roles import OneRole, engines_of, trained_elements, trained_models
from dschat_lora.runtime.validation import Sources

# Of a card's bandwidth, that decoding reaches beside what its kernels take for themselves: what was
# measured on an H200 and an H100 lies about it on both sides.
BANDWIDTH_SHARE = 0.6
# Of the host for a kernel of decoding without graphs, Python included: a step of OPT-1.3B on an
# H100 took 49 ms.
EAGER_SECONDS = 1.2e-4
Config = SupervisedConfig | RlhfConfig
TRAINING, GENERATION = "training", "generation"
_ADAPTER_PARTS = ("lora_", ".trained.", "trained_bias")


def peak_of(card: Card) -> float | None:
    """Dense TFLOP/s of 16 bits of a card; None where they are not known."""
    return tabled_peak(card.name, torch.bfloat16) or tabled_peak(card.name, torch.float16)


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
class Recorded:
    """Passes of training of one model that CUDA graphs may replay."""

    trained: TrainedModel
    times: int

    def kernels(self, *, fused: bool) -> int:
        """Kernels that are replayed."""
        model, recomputes = self.trained.model, self.trained.recomputes
        return self.times * count_launches(model, fused=fused, recomputes=recomputes).blocks


@dataclass(frozen=True)
class StepTime:
    """Work of one optimizer step of supervised training, or of one iteration of step 3."""

    tokens: int  # over all processes
    flops: float  # of one process
    launches: Mapping[bool, int]  # of one process but for decoding, by whether they are fused
    fused: bool = True  # --fused_kernels
    generated: int = 0  # tokens, over all processes
    decode_bytes: float = 0.0  # that one process reads while it decodes
    decode_launches: Mapping[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    passes: Sequence[Recorded] = ()  # that CUDA graphs may replay
    load: LoadConfig = field(default_factory=LoadConfig)
    training_bytes: int = 0  # on one device, without graphs

    def recorded_on(self, card: Card) -> list[Recorded]:
        """Passes that a run replays on a card."""
        if (peak := peak_of(card)) is None:
            return []
        models, left = [each.trained for each in self.passes], card.usable_bytes
        taken = with_graphs(models, self.load, peak=peak, left=lambda: left - self.training_bytes)
        return [each for each in self.passes if each.trained in taken]

    def graph_bytes_on(self, card: Card) -> int:
        """Bytes of one device that graphs of these passes keep."""
        return sum(each.trained.estimated().activations for each in self.recorded_on(card))

    def on(self, card: Card, *, fused: bool | None = None, graphs: bool = True) -> "Seconds | None":
        """Its time on a card, by estimate; None where the card's peak is not known.

        ``fused`` norms and rotations are as the options say, unless it is given. Without ``graphs``
        each kernel is launched by the host.
        """
        peak = peak_of(card)
        if peak is None or card.bandwidth is None:
            return None
        fused = self.fused if fused is None else fused
        kernels = self.decode_launches[fused]
        decoding = self.decode_bytes / (BANDWIDTH_SHARE * card.bandwidth) + kernels * REPLAY_SECONDS
        recorded = self.recorded_on(card) if graphs else []
        replayed = sum(each.kernels(fused=fused) for each in recorded)
        return Seconds(
            work=self.flops / (EFFICIENCY * peak * 1e12),
            launching=self.launches[fused] * LAUNCH_SECONDS,
            decoding=decoding if graphs else max(decoding, kernels * EAGER_SECONDS),
            blocks=replayed,
        ).recorded()


@dataclass(frozen=True)
class Seconds(PassSeconds):
    """Time of a step or iteration, in which decoding is no work that is launched."""

    decoding: float = 0.0

    @property
    def training(self) -> float:
        """Of everything but decoding."""
        return super().total

    @property
    def total(self) -> float:
        """Of all phases."""
        return self.training + self.decoding


class NoTokenizer:
    """Stands where only a vocabulary's size is looked at, which is the model's."""

    pad_token_id, eos_token_id = 1, 2

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class StagePlan:
    """A stage as its checks resolved it, with its models on the meta device."""

    config: Any  # of the stage that its models are for
    models: OneRole | Roles
    # What is loaded beside text models for rows that are about more, by its name: bytes.
    beside: Mapping[str, int] = field(default_factory=dict)
    # by config, of these models
    known: dict[Config, MemoryPlan] = field(default_factory=dict, compare=False, repr=False)

    def changed(self, config: StageConfig) -> "StagePlan":
        """The same models at other settings, which do not change what they are made of."""
        return replace(self, config=config)

    @property
    def load(self) -> LoadConfig:
        """How its models are loaded, and which kernels they have."""
        config: Config = self.config
        return config.load

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """The models that train, by role."""
        return trained_models(self.config, self.models)

    @property
    def settings(self) -> dict[str, EngineSettings]:
        """How the engine of each trained role is built."""
        return engines_of(self.config, self.models)

    @property
    def phases(self) -> dict[str, int]:
        """The most bytes on one device in each phase; raises as :attr:`memory_plan` does."""
        plan, beside = self.memory_plan, sum(self.beside.values())
        decoding = {GENERATION: plan.decoding + beside} if isinstance(self.models, Roles) else {}
        return {TRAINING: plan.updating + beside, **decoding}

    @property
    def peak(self) -> int:
        """The most bytes on one device at a time."""
        return max(self.phases.values())

    @property
    def left_out(self) -> tuple[str, int] | None:
        """Names and bytes of what composite models have beside text, if it is not loaded."""
        for each in self.models.models.values():
            if isinstance(model := each.model, TextModel) and not model.rest:
                parts, count = model.place.left_out, 0
                with torch.device("meta"), unbuildable_left_out():
                    whole = model.whole_class._from_config(whole_config(model.config))
                for name, parameter in whole.named_parameters():
                    count += parameter.numel() * is_inside(name, parts)
                return ", ".join(parts), count * model.dtype.itemsize
        return None

    @property
    def roles(self) -> dict[str, RoleMemory]:
        """Bytes on one device by role; raises as :attr:`memory_plan` does."""
        seen: set[int] = set()
        roles, trained, settings = {}, self.trained, self.settings
        for name, each in self.models.models.items():
            roles[name] = _role_memory(name, each.model, seen, trained, settings)
            seen |= {id(p) for p in each.model.parameters()}
        return roles | {name: RoleMemory(size, 0) for name, size in self.beside.items()}

    @property
    def memory_plan(self) -> MemoryPlan:
        """The plan of the run's memory; a ValueError says what of its models is not understood."""
        if self.config not in self.known:
            if isinstance(self.models, Roles):
                plan = memory_plan(self.config, self.models)
            else:
                plan = plan_memory(list(self.trained.values()))
            if plan is None:
                for each in self.trained.values():
                    describe(each.model)  # says what is not understood
            assert plan is not None
            self.known[self.config] = plan
        return self.known[self.config]

    @property
    def parameters(self) -> tuple[int, int]:
        """(all, trained) numbers, each shared one once."""
        models = self.models
        total = sum((value_shape(p) or p.shape).numel() for p in models.whole().parameters())
        return total, sum(trained_elements(each.model) for each in models.trained.values())

    @property
    def time(self) -> StepTime:
        """Work of a step or iteration whose rows are all full, and all their tokens trained on."""
        if isinstance(self.models, Roles):
            time = _iteration_time(self.config, self.models, self.trained)
        else:
            time = _step_time(self.config, self.trained["model"])
        return replace(time, load=self.load, training_bytes=self.phases[TRAINING])


def build_plan(config: Any, home: Path) -> StagePlan:
    """The plan of a checked config, whose placeholders lie in ``home``.

    Of a model that is divided among tensor-parallel ranks the first one's part is built.
    """
    parallel, group = config.parallel, None
    if parallel.tensor_parallel_size > 1:
        group = TensorGroup(
            cast(torch.distributed.ProcessGroup, None),  # there are no processes
            0,
            parallel.tensor_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
        )
    tokenizer = cast(Tokenizer, NoTokenizer())
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    if isinstance(config, RlhfConfig):
        dtype = dtypes.get(config.load.dtype, torch.bfloat16)
        given = find_sources(config).by_role.items()
        sources = Sources({role: as_planned(source, home) for role, source in given})
        roles = build_roles(config, sources, tokenizer, dtype=dtype, meta=True, group=group)
        return StagePlan(config, roles)
    build = build_reward_model if config.task == "SEQ_CLS" else build_causal_lm
    model = build(
        as_planned(find_model(config.model.model_name_or_path), home),
        tokenizer,
        config.model,
        config.lora,
        dtype=dtypes.get(config.model.dtype, torch.bfloat16),
        seed=config.run.seed,
        meta=True,
        group=group,
    )
    return StagePlan(config, OneRole(model))


def recomputing_options(config: Config) -> tuple[str, ...]:
    """Options of recomputation; the critic's first, which costs less as a rule."""
    prefixes = (role.prefix for role in reversed([*config.trained.values()]))
    return tuple(f"{prefix}gradient_checkpointing" for prefix in prefixes)


def with_recomputation(plan: StagePlan, options: Sequence[str]) -> StagePlan:
    """The plan with recomputation by these options, and by no others."""
    names = (name for name in flatten(plan.config) if name.endswith("gradient_checkpointing"))
    return plan.changed(with_values(plan.config, {name: name in options for name in names}))


def recomputation(plan: StagePlan) -> tuple[list[str], list[str]]:
    """Options of recomputation that are on, and those that are left to the run to decide."""
    values, options = flatten(plan.config), recomputing_options(plan.config)
    on = [name for name in options if values[name] is True]
    return on, [name for name in options if values[name] == "auto"]


def _step_time(config: SupervisedConfig, trained: TrainedModel) -> StepTime:
    sequences = trained.rows * trained.sequences * config.batch.gradient_accumulation_steps
    tokens = sequences * trained.length
    shape, pairs = describe(trained.model), sequences * causal_pairs(trained.length)
    sizes = {"num_tokens": tokens, "num_attended": pairs, "num_targets": tokens}
    flops = step_flops(shape, gradient_checkpointing=trained.recomputes, **sizes)
    compares = isinstance(config, DpoStageConfig) and config.dpo.has_reference
    if compares:
        flops += forward_flops(shape, **sizes)

    def launches(fused: bool) -> int:
        counted = count_launches(trained.model, fused=fused, recomputes=trained.recomputes)
        passes = counted.training + compares * counted.forward
        return passes * config.batch.gradient_accumulation_steps

    return StepTime(
        tokens * data_world_size() // config.parallel.context_parallel_size,
        flops.hardware / config.parallel.processes_per_share,
        {fused: launches(fused) for fused in (True, False)},
        fused=config.model.fused_kernels != "off",
        passes=[Recorded(trained, config.batch.gradient_accumulation_steps)],
    )


def _iteration_time(
    config: RlhfConfig, roles: Roles, trained: Mapping[str, TrainedModel]
) -> StepTime:
    batch, data = config.batch, config.data
    count = batch.responses
    prompt, answer = (0,) * data.max_prompt_seq_len, (0,) * data.max_answer_seq_len
    responses = [Response(prompt, answer, ended=True, group=0)] * count
    checkpointed = {n: is_on(r.model.gradient_checkpointing) for n, r in config.trained.items()}
    counter = FlopCounter(
        roles.models,
        checkpointed=checkpointed,
        num_generations=batch.num_generations,
        batch_size=batch.rows_decoded,
    )
    at_once = batch.per_device_training_batch_size
    rows = min(count, at_once * batch.gradient_accumulation_steps)  # of a step
    if batch.tokens_per_device:
        at_once = max(1, batch.tokens_per_device // data.max_seq_len)
    num_steps, per_step = -(-count // rows), -(-rows // at_once)
    step = Minibatch([], [[]] * per_step)
    deferred = bool(count_deferred(config.ppo, [step] * num_steps * config.ppo.ppo_epochs))
    from_sampler = config.ppo.use_rollout_logprobs and not deferred
    left = 1 - deferred / num_steps
    before = {"actor": left * (not from_sampler), "critic": left}
    counts = StepCounts(
        num_tokens=sum(map(len, responses)),
        num_targets=sum(each.num_actor_tokens for each in responses),
        num_attended=sum(causal_pairs(len(each)) for each in responses),
    )
    work = counter(
        responses,
        passes=config.ppo.ppo_epochs,
        shares_before=before,
        counts=counts,
        skips_padding=True,
    )
    ranks, both, actor = config.parallel.tensor_parallel_size, (True, False), roles.actor.model
    decode_steps = data.max_answer_seq_len * -(-count // batch.rows_decoded)

    def launches(fused: bool) -> int:
        total = 0.0
        for name, role in roles.models.items():
            recomputes = checkpointed.get(name, False)
            counted = count_launches(role.model, fused=fused, recomputes=recomputes)
            trains = (name in roles.trained) * config.ppo.ppo_epochs
            total += before.get(name, 1.0) * counted.forward + trains * counted.training
        return round(num_steps * per_step * total)

    return StepTime(
        sum(map(len, responses)) * data_world_size(),
        sum(work.flops.values(), Flops()).hardware / ranks,
        {fused: launches(fused) for fused in both},
        fused=config.load.fused_kernels != "off",
        generated=count * data.max_answer_seq_len * data_world_size(),
        decode_bytes=work.decode_bytes / ranks,
        decode_launches={f: decode_steps * count_launches(actor, fused=f).decoding for f in both},
        passes=[
            Recorded(each, num_steps * per_step * config.ppo.ppo_epochs)
            for each in trained.values()
        ],
    )


def _role_memory(
    name: str,
    model: nn.Module,
    seen: Collection[int],
    trained: Mapping[str, TrainedModel],
    settings: Mapping[str, EngineSettings],
) -> RoleMemory:
    """Of one model; parameters that are ``seen`` belong to a model before it."""
    first = next(iter(settings.values()))
    ranks = data_world_size() if first.zero_stage == 3 else 1
    own = [(n, p) for n, p in model.named_parameters() if id(p) not in seen]
    adapters, weights = (
        parameter_bytes(
            p for n, p in own if any(part in n for part in _ADAPTER_PARTS) == of_adapter
        )
        // ranks
        for of_adapter in (True, False)
    )
    host = 0
    if first.zero_stage == 3 and first.offload:
        weights, adapters, host = 0, 0, weights + adapters
    if name not in trained:
        return RoleMemory(weights, adapters, host=host)
    e = trained[name].estimated()
    if settings[name].offload:  # AdamW's mean, square and fp32 copy
        host += 12 * trained_elements(model) // data_world_size()
    return RoleMemory(
        weights,
        adapters,
        gradients=e.gradients,
        moments=e.optimizer,
        activations=e.activations + e.temporaries,
        logits=e.loss + e.update,
        gathered=e.gathered,
        host=host,
    )
