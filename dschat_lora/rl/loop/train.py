"""Step 3 from a checked config to the saved result: setup, iterations, evaluations, export."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dschat_lora.config.addons import groups_of
from dschat_lora.config.plurals import counted
from dschat_lora.data.sources import StreamError
from dschat_lora.engine.distributed import (
    data_world_size,
    device,
    sum_over_processes,
    world_size,
)
from dschat_lora.engine.state import EngineState
from dschat_lora.lora.rates import length_warning
from dschat_lora.perf.throughput import device_peak, memory_of, peak_memory_bytes
from dschat_lora.rl.draw.engine import Drawing
from dschat_lora.rl.draw.generator import BrokenWeightsError
from dschat_lora.rl.learn.engines import Engines
from dschat_lora.rl.loop.build import build_engines
from dschat_lora.rl.loop.evaluation import RlhfEvaluator
from dschat_lora.rl.loop.sampler import make_rlhf_schedule
from dschat_lora.rl.loop.schedule import RlhfProgress, RlhfSchedule
from dschat_lora.rl.loop.setup import RlhfSetup, set_up
from dschat_lora.rl.loop.trainer import RlhfTrainer
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.errors import (
    FullAfterReleaseError,
    FullWhileDecodingError,
    UserFunctionError,
)
from dschat_lora.rl.watch.throughput import PHASES
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.checkpointer import Checkpointer
from dschat_lora.runtime.export import export_trained, first_ids, say_next_steps
from dschat_lora.runtime.loop import TrainingLoop, check_repeats, small_data_warning
from dschat_lora.runtime.run import open_run

FEW_PROMPTS = 16  # of an evaluation, below which the mean of their rewards is mostly noise
NOTE = (
    "the GPU ran out of memory for training next to the KV cache, which was freed; from here on "
    "it is freed after every rollout, as with --release_inference_cache, which does not change "
    "results"
)


def run_rlhf(config: RlhfConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 3, RLHF of an actor on its own responses; gives its directory, None for a dry run."""
    with open_run(config, check=check_rlhf, caller=caller) as run:
        for own in groups_of(config, "before_models"):
            own.before_models()
        setup = set_up(run)
        schedule = make_rlhf_schedule(setup)
        check_repeats(config.data, setup.data.prompts.times, schedule)
        if run.directory is None:
            show_plan(setup, schedule)
        else:
            train(setup, build_engines(setup))
    return run.directory


def train(setup: RlhfSetup, engines: Engines) -> None:
    """Train by the schedule, evaluate on the way, and save the result; call on every rank."""
    config, run, trainer = setup.config, setup.run, RlhfTrainer(setup, engines)
    progress, generator, schedule = trainer.progress, trainer.generator, trainer.schedule
    _announce(setup, schedule)
    evaluator = RlhfEvaluator(
        setup, engines, generator, trainer.parts, trainer.state, lambda: progress.iteration
    )
    checkpointer = _make_checkpointer(trainer, evaluator)
    checkpointer.restore(num_steps=schedule.num_steps)
    progress.begin_at(config.ppo)
    loop = TrainingLoop(
        schedule,
        progress,
        evaluate=evaluator,
        evaluated_up_to=lambda: evaluator.results.last_step,
        checkpointer=checkpointer,
        log=run.log,
    )

    def stop_if_asked(*, last: bool) -> None:
        if not last and (by := trainer.parts.stopped_by()):
            checkpointer.stop(progress.step, by=by)

    scales_loss, keeps_cache = setup.models.settings["actor"].dtype == "fp16", True
    failures_saved = _failures_saved(
        checkpointer, progress, generator.engine, in_python=run.caller.in_python
    )
    with failures_saved, run.interrupts.deferred():
        loop.begin()
        # The evaluation of a run that goes on may be the one that its stop came before.
        stop_if_asked(last=progress.iteration == schedule.num_iterations)
        while progress.iteration < schedule.num_iterations:
            skipped = trainer.iterate()
            own = [*checkpointer.requests(), float(generator.engine.released)]
            *requests, released = sum_over_processes(own)
            if released and keeps_cache:  # on those too that had room
                keeps_cache = False
                generator.engine.release()
                run.log.report_event(progress.step, "note", NOTE, label="note")
            last = loop.after_iteration(requests, skipped=skipped, scales_loss=scales_loss)
            stop_if_asked(last=last)
    if progress.responses and not progress.step:
        raise ValueError(
            f"none of the {progress.responses:,} responses of {progress.iteration} iterations "
            "counted: nothing was trained, and no adapter was written; check what the reward "
            "function returns (None excludes a response)"
        )
    finish(trainer, evaluator.before_and_after())


