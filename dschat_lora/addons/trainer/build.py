"""What a Trainer is made of: options, model, engine and decoder, its state on disk, and its group.

Trainers share one process group.
"""

import atexit
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.algos.tensors import check_finite
from dschat_lora.api.options import model_value
from dschat_lora.api.process import variables_kept
from dschat_lora.checkpoint.manifest import verify, write_manifest
from dschat_lora.checkpoint.tensors import TensorFiles, save_tensors
from dschat_lora.config.files import read_json
from dschat_lora.config.groups import LoraConfig, OptimConfig, is_on
from dschat_lora.config.options import build_config, group, options_in_python, unknown_in_python
from dschat_lora.config.roles import MODEL
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.config.staging import staged_directory
from dschat_lora.engine import failure_detection
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import (
    broadcast_string,
    data_rank,
    destroy_engines,
    device,
    form_grid,
    grid,
    is_destroyed,
    max_over_ranks,
    raise_together,
    rank,
)
from dschat_lora.engine.process_group import init_distributed, shutdown
from dschat_lora.engine.state import EngineState
from dschat_lora.engine.zero import gathered
from dschat_lora.generation.generate import Decoder, KeepGoing, check_cache
from dschat_lora.generation.stops import stop_ids
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
from dschat_lora.models.source import ModelSource
from dschat_lora.rl.draw.own_engine import whole_weights_fit
from dschat_lora.runtime.checks import apply_checks
from dschat_lora.runtime.setup import (
    check_same_models,
    engine_settings,
    shard_model,
    tensor_group,
    tokenizer_digest,
)
from dschat_lora.runtime.stage_main import hush_libraries
from dschat_lora.runtime.validation import (
    MODEL_CHECKS,
    Inputs,
    find_model_of,
    with_deepspeed_json,
    with_recomputation,
)

