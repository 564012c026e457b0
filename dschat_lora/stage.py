"""What the supervised stages do around their own loss: directory, data, engine, records."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.cli.options import flatten
from dschat_lora.config import DpoConfig, LoraConfig, ModelConfig, PairConfig, SupervisedConfig
from dschat_lora.data.batch import PairLayout
from dschat_lora.data.fingerprint import describe_tokenizer
from dschat_lora.data.loader import Collator, Samples, StepLoader
from dschat_lora.data.packing import Row, fill, make_rows
from dschat_lora.data.prepare import Prepared, prepare
from dschat_lora.data.rows import DataKind
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
from dschat_lora.engine.zero import Snapshot, shard_from_rank_zero
from dschat_lora.evaluation import Evaluator, SampleAnswers, first_prompts
from dschat_lora.keeper import Keeper, Part
from dschat_lora.lora.rates import parameter_groups, rate_warning
from dschat_lora.memory import estimate_memory_of, explaining_memory
from dschat_lora.models.build import AdaptedModel, Task, check_targets
from dschat_lora.models.causal_lm import Tokenizer, load_tokenizer, stored_dropouts
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.models.probe import ProbeReport, head_is_linear, probe
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.models.trunk import Trunk
from dschat_lora.objective import Objective, dpo_objective
from dschat_lora.perf.flops import Flops, forward_flops
from dschat_lora.perf.peak import device_peak
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import Meter, StepCounts
from dschat_lora.reference import WithReference, logprobs_at, reference_logprobs
from dschat_lora.report.log import summary_lines
from dschat_lora.report.record import package_versions
from dschat_lora.run import Output
from dschat_lora.schedule import rate_factor
from dschat_lora.trainer import Progress, fit, make_plan


@dataclass(frozen=True)
class Setup:
    """A stage with its data and its model, before the engine."""

    config: SupervisedConfig
    source: ModelSource
    tokenizer: Tokenizer
    data: Prepared
    settings: EngineSettings
    adapted: AdaptedModel
    identity: dict[str, Any]
    output: Output


class Build(Protocol):
    """Builds a stage's model; see :func:`dschat_lora.models.build.build_causal_lm`."""

    def __call__(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        config: ModelConfig,
        lora: LoraConfig,
        *,
        dtype: torch.dtype,
        seed: int,
        meta: bool,
    ) -> AdaptedModel:
        """The model with its adapter."""


def set_up(
    output: Output, build: Build, *, phase: int, kind: DataKind = "samples", task: Task
) -> Setup:
    """Data and model of a stage, shown and recorded; call on every rank.

    Args:
        output: of the run.
        build: of the model.
        phase: 1, 2 or 3, the part of ``--data_split`` to use.
        kind: what is made of a row of data.
        task: what kind of model is built.

    Raises:
        ValueError: if data or model cannot be used.
    """
    config = output.config
    source = find_model(config.model.model_name_or_path)
    check_targets(source, config.model, config.lora, task)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    data = prepare_data(config, tokenizer, phase=phase, kind=kind, output=output)
    settings = engine_settings(config)
    adapted = build(
        source,
        tokenizer,
        config.model,
        config.lora,
        dtype=settings.torch_dtype,
        seed=config.run.seed,
        meta=wants_shape_only(config, settings),
    )
    describe(config, settings, adapted, output)
    identity: dict[str, Any] = {}
    if output.directory is not None:
        output.closing.enter_context(explaining_memory(adapted, config, settings, output.directory))
        identity = identify(adapted, tokenizer, data, settings)
        place(adapted.model, settings)
    return Setup(config, source, tokenizer, data, settings, adapted, identity, output)


def prepare_data(
    config: SupervisedConfig,
    tokenizer: Tokenizer,
    *,
    phase: int,
    kind: DataKind = "samples",
    output: Output,
) -> Prepared:
    """Tokenised rows, audited; the audit is shown and recorded. Call on every rank.

    Raises:
        ValueError: if rows cannot be read, or there is nothing to learn from them.
    """
    prepared = local_first(
        lambda: prepare(
            config.data,
            tokenizer,
            phase=phase,
            seed=config.run.seed,
            eos_id=int(tokenizer.eos_token_id),
            cache_dir=cache_directory(config),
            kind=kind,
        )
    )
    for line in prepared.audit.lines():
        output.log.say(f"  {line}")
    audit = prepared.audit.to_dict()
    output.record.update({"data": {"fingerprint": prepared.fingerprint, "audit": audit}})
    if config.optim.num_train_epochs > 0:
        prepared.audit.check()
    return prepared


def cache_directory(config: SupervisedConfig) -> Path:
    """Where tokenised data and reference log-probabilities are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dschat_lora"
    return Path(config.data.data_output_path or default).expanduser()


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
        "start": adapter_fingerprint(adapted.model),
    }


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


def build_engine(setup: Setup, network: nn.Module) -> TrainEngine:
    """The engine over ``network``, which holds the stage's model; call on every rank."""
    groups = parameter_groups(setup.adapted.model, setup.config.optim)
    return TrainEngine(network, groups, setup.settings)


