"""Setup that stages of one trained model or several share: data, memory, identity, engines."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from dschat_lora.algos.adamw import adamw_
from dschat_lora.config.data import DataConfig, DataKind
from dschat_lora.config.groups import ParallelConfig, RunConfig, ScheduleConfig
from dschat_lora.config.stages import StageConfig
from dschat_lora.data.encoder import describe_tokenizer
from dschat_lora.data.media import MediaReader, media_reader
from dschat_lora.data.prepare import Prepared, prepare
from dschat_lora.engine.build import EngineSettings, Update, resolve_dtype
from dschat_lora.engine.distributed import (
    check_same,
    data_rank,
    device,
    grid,
    local_rank,
    local_rank_first,
    raise_together,
    tensor_rank,
)
from dschat_lora.engine.ds_config import read_deepspeed_json
from dschat_lora.engine.zero import shard_from_rank_zero
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.models.architecture_checks import head_is_linear
from dschat_lora.models.blocks import check_compiler
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint, file_fingerprint
from dschat_lora.models.loading import Tokenizer
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import progress
from dschat_lora.runtime.checks import cache_directory
from dschat_lora.runtime.run import OpenRun

ConfigT = TypeVar("ConfigT", bound=StageConfig)
# Of fewer rows each one that is held out by default is missed.
FEW_ROWS = 100


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


def prepare_to_compile(run: OpenRun[StageConfig], option: str = "--compile") -> None:
    """Refuse ``option`` where torch cannot compile, and say what it costs; call on every rank.

    Raises:
        ValueError: if there is no working compiler on some rank.
    """
    raise_together(lambda: check_compiler(device(), option))
    run.log.say(
        f"  note         {option}: the first evaluation and steps are slow while it compiles"
    )


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    phase: int,
    kind: DataKind,
    media: MediaReader | None = None,
) -> Prepared:
    """Tokenised rows, from the cache of the options if they were made before."""
    return prepare(
        data,
        tokenizer,
        phase=phase,
        seed=seed,
        eos_id=int(tokenizer.eos_token_id),
        cache_dir=cache_directory(data),
        kind=kind,
        progress=progress,
        media=media,
    )


def read_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    run: OpenRun[StageConfig],
    *,
    kind: DataKind,
    name: str,
    media: MediaReader | None = None,
) -> Prepared:
    """Tokenised rows; their audit is shown, and recorded under ``name``. Call on every rank.

    Whether they are fit to train on is for the caller to check.
    """
    how: dict[str, Any] = {"seed": run.config.run.seed, "phase": run.config.phase, "kind": kind}
    prepared = local_rank_first(lambda: prepare_data(data, tokenizer, media=media, **how))
    speaks = local_rank() == 0  # processes of one host read the same files
    check_same(
        lambda: {
            f"the {name} to train on": prepared.train.digest if speaks else "",
            f"the {name} to evaluate on": prepared.eval.digest if speaks else "",
            "the tokenizer": tokenizer_digest(tokenizer) if speaks else "",
        },
        remedy="give all hosts the same files",
    )
    for line in prepared.audit.lines(of_head=data.tail is not None):
        run.log.say(f"  {line}")
    held_out, rows = prepared.audit.eval_rows, prepared.audit.train_rows + prepared.audit.eval_rows
    by_default = not data.eval_data_path and "eval_ratio" not in run.config.given
    if by_default and held_out and rows < FEW_ROWS and run.config.optim.num_train_epochs > 0:
        run.log.say(
            f"  note         {held_out} of the {rows} rows {'is' if held_out == 1 else 'are'} held "
            f"out for evaluation (--eval_ratio {data.eval_ratio:g}); --eval_ratio 0 trains on all"
        )
    audit = prepared.audit.to_dict()
    run.record.update({name: {"fingerprint": prepared.fingerprint, "audit": audit}})
    if prepared.media is not None:
        run.record.update({"media": dict(prepared.media.facts)})
    return prepared


def read_training_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    run: OpenRun[StageConfig],
    *,
    base: str,
) -> Prepared:
    """The rows that a run trains on, as the model at ``base`` reads them; call on every rank.

    Raises:
        ValueError: if rows cannot be read, or there is nothing to learn from them.
    """
    media, kind = media_reader(run.config, tokenizer, base), run.config.kind
    prepared = read_data(data, tokenizer, run, kind=kind, name="data", media=media)
    if run.config.optim.num_train_epochs > 0:
        prepared.audit.check()
    return prepared


def engine_settings(
    config: StageConfig,
    *,
    dtype: str,
    zero_stage: int | None,
    micro_batch_size: int,
    shares_weights: bool = False,
) -> EngineSettings:
    """How an engine is to be built, on this machine.

    ``shares_weights`` says whether another engine trains on the same base weights.
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


def builds_shapes_alone(run: RunConfig, settings: Iterable[EngineSettings]) -> bool:
    """Whether this rank builds models without their weights: they come sharded, or never."""
    return run.dry_run or (data_rank() > 0 and all(each.zero_stage == 3 for each in settings))


def state_identity(
    adapted: AdaptedModel, tokenizer: Tokenizer, data: Prepared, settings: EngineSettings
) -> dict[str, Any]:
    """What the run's state belongs to: model, tokenizer, data; complete on rank 0. On every rank.

    Call it before :func:`shard_model`, while the first data-parallel ranks hold the model.
    """
    if data_rank() != 0:
        return {}
    frozen = getattr(adapted.model, "frozen_rest", None)
    rest = {} if frozen is None else {"rest": frozen[0]}
    return rest | {
        "model": base_fingerprint(adapted.model),
        "tokenizer": tokenizer_digest(tokenizer),
        "train_data": data.train.identity,
        "eval_data": data.eval.identity,
        "dtype": settings.dtype,
        "adapter": adapted.lora.described(),
        "start": adapter_fingerprint(adapted.model),
        **({} if data.media is None else {"media": dict(data.media.identity)}),
    }


def resolve_logits(
    networks: Sequence[Any], *, vocab_size: int, device: torch.device, run: OpenRun[StageConfig]
) -> None:
    """Take the model's own logits where its head is more than a linear layer. On every rank.

    All ``networks`` are over one architecture: each has a ``model``, a ``backbone``, and
    ``full_logits``, which says whether logits are the model's own, computed whole.
    """
    if head_is_linear(networks[0].model, vocab_size=vocab_size, device=device):
        return
    recorded = any(network.backbone.graphs is not None for network in networks)
    for network in networks:
        network.full_logits, network.backbone.graphs = True, None
    run.log.say(
        "  note         this architecture transforms its logits, so they are computed all at "
        f"once, which takes more memory{', and without --training_graphs' if recorded else ''}"
    )


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


def check_same_models(sources: Mapping[str, ModelSource]) -> None:
    """Refuse hosts whose models, by role, are not rank 0's; call on every rank."""

    def fingerprints() -> dict[str, str]:
        own = {}
        for role, source in sources.items():
            for part in ("base", "adapter"):
                path = getattr(source, part) if local_rank() == 0 else None
                name = f"the {part}{role and f' of the {role}'}"
                own[name] = "" if path is None else file_fingerprint(path)
        return own

    check_same(fingerprints, remedy="give all hosts the same files")


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """32 hex digits of all that decides which tokens a text becomes."""
    rules = json.dumps(describe_tokenizer(tokenizer), sort_keys=True)
    return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()
