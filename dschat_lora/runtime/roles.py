"""The models of a run by role: layers, rates, engines, memory, and what a run says of them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from dschat_lora.config.groups import ModelConfig, is_on
from dschat_lora.config.options import flatten, with_values
from dschat_lora.config.plurals import counted
from dschat_lora.config.roles import MODEL, Role
from dschat_lora.config.stages import StageConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import device, grid, raise_together, rank, world_size
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.rates import adapter_learning_rate, ruled_rates
from dschat_lora.models.build import AdaptedModel, as_trained, check_targets
from dschat_lora.models.loading import attention_note, load_config
from dschat_lora.models.source import ModelSource
from dschat_lora.perf.cards import USABLE
from dschat_lora.perf.coverage import coverage
from dschat_lora.perf.memory import rows_of
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import device_peak
from dschat_lora.runtime.directory import check_room
from dschat_lora.runtime.graphs import launches_note
from dschat_lora.runtime.memory import MemoryPlan, TrainedModel, offloads_inputs, peak_here
from dschat_lora.runtime.micro_batches import StepCosts, resolve_step
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import engine_settings
from dschat_lora.runtime.validation import Sources, fit_lengths

StageT = TypeVar("StageT", bound=StageConfig)


class ModelsByRole(Protocol):
    """The models of a run."""

    @property
    def models(self) -> Mapping[str, AdaptedModel]:
        """All of them, by role; those on one base share its parameters."""

    @property
    def trained(self) -> Mapping[str, AdaptedModel]:
        """Those that train."""

    @property
    def shares_base(self) -> bool:
        """Whether those that train do so on the same base weights."""

    def whole(self) -> nn.Module:
        """All of them as one module, whose ``parameters()`` gives shared tensors once."""


@dataclass(frozen=True)
class OneRole:
    """The one model of a supervised stage."""

    adapted: AdaptedModel
    shares_base: ClassVar[bool] = False

    @property
    def models(self) -> dict[str, AdaptedModel]:
        return {MODEL: self.adapted}

    @property
    def trained(self) -> dict[str, AdaptedModel]:
        return self.models

    def whole(self) -> nn.Module:
        return self.adapted.model


def check_layers(config: StageConfig, sources: Sources, group: TensorGroup | None) -> None:
    """Try each role's choice of layers on the empty shape of its model."""
    for name, role in config.trained.items():
        with config.naming_options_of(name):
            check_targets(
                sources.of(name),
                role.model,
                role.lora,
                role.task,
                given=role.typed(config.given),
                expert_learning_rate=role.optim.expert_learning_rate,
                group=group,
            )


def with_loaded_lengths(config: StageT, sources: Sources) -> StageT:
    """With lengths that the models have positions for; those of the hub are known only here."""

    def read(source: ModelSource, model: ModelConfig) -> tuple[dict[str, Any], None]:
        return load_config(source.base, as_trained(model, source)).to_dict(), None

    return fit_lengths(config, sources, read)


def with_ruled_rates(config: StageT, sources: Sources, run: OpenRun[StageConfig]) -> StageT:
    """With rates by published rules for roles whose ``learning_rate`` is auto; shown, recorded.

    The record's options get the rates that adapters train at, but for multiples of others.
    """
    ruled, (stage, factor) = dict[str, dict[str, object]](), config.rule_of_rates
    for name, role in config.trained.items():
        if role.optim.learning_rate != "auto":
            continue
        model = load_config(sources.of(name).base, role.model)
        width = model.hidden_size
        rates = ruled_rates(model.model_type, width, stage=stage, factor=factor, lora=role.lora)
        typed = "lora_learning_rate" in role.typed(config.given)
        adapter = role.optim.lora_learning_rate if typed else rates.adapter
        config = with_values(config, {f"{role.prefix}ruled": (rates.base, adapter)})
        rate = rates.base
        if role.lora.lora_dim:
            rate = adapter_learning_rate(config.trained[name].optim)
        option = f"--{role.prefix}learning_rate auto"
        run.log.say(f"  rate         {rate:.3g} by {option}: {rates.reason}")
        ruled[name] = rates._asdict() | {"adapter": adapter}
        run.record.update({"rates": ruled if role.prefix else ruled[name]})
    used = {
        f"{role.prefix}lora_learning_rate": adapter_learning_rate(role.optim)
        for role in config.trained.values()
        if role.lora.lora_dim and role.optim.lora_lr_multiplier is None
    }
    run.record.update({"config": flatten(config) | used})
    return config


