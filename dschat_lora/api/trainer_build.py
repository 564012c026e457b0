"""Model, engine and decoder of a Trainer, and the process group that Trainers share."""

import atexit
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.api.process import variables_kept
from dschat_lora.api.trainer_options import CheckedOptions
from dschat_lora.config.groups import is_on
from dschat_lora.engine import peers
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.collectives import max_over_ranks, raise_together
from dschat_lora.engine.distributed import (
    data_rank,
    destroy_engines,
    device,
    form_grid,
    grid,
    init_distributed,
    is_destroyed,
    shutdown,
)
from dschat_lora.engine.zero import gathered
from dschat_lora.generation.generate import Decoder, KeepGoing, check_cache
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.blocks import (
    FLEX_ATTENTION,
    check_compiler,
    offload_inputs,
    recompute_blocks,
)
from dschat_lora.models.build import AdaptedModel, build_causal_lm, check_targets
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.fingerprint import base_fingerprint
from dschat_lora.models.loading import PreTrainedModel, Tokenizer, load_tokenizer, share_parameters
from dschat_lora.rl.rollout import stop_ids, whole_weights_fit
from dschat_lora.runtime.consistency import check_same_models, tokenizer_digest
from dschat_lora.runtime.setup import engine_settings, shard_model, tensor_group

_open: "WeakSet[Parts]" = WeakSet()
_joined = False  # whether the process group was formed here
_restore_variables: Callable[[], None] | None = None  # a launcher's, as they were before


@dataclass(eq=False)
class Parts:
    """What a Trainer is made of."""

    options: CheckedOptions
    tokenizer: Tokenizer
    adapted: AdaptedModel
    rollout: PreTrainedModel  # the model in modules without the engine's hooks, for decoding
    engine: TrainEngine[CausalLMLogprobs]
    end_ids: list[int]
    identity: dict[str, str]  # of the base; complete on rank 0
    closed: bool = False

    @property
    def pad_id(self) -> int:
        """The token of padding."""
        return int(self.tokenizer.pad_token_id)

    @property
    def max_length(self) -> int | None:
        """Positions of the model; None where there is no bound."""
        return getattr(self.adapted.model.config, "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.adapted.model.config.vocab_size)


def open_parts(options: CheckedOptions) -> Parts:
    """Join the process group, load the model and build its engine; call on every rank.

    Raises:
        ValueError: if something cannot be loaded or does not fit.
    """
    _join(options)
    with torch.random.fork_rng(devices=[device()] if device().type == "cuda" else []):
        torch.manual_seed(stream_seed("build", options.config.run.seed))
        parts = _build(options)
    _open.add(parts)
    return parts


def close_parts(parts: Parts, *, together: bool) -> None:
    """Destroy the engine, and leave the process group if it was formed here for the last Trainer.

    ``together`` says whether every rank calls this: only then the group can be left.
    """
    _open.discard(parts)
    parts.closed = True
    if not is_destroyed(parts.engine.deepspeed):
        destroy_engines([parts.engine.deepspeed])
    del parts.engine, parts.adapted, parts.rollout
    gc.collect()  # engines refer to themselves
    if device().type == "cuda":
        torch.cuda.empty_cache()
    if together and not _open:
        _leave()


def _join(options: CheckedOptions) -> None:
    global _joined, _restore_variables
    config = options.config
    if not dist.is_initialized():
        _restore_variables = variables_kept()
        init_distributed()
        if not _joined:
            atexit.register(_leave_at_exit)
        _joined = True
        peers.set_timeout(config.run.distributed_timeout)
    size, ranks = config.parallel.tensor_parallel_size, grid()
    if size != (1 if ranks is None else ranks.tensor_size):
        if _open:
            raise ValueError(
                f"--tensor_parallel_size {size} differs from that of a Trainer that is open: "
                "close() it first"
            )
        form_grid(size)


def _leave() -> None:
    global _joined
    if _joined and dist.is_initialized():
        shutdown()
    _joined = False
    if _restore_variables is not None:
        _restore_variables()


def _leave_at_exit() -> None:
    """Leave the group in order; not after an error, for others may not come."""
    in_order = getattr(sys, "last_value", None) is None and dist.is_initialized()
    for parts in list(_open):
        parts.closed = True  # what is deleted from here on finds no module any more
        if in_order:
            close_parts(parts, together=False)
    if in_order:
        _leave()


def _build(options: CheckedOptions) -> Parts:
    config, source = options.config, options.source
    if config.model.attn_implementation == "flex_attention":
        raise_together(lambda: check_compiler(device(), FLEX_ATTENTION))
    check_same_models(source)
    group = tensor_group(config.parallel)
    check_targets(source, config.model, config.lora, group=group)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    settings = engine_settings(
        config,
        dtype=config.model.dtype,
        zero_stage=config.parallel.zero_stage,
        micro_batch_size=config.batch.per_device_train_batch_size,
    )
    # How many is not known; where gradients are offloaded DeepSpeed asks whether it is above 1.
    settings = replace(settings, accumulation_steps=2)
    adapted = build_causal_lm(
        source,
        tokenizer,
        config.model,
        config.lora,
        dtype=settings.torch_dtype,
        seed=config.run.seed,
        meta=settings.zero_stage == 3 and data_rank() > 0,
        group=group,
    )
    if is_on(config.model.gradient_checkpointing):
        recompute_blocks(adapted.model)
        if config.parallel.offload_activations:
            offload_inputs(adapted.model)
    identity = {}
    if data_rank() == 0:
        identity = {
            "base model": base_fingerprint(adapted.model),
            "tokenizer": tokenizer_digest(tokenizer),
            "adapter": adapted.lora.described(),
        }
    rollout = share_parameters(adapted.model)
    both = nn.ModuleList([adapted.model, rollout])
    shard_model(both, settings)
    both.to(device())
    groups = parameter_groups(adapted.model, config.optim)
    engine = TrainEngine(CausalLMLogprobs(adapted.model), groups, settings)
    engine.eval()
    engine.module.fit_to_architecture(len(tokenizer), engine.device)
    ends = stop_ids(tokenizer, adapted.model, ())
    return Parts(options, tokenizer, adapted, rollout, engine, ends, identity)


@contextmanager
def decoding(parts: Parts) -> Iterator[tuple[Decoder, KeepGoing | None]]:
    """A decoder of the weights as they are, and ``keep_going`` where ranks decode in step.

    At ZeRO 3 the weights are gathered once if the free memory holds them, else layer by layer at
    every token. Call on every rank.
    """
    engine, rollout = parts.engine, parts.rollout.eval()
    engine.eval()
    if engine.zero_stage < 3:
        yield _decoder(parts, rollout), None
        return
    parameters = list(rollout.parameters())
    if whole_weights_fit(parameters, engine.device):
        with gathered(parameters):
            yield _decoder(parts, rollout), None
        return
    yield _decoder(parts, parts.adapted.model), lambda done: max_over_ranks(float(not done)) > 0


def _decoder(parts: Parts, model: PreTrainedModel) -> Decoder:
    check_cache(model)
    return Decoder(model, eos_ids=parts.end_ids, pad_id=parts.pad_id, device=parts.engine.device)