OPTIONS: frozenset[str] = frozenset(
    (
        *("dtype", "attn_implementation", "trust_remote_code", "base_bits", "chat_template"),
        *("add_eot_token", "eot_token", "gradient_checkpointing", "dropout", "rope_scaling"),
        *(field.name for field in fields(LoraConfig) if "hidden" not in field.metadata),
        *("per_device_train_batch_size", "per_device_eval_batch_size"),
        *("loraplus_lr_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("weight_decay", "zero_stage", "offload", "offload_activations", "deepspeed_config"),
        *("tensor_parallel_size", "sequence_parallel", "distributed_timeout", "seed"),
    )
)
_RATES = ("learning_rate", "lora_learning_rate", "lora_lr_multiplier", "expert_learning_rate")
_SHARD_BYTES = 2**30
_open: "WeakSet[TrainerParts]" = WeakSet()
_joined = False  # whether the process group was formed here
_restore_variables: Callable[[], None] | None = None  # a launcher's, as they were before


@dataclass(frozen=True)
class TrainerConfig(SupervisedConfig):
    """The options of a supervised stage, of which a Trainer takes some."""

    # optim_step says the rate of all that trains; groups differ by --loraplus_lr_ratio alone.
    optim: OptimConfig = group(OptimConfig, learning_rate=1.0, lora_learning_rate=1.0)


def check_options(model: object, values: Mapping[str, Any]) -> tuple[TrainerConfig, ModelSource]:
    """The options that were given, over the command line's defaults, and the model's files.

    ``model`` is a name, a path, a run, (model, tokenizer), or None for the bundled model.

    Raises:
        TypeError: for a name that is unknown.
        ValueError: for a value that is not allowed, or options that contradict each other.
    """
    hush_libraries()
    for name in values:
        if name in _RATES:
            raise TypeError(
                f"unknown option --{name}; the rate of a step is given to it: "
                "optim_step(learning_rate=...)"
            )
        if name not in OPTIONS:
            raise TypeError(unknown_in_python(name, OPTIONS))
    config = build_config(TrainerConfig, options_in_python(TrainerConfig, values))
    path = model_value(model)
    config = replace(config, model=replace(config.model, model_name_or_path=path))
    sources = find_model_of(config)
    checks = (*MODEL_CHECKS, with_deepspeed_json, with_recomputation)
    return apply_checks(config, Inputs(sources, ()), checks), sources.of(MODEL)


@dataclass(eq=False)
class TrainerParts:
    """What a Trainer is made of."""

    config: TrainerConfig
    source: ModelSource
    tokenizer: Tokenizer
    adapted: AdaptedModel
    rollout: PreTrainedModel  # the model in modules without the engine's hooks, for decoding
    engine: TrainEngine[CausalLMLogprobs]
    end_ids: list[int]
    pad_id: int
    vocab_size: int
    max_length: int | None  # positions of the model; None where there is no bound
    identity: dict[str, str]  # of the base; complete on rank 0
    closed: bool = False


def open_parts(config: TrainerConfig, source: ModelSource) -> TrainerParts:
    """Join the process group, load the model and build its engine; call on every rank.

    Raises:
        ValueError: if something cannot be loaded or does not fit.
    """
    _join(config)
    with torch.random.fork_rng(devices=[device()] if device().type == "cuda" else []):
        torch.manual_seed(stream_seed("build", config.run.seed))
        parts = _build(config, source)
    _open.add(parts)
    return parts


def close_parts(parts: TrainerParts, *, together: bool) -> None:
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


def _join(config: TrainerConfig) -> None:
    global _joined, _restore_variables
    if not dist.is_initialized():
        _restore_variables = variables_kept()
        init_distributed()
        if not _joined:
            atexit.register(_leave_at_exit)
        _joined = True
        failure_detection.set_timeout(config.run.distributed_timeout)
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


def _build(config: TrainerConfig, source: ModelSource) -> TrainerParts:
    if config.model.attn_implementation == "flex_attention":
        raise_together(lambda: check_compiler(device(), FLEX_ATTENTION))
    check_same_models({"": source})
    group = tensor_group(config.parallel)
    check_targets(source, config.model, config.lora, given=config.given, group=group)
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
    return TrainerParts(
        config,
        source,
        tokenizer,
        adapted,
        rollout,
        engine,
        end_ids=stop_ids(tokenizer, adapted.model, ()),
        pad_id=int(tokenizer.pad_token_id),
        vocab_size=int(adapted.model.config.vocab_size),
        max_length=getattr(adapted.model.config, "max_position_embeddings", None),
        identity=identity,
    )


@contextmanager
def decoding(parts: TrainerParts) -> Iterator[tuple[Decoder, KeepGoing | None]]:
    """A decoder of the weights as they are, and ``keep_going`` where ranks decode in step.

    At ZeRO 3 the weights are gathered once if the free memory holds them, else layer by layer at
    every token. Call on every rank.
    """
    engine, model = parts.engine, parts.rollout.eval()
    keep_going: KeepGoing | None = None
    engine.eval()

    def some_rank_goes_on(done: bool) -> bool:
        return max_over_ranks(float(not done)) > 0

    with ExitStack() as stack:
        if engine.zero_stage == 3:
            parameters = list(model.parameters())
            if whole_weights_fit(parameters, engine.device):
                stack.enter_context(gathered(parameters))
            else:
                model, keep_going = parts.adapted.model, some_rank_goes_on
        check_cache(model)
        here, ends = engine.device, parts.end_ids
        yield Decoder(model, eos_ids=ends, pad_id=parts.pad_id, device=here), keep_going


def save_state(parts: TrainerParts, directory: Path, *, step: int) -> None:
    """Write the state; call on every rank.

    Raises:
        OSError: on rank 0, if the disk refuses.
        ValueError: if a weight is not finite.
    """
    state = EngineState(parts.engine, parts.adapted.model)
    content = {"step": step, "identity": parts.identity, "engine": state.facts()}
    tensors = state.tensors()

    def write() -> None:
        try:
            if rank() == 0:
                with staged_directory(directory) as staging:
                    _write_shards(tensors, staging, where=directory)
                    text = json.dumps(content, indent=1) + "\n"
                    (staging / "state.json").write_text(text, encoding="utf-8")
                    write_manifest(staging, kind="trainer")
        finally:
            for _ in tensors:  # the others wait for their part in gathering them
                pass

    raise_together(write)


def load_state(parts: TrainerParts, directory: Path) -> int:
    """Restore the state; returns its step. Call on every rank.

    Raises:
        ValueError: if it is damaged, or of another model or adapter.
    """
    content = json.loads(
        broadcast_string(raise_together(lambda: _read(parts, directory) if rank() == 0 else ""))
    )
    paths = sorted(directory.glob("*.safetensors")) if rank() == 0 else []
    EngineState(parts.engine, parts.adapted.model).load(content["engine"], TensorFiles(paths).read)
    return int(content["step"])


def _read(parts: TrainerParts, directory: Path) -> str:
    if not (directory / "state.json").is_file():
        raise ValueError(f"{directory} contains nothing saved by a Trainer")
    verify(directory, kind="trainer")
    content = read_json(directory / "state.json")
    for what, theirs in content["identity"].items():
        if theirs != parts.identity[what]:
            raise ValueError(
                f"{directory} was saved by a Trainer with another {what} ({theirs}, here "
                f"{parts.identity[what]})"
            )
    return json.dumps(content)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], staging: Path, *, where: Path) -> None:
    shard: dict[str, Tensor] = {}
    number = 1
    for key, tensor in tensors:
        check_finite(tensor, f"{where} was not written: {key}")
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            save_tensors(shard, staging / f"model-{number:05d}.safetensors")
            number, shard = number + 1, {}
        shard[key] = tensor
    save_tensors(shard, staging / f"model-{number:05d}.safetensors")
