"""fp16 with a loss scale that overflows at first: what is skipped, and what that leaves."""

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.bundled import Bundled, bundled_engine
from benchmarks.common.report import PartReport, print_table
from dschat_lora.engine.build import TrainEngine
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

INITIAL_POWER = 32
STAGES = (0, 2)
WANTED_STEPS = 5  # that take effect
MAX_STEPS = 60


def run(report: PartReport, *, tiny: bool) -> None:
    """Train from a scale of 2^32 at each ZeRO stage; store, print and check."""
    bundled = Bundled(tiny=tiny)
    results: list[dict[str, Any]] = []
    for stage in STAGES:
        results.append(_train(bundled, stage))
        report.store({"initial_scale": 2.0**INITIAL_POWER, "runs": results})
    print_table(list(results[0]), [list(result.values()) for result in results])
    for result in results:
        at = f"at ZeRO {result['zero_stage']}"
        report.check(f"2^{INITIAL_POWER} overflows {at}", result["skipped"] > 0)
        report.check(f"a skipped step changes no weight {at}", result["kept"] == result["skipped"])
        report.check(f"every other step does {at}", result["changed"] == result["taken"])
        report.check(f"{WANTED_STEPS} steps take effect {at}", result["taken"] == WANTED_STEPS)
        report.check(f"all stays finite {at}", result["finite"])


def _train(bundled: Bundled, zero_stage: int) -> dict[str, Any]:
    fp16 = {"fp16": {"initial_scale_power": INITIAL_POWER}}
    _, engine = bundled_engine(bundled, dtype="fp16", zero_stage=zero_stage, deepspeed_json=fp16)
    result = {"zero_stage": zero_stage, "skipped": 0, "kept": 0, "taken": 0, "changed": 0}
    before, losses, scale = _trained(engine), [], 0.0
    for step in train_steps(engine, bundled.windows(MAX_STEPS), SUPERVISED, repeat(1.0)):
        after = _trained(engine)
        same = all(torch.equal(after[name], before[name]) for name in after)
        if step.outcome.skipped:
            result["skipped"] += 1
            result["kept"] += same
        else:
            result["taken"] += 1
            result["changed"] += not same
        before, scale = after, step.outcome.loss_scale
        losses.append(step.loss)
        if result["taken"] == WANTED_STEPS:
            break
    finite = _all_finite(before) and all(loss < float("inf") for loss in losses)
    return {**result, "final_scale": scale, "last_loss": losses[-1], "finite": finite}


def _trained(engine: TrainEngine) -> dict[str, Tensor]:
    parameters = engine.module.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if p.requires_grad}


def _all_finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())
