"""What step 3 keeps in memory, estimated before it starts."""

from dataclasses import asdict, dataclass
from typing import Any

from dschat_lora.config.groups import is_on
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.lora.parallel import group_of
from dschat_lora.perf.memory import MemoryEstimate, cached_token_bytes, estimate_memory, rows_of
from dschat_lora.rlhf.config import RlhfConfig
from dschat_lora.rlhf.roles import Roles

GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, by what they hold."""

    weights: int  # of all roles, each shared tensor once
    separate_weights: int  # what the roles would take as models of their own
    training: int  # gradients and optimizer state of actor and critic, and the moving average
    update: int  # activations and a chunk of logits of both, for full rows
    cache: int  # keys and values of responses decoded at a time; at ZeRO 3 whole weights too

    @property
    def peak(self) -> int:
        """The most at a time: decoding and updating take turns."""
        return max(self.updating, self.weights + self.training + self.cache)

    @property
    def updating(self) -> int:
        """The most of an update, the part that recomputed activations make less of."""
        return self.weights + self.training + self.update

    def lines(self) -> list[str]:
        """For people."""
        saved = self.separate_weights - self.weights
        shared = f" (as models of their own: {self.separate_weights / GIB:.3g})" if saved else ""
        return [
            f"memory       up to {self.peak / GIB:.3g} GiB per device by estimate: weights "
            f"{self.weights / GIB:.3g}{shared}, gradients and optimizer "
            f"{self.training / GIB:.3g}, update {self.update / GIB:.3g}, keys and values while "
            f"decoding {self.cache / GIB:.3g}"
        ]

    def to_dict(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self) | {"peak": self.peak}


def memory_plan(
    config: RlhfConfig, roles: Roles, settings: dict[str, EngineSettings]
) -> MemoryPlan | None:
    """The estimate; None for architectures that are not understood.

    Args:
        config: of the run.
        roles: not yet sharded, perhaps on the meta device.
        settings: of the trained roles' engines.
    """
    try:
        estimates = {name: _estimate(config, roles, settings, name) for name in roles.trained}
    except ValueError:
        return None
    sharded = data_world_size() if settings["actor"].zero_stage == 3 else 1
    weights = _bytes(list(roles.whole().parameters()))
    averaged = 4 * sum(p.numel() for p in roles.actor.model.parameters() if p.requires_grad)
    kept = averaged // sharded if config.classic.enable_ema else 0
    offloaded = config.parallel.offload
    return MemoryPlan(
        weights=weights // sharded,
        separate_weights=sum(_bytes(list(m.model.parameters())) for m in roles.models.values())
        // sharded,
        training=kept
        + sum(e.gradients + (0 if offloaded else e.optimizer) for e in estimates.values()),
        update=sum(e.activations + e.loss for e in estimates.values()),
        # At ZeRO 3 the weights are whole for as long as responses are generated.
        cache=cache_bytes(config, roles.actor.model)
        + (_bytes(list(roles.rollout.parameters())) if sharded > 1 else 0),
    )


def cache_bytes(config: RlhfConfig, model: Any) -> int:
    """Bytes on one device of keys and values of the responses decoded at a time."""
    tokens = config.batch.per_device_generation_batch_size * config.data.max_seq_len
    group = group_of(model)
    return tokens * cached_token_bytes(model) // (1 if group is None else group.size)


def _estimate(
    config: RlhfConfig, roles: Roles, settings: dict[str, EngineSettings], role: str
) -> MemoryEstimate:
    rows, length = config.batch.per_device_training_batch_size, config.data.max_seq_len
    if tokens := config.batch.tokens_per_device:
        rows, length = rows_of(tokens, length)
    return estimate_memory(
        roles.models[role].model,
        rows=rows,
        length=length,
        compute_dtype=settings[role].torch_dtype,
        gradient_checkpointing=is_on(getattr(config, role).gradient_checkpointing),
        zero_stage=settings[role].zero_stage,
        world_size=data_world_size(),
    )


def _bytes(parameters: list[Any]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
