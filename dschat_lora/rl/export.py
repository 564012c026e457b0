"""The end of a run of step 3: its summary, and actor, critic and moving average written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dschat_lora.models.build import AdaptedModel
from dschat_lora.rl.engines import Engines
from dschat_lora.rl.schedule import RlhfProgress
from dschat_lora.rl.setup import RlhfSetup
from dschat_lora.rl.throughput import PHASES
from dschat_lora.rl.train import TrainResult
from dschat_lora.runtime.export import export_trained, first_ids
from dschat_lora.runtime.next_steps import say_next_steps


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
