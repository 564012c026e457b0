"""Training, evaluating and saving in the supervised stages, once engine and data are there."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from dschat_lora.config.groups import is_on
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.loader import Loader
from dschat_lora.data.samples import Samples, TokenSet
from dschat_lora.data.sources import StreamError
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import device, world_size
from dschat_lora.engine.state import EngineState
from dschat_lora.lora.rates import capacity_warnings, length_warning
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.loading import Tokenizer
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import Flops, Meter, StepCounts, device_peak, memory_of
from dschat_lora.report.log import summary_lines
from dschat_lora.runtime.checkpointer import Checkpointer, Stateful
from dschat_lora.runtime.export import export_trained, first_ids, say_next_steps
from dschat_lora.runtime.loop import (
    AnswerLog,
    EvalResults,
    RateFactor,
    check_repeats,
    small_data_warning,
    standard_schedule,
)
from dschat_lora.runtime.roles import trained_elements
from dschat_lora.runtime.run import OpenRun
from dschat_lora.supervised.batching import BatchLayout, row_share, rows_per_step, train_loader
from dschat_lora.supervised.evaluation import (
    SampleAnswers,
    SupervisedEvaluator,
    first_prompts,
    first_sequences,
)
from dschat_lora.supervised.loop import TrainProgress, TrainSchedule, fit, make_train_schedule
from dschat_lora.supervised.objectives import Objective
from dschat_lora.supervised.setup import SupervisedSetup


class SampleSplit(Protocol):
    """Samples to train on, and held-out ones."""

    @property
    def train(self) -> Samples: ...

    @property
    def eval(self) -> Samples: ...


def train(
    setup: SupervisedSetup,
    engine: TrainEngine[BackboneModel],
    data: SampleSplit,
    batch_layout: BatchLayout,
    objective: Objective,
    *,
    answers: SampleAnswers | None = None,
    extra_flops: Callable[[StepCounts], Flops] | None = None,
    lr_schedule: Callable[[int], RateFactor] | None = None,
    on_checkpoint: Callable[[int], None] | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> None:
    """Train by the schedule, evaluate on the way, and save the result; call on every rank.

    ``data`` is the setup's, perhaps with something added to the samples. ``extra_flops`` are those
    of a step besides forward and backward; ``lr_schedule`` is made from the steps of the whole
    run, in place of ``--lr_scheduler_type``; ``on_checkpoint`` is called on every rank with the
    step of a checkpoint, to write more; ``on_epoch`` with the number of an epoch, from 1, at its
    end, before it is evaluated.
    """
    config, run = setup.config, setup.run
    loader = train_loader(setup, data.train, batch_layout)
    schedule = make_train_schedule(config.optim, config.run, loader.steps_per_epoch)
    check_repeats(config.data, setup.data.times, schedule)
    for warning in size_warnings(setup, loader, schedule):
        run.log.say(f"  warning      {warning}")
    evaluator = SupervisedEvaluator(setup, engine, data.eval, batch_layout, objective)
    meter, progress = make_meter(setup, engine), TrainProgress()
    parts: dict[str, Stateful] = {"progress": progress, "evaluation": evaluator.results}
    if answers is not None:
        parts["answers"] = answers.answers
    checkpointer = _make_checkpointer(setup, engine, loader, parts, on_checkpoint)
    checkpointer.restore(num_steps=schedule.num_steps)
    if answers is not None:
        answers.show("before")

    def evaluate_at(step: int) -> None:
        per_epoch = schedule.iterations_per_epoch
        if on_epoch is not None and step and (step % per_epoch == 0 or step == schedule.num_steps):
            on_epoch(math.ceil(step / per_epoch))
        evaluator(step)
        if step in (0, schedule.num_steps):
            evaluator.check_finite(step)

    with run.interrupts.deferred(), _stops_with_the_data(checkpointer, progress):
        fit(
            engine,
            loader,
            objective,
            schedule,
            progress=progress,
            rate_factor=(lr_schedule or standard_schedule(config.optim))(schedule.num_steps),
            seed=config.run.seed,
            meter=meter,
            log=run.log,
            evaluate_at=evaluate_at,
            checkpointer=checkpointer,
            extra_flops=extra_flops,
            ends_early=partial(ends_early, run, evaluator.results),
        )
    loader.record(run, progress.step)
    if schedule.num_steps and answers is not None:
        answers.show("after")
    # Without a step there is nothing to save, unless base and adapter are to become one model.
    if schedule.num_steps or config.run.merge_adapter:
        finish(setup, engine, results=evaluator.before_and_after(), meter=meter)


@contextmanager
def _stops_with_the_data(checkpointer: Checkpointer, progress: TrainProgress) -> Iterator[None]:
    """Where the data cannot be read on, save the steps up to there, then raise; on every rank."""
    try:
        yield
    except StreamError:
        checkpointer.save_rest(progress.step, "stopped by the data")
        raise


def ends_early(run: OpenRun[SupervisedConfig], results: EvalResults) -> bool:
    """Whether ``--early_stopping_patience`` ends the run after its latest evaluation."""
    patience = run.config.optim.early_stopping_patience
    losses = [float(each["loss"]) for each in results.by_step.values()]
    if not patience or evaluations_since_best(losses) < patience:
        return False
    run.log.say(
        f"the held-out loss was lowest {patience} evaluations ago: the run stops early "
        f"(--early_stopping_patience {patience})"
    )
    return True


def evaluations_since_best(losses: Sequence[float]) -> int:
    """Evaluations after the first with the lowest loss; NaN is as high as infinity."""
    known = [math.inf if math.isnan(loss) else loss for loss in losses]
    return len(known) - 1 - known.index(min(known)) if known else 0


def size_warnings(setup: SupervisedSetup, loader: Loader, schedule: TrainSchedule) -> list[str]:
    """What is doubtful about the run's length, its batches, and the rank for so much data."""
    optim = setup.config.optim
    length = length_warning(optim, schedule.num_steps)
    warnings = [] if length is None else [length]
    counts, batch = loader.counts, setup.config.batch
    if counts is None:
        return warnings
    small, shares = None, row_share(setup)["world_size"]
    if not optim.max_steps and not batch.tokens_per_device:
        small = small_data_warning(
            setup.data.audit.train_rows,
            "rows",
            lambda rows, times: -(-loader.num_rows // (rows * times * shares)),
            epochs=optim.num_train_epochs,
            size="per_device_train_batch_size",
            batch=batch.per_device_train_batch_size,
            least=1 if loader.packs else 2,
            accumulation=batch.gradient_accumulation_steps,
        )
    warnings += [] if small is None else [small]
    return warnings + capacity_warnings(
        setup.config.lora,
        samples_per_step=loader.num_rows / max(1, loader.steps_per_epoch),
        parameters=trained_elements(setup.adapted.model),
        tokens=int(counts.targets.sum()),
        width=setup.adapted.model.config.hidden_size,
    )


def _make_checkpointer(
    setup: SupervisedSetup,
    engine: TrainEngine[BackboneModel],
    loader: Loader,
    parts: dict[str, Stateful],
    on_checkpoint: Callable[[int], None] | None,
) -> Checkpointer:
    stream: dict[str, Stateful] = {"stream": loader} if loader.state() else {}
    return Checkpointer(
        setup.run,
        engines={"model": EngineState(engine, setup.adapted.model)},
        parts=parts | stream,
        identity={
            **setup.identity,
            "stage": setup.run.stage,
            **loader.identity(),
            "rows_per_step": rows_per_step(setup),
            "tokens_per_device": setup.config.batch.tokens_per_device or None,
        },
        on_checkpoint=on_checkpoint,
    )


def make_answers(setup: SupervisedSetup, engine: TrainEngine[BackboneModel]) -> SampleAnswers:
    """Answers to the first held-out prompts, and the tokens of the first rows."""
    held_out, count = setup.data.eval, setup.config.run.sample_generations
    answers = AnswerLog(setup.run, setup.tokenizer)
    rows = first_sequences(held_out, count)
    return SampleAnswers(engine, first_prompts(held_out, count), answers, rows)


def make_meter(setup: SupervisedSetup, engine: TrainEngine[BackboneModel]) -> Meter:
    """The throughput meter of a run over this engine."""
    try:
        shape = describe_shape(setup.adapted.model)
    except ValueError:  # the start-up said why
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
    setup: SupervisedSetup,
    engine: TrainEngine[BackboneModel],
    *,
    results: dict[str, Any],
    meter: Meter,
) -> None:
    """Summarise the run and save what was trained; call on every rank."""
    config, run = setup.config, setup.run
    assert run.directory is not None, "a dry run has no end"
    run.record.update({"results": results})
    summary = meter.summary()
    if summary["steps"]:  # none where a run is resumed at its end
        for line in summary_lines(summary, memory_of=memory_of(device())):
            run.log.say(line)
        run.record.update({"throughput": summary})
    engine.eval()
    report = export_trained(
        run,
        run.directory,
        setup.adapted,
        source=setup.source,
        tokenizer=setup.tokenizer,
        model=config.model,
        data_path=config.data.data_path,
        metrics=results,
        probe_ids=probe_batch(setup.data.eval, setup.tokenizer, max_length=config.data.max_seq_len),
    )
    if report is not None:
        run.record.update({"merge": vars(report)})
        run.log.say(
            f"model written to {run.directory / 'model'}; checked: its logits differ from the "
            f"trained model's by at most {report.max_abs_logit:.2g}, KL "
            f"{report.kl_nats_per_token:.2g} nats per token"
        )
    say_next_steps(run, has_pairs=setup.data.audit.rows_by_type.keys() == {"preference"})


def probe_batch(samples: TokenSet, tokenizer: Tokenizer, *, max_length: int) -> torch.Tensor:
    """(1, T) ids of a few held-out samples in a row, or random ones where none is held out."""
    if ids := first_ids(samples, 4, max_length=max_length):
        return torch.tensor([ids])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, len(tokenizer), (1, 32), generator=generator)[:, :max_length]
