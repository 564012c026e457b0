"""What the supervised stages do around their own loss: directory, data, engine, records."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.cli.options import flatten
from dschat_lora.config import SupervisedConfig
from dschat_lora.data.fingerprint import describe_tokenizer
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.packing import fill, make_rows
from dschat_lora.data.prepare import Prepared, prepare
from dschat_lora.data.store import TokenSet
from dschat_lora.engine.build import EngineSettings, TrainEngine, resolve_dtype
from dschat_lora.engine.distributed import (
    device,
    local_first,
    rank,
    world_size,
)
from dschat_lora.engine.ds_config import read_deepspeed_json
from dschat_lora.engine.state import EngineState
from dschat_lora.engine.zero import shard_from_rank_zero
from dschat_lora.keeper import Keeper, Part
from dschat_lora.lora.rates import parameter_groups, rate_warning
from dschat_lora.memory import estimate_memory_of
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.causal_lm import Tokenizer, stored_dropouts
from dschat_lora.models.fingerprint import base_fingerprint
from dschat_lora.models.probe import probe
from dschat_lora.models.source import ModelSource
from dschat_lora.perf.peak import device_peak
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import Meter
from dschat_lora.report.log import summary_lines
from dschat_lora.report.record import package_versions
from dschat_lora.run import Output


def prepare_data(
    config: SupervisedConfig, tokenizer: Tokenizer, *, phase: int, output: Output
) -> Prepared:
    """Tokenised rows, audited; the audit is shown and recorded. Call on every rank.

    Raises:
        ValueError: if rows cannot be read, or there is nothing to learn from them.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dschat_lora"
    cache = Path(config.data.data_output_path or default).expanduser()
    prepared = local_first(
        lambda: prepare(
            config.data,
            tokenizer,
            phase=phase,
            seed=config.run.seed,
            eos_id=int(tokenizer.eos_token_id),
            cache_dir=cache,
        )
    )
    for line in prepared.audit.lines():
        output.log.say(f"  {line}")
    audit = prepared.audit.to_dict()
    output.record.update({"data": {"fingerprint": prepared.fingerprint, "audit": audit}})
    if config.optim.num_train_epochs > 0:
        prepared.audit.check()
    return prepared


def engine_settings(config: SupervisedConfig) -> EngineSettings:
    """How the engine is to be built, on this machine."""
    return EngineSettings(
        dtype=resolve_dtype(config.model.dtype),
        zero_stage=config.parallel.zero_stage or 0,
        offload=config.parallel.offload,
        micro_batch_size=config.batch.per_device_train_batch_size,
        accumulation_steps=config.batch.gradient_accumulation_steps,
        max_grad_norm=config.optim.max_grad_norm,
        betas=(config.optim.adam_beta1, config.optim.adam_beta2),
        epsilon=config.optim.adam_epsilon,
        deepspeed_json=read_deepspeed_json(config.parallel.deepspeed_config),
    )


def identify(
    adapted: AdaptedModel, tokenizer: Tokenizer, data: Prepared, settings: EngineSettings
) -> dict[str, Any]:
    """What the run's state would mean nothing without; complete on rank 0.

    Call it before :func:`place`, while rank 0 holds the model whole.
    """
    if rank() != 0:
        return {}
    rules = json.dumps(describe_tokenizer(tokenizer), sort_keys=True)
    return {
        "model": base_fingerprint(adapted.model),
        "tokenizer": hashlib.blake2b(rules.encode(), digest_size=16).hexdigest(),
        "train_data": data.train.digest(),
        "eval_data": data.eval.digest(),
        "dtype": settings.dtype,
        "adapter": adapted.lora.described(),
    }


def make_keeper(
    engine: TrainEngine,
    adapted: AdaptedModel,
    loader: StepLoader,
    *,
    identity: Mapping[str, Any],
    parts: Mapping[str, Part],
    output: Output,
) -> Keeper:
    """What saves and restores a run that trains one model."""
    return Keeper(
        output,
        engines={"model": EngineState(engine, adapted.model)},
        parts=parts,
        identity={
            **identity,
            "packing": loader.packs,
            "rows": loader.num_rows,
            "rows_per_step": loader.rows_per_step,
        },
    )


def wants_shape_only(config: SupervisedConfig, settings: EngineSettings) -> bool:
    """Whether this rank builds the model without its weights: they come sharded, or never."""
    return config.run.dry_run or (settings.zero_stage == 3 and rank() > 0)