def engines_of(config: StageConfig, roles: ModelsByRole | None = None) -> dict[str, EngineSettings]:
    """How the engine of each role that trains is built, on this machine.

    Of models that are not yet built it does not say whether they share weights.
    """
    return {
        name: engine_settings(
            config,
            dtype=config.load.dtype,
            zero_stage=role.zero_stage,
            micro_batch_size=config.micro_batch_size,
            shares_weights=roles is not None and roles.shares_base,
        )
        for name, role in config.trained.items()
    }


def trained_models(config: StageConfig, roles: ModelsByRole) -> dict[str, TrainedModel]:
    """The models that train, by role, with the full micro-batches that each trains on."""
    settings = engines_of(config, roles)
    rows, tokens = config.micro_batch_size, config.batch.tokens_per_device
    if config.micro_batch not in config.rows["rows_per_step"]:
        rows = rows_of(tokens, config.max_row_tokens)[0]
    return {
        name: TrainedModel(
            each.model,
            settings[name],
            rows=rows,
            length=config.data.max_seq_len,
            recomputes=is_on(config.trained[name].model.gradient_checkpointing),
            tokens=tokens,
            sequences=config.max_row_tokens // config.data.max_seq_len,
            offloads=offloads_inputs(config),
            logit_bytes=config.logit_bytes(name),
            processes=config.parallel.context_parallel_size,
        )
        for name, each in roles.trained.items()
    }


def resolve_micro_batches(
    run: OpenRun[StageConfig],
    config: StageT,
    roles: ModelsByRole,
    *,
    plan: Callable[[StageT], MemoryPlan | None],
    free: int,
) -> StageT:
    """The config with micro-batches and each role's recomputation settled, as the models do.

    A device has ``free`` bytes; the memory ``plan`` is that of a config. Call on every rank.
    """

    def need(config: StageT) -> int | None:
        planned = plan(config)
        return None if planned is None else planned.updating

    first = next(iter(engines_of(config).values()))
    costs = StepCosts[StageT](
        need=need,
        trained=lambda config: trained_models(config, roles).values(),
        load=config.load,
        peak=peak_here(first.torch_dtype),
        budget=USABLE * free,
    )
    # The critic before the actor: it is the smaller one as a rule, and costs less to compute again.
    models = {
        f"{role.prefix}gradient_checkpointing": roles.trained[name].model
        for name, role in reversed([*config.trained.items()])
    }
    return resolve_step(run, models, config, costs, free=free)


def record_memory(run: OpenRun[StageConfig], plan: MemoryPlan | None) -> list[str]:
    """Record the plan; what of it the log shows."""
    if plan is None:
        return []
    run.record.update({"memory": plan.to_dict()})
    return [plan.line(of_parts=run.config.kind == "prompts")]


def describe_roles(
    run: OpenRun[StageConfig],
    roles: ModelsByRole,
    *,
    warning: Callable[[str, int], str | None],
    memory: Iterable[str],
    recorded: Sequence[str],
) -> None:
    """Show and record what trains, on what, and the memory it takes; call on every rank.

    ``warning`` is that of the rate of a role with a model of so many parameters; ``memory`` are
    lines, and ``recorded`` the roles whose passes of training run as CUDA graphs.
    """
    config, log, settings = run.config, run.log, engines_of(run.config, roles)
    first = next(iter(roles.trained))
    total = num_elements(roles.whole().parameters())  # each shared one once
    counts = {name: trained_elements(each.model) for name, each in roles.trained.items()}
    trainable = sum(counts.values())
    of_roles = {name: n for name, n in counts.items() if config.trained[name].prefix}
    how = engine_words(settings[first], roles.models[first].model)
    layers = roles.models[first].targets
    if of_roles:
        trained = ", ".join(f"{name} {count:,}" for name, count in of_roles.items())
        words = f"{total:,} in memory for {' + '.join(roles.models)}; trained: {trained}"
    else:
        words = f"{total:,}, of which {trainable:,} train ({trainable / total:.2%})"
        words += f"; {counted(len(layers), 'adapted layer')}"
    log.say(f"  parameters   {words}; {how}")
    notes = (attention_note(each.model, config.load) for each in roles.models.values())
    for kind in sorted(set(filter(None, notes))):
        log.say(f"  note         {kind}")
    say_coverage(run, {n: each.model for n, each in roles.models.items()}, roles.trained)
    for name, each in roles.trained.items():
        _describe_trained(run, config.trained[name], each)
        if doubt := warning(name, num_elements(each.model.parameters())):
            log.say(f"  warning      {doubt}")
    for line in memory:
        log.say(f"  {line}")
    for name, one in trained_models(config, roles).items():
        note = launches_note(one, config.load, recorded=name in recorded)
        if note is not None:
            log.say(f"  note         {f'{name}: ' if name in of_roles else ''}{note}")
    parameters = {"total": total, "trainable": trainable, **of_roles}
    record_models(run, settings[first], parameters=parameters, layers=layers)


