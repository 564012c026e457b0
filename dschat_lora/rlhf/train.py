"""The course of step 3: roll out, score, update, look up, save; iteration after iteration."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dschat_lora.engine.distributed import device, sum_over_processes
from dschat_lora.engine.state import EngineState
from dschat_lora.perf.peak import device_peak
from dschat_lora.rlhf.config import RlhfConfig
from dschat_lora.rlhf.diagnostics import Diagnostics
from dschat_lora.rlhf.ema import MovingAverage
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.evaluation import Evaluator, make_evaluator
from dschat_lora.rlhf.export import finish
from dschat_lora.rlhf.iteration import IterationReport, Iterations
from dschat_lora.rlhf.pretraining import Pretraining
from dschat_lora.rlhf.rollout import Generator
from dschat_lora.rlhf.schedule import Progress, RlhfSchedule, make_rlhf_schedule
from dschat_lora.rlhf.setup import Setup, make_pretraining
from dschat_lora.rlhf.throughput import PhaseTimer
from dschat_lora.runtime.checkpointer import Checkpointer, Part
from dschat_lora.runtime.lr_schedule import standard_schedule
from dschat_lora.runtime.setup import MAX_SKIPS, MAX_SKIPS_FP16
from dschat_lora.runtime.signals import StopRequested


def train(setup: Setup, engines: Engines) -> None:
    """Train by the plan, evaluate on the way, and save; call on every rank."""
    config, run = setup.config, setup.run
    plan = make_rlhf_schedule(config, len(setup.prompts.train))
    _announce(plan, run.log.say)
    generator = make_generator(setup, engines)
    pretraining = make_pretraining(setup)
    average = None
    if config.classic.enable_ema:
        average = MovingAverage(setup.roles.actor.model, config.classic.ema_decay)
    progress = Progress(kl_coef=config.ppo.kl_coef, kl_start=config.ppo.kl_coef)
    plain = config.batch.do_sample and config.batch.top_p == 1 and config.batch.top_k == 0
    diagnostics = Diagnostics(setup.settings["actor"].dtype, samples_tokens=plain)
    evaluator = make_evaluator(setup, engines, generator, diagnostics)
    states: dict[str, Any] = {
        name: EngineState(engine, setup.roles.models[name].model)
        for name, engine in engines.trained.items()
    }
    parts: dict[str, Part] = {"progress": progress, "watch": diagnostics, "evaluation": evaluator}
    if pretraining is not None:
        parts["pretraining"] = pretraining
    if average is not None:
        states["actor_ema"] = average
    checkpointer = Checkpointer(
        run,
        engines=states,
        parts=parts,
        identity={
            **setup.identity,
            "stage": run.stage,
            "rows_per_step": plan.rows_per_step,
            "responses": plan.order.per_iteration * plan.num_generations,
        },
    )
    checkpointer.restore(num_steps=plan.num_steps)
    if progress.kl_start != config.ppo.kl_coef:  # another one from here on
        progress.kl_coef = progress.kl_start = config.ppo.kl_coef
    iterate = make_iterations(
        setup,
        engines,
        plan,
        generator,
        progress,
        diagnostics,
        pretraining=pretraining,
        average=average,
    )
    with run.interrupts.deferred():
        _run(setup, plan, iterate, progress, evaluator, checkpointer)
    finish(setup, engines, evaluator=evaluator, progress=asdict(progress), average=average)


def _announce(plan: RlhfSchedule, say: Callable[[str], None]) -> None:
    prompts = plan.order.size(0)
    say(
        f"  iterations   {plan.num_iterations:,} of {prompts * plan.num_generations:,} responses "
        f"to {prompts:,} prompts, {plan.steps_of(0)} optimizer steps each; "
        f"{plan.num_steps:,} steps in all"
    )


def make_generator(setup: Setup, engines: Engines) -> Generator:
    """The generator of the actor's responses."""
    return Generator(
        engines.actor,
        setup.roles.rollout,
        engines.actor.module.policy("actor").model,
        eos_ids=[int(setup.tokenizer.eos_token_id)],
        pad_id=int(setup.tokenizer.pad_token_id),
        batch_size=setup.config.batch.per_device_generation_batch_size,
    )


def make_iterations(
    setup: Setup,
    engines: Engines,
    schedule: RlhfSchedule,
    generator: Generator,
    progress: Progress,
    diagnostics: Diagnostics,
    *,
    pretraining: Pretraining | None,
    average: MovingAverage | None,
) -> Iterations:
    """The iterations of a run, from where ``progress`` is."""
    config, tokenizer, log = setup.config, setup.tokenizer, setup.run.log
    return Iterations(
        config=config,
        schedule=schedule,
        progress=progress,
        engines=engines,
        generator=generator,
        prompts=setup.prompts.train,
        pad_id=int(tokenizer.pad_token_id),
        reward_function=setup.function,
        pretraining=pretraining,
        average=average,
        rate_factor=standard_schedule(config.optim)(schedule.num_steps),
        counter=setup.counter,
        peak_tflops=device_peak(device(), setup.settings["actor"].torch_dtype),
        timer=PhaseTimer(device()),
        report=IterationReport(log, config, schedule.num_iterations, tokenizer, diagnostics),
    )


def _run(
    setup: Setup,
    plan: RlhfSchedule,
    iterate: Iterations,
    progress: Progress,
    evaluator: Evaluator,
    checkpointer: Checkpointer,
) -> None:
    """Evaluate, iterate from where ``progress`` is, and evaluate on the way and last."""
    log, total = setup.run.log, plan.num_iterations
    if progress.iteration and progress.iteration == total:
        log.say("the run was complete: there is no step left to train")
    if _eval_due(setup.config, plan, progress, evaluator):
        _evaluate(evaluator, checkpointer, progress.step)
    log.expect(total, progress.iteration)
    while progress.iteration < total:
        skipped = iterate()
        requests = sum_over_processes(checkpointer.requests())
        last = progress.iteration == total
        _check_skips(progress, setup, checkpointer)
        if _eval_due(setup.config, plan, progress, evaluator) and not checkpointer.is_stopping(
            requests
        ):
            _evaluate(evaluator, checkpointer, progress.step)
        checkpointer.after_step(progress.step, requests, skipped=skipped, last=last)


def _eval_due(
    config: RlhfConfig, plan: RlhfSchedule, progress: Progress, evaluator: Evaluator
) -> bool:
    interval, last = config.run.eval_interval, max(evaluator.results, default=0)
    # Iterations take several steps, or none: the interval may end within one.
    due = bool(interval) and progress.step // interval > last // interval
    whole = progress.iteration % plan.order.iterations_per_epoch == 0
    return due or whole or progress.iteration == plan.num_iterations


def _evaluate(evaluator: Evaluator, checkpointer: Checkpointer, step: int) -> None:
    try:
        evaluator(step)
    except StopRequested:
        checkpointer.stop(step)


def _check_skips(progress: Progress, setup: Setup, checkpointer: Checkpointer) -> None:
    """Stop a run whose gradient stays non-finite; falling loss scales need some patience."""
    limit = MAX_SKIPS_FP16 if setup.settings["actor"].dtype == "fp16" else MAX_SKIPS
    if progress.skipped_in_a_row >= limit:
        raise ValueError(
            f"training stopped at step {progress.step}: the gradient was not finite "
            f"{progress.skipped_in_a_row} times in a row; those steps changed no weight. Lower "
            f"the learning rate or try --dtype bf16. {checkpointer.last_good()}"
        )