def settle_head(engine: TrainEngine, vocab_size: int, output: Output) -> None:
    """Take the model's own logits where its head is more than a linear layer. On every rank."""
    network: Any = engine.module
    engine.eval()
    if not head_is_linear(network.model, vocab_size=vocab_size, device=engine.device):
        network.full_logits = True
        output.log.say(
            "  note         this architecture transforms its logits: they are computed whole, "
            "which takes more memory"
        )


def settle_packing(engine: TrainEngine, wanted: bool, vocab_size: int, output: Output) -> bool:
    """Whether to pack, after a look at how the user's own model treats a packed row.

    Call on every rank.
    """
    trunk, report = _probe(engine, vocab_size, output)
    if report.packing_is_exact and not trunk.own_mask:
        return wanted
    trunk.own_mask = True
    if wanted:
        output.log.say(
            "  note         packing is off: this architecture mixes the samples of a packed row "
            f"(relative error {report.packing_error:.1g})"
        )
    return False


def settle_pairs(
    engine: TrainEngine, wanted: PairConfig, *, packing: bool, vocab_size: int, output: Output
) -> tuple[PairLayout, bool]:
    """How pairs are laid out and whether rows hold several, after the same look.

    Call on every rank.
    """
    trunk, report = _probe(engine, vocab_size, output)
    if trunk.own_mask or not report.packing_is_exact:
        trunk.own_mask = True
        if packing or wanted.share_prompt:
            output.log.say(
                "  note         every answer has a row of its own: this architecture mixes the "
                f"sequences of a row (relative error {report.packing_error:.1g})"
            )
        return "alone", False
    if wanted.share_prompt and report.tree_is_exact:
        return "shared", packing
    if wanted.share_prompt:
        output.log.say(
            "  note         answers do not share their prompt: this architecture mixes them "
            f"(relative error {report.tree_error:.1g})"
        )
    return "separate", packing


def _probe(engine: TrainEngine, vocab_size: int, output: Output) -> tuple[Trunk, ProbeReport]:
    network: Any = engine.module
    engine.eval()
    report = probe(network.trunk, vocab_size=vocab_size, device=engine.device)
    output.record.update({"probe": vars(report)})
    return network.trunk, report


def rows_of(setup: Setup, samples: TokenSet, collate: Collator, *, packing: bool) -> list[Row]:
    """Rows of sample numbers, several samples a row if they are to be packed."""
    return make_rows(
        collate.lengths(samples),
        max_seq_len=setup.config.max_row_tokens,
        packing=packing,
        seed=setup.config.run.seed,
    )


def train_loader(setup: Setup, samples: Samples, collate: Collator, *, packing: bool) -> StepLoader:
    """This rank's micro-batches of every optimizer step.

    Args:
        setup: of the stage.
        samples: the training samples, perhaps with something added.
        collate: makes batches.
        packing: several samples a row.
    """
    config, log = setup.config, setup.output.log
    lengths = collate.lengths(setup.data.train)
    rows = rows_of(setup, setup.data.train, collate, packing=packing)
    if packing:
        capacity = config.max_row_tokens
        share = fill(rows, lengths, capacity)
        log.say(f"  packing      {len(rows):,} rows of {capacity} tokens, {share:.1%} full")
    loader = StepLoader(
        samples,
        rows=rows,
        micro_batch_size=config.batch.per_device_train_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        rank=rank(),
        world_size=world_size(),
        seed=config.run.seed,
        collate=collate,
    )
    steps = loader.steps_per_epoch
    log.say(
        f"  steps        {steps:,} an epoch, of up to {loader.rows_per_step} rows: about "
        f"{len(lengths) / max(1, steps):,.0f} samples and "
        f"{lengths.sum() / max(1, steps):,.0f} tokens each"
    )
    return loader


def make_evaluator(
    setup: Setup,
    engine: TrainEngine,
    samples: Samples,
    collate: Collator,
    objective: Objective,
    *,
    packing: bool,
) -> Evaluator:
    """Looks at the held-out rows.

    Args:
        setup: of the stage.
        engine: over its network.
        samples: the held-out samples, perhaps with something added.
        collate: makes batches.
        objective: what is measured.
        packing: several samples a row.
    """
    rows = rows_of(setup, setup.data.eval, collate, packing=packing)
    return Evaluator(engine, samples, rows, collate, objective, setup.config, setup.output)


@dataclass(frozen=True)
class Reference:
    """DPO's objective and the pairs it is taken on, which may bring the reference's values."""

    objective: Objective
    train: Samples
    eval: Samples
    extra_flops: Callable[[StepCounts], Flops] | None = None


