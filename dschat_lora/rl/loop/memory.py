"""Memory of step 3: a plan of roles, moving average and decoding cache."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import nn

from dschat_lora.config.groups import is_on
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size, device, device_type, max_over_ranks
from dschat_lora.lora.layers import LoraLinear, is_quantized, value_bytes
from dschat_lora.lora.parallel import group_of
from dschat_lora.perf.cards import USABLE
from dschat_lora.perf.memory import cached_token_bytes, largest_unpacked, parameter_bytes
from dschat_lora.rl.draw.own_engine import cache_columns
from dschat_lora.rl.learn.roles import Models, Roles
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.watch.throughput import FlopCounter
from dschat_lora.runtime.graphs import plan_graphs
from dschat_lora.runtime.memory import GIB, MemoryPlan, TrainedModel, offloads_inputs, plan_memory


@dataclass(frozen=True)
class Costs:
    """Memory and work of a run; None for an architecture that is not understood."""

    plan: MemoryPlan | None
    unpacked: bool | None  # 4-bit weights once for a rollout; None: as the free memory allows
    counter: FlopCounter | None
    recorded: list[str] = field(default_factory=list)  # roles whose passes run as CUDA graphs


def plan_costs(config: RlhfConfig, models: Models, *, free: int) -> Costs:
    """The costs of roles that are not yet sharded, on devices with so many ``free`` bytes."""
    roles, settings, counter = models.roles, models.settings, None
    trained = trained_models(config, roles, settings)
    plan = memory_plan(config, roles, settings)
    plan, recorded = plan_graphs(plan, trained, config.load, free=free)
    plan, unpacked = unpacking_for_rollouts(plan, roles, free=free)
    with suppress(ValueError):  # the start-up says why
        counter = FlopCounter(
            roles.models,
            checkpointed={
                name: is_on(getattr(config, name).gradient_checkpointing) for name in roles.trained
            },
            num_generations=config.batch.num_generations,
            batch_size=config.batch.rows_decoded,
            decodes_here=config.batch.engine.decodes_actor,
            compares=_logit_bytes(config) is not None,
        )
    kept = keeping_cache(plan, config, settings, free=free)
    return Costs(kept, unpacked, counter, recorded)


def memory_plan(
    config: RlhfConfig, roles: Roles, settings: dict[str, EngineSettings]
) -> MemoryPlan | None:
    """The plan of roles that are not yet sharded; ``settings`` are those of the trained ones.

    None for architectures that are not understood.
    """
    sharded = settings["actor"].zero_stage == 3 and data_world_size() > 1
    trained = [p for p in roles.actor.model.parameters() if p.requires_grad]
    try:
        cache = cache_bytes(config, roles.actor.model)
    except ValueError:
        return None
    layers = [m.weight for m in roles.actor.model.modules() if isinstance(m, LoraLinear)]
    adapted = parameter_bytes(w for w in layers if not is_quantized(w)) + value_bytes(layers)
    return plan_memory(
        list(trained_models(config, roles, settings).values()),
        models=[each.model for each in roles.models.values()],
        averaged=4 * sum(p.numel() for p in trained) if config.classic.enable_ema else 0,
        # At ZeRO 3 the weights are whole for as long as responses are generated.
        cache=cache
        + (adapted if config.batch.merge_for_rollouts else 0)
        + largest_unpacked(roles.actor.model.parameters())
        + (parameter_bytes(roles.rollout.parameters()) if sharded else 0),
    )


def trained_models(
    config: RlhfConfig, roles: Roles, settings: dict[str, EngineSettings]
) -> dict[str, TrainedModel]:
    """The roles that train, by name, with the micro-batches that each trains on."""
    return {
        name: TrainedModel(
            each.model,
            settings[name],
            rows=config.batch.per_device_training_batch_size,
            length=config.data.max_seq_len,
            recomputes=is_on(getattr(config, name).gradient_checkpointing),
            tokens=config.batch.tokens_per_device,
            offloads=offloads_inputs(config),
            logit_bytes=_logit_bytes(config) if name == "actor" else None,
        )
        for name, each in roles.trained.items()
    }


def _logit_bytes(config: RlhfConfig) -> int | None:
    return None if config.reference is None else config.reference.logit_bytes(config)


def unpacking_for_rollouts(
    plan: MemoryPlan | None, roles: Roles, *, free: int
) -> tuple[MemoryPlan | None, bool | None]:
    """The plan with the weights of a 4-bit actor whole during rollouts, if they fit; whether so.

    None where there are no such weights, or nothing is known.
    """
    size = value_bytes(roles.rollout.parameters())
    if plan is None or size == 0:
        return plan, None
    whole = replace(plan, cache=plan.cache + size)
    fits = max_over_ranks(float(whole.peak > USABLE * free)) == 0
    return (whole if fits else plan), fits


def unpacking_note(roles: Roles, unpacked: bool) -> str:
    """What the log says of how 4-bit weights are decoded with."""
    size = f"{value_bytes(roles.rollout.parameters()) / GIB:.3g} GiB"
    if unpacked:
        return f"rollouts: 4-bit weights are unpacked once for each, into {size}"
    return f"rollouts: 4-bit weights are unpacked layer by layer; {size} for all would not fit"


def keeping_cache(
    plan: MemoryPlan | None, config: RlhfConfig, settings: dict[str, EngineSettings], *, free: int
) -> MemoryPlan | None:
    """The plan with the decoding cache kept during updates, where a GPU has room for both.

    At ZeRO 3 the weights move, and nothing that refers to them can be kept.
    """
    if plan is None or device().type != "cuda" or config.classic.release_inference_cache:
        return plan
    kept = replace(plan, keeps_cache=True)
    fits = kept.peak <= USABLE * free and settings["actor"].zero_stage < 3
    return kept if fits else plan


def cache_bytes(config: RlhfConfig, model: nn.Module) -> int:
    """Bytes on one device of what draws responses: of our own keys and values, those at a time.

    With turns, a CPU has those of two at a time, of which one reads the other.

    Raises:
        ValueError: for an architecture that is not understood.
    """
    if not config.batch.engine.decodes_actor:
        return config.batch.engine.bytes_beside_training(config)
    tokens = config.batch.rows_decoded * cache_columns(config)
    if config.players and device_type() == "cpu":
        tokens *= 2
    group = group_of(model)
    return tokens * cached_token_bytes(model) // (1 if group is None else group.size)
