"""Step 3 from a checked config to the saved result: setup, iterations, evaluations, export."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat_lora.engine.collectives import sum_over_processes
from dschat_lora.engine.distributed import rank
from dschat_lora.engine.state import EngineState
from dschat_lora.models.build import AdaptedModel
from dschat_lora.report.rollouts import RolloutLog
from dschat_lora.rl.advice import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.diagnostics import Diagnostics
from dschat_lora.rl.ema import MovingAverage
from dschat_lora.rl.engines import Engines, Retry, build_engines
from dschat_lora.rl.evaluation import RlhfEvaluator
from dschat_lora.rl.iteration import Iterations
from dschat_lora.rl.memory import cache_columns
from dschat_lora.rl.pretraining import make_pretraining
from dschat_lora.rl.rollout import BrokenWeightsError, Generator, end_of_text, stop_ids
from dschat_lora.rl.schedule import RlhfProgress, RlhfSchedule, make_rlhf_schedule
from dschat_lora.rl.setup import RlhfSetup, set_up
from dschat_lora.rl.throughput import PHASES
from dschat_lora.rl.user_functions import UserFunctionError
from dschat_lora.rl.validation import NAME, check_rlhf
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.checkpointer import Checkpointer, Part
from dschat_lora.runtime.dry_run import say_options, say_sample
from dschat_lora.runtime.export import export_trained, first_ids
from dschat_lora.runtime.loop import TrainingLoop
from dschat_lora.runtime.next_steps import say_next_steps
from dschat_lora.runtime.resume import goes_on_in_place, run_of
from dschat_lora.runtime.run import OpenRun, open_run

NOTE = (
    "the GPU had no room to train beside what decoding keeps: that was freed, which changes no "
    "result, and is after every rollout from here on, as by --release_inference_cache"
)


@dataclass(frozen=True)
class TrainResult:
    """What :func:`train` did, beside the weights in its engines."""

    metrics: dict[str, float]  # of the first and the last evaluation
    progress: RlhfProgress
    average: MovingAverage | None  # of the actor


def train(setup: RlhfSetup, engines: Engines) -> TrainResult:
    """Train by the schedule and evaluate on the way; call on every rank."""
    config, run = setup.config, setup.run
    schedule = make_rlhf_schedule(config, len(setup.prompts.train))
    _announce(schedule, run.log.say)
    generator = make_generator(setup, engines)
    engines = replace(engines, retry=Retry(engines.trained.values(), generator))
    pretraining = average = None
    if setup.text is not None:
        pad_id = int(setup.tokenizer.pad_token_id)
        pretraining = make_pretraining(setup.text.train, config, pad_id=pad_id)
    if config.classic.enable_ema:
        average = MovingAverage(setup.roles.actor.model, config.classic.ema_decay)
    progress = RlhfProgress(kl_coef=config.ppo.kl_coef, kl_start=config.ppo.kl_coef)
    plain = config.batch.draws_from_policy
    diagnostics = Diagnostics(setup.settings["actor"].dtype, samples_tokens=plain)
    evaluator = RlhfEvaluator(setup, engines, generator, diagnostics)
    rollouts = _make_rollout_log(run)
    parts: dict[str, Part] = {"progress": progress, "watch": diagnostics, "evaluation": evaluator}
    parts["rollouts"] = rollouts
    if pretraining is not None:
        parts["pretraining"] = pretraining
    checkpointer = _make_checkpointer(
        setup, engines, schedule, parts, average, on_checkpoint=rollouts.sync
    )
    checkpointer.restore(num_steps=schedule.num_steps)
    if progress.kl_start != config.ppo.kl_coef:  # another one from here on
        progress.kl_coef = progress.kl_start = config.ppo.kl_coef
    iterate = Iterations(
        setup, engines, schedule, generator, progress, diagnostics, pretraining, average, rollouts
    )

    loop = TrainingLoop(
        schedule,
        progress,
        evaluate=evaluator,
        evaluated_up_to=lambda: evaluator.results.last_step,
        checkpointer=checkpointer,
        log=run.log,
    )
    scales_loss, keeps_cache = setup.settings["actor"].dtype == "fp16", True
    with _failures_saved(checkpointer, progress, generator), run.interrupts.deferred():
        loop.begin()
        while progress.iteration < schedule.num_iterations:
            skipped = iterate()
            own = [*checkpointer.requests(), float(generator.released)]
            *requests, released = sum_over_processes(own)
            if released and keeps_cache:
                keeps_cache = False
                _release(generator, run, progress.step)
            loop.after_iteration(requests, skipped=skipped, scales_loss=scales_loss)
    _check_learnt(progress)
    return TrainResult(evaluator.before_and_after(), progress, average)


def _release(generator: Generator, run: OpenRun[RlhfConfig], step: int) -> None:
    """Free what decoding keeps, as a rank had to, on those too that had room; and say so."""
    generator.release()
    run.log.say(f"  note         {NOTE}")
    run.log.write("event", step, {"event": "note", "message": NOTE})


def show_plan(setup: RlhfSetup) -> None:
    """Say what the run would do, for a dry run."""
    config, run = setup.config, setup.run
    _announce(make_rlhf_schedule(config, len(setup.prompts.train)), run.log.say)
    run.log.say("  time         as long as responses get: the first iteration tells")
    say_sample(run, config.data.data, setup.tokenizer, "prompts")
    say_options(run)


@contextmanager
def _failures_saved(
    checkpointer: Checkpointer, progress: RlhfProgress, generator: Generator
) -> Iterator[None]:
    """Where a user's function fails in the block, save the last whole iteration, then raise.

    It sees responses before any of their steps is taken: no iteration is saved in part. Weights
    that are not finite are not saved.
    """
    try:
        yield
        return
    except torch.OutOfMemoryError as error:
        if generator.released and not isinstance(error, FullWhileDecodingError):
            raise FullAfterReleaseError(str(error)) from error
        raise
    except BrokenWeightsError as error:
        raise ValueError(
            f"stopped after step {progress.step}: {error}. {checkpointer.last_good()}"
        ) from error
    except UserFunctionError as error:
        cause, what = error.__cause__, error.what
    checkpointer.save_rest(progress.step, f"stopped by {what} that failed")
    assert cause is not None
    raise cause


def _check_learnt(progress: RlhfProgress) -> None:
    """Refuse to pass off as finished a run of which no response ever counted."""
    if progress.responses and not progress.step:
        raise ValueError(
            f"none of the {progress.responses:,} responses of {progress.iteration} iterations "
            "counted: nothing was learnt, and no adapter was written; look at what the reward "
            "function returns (None leaves a response out)"
        )


def _announce(schedule: RlhfSchedule, say: Callable[[str], None]) -> None:
    prompts = schedule.order.size(0)
    say(
        f"  iterations   {schedule.num_iterations:,} of {prompts * schedule.num_generations:,} "
        f"responses to {prompts:,} prompts, {schedule.steps_of(0)} optimizer steps each; "
        f"{schedule.num_steps:,} steps in all"
    )


def make_generator(setup: RlhfSetup, engines: Engines) -> Generator:
    """The generator of the actor's responses.

    Raises:
        ValueError: if one of ``--stop_tokens`` is not one token.
    """
    batch, decode, plan = setup.config.batch, setup.tokenizer.decode, setup.plan
    return Generator(
        engines.actor,
        setup.roles.rollout,
        engines.actor.module.policy("actor").model,
        eos_ids=stop_ids(setup.tokenizer, setup.roles.actor.model, batch.stop_tokens),
        pad_id=int(setup.tokenizer.pad_token_id),
        batch_size=batch.per_device_generation_batch_size,
        max_length=cache_columns(setup.config),
        keeps_memory=plan is not None and plan.keeps_cache,
        update_bytes=0 if plan is None else plan.update,
        merged=batch.merge_for_rollouts,
        unpacked=setup.unpacked,
        find_end=partial(end_of_text, stop_strings=batch.stop_strings, decode=decode),
        episodes=setup.episodes,
    )


def _make_rollout_log(run: OpenRun[RlhfConfig]) -> RolloutLog:
    """The file of responses; of a run that goes on elsewhere, with those of the earlier run."""
    assert run.directory is not None, "a dry run keeps nothing"
    source = None
    if run.config.checkpoint and not goes_on_in_place(run.config):
        source = run_of(Path(run.config.checkpoint))
    return RolloutLog(run.directory, run.log, active=rank() == 0, source=source)


def _make_checkpointer(
    setup: RlhfSetup,
    engines: Engines,
    schedule: RlhfSchedule,
    parts: dict[str, Part],
    average: MovingAverage | None,
    on_checkpoint: Callable[[int], None],
) -> Checkpointer:
    states: dict[str, Any] = {
        name: EngineState(engine, setup.roles.models[name].model)
        for name, engine in engines.trained.items()
    }
    if average is not None:
        states["actor_ema"] = average
    return Checkpointer(
        setup.run,
        engines=states,
        parts=parts,
        identity={
            **setup.identity,
            "stage": setup.run.stage,
            "rows_per_step": schedule.rows_per_step,
            "responses": schedule.order.per_iteration * schedule.num_generations,
        },
        on_checkpoint=on_checkpoint,
    )


def finish(setup: RlhfSetup, engines: Engines, result: TrainResult) -> None:
    """Summarise the run and save what was trained; call on every rank."""
    progress, roles = result.progress, setup.roles
    phases = {
        name: {"seconds": progress.seconds[name], "flops": progress.flops[name]} for name in PHASES
    }
    setup.run.record.update({"results": result.metrics, "phases": phases})
    if not progress.step and not setup.config.run.merge_adapter:
        return
    if progress.step:
        setup.run.log.say(_summary_line(progress))
    engines.eval()
    for role, adapted in roles.trained.items():
        _export(setup, role, adapted, result.metrics)
    if result.average is not None:
        tensors = dict(result.average.tensors())
        _export(setup, "actor_ema", roles.actor, result.metrics, tensors=tensors)
    say_next_steps(setup.run)


def _summary_line(progress: RlhfProgress) -> str:
    total = sum(progress.seconds.values())
    shares = ", ".join(
        f"{name} {progress.seconds[name]:.1f} s ({progress.seconds[name] / total:.0%})"
        for name in PHASES
    )
    return (
        f"{progress.iteration} iterations, {progress.step} steps, "
        f"{progress.responses:,} responses; {shares}; "
        f"{progress.kl_spent:.3g} nats per response from the reference"
    )


def _export(
    setup: RlhfSetup,
    name: str,
    adapted: AdaptedModel,
    metrics: Mapping[str, float],
    *,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``name/adapter``, or ``name/model`` where more than an adapter was trained."""
    config, run, sources = setup.config, setup.run, setup.sources
    assert run.directory is not None, "a dry run has no end"
    ids = first_ids(setup.prompts.train, 8, max_length=config.data.max_seq_len)
    report = export_trained(
        run,
        run.directory / name,
        adapted,
        source=(sources.critic if name == "critic" else None) or sources.actor,
        tokenizer=setup.tokenizer,
        model=config.actor.model(config.load),
        data_path=config.data.data_path,
        metrics=metrics,
        probe_ids=torch.tensor([ids]),
        label=f"{name}: ",
        tensors=tensors,
    )
    if report is not None:
        run.log.say(f"model written to {run.directory / name / 'model'}")


def run_rlhf(config: RlhfConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 3, RLHF of an actor on its own responses; gives its directory, None for a dry run."""
    with open_run(config, name=NAME, check=check_rlhf, caller=caller) as run:
        train_rlhf(run)  # a function of its own: its engine must not outlive the run
    return run.directory


def train_rlhf(run: OpenRun[RlhfConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    setup = set_up(run)
    if run.directory is None:
        show_plan(setup)
        return
    engines = build_engines(setup)
    result = train(setup, engines)
    finish(setup, engines, result)
