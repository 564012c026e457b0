"""What a finished run of step 3 leaves behind: actor, critic, and the actor's moving average."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.causal_lm import stored_dropouts
from dschat_lora.models.source import ModelSource
from dschat_lora.report.record import package_versions
from dschat_lora.rlhf.ema import MovingAverage
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.evaluation import Evaluator
from dschat_lora.rlhf.setup import Setup
from dschat_lora.rlhf.throughput import PHASES


def finish(
    setup: Setup,
    engines: Engines,
    *,
    evaluator: Evaluator,
    progress: Mapping[str, Any],
    average: MovingAverage | None,
) -> None:
    """Summarise the run and save what was trained; call on every rank."""
    record, log = setup.run.record, setup.run.log
    results = evaluator.before_and_after()
    phases = {
        name: {"seconds": progress["seconds"][name], "flops": progress["flops"][name]}
        for name in PHASES
    }
    record.update({"results": results, "phases": phases})
    if not progress["step"]:
        return
    total = sum(progress["seconds"].values())
    shares = ", ".join(
        f"{name} {progress['seconds'][name]:.1f} s ({progress['seconds'][name] / total:.0%})"
        for name in PHASES
    )
    log.say(
        f"{progress['iteration']} iterations, {progress['step']} steps, "
        f"{progress['responses']:,} responses; {shares}; "
        f"{progress['kl_spent']:.3g} nats per response from the reference"
    )
    engines.eval()
    for role, adapted in setup.roles.trained.items():
        _save(setup, role, adapted, results)
    if average is not None:
        tensors = dict(average.tensors())
        _save(setup, "actor_ema", setup.roles.actor, results, tensors=tensors)


def _save(
    setup: Setup,
    name: str,
    adapted: AdaptedModel,
    results: Mapping[str, Any],
    *,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``name/adapter``, or ``name/model`` where more than an adapter was trained."""
    config, run = setup.config, setup.run
    assert run.directory is not None, "a dry run has no end"
    source = setup.sources.critic if name == "critic" else setup.sources.actor
    source = source or setup.sources.actor
    directory: Path = run.directory / name
    only_adapter = adapted.lora.lora_dim > 0 and adapted.lora.only_optimize_lora
    if only_adapter:
        save_adapter(
            directory / "adapter",
            adapted.model,
            adapted.lora,
            base=source.base,
            tokenizer=setup.tokenizer,
            card={
                "data": {"training data": " ".join(config.data.data_path)},
                "metrics": results,
                "versions": package_versions(),
            },
            task_type=adapted.task,
            tensors=tensors,
        )
        run.log.say(f"{name}: adapter written to {directory / 'adapter'}")
    if config.run.merge_adapter or not only_adapter:
        _save_whole(setup, directory / "model", adapted, source, tensors)


def _save_whole(
    setup: Setup,
    directory: Path,
    adapted: AdaptedModel,
    source: ModelSource,
    tensors: Mapping[str, Tensor] | None,
) -> None:
    """Write a complete transformers directory."""
    config, run = setup.config, setup.run
    prompts = setup.prompts.train
    ids = [int(i) for n in range(min(8, len(prompts))) for i in prompts[n].input_ids]
    save_merged(
        directory,
        adapted.model,
        tokenizer=setup.tokenizer,
        probe_ids=torch.tensor([ids[: min(256, config.data.max_seq_len)]]),
        # Without adapters nothing was merged that could be refused.
        max_kl=config.run.merge_max_kl if adapted.targets and tensors is None else math.inf,
        dropouts=stored_dropouts(source.base, config.actor.model(config.load)),
        tensors=tensors,
    )
    run.log.say(f"model written to {directory}")
