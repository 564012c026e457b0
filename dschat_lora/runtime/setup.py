"""Setup that every trained stage shares: data, engine settings, identity and placement."""

import hashlib
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dschat_lora.algos.adamw import adamw_
from dschat_lora.config.groups import DataConfig, ParallelConfig, ScheduleConfig
from dschat_lora.config.stages import StageConfig
from dschat_lora.data.fingerprint import describe_tokenizer
from dschat_lora.data.prepare import Prepared, prepare
from dschat_lora.data.rows import DataKind
from dschat_lora.engine.adamw import Update
from dschat_lora.engine.build import EngineSettings, resolve_dtype
from dschat_lora.engine.distributed import (
    data_rank,
    device,
    grid,
    local_rank_first,
    raise_together,
    tensor_rank,
    world_size,
)
from dschat_lora.engine.ds_config import read_deepspeed_json
from dschat_lora.engine.zero import shard_from_rank_zero
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.models.build import (
    AdaptedModel,
)
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.models.compile import check_compiler
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.runtime.run import Run


def tensor_group(parallel: ParallelConfig) -> TensorGroup | None:
    """The ranks that hold one model between them; None where each holds a whole one."""
    ranks = grid()
    if ranks is None:
        return None
    return TensorGroup(
        ranks.tensor_group,
        tensor_rank(),
        ranks.tensor_size,
        sequence_parallel=parallel.sequence_parallel,
    )


def prepare_to_compile(run: Run[StageConfig]) -> None:
    """Refuse ``--compile`` where it cannot work, and say what it costs; call on every rank.

    Raises:
        ValueError: if there is no working compiler on some rank.
    """
    raise_together(lambda: check_compiler(device()))
    run.log.say("  note         --compile: the first evaluation and steps wait for the compiler")


def read_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    phase: int,
    seed: int,
    kind: DataKind,
    name: str,
    run: Run[StageConfig],
) -> Prepared:
    """Tokenised rows; their audit is shown, and recorded under ``name``. Call on every rank.

    Whether they are fit to train on is for the caller to say.
    """
    prepared = local_rank_first(
        lambda: prepare(
            data,
            tokenizer,
            phase=phase,
            seed=seed,
            eos_id=int(tokenizer.eos_token_id),
            cache_dir=cache_directory(data),
            kind=kind,
        )
    )
    for line in prepared.audit.lines():
        run.log.say(f"  {line}")
    audit = prepared.audit.to_dict()
    run.record.update({name: {"fingerprint": prepared.fingerprint, "audit": audit}})
    return prepared


def cache_directory(data: DataConfig) -> Path:
    """Where tokenised data and reference log-probabilities are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dschat_lora"
    return Path(data.data_output_path or default).expanduser()


def engine_settings(
    config: StageConfig,
    *,
    dtype: str,
    zero_stage: int | None,
    micro_batch_size: int,
    shares_weights: bool = False,
) -> EngineSettings:
    """How an engine is to be built, on this machine.

    Args:
        config: of the stage.
        dtype: compute type, or auto.
        zero_stage: None for 0.
        micro_batch_size: rows of a device's micro-batch.
        shares_weights: whether another engine trains on the same base weights.
    """
    return EngineSettings(
        dtype=resolve_dtype(dtype),
        zero_stage=zero_stage or 0,
        offload=config.parallel.offload,
        micro_batch_size=micro_batch_size,
        accumulation_steps=config.batch.gradient_accumulation_steps,
        max_grad_norm=config.optim.max_grad_norm,
        betas=(config.optim.adam_beta1, config.optim.adam_beta2),
        epsilon=config.optim.adam_epsilon,
        deepspeed_json=read_deepspeed_json(config.parallel.deepspeed_config),
        shares_weights=shares_weights,
        update=adamw_update(config.optim),
    )


def adamw_update(optim: ScheduleConfig) -> Update | None:
    """The update of a run that wants another than torch's."""
    if optim.correct_bias and not optim.decay_after_update:
        return None
    return partial(
        adamw_, correct_bias=optim.correct_bias, decay_after_update=optim.decay_after_update
    )


def state_identity(
    adapted: AdaptedModel, tokenizer: Tokenizer, data: Prepared, settings: EngineSettings
) -> dict[str, Any]:
    """What the run's state would mean nothing without; complete on rank 0. On every rank.

    Call it before :func:`shard_model`, while the first data-parallel ranks hold the model.
    """
    if data_rank() != 0:
        return {}
    rules = json.dumps(describe_tokenizer(tokenizer), sort_keys=True)
    return {
        "model": base_fingerprint(adapted.model),
        "tokenizer": hashlib.blake2b(rules.encode(), digest_size=16).hexdigest(),
        "train_data": data.train.digest(),
        "eval_data": data.eval.digest(),
        "dtype": settings.dtype,
        "adapter": adapted.lora.described(),
        "start": adapter_fingerprint(adapted.model),
    }


def zero_words(settings: EngineSettings, model: nn.Module) -> str:
    """The ZeRO stage asked for, and whether it makes no difference to ``model`` here."""
    trained = [p for p in model.parameters() if p.requires_grad]
    idle = settings.stage_in_use(settings.native_dtype(trained)) < settings.zero_stage
    return f"ZeRO {settings.zero_stage}{' (one process: nothing to shard)' if idle else ''}"


def process_words() -> str:
    """How many processes there are, of what kind, and what they share."""
    count = world_size()
    words = f"{count} process{'es' if count > 1 else ''} on {device().type}"
    ranks = grid()
    return words if ranks is None else f"{words}, {ranks.tensor_size} to a model"


def shard_model(model: nn.Module, settings: EngineSettings) -> None:
    """Shard the weights over ranks at ZeRO 3; DeepSpeed moves them otherwise. On every rank."""
    if settings.zero_stage < 3:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    native = settings.native_dtype(trained)
    if native is not None:
        # One type for all that trains, as DeepSpeed makes it at the other stages.
        for parameter in trained:
            parameter.data = parameter.data.to(settings.torch_dtype)
    shard_from_rank_zero(model, settings.deepspeed(3, native))


MAX_SKIPS = 3


MAX_SKIPS_FP16 = 40  # a loss scale of 2^32 needs as many halvings to reach 1


def broken_unless_finite(loss: Tensor, total: Tensor) -> Tensor:
    """``loss`` or, where ``total`` is not finite, NaN, as its gradient will be.

    A loss of infinity can have a finite gradient (that of ``-log 0`` has). No value is waited
    for, so a GPU keeps working.
    """
    finite = torch.isfinite(total)
    return loss * torch.where(finite, 1.0, math.nan).to(loss.dtype)
