"""The course of a run once its engine and batches are there: train, look up, save, sum up."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.config.groups import is_on
from dschat_lora.data.loader import Samples, StepLoader
from dschat_lora.data.store import TokenSet
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import device, world_size
from dschat_lora.engine.state import EngineState
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.causal_lm import Tokenizer, stored_dropouts
from dschat_lora.perf.flops import Flops
from dschat_lora.perf.peak import device_peak
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import Meter, StepCounts
from dschat_lora.report.log import summary_lines
from dschat_lora.report.record import package_versions
from dschat_lora.runtime.checkpointer import Checkpointer, Part
from dschat_lora.runtime.lr_schedule import RateFactor, standard_schedule
from dschat_lora.supervised.batching import BatchLayout, rows_of
from dschat_lora.supervised.evaluation import Evaluator, SampleAnswers, first_prompts
from dschat_lora.supervised.loop import Progress, fit, make_train_schedule
from dschat_lora.supervised.objectives import Objective
from dschat_lora.supervised.setup import Setup


def train(
    setup: Setup,
    engine: TrainEngine[BackboneModel],
    loader: StepLoader,
    objective: Objective,
    evaluator: Evaluator,
    *,
    answers: SampleAnswers | None = None,
    extra_flops: Callable[[StepCounts], Flops] | None = None,
    schedule: Callable[[int], RateFactor] | None = None,
    on_checkpoint: Callable[[int], None] | None = None,
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
        schedule: from the steps of the whole run, another than ``--lr_scheduler_type``.
        on_checkpoint: called with the step when a checkpoint is made, on every rank, to write more.
    """
    config, run = setup.config, setup.run
    plan = make_train_schedule(config.optim, config.run, loader.steps_per_epoch)
    meter = make_meter(setup, engine)
    progress = Progress()
    parts: dict[str, Part] = {"progress": progress, "evaluation": evaluator}
    checkpointer = Checkpointer(
        run,
        engines={"model": EngineState(engine, setup.adapted.model)},
        parts=parts | ({"answers": answers} if answers is not None else {}),
        identity={
            **setup.identity,
            "stage": run.stage,
            "packing": loader.packs,
            "rows": loader.num_rows,
            "rows_per_step": loader.rows_per_step,
            "tokens_per_device": config.batch.tokens_per_device or None,
        },
        on_checkpoint=on_checkpoint,
    )
    checkpointer.restore(num_steps=plan.num_steps)
    if answers is not None:
        answers.show("before")
    with run.interrupts.deferred():
        fit(
            engine,
            loader,
            objective,
            plan,
            progress=progress,
            rate_factor=(schedule or standard_schedule(config.optim))(plan.num_steps),
            seed=config.run.seed,
            meter=meter,
            log=run.log,
            evaluate_at=evaluator,
            checkpointer=checkpointer,
            extra_flops=extra_flops,
        )
    if plan.num_steps:
        if answers is not None:
            answers.show("after")
        finish(setup, engine, results=evaluator.before_and_after(), meter=meter)


def make_evaluator(
    setup: Setup,
    engine: TrainEngine[BackboneModel],
    samples: Samples,
    batch_layout: BatchLayout,
    objective: Objective,
) -> Evaluator:
    """Looks at the held-out rows.

    Args:
        setup: of the stage.
        engine: over its network.
        samples: the held-out samples, perhaps with something added.
        batch_layout: of samples in batches.
        objective: what is measured.
    """
    rows, collate = rows_of(setup, setup.data.eval, batch_layout), batch_layout.collate
    return Evaluator(engine, samples, rows, collate, objective, setup.config, setup.run)


def make_answers(setup: Setup, engine: TrainEngine[BackboneModel]) -> SampleAnswers:
    """Answers a few held-out prompts before and after."""
    prompts = first_prompts(setup.data.eval, setup.config.run.sample_generations)
    return SampleAnswers(engine, prompts, setup.tokenizer, setup.run)


def make_meter(setup: Setup, engine: TrainEngine[BackboneModel]) -> Meter:
    """The throughput meter of a run over this engine."""
    try:
        shape = describe_shape(setup.adapted.model)
    except ValueError as error:
        setup.run.log.say(f"  note         TFLOPs are not reported: {error}")
        shape = None
    return Meter(
        shape,
        gradient_checkpointing=is_on(setup.config.model.gradient_checkpointing),
        world_size=world_size(),
        device=device(),
        peak_tflops=device_peak(device(), setup.settings.torch_dtype),
        skips_padding=engine.module.backbone.skips_padding(engine.device),
    )


def finish(
    setup: Setup, engine: TrainEngine[BackboneModel], *, results: dict[str, Any], meter: Meter
) -> None:
    """Summarise the run and save what was trained; call on every rank.

    Args:
        setup: of the stage.
        engine: over the model.
        results: for run.json and the model card.
        meter: of the run.
    """
    config, run, adapted = setup.config, setup.run, setup.adapted
    assert run.directory is not None, "a dry run has no end"
    run.record.update({"results": results})
    summary = meter.summary()
    if summary["steps"]:  # none where a run is resumed at its end
        for line in summary_lines(summary):
            run.log.say(line)
        run.record.update({"throughput": summary})
    engine.eval()
    only_adapter = adapted.lora.lora_dim > 0 and adapted.lora.only_optimize_lora
    if only_adapter:
        directory = run.directory / "adapter"
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
        run.log.say(f"adapter written to {directory}")
    if config.run.merge_adapter or not only_adapter:
        directory = run.directory / "model"
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
            run.record.update({"merge": vars(report)})
            run.log.say(
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