def _describe_trained(run: OpenRun[StageConfig], role: Role, adapted: AdaptedModel) -> None:
    if run.config.run.merge_adapter:
        from dschat_lora.lora.merge import check_mergeable

        check_mergeable(adapted.model)
    for fact in adapted.facts():
        run.log.say(f"  {fact}")
    if role.lora.lora_dim == 0:
        option = f"{role.prefix}lora_dim"
        if option not in run.config.given and run.config.optim.num_train_epochs:
            words = f"--{option} is 0: all weights are trained; --{option} 16 trains an adapter"
            run.log.say(f"  note         {words}")


def num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of the parameters, whole where ranks hold a part."""
    return sum(full_shape(p).numel() for p in parameters)


def trained_elements(model: nn.Module) -> int:
    """Elements of the parameters that train."""
    return num_elements(p for p in model.parameters() if p.requires_grad)


def engine_words(settings: EngineSettings, model: nn.Module) -> str:
    """Compute type, ZeRO stage, and how many processes there are of what kind, for the log."""
    trained = [p for p in model.parameters() if p.requires_grad]
    idle = settings.stage_in_use(settings.native_dtype(trained)) < settings.zero_stage
    count, ranks = world_size(), grid()
    peak = device_peak(device(), settings.torch_dtype)
    return (
        f"{settings.dtype}, ZeRO {settings.zero_stage}"
        f"{' (one process: nothing to shard)' if idle else ''}, "
        f"{count} process{'es' if count > 1 else ''} on {device().type}"
        f"{'' if peak is None else f' of {peak:,.0f} TFLOPs'}"
        f"{'' if ranks is None else f', {ranks.tensor_size} per model'}"
    )


def say_coverage(
    run: OpenRun[StageConfig], models: Mapping[str, nn.Module], trained: Collection[str]
) -> None:
    """Show and record which kinds of layers learn of the roles that train; show what is unknown.

    That is of the memory and the FLOPs of all models, by role; roles may share one.
    """
    coverages = {role: coverage(models[role]) for role in trained}
    for role, each in coverages.items():
        whose = f"{role}: " if len(coverages) > 1 else ""
        run.log.say(f"  learns       {whose}{each.words}")
        if each.warning is not None:
            run.log.say(f"  warning      {whose}{each.warning}")
    run.record.update({"learns": {role: each.to_dict() for role, each in coverages.items()}})
    roles: dict[str, list[str]] = {}
    for role, model in models.items():
        try:
            uncounted = describe(model).uncounted
            line = f"note         FLOPs and memory do not include {uncounted}" if uncounted else ""
        except ValueError as error:
            line = f"memory       unknown, and so are TFLOPs: {error}"
        roles.setdefault(line, []).append(role)
    for line, names in roles.items():
        if line:
            suffix = f" ({', '.join(names)})" if len(models) > 1 else ""
            run.log.say(f"  {line}{suffix}")


def record_models(
    run: OpenRun[StageConfig],
    settings: EngineSettings,
    *,
    parameters: Mapping[str, int],
    layers: list[str],
) -> None:
    """Record what trains, if the disk has room for it as checkpoint and result; on every rank.

    A checkpoint, if any is to be written, holds a weight and two moments of each element that
    trains in fp32, a result the weight in 16 bits at least.
    """
    directory, options = run.directory, run.config.run
    saves = options.save_interval > 0 or options.save_minutes > 0
    need = (14 if saves else 2) * parameters["trainable"]
    if directory is not None and run.config.optim.num_train_epochs > 0:
        raise_together(lambda: check_room(directory, need) if rank() == 0 else None)
    run.record.update({"parameters": parameters, "dtype": settings.dtype, "adapted_layers": layers})