def show_plan(setup: RlhfSetup, schedule: RlhfSchedule) -> None:
    """Say what the run would do, for a dry run."""
    from dschat_lora.runtime.dry_run import say_options, say_sample

    config, run = setup.config, setup.run
    _announce(setup, schedule)
    run.log.say(
        "  time         unknown until the first iteration, as it depends on the length of responses"
    )
    say_sample(run, config.data.data, setup.tokenizer)
    say_options(run)


@contextmanager
def _failures_saved(
    checkpointer: Checkpointer, progress: RlhfProgress, engine: Drawing, *, in_python: bool
) -> Iterator[None]:
    """Where a user's function or the data fails in the block, save the last iteration, then raise.

    Responses are seen before any of their steps is taken: no iteration is saved in part.
    """
    try:
        yield
        return
    except torch.OutOfMemoryError as error:
        if engine.released and not isinstance(error, FullWhileDecodingError):
            raise FullAfterReleaseError(str(error)) from error
        raise
    except BrokenWeightsError as error:
        raise ValueError(
            f"stopped after step {progress.step}: {error}. {checkpointer.last_good()}"
        ) from error
    except StreamError:
        checkpointer.save_rest(progress.step, "stopped by the data")
        raise
    except UserFunctionError as error:
        cause, what = error.__cause__, error.what
    words = checkpointer.save_rest(progress.step, f"stopped by {what} that failed")
    assert cause is not None
    if in_python and progress.step:
        cause.add_note(words)
    raise cause


def _announce(setup: RlhfSetup, schedule: RlhfSchedule) -> None:
    """Say how long the run is, and what is doubtful about that and its evaluations."""
    config, say = setup.config, setup.run.log.say
    source, optim, batch = schedule.source, config.optim, config.batch
    prompts = source.size(0)
    responses, step = prompts * schedule.num_generations, schedule.rows_per_step
    say(
        f"  iterations   {schedule.num_iterations:,} of {counted(responses, 'response')} to "
        f"{counted(prompts, 'prompt')}, {counted(schedule.steps_of(0), 'optimizer step')} each; "
        f"{counted(schedule.num_steps, 'step')} in all"
    )

    def steps_of(rows: int, times: int) -> int:
        return replace(schedule, rows_per_step=rows * times * data_world_size()).steps_per_epoch

    warnings = [length_warning(optim, schedule.num_steps)]
    if responses > step and responses % step:
        warnings.append(
            f"the last optimizer step on the {responses} responses of an iteration has only "
            f"{responses % step}, where others have {step} (--per_device_training_batch_size, "
            "--gradient_accumulation_steps)"
        )
    if not (optim.max_steps or batch.tokens_per_device):
        sizes = source.sizes(source.iterations_per_epoch).items()
        warnings.append(
            small_data_warning(
                sum(size * count for size, count in sizes),
                "prompts",
                steps_of,
                epochs=optim.num_train_epochs,
                size="per_device_training_batch_size",
                batch=batch.per_device_training_batch_size,
                least=min(batch.per_device_training_batch_size, batch.num_generations),
                accumulation=batch.gradient_accumulation_steps,
            )
        )
    held_out = len(setup.data.prompts.eval)
    used = min(config.eval_prompts, held_out)
    if 0 < used < FEW_PROMPTS:
        where, remedy = "held out", "use more data, a larger --eval_ratio or --eval_data_path"
        if used < held_out:
            where, remedy = "in an evaluation", "increase --eval_prompts"
        warnings.append(
            f"only {counted(used, 'prompt')} {where}: the held-out reward says little; {remedy}"
        )
    for warning in filter(None, warnings):
        say(f"  warning      {warning}")