def describe(
    config: SupervisedConfig, settings: EngineSettings, adapted: AdaptedModel, output: Output
) -> None:
    """Show and record parameter counts, compute type and ZeRO stage."""
    parameters = list(adapted.model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    output.log.say(
        f"  parameters   {total:,}, of which {trained:,} train ({trained / total:.2%}); "
        f"{len(adapted.targets)} adapted layers; {settings.dtype}, ZeRO {settings.zero_stage}, "
        f"{world_size()} process{'es' if world_size() > 1 else ''} on {device().type}"
    )
    if warning := rate_warning(config.optim, config.lora):
        output.log.say(f"  warning      {warning}")
    memory = estimate_memory_of(adapted, config, settings)
    if memory is not None:
        output.log.say(
            f"  memory       up to {memory / 2**30:.3g} GiB per device by estimate, for full rows"
        )
    output.record.update(
        {
            "parameters": {"total": total, "trainable": trained},
            "dtype": settings.dtype,
            "adapted_layers": adapted.targets,
        }
    )
    if config.run.dry_run:
        for name, value in flatten(config).items():
            output.log.say(f"  --{name} {value}")
        output.log.say("dry run: nothing was trained or saved")


def place(model: nn.Module, settings: EngineSettings) -> None:
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


def build_engine(
    network: nn.Module, adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings
) -> TrainEngine:
    """The engine over ``network``, which holds ``adapted.model``; call on every rank."""
    return TrainEngine(network, parameter_groups(adapted.model, config.optim), settings)


def settle_packing(
    engine: TrainEngine, config: SupervisedConfig, tokenizer: Tokenizer, output: Output
) -> bool:
    """Whether to pack, after a look at how the user's own model treats a packed row.

    Also falls back to the model's own logits where its head is more than a linear layer. Call
    on every rank.
    """
    network: Any = engine.module
    engine.eval()
    report = probe(network, vocab_size=len(tokenizer), device=engine.device)
    output.record.update({"probe": vars(report)})
    if not report.head_is_linear:
        network.full_logits = True
        output.log.say(
            "  note         this architecture transforms its logits: they are computed whole, "
            "which takes more memory"
        )
    if report.packing_is_exact and not network.own_mask:
        return config.data.packing
    network.own_mask = True
    if config.data.packing:
        output.log.say(
            "  note         packing is off: this architecture mixes the samples of a packed row "
            f"(relative error {report.packing_error:.1g})"
        )
    return False


def train_loader(
    samples: TokenSet,
    config: SupervisedConfig,
    tokenizer: Tokenizer,
    *,
    packing: bool,
    output: Output,
) -> StepLoader:
    """This rank's micro-batches of every optimizer step."""
    length = config.data.max_seq_len
    rows = make_rows(samples.lengths, max_seq_len=length, packing=packing, seed=config.run.seed)
    if packing:
        share = fill(rows, samples.lengths, length)
        output.log.say(f"  packing      {len(rows):,} rows of {length} tokens, {share:.1%} full")
    loader = StepLoader(
        samples,
        rows=rows,
        micro_batch_size=config.batch.per_device_train_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        rank=rank(),
        world_size=world_size(),
        seed=config.run.seed,
        pad_id=int(tokenizer.pad_token_id),
    )
    steps = loader.steps_per_epoch
    output.log.say(
        f"  steps        {steps:,} an epoch, of up to {loader.rows_per_step} rows: about "
        f"{len(samples) / max(1, steps):,.0f} samples and "
        f"{samples.lengths.sum() / max(1, steps):,.0f} tokens each"
    )
    return loader


def make_meter(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings, output: Output
) -> Meter:
    """The throughput meter of a run over this model."""
    try:
        shape = describe_shape(adapted.model)
    except ValueError as error:
        output.log.say(f"  note         TFLOPs are not reported: {error}")
        shape = None
    return Meter(
        shape,
        gradient_checkpointing=config.model.gradient_checkpointing,
        world_size=world_size(),
        device=device(),
        peak_tflops=device_peak(device(), settings.torch_dtype),
    )


def finish(
    engine: TrainEngine,
    adapted: AdaptedModel,
    source: ModelSource,
    config: SupervisedConfig,
    tokenizer: Tokenizer,
    *,
    results: dict[str, Any],
    probe_ids: torch.Tensor,
    meter: Meter,
    output: Output,
) -> None:
    """Summarise the run and save what was trained; call on every rank.

    Args:
        engine: over the model.
        adapted: what was trained.
        source: of the base model.
        config: the stage's config.
        tokenizer: saved along.
        results: for run.json and the model card.
        probe_ids: (B, T) token ids on which a merged model is compared.
        meter: of the run.
        output: of the run.
    """
    assert output.directory is not None, "a dry run has no end"
    output.record.update({"results": results})
    summary = meter.summary()
    if summary["steps"]:  # none where a run is resumed at its end
        for line in summary_lines(summary):
            output.log.say(line)
        output.record.update({"throughput": summary})
    engine.eval()
    only_adapter = adapted.lora.lora_dim > 0 and adapted.lora.only_optimize_lora
    if only_adapter:
        directory = output.directory / "adapter"
        save_adapter(
            directory,
            adapted.model,
            adapted.lora,
            base=source.base,
            tokenizer=tokenizer,
            card={
                "data": {"training data": " ".join(config.data.data_path)},
                "metrics": results,
                "versions": package_versions(),
            },
        )
        output.log.say(f"adapter written to {directory}")
    if config.run.merge_adapter or not only_adapter:
        directory = output.directory / "model"
        report = save_merged(
            directory,
            adapted.model,
            tokenizer=tokenizer,
            probe_ids=probe_ids,
            # Without adapters nothing was merged that could be refused.
            max_kl=config.run.merge_max_kl if adapted.targets else math.inf,
            dropouts=stored_dropouts(source.base, config.model),
        )
        if report is not None:
            output.record.update({"merge": vars(report)})
            output.log.say(
                f"model written to {directory}: against the trained one, largest logit difference "
                f"{report.max_abs_logit:.2g}, KL {report.kl_nats_per_token:.2g} nats per token"
            )


def probe_batch(samples: TokenSet, tokenizer: Tokenizer, *, max_length: int) -> torch.Tensor:
    """(1, T) ids of a few held-out samples in a row, or random ones where none is held out."""
    ids = [int(i) for n in range(min(4, len(samples))) for i in samples[n].input_ids]
    if not ids:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, len(tokenizer), (32,), generator=generator).tolist()
    return torch.tensor([ids[: min(256, max_length)]])
