"""Memory of step 3: a plan of roles, moving average and decoding cache."""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dschat_lora.config.groups import is_on
from dschat_lora.engine.distributed import data_world_size, device, device_type, max_over_ranks
from dschat_lora.generation.batch_state import COLUMN_BUCKET, ROW_BUCKETS
from dschat_lora.generation.slots import READ_ROWS, READ_TOKENS
from dschat_lora.kernels.support import next_power_of_2
from dschat_lora.lora.layers import LoraLinear, is_quantized, value_bytes
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.perf.cards import USABLE
from dschat_lora.perf.memory import cached_token_bytes, largest_unpacked, parameter_bytes
from dschat_lora.perf.shape import chains_of, describe
from dschat_lora.rl.draw.own_engine import cache_columns
from dschat_lora.rl.learn.roles import Models, Roles
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.watch.throughput import FlopCounter
from dschat_lora.runtime.graphs import plan_graphs
from dschat_lora.runtime.memory import GIB, MemoryPlan, plan_memory
from dschat_lora.runtime.roles import trained_models

# Of a logit while a token is drawn: fp32, its probability, the sum up to it in fp64, and twice as
# it is taken for log-probabilities.
_LOGIT_BYTES = 24


@dataclass(frozen=True)
class Costs:
    """Memory and work of a run; None for an architecture that is not understood."""

    plan: MemoryPlan | None
    unpacked: bool | None  # 4-bit weights once for a rollout; None: as the free memory allows
    counter: FlopCounter | None
    recorded: list[str] = field(default_factory=list)  # roles whose passes run as CUDA graphs


def plan_costs(config: RlhfConfig, models: Models, *, free: int) -> tuple[RlhfConfig, Costs]:
    """The config with the responses decoded at a time, and the costs of roles not yet sharded.

    Devices have so many ``free`` bytes. Call on every rank.
    """
    roles, counter = models.roles, None
    plan, trained = memory_plan(config, roles), trained_models(config, roles)
    plan, recorded = plan_graphs(plan, trained, config.load, free=free)
    plan, unpacked = unpacking_for_rollouts(plan, roles, free=free)
    config, plan = decoding_by_memory(config, plan, roles.actor.model, free=free)
    with suppress(ValueError):  # the start-up says why
        counter = FlopCounter(
            roles.models,
            checkpointed={
                name: is_on(role.model.gradient_checkpointing)
                for name, role in config.trained.items()
            },
            num_generations=config.batch.num_generations,
            batch_size=config.batch.rows_decoded,
            decodes_here=config.batch.engine.decodes_actor,
            compares=config.logit_bytes("actor") is not None,
        )
    kept = keeping_cache(plan, config, free=free)
    return config, Costs(kept, unpacked, counter, recorded)


def decoding_by_memory(
    config: RlhfConfig, plan: MemoryPlan | None, model: PreTrainedModel, *, free: int
) -> tuple[RlhfConfig, MemoryPlan | None]:
    """The config with as many responses decoded at a time as fit beside the rest of its plan.

    They are those of an iteration at most, in whole groups; on every rank as many as on the
    fullest. Nothing changes where ``--max_num_seqs`` is a number, or auto goes by the batch.
    """
    batch = config.batch
    goes_by_batch = batch.max_num_seqs != "auto" or config.players
    if plan is None or device_type() != "cuda" or goes_by_batch or not batch.engine.decodes_actor:
        return config, plan
    if any(block.has_state for block in describe(model).blocks):
        return config, plan  # a row's states have a size that is not known

    def decoding(rows: int) -> tuple[RlhfConfig, MemoryPlan]:
        changed = replace(config, batch=replace(batch, rows_that_fit=rows))
        more = cache_bytes(changed, model) - cache_bytes(config, model)
        return changed, replace(plan, cache=plan.cache + more)

    def is_full(groups: int) -> bool:
        rows = groups * batch.num_generations
        changed, needed = decoding(rows)
        kept = needed.decoding + recorded_bytes(changed, model)
        # Half of what estimates leave is for these, half for what the allocator loses.
        passes = passes_bytes(config, model, rows=rows)
        return kept > USABLE * free or kept + passes > (1 + USABLE) / 2 * free

    most = batch.responses // batch.num_generations
    # Where all are decoded at once, none is refilled, and that may take less than a few fewer.
    fitting = bisect_left(range(1, most), True, key=is_full) if is_full(most) else most
    fitting = -int(max_over_ranks(-float(fitting)))
    return decoding(batch.num_generations * max(1, fitting))


def passes_bytes(config: RlhfConfig, model: PreTrainedModel, *, rows: int) -> int:
    """Most bytes that passes of decoding take for themselves, with so many rows.

    The prompts of a batch are read at once. A token is drawn from logits, probabilities and their
    sums, and has log-probabilities.
    """
    length = config.data.max_prompt_seq_len
    tokens = _prompts_at_once(config, rows) * length
    of_prompts = _reading_bytes(model, tokens=tokens, columns=length)
    return of_prompts + rows * describe(model).vocab_size * _LOGIT_BYTES