def _make_checkpointer(trainer: RlhfTrainer, evaluator: RlhfEvaluator) -> Checkpointer:
    setup, schedule = trainer.setup, trainer.schedule
    identity = {
        **setup.identity,
        "stage": setup.run.stage,
        "rows_per_step": schedule.rows_per_step,
        "responses": schedule.source.per_iteration * schedule.num_generations,
        **schedule.source.identity(),
    }
    models, trained = setup.models.roles.models, trainer.engines.trained.items()
    engines: dict[str, Any] = {n: EngineState(each, models[n].model) for n, each in trained}
    return Checkpointer(
        setup.run,
        engines=engines | trainer.parts.averages(),
        parts={
            "progress": trainer.progress,
            **trainer.sampler.parts,
            "evaluation": evaluator,
            **trainer.parts.stateful(),
        },
        identity=identity,
        on_checkpoint=trainer.parts.before_checkpoint,
    )


def finish(trainer: RlhfTrainer, results: dict[str, float]) -> None:
    """Summarise the run and save the adapter or model of each trained role; call on every rank.

    ``results`` are metrics of the first and the last evaluation.
    """
    setup, progress, config = trainer.setup, trainer.progress, trainer.config
    run, sources, roles = setup.run, setup.models.sources, setup.models.roles
    phases = {
        name: {"seconds": progress.seconds[name], "flops": progress.flops[name]} for name in PHASES
    }
    run.record.update({"results": results, "phases": phases})
    trainer.schedule.source.record(run, progress.step)
    if not progress.step and not config.run.merge_adapter:
        return
    if progress.step:
        total = sum(progress.seconds.values())
        shares = ", ".join(f"{n} {s:.1f} s ({s / total:.0%})" for n, s in progress.seconds.items())
        run.log.say(
            f"{counted(progress.iteration, 'iteration')}, {counted(progress.step, 'step')}, "
            f"{counted(progress.responses, 'response')}; {shares}; "
            f"{progress.kl_spent:.3g} nats per response from the reference"
        )
        tflops = sum(progress.flops.values()) / total / world_size() / 1e12
        peak = device_peak(device(), setup.models.settings["actor"].torch_dtype)
        mfu = "" if peak is None else f", MFU {tflops / peak:.1%}"
        memory = peak_memory_bytes(device()) / 2**30
        run.log.say(
            f"per device: {tflops or math.nan:.3g} TFLOPs{mfu}, "
            f"peak memory {memory:.3g} GiB{memory_of(device())}"
        )
    trainer.engines.eval()
    assert run.directory is not None, "a dry run has no end"
    ids = first_ids(setup.data.prompts.train, 8, max_length=config.data.max_seq_len)
    averages = trainer.parts.averages()
    for name, adapted in (roles.trained | dict.fromkeys(averages, roles.actor)).items():
        report = export_trained(
            run,
            run.directory / name,
            adapted,
            source=sources.of(name),
            tokenizer=setup.tokenizer,
            model=config.model_of("actor"),
            data_path=config.data.data_path,
            metrics=results,
            probe_ids=torch.tensor([ids]),
            label=f"{name}: ",
            tensors=dict(averages[name].tensors()) if name in averages else None,
        )
        if report is not None:
            run.log.say(f"model written to {run.directory / name / 'model'}")
    say_next_steps(run)