def make_reference(
    setup: Setup, engine: TrainEngine, collate: Collator, dpo: DpoConfig, *, packing: bool
) -> Reference:
    """The model as it is, before anything is trained or restored; call on every rank.

    Args:
        setup: of the stage.
        engine: over its network.
        collate: makes batches.
        dpo: the user's options.
        packing: several pairs a row.
    """
    data, config = setup.data, setup.config
    if not dpo.precompute_ref_log_probs:
        trained = [p for p in setup.adapted.model.parameters() if p.requires_grad]
        return Reference(
            dpo_objective(dpo, partial(logprobs_at, Snapshot(trained), engine)),
            data.train,
            data.eval,
            partial(_forward_flops, setup.adapted.model),
        )
    setup.output.log.say("  reference    its log-probabilities of all pairs ...")
    known = partial(
        reference_logprobs,
        engine,
        collate=collate,
        batch_size=config.batch.per_device_eval_batch_size,
        cache=cache_directory(config),
        identity=[setup.identity.get(name) for name in ("model", "start", "dtype")],
    )
    train, held_out = (
        WithReference(pairs, known(pairs, rows=rows_of(setup, pairs, collate, packing=packing)))
        for pairs in (data.train, data.eval)
    )
    return Reference(dpo_objective(dpo, lambda batch: batch.reference), train, held_out)


def _forward_flops(model: nn.Module, counts: StepCounts) -> Flops:
    """FLOPs of one more forward pass; none where the architecture is not understood."""
    try:
        shape = describe_shape(model)
    except ValueError:
        return Flops()
    return forward_flops(
        shape,
        num_tokens=counts.num_tokens,
        num_attended=counts.num_attended,
        num_targets=counts.num_targets,
        num_positions=counts.num_positions,
        num_scored_pairs=counts.num_scored_pairs,
    )


def make_answers(setup: Setup, engine: TrainEngine) -> SampleAnswers:
    """Answers a few held-out prompts before and after."""
    prompts = first_prompts(setup.data.eval, setup.config.run.sample_generations)
    return SampleAnswers(engine, prompts, setup.tokenizer, setup.output)


def train(
    setup: Setup,
    engine: TrainEngine,
    loader: StepLoader,
    objective: Objective,
    evaluator: Evaluator,
    *,
    answers: SampleAnswers | None = None,
    extra_flops: Callable[[StepCounts], Flops] | None = None,
) -> None:
    """Train by the plan, evaluate on the way, and save what was trained; call on every rank.

    Args:
        setup: of the stage.
        engine: over its network.
        loader: of training batches.
        objective: what to descend.
        evaluator: of held-out rows.
        answers: shown before and after.
        extra_flops: of a step besides forward and backward.
    """
    config, output = setup.config, setup.output
    plan = make_plan(config.optim, config.run, loader.steps_per_epoch)
    meter = make_meter(setup.adapted, config, setup.settings, output)
    progress = Progress()
    parts: dict[str, Part] = {"progress": progress, "evaluation": evaluator}
    keeper = Keeper(
        output,
        engines={"model": EngineState(engine, setup.adapted.model)},
        parts=parts | ({"answers": answers} if answers is not None else {}),
        identity={
            **setup.identity,
            "packing": loader.packs,
            "rows": loader.num_rows,
            "rows_per_step": loader.rows_per_step,
        },
    )
    keeper.restore(num_steps=plan.num_steps)
    if answers is not None:
        answers.show("before")
    with output.interrupts.deferred():
        fit(
            engine,
            loader,
            objective,
            plan,
            progress=progress,
            rate_factor=rate_factor(
                config.optim.lr_scheduler_type,
                num_warmup_steps=config.optim.num_warmup_steps,
                num_steps=plan.num_steps,
            ),
            seed=config.run.seed,
            meter=meter,
            log=output.log,
            evaluate_at=evaluator,
            keeper=keeper,
            extra_flops=extra_flops,
        )
    if plan.num_steps:
        if answers is not None:
            answers.show("after")
        finish(setup, engine, results=evaluator.before_and_after(), meter=meter)


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


def finish(setup: Setup, engine: TrainEngine, *, results: dict[str, Any], meter: Meter) -> None:
    """Summarise the run and save what was trained; call on every rank.

    Args:
        setup: of the stage.
        engine: over the model.
        results: for run.json and the model card.
        meter: of the run.
    """
    config, output, adapted = setup.config, setup.output, setup.adapted
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
            base=setup.source.base,
            tokenizer=setup.tokenizer,
            card={
                "data": {"training data": " ".join(config.data.data_path)},
                "metrics": results,
                "versions": package_versions(),
            },
            task_type=adapted.task,
        )
        output.log.say(f"adapter written to {directory}")
    if config.run.merge_adapter or not only_adapter:
        directory = output.directory / "model"
        report = save_merged(
            directory,
            adapted.model,
            tokenizer=setup.tokenizer,
            probe_ids=probe_batch(
                setup.data.eval, setup.tokenizer, max_length=config.data.max_seq_len
            ),
            # Without adapters nothing was merged that could be refused.
            max_kl=config.run.merge_max_kl if adapted.targets else math.inf,
            dropouts=stored_dropouts(setup.source.base, config.model),
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