def recorded_bytes(config: RlhfConfig, model: PreTrainedModel) -> int:
    """Most bytes that CUDA graphs keep which read the prompts of rows that are refilled.

    They are of one size at a time, as one's memory is the others' too; their logits are in fp32.
    """
    batch = config.batch
    own, most_rows = batch.engine.decodes_actor, max(batch.responses, config.eval_prompts)
    is_refilled = own and most_rows > batch.rows_decoded
    if device_type() != "cuda" or group_of(model) is not None or not is_refilled:
        return 0
    columns = cache_columns(config)
    columns += -columns % COLUMN_BUCKET
    rows = next_power_of_2(_prompts_at_once(config, batch.rows_decoded))
    tokens = min(READ_TOKENS, rows * config.data.max_prompt_seq_len)
    of_prompts = _reading_bytes(model, tokens=tokens, columns=columns)
    return of_prompts + 2 * 4 * READ_ROWS * describe(model).vocab_size


def _prompts_at_once(config: RlhfConfig, rows: int) -> int:
    # An evaluation has one response to a prompt.
    return max(rows // config.batch.num_generations, min(rows, config.eval_prompts))


def _reading_bytes(model: PreTrainedModel, *, tokens: int, columns: int) -> int:
    """Most bytes that a pass over tokens of prompts takes, which attend to so many columns.

    Each has what the readers of an MLP give, its activation and product, and four tensors of the
    hidden size; each pair two numbers of a mask.
    """
    shape, group = describe(model), group_of(model)
    widest = max(
        sum(x.uses * x.out_features for x in readers) + 2 * down.uses * down.in_features
        for block in shape.blocks
        for *readers, down in chains_of(block.mlp)
    )
    position = widest / (1 if group is None else group.size) + 4 * shape.hidden_size
    return round(tokens * model.dtype.itemsize * (position + 2 * columns))


def rollout_words(config: RlhfConfig, plan: MemoryPlan | None, model: PreTrainedModel) -> str:
    """How many responses a device decodes at a time, and why, for the log."""
    batch = config.batch
    words = f"{batch.rows_decoded:,} of {batch.responses:,} responses at a time"
    if batch.rows_that_fit is None or plan is None:
        return words
    cache = cache_bytes(config, model)
    beside = plan.decoding - cache
    return (
        f"{words} (--max_num_seqs auto: {cache / GIB:.3g} GiB of KV cache fit next to "
        f"{beside / GIB:.3g} GiB of weights and the like)"
    )


def memory_plan(config: RlhfConfig, roles: Roles) -> MemoryPlan | None:
    """The plan of roles that are not sharded yet; None for one that is not understood."""
    sharded = config.actor.zero_stage == 3 and data_world_size() > 1
    trained = [p for p in roles.actor.model.parameters() if p.requires_grad]
    try:
        cache = cache_bytes(config, roles.actor.model)
    except ValueError:
        return None
    layers = [m.weight for m in roles.actor.model.modules() if isinstance(m, LoraLinear)]
    adapted = parameter_bytes(w for w in layers if not is_quantized(w)) + value_bytes(layers)
    return plan_memory(
        list(trained_models(config, roles).values()),
        models=[each.model for each in roles.models.values()],
        averaged=4 * sum(p.numel() for p in trained) if config.classic.enable_ema else 0,
        # At ZeRO 3 the weights are whole for as long as responses are generated.
        cache=cache
        + (adapted if config.batch.merge_for_rollouts else 0)
        + largest_unpacked(roles.actor.model.parameters())
        + (parameter_bytes(roles.rollout.parameters()) if sharded else 0),
    )


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


def keeping_cache(plan: MemoryPlan | None, config: RlhfConfig, *, free: int) -> MemoryPlan | None:
    """The plan with the decoding cache kept during updates, where a GPU has room for both.

    At ZeRO 3 the weights move, and nothing that refers to them can be kept.
    """
    if plan is None or device().type != "cuda" or config.classic.release_inference_cache:
        return plan
    kept = replace(plan, keeps_cache=True)
    fits = kept.peak <= USABLE * free and (config.actor.zero_stage or 0) < 3
    return kept if fits else plan


def cache_bytes(config: RlhfConfig, model: PreTrainedModel) -> int:
    """Bytes on one device of what draws responses: of our own keys and values, those at a time.

    A GPU has room for 8 rows and :data:`COLUMN_BUCKET` columns more at a time. With turns, a CPU
    has those of two batches, of which one reads the other.

    Raises:
        ValueError: for an architecture that is not understood.
    """
    if not config.batch.engine.decodes_actor:
        return config.batch.engine.bytes_beside_training(config)
    rows, columns = config.batch.rows_decoded, cache_columns(config)
    if device_type() == "cuda":
        rows, columns = rows + -rows % ROW_BUCKETS[0], columns + -columns % COLUMN_BUCKET
    tokens = rows * columns
    if config.players and device_type() == "cpu":
        tokens *= 2
    group = group_of(model)
    return tokens * cached_token_bytes(model) // (1 if group is None else group.size)
