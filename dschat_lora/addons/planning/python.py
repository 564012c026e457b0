"""``dschat_lora.plan`` and ``dschat_lora.tune``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.addons.planning.cards import find_card
from dschat_lora.addons.planning.config import TuneConfig
from dschat_lora.addons.report.markup import safe
from dschat_lora.api.options import Data, Model, option_values
from dschat_lora.api.tracebacks import api_boundary
from dschat_lora.commands.stages import STAGES, with_verb_defaults
from dschat_lora.config.held import is_held
from dschat_lora.config.options import (
    build_config,
    option_fields,
    options_in_python,
    typed_options,
)
from dschat_lora.runtime.checks import require_packages
from dschat_lora.runtime.stage_main import late


@dataclass(frozen=True)
class Plan:
    """Memory and time of a stage before anything is loaded.

    Attributes:
        facts: what ``dschat-lora plan --json`` gives: sizes are bytes on one device.
        text: what it prints.
        peak: most bytes at a time on a device.
        fits: whether it fits as it was given; None without a device.
        command: a command line that fits; None where nothing was found.
    """

    facts: dict[str, Any]
    text: str
    peak: int
    fits: bool | None
    command: str | None

    def __repr__(self) -> str:
        return f"<Plan: {self.peak / 2**30:.3g} GiB per device>"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{safe(self.text)}</pre>"


@api_boundary
def plan(
    stage: str,
    model: Model | None = None,
    data: Data | None = None,
    *,
    device: str | None = None,
    num_gpus: int | None = None,
    **options: object,
) -> Plan:
    """Memory and time of a stage, and settings that fit a device; no weights are loaded.

    Args:
        stage: "sft", "reward", "dpo", "rlhf" or "distill".
        model: as in ``dschat_lora.sft``, or the name of a published one without its files.
        data: rows, if their lengths are to count.
        device: memory such as "24GB", or the name of a card (the command's ``--for``).
        num_gpus: processes, one for each GPU.
        **options: those of the stage, by their names.

    Raises:
        ValueError: as the stage would refuse its options, or for an unknown architecture.
    """
    if num_gpus is not None and num_gpus < 1:
        raise ValueError(f"num_gpus must be >= 1, got {num_gpus}")
    card = None if device is None else find_card(device)
    with ExitStack() as stack:
        typed = _stage_options(stage, model, data, options, stack)
        facts, text = late("addons.planning.plan_report:described_plan")(
            stage, typed, card=card, processes=num_gpus or 1
        )
    return Plan(facts, text, int(facts["peak"]), facts["fits"], facts["command"])


@dataclass(frozen=True)
class Tuned:
    """What a search came to.

    Attributes:
        path: the directory, with ``report.html``, the curves of all trials.
        best: options of the best trial, beside those that were given, as arguments of the stage.
        value: the held-out measure of that trial.
        trials: ``trial``, ``options``, ``steps``, the measure and ``ended`` of each, as printed.
        command: the command line that trains with the best options.
    """

    path: Path
    best: dict[str, float]
    value: float
    trials: list[dict[str, str]]
    command: str


@api_boundary
def tune(
    stage: str,
    model: Model | None = None,
    data: Data | None = None,
    *,
    rates: Sequence[float] = (),
    ranks: Sequence[int] = (),
    batches: Sequence[int] = (),
    trials: int = 0,
    seeds: int = 1,
    jobs: int = 1,
    metric: str | None = None,
    min_steps: int = 0,
    reduction_factor: int = 3,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    **options: object,
) -> Tuned:
    """Search for a stage's learning rate and, optionally, its rank and batch size by short runs.

    Needs ``dschat_lora[planning]``. Runs are separate processes; call it from the main thread.

    Args:
        stage: "sft", "reward", "dpo", "rlhf" or "distill".
        model: as in ``dschat_lora.sft``.
        data: a path, or several.
        rates: peak rates to try, of the adapter where there is one; by default that of the rules,
            times 1/8 to 8.
        ranks: values of ``lora_dim`` to try with each rate.
        batches: sizes of the training batch of a device to try with each.
        trials: in all; those beyond the listed ones are drawn where these were good.
        seeds: runs of a trial, whose mean counts.
        jobs: trials at a time.
        metric: held-out measure that decides; by default loss, of rlhf and distill reward.
        min_steps: optimizer steps after which a trial may end.
        reduction_factor: one of so many trials goes on.
        output_dir: of the search; the first free of ``output/tune-STAGE``, ... when absent.
        resume: go on with the search in ``output_dir``.
        **options: those of the stage, by their names; ``max_steps`` is a whole trial's length.

    Returns:
        The trials and the best options: ``dschat_lora.sft(model, data, **found.best)`` trains by
        them.

    Raises:
        TypeError: for an option that does not exist, and for rows, functions and other objects,
            which processes of their own cannot read.
        ValueError: for a value that cannot be used, or if no trial came to its end.
        SystemExit: after Ctrl-C, once the runs are saved; ``resume=True`` goes on.
    """
    given = locals()
    search = {name: given[name] for name in option_fields(TuneConfig)}
    config = build_config(TuneConfig, options_in_python(TuneConfig, search))
    with ExitStack() as stack:
        typed = _stage_options(stage, model, data, options, stack)
    for name, value in typed.items():
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, str) and is_held(each) for each in values):
            raise TypeError(f"{name} must be a path or a name, which the runs can read themselves")
    require_packages("dschat_lora.tune", "optuna", extra="planning")
    return Tuned(**late("addons.planning.tune:run_tune")(config, stage, typed, None))


def _stage_options(
    stage: str, model: Model | None, data: Data | None, options: Mapping[str, Any], stack: ExitStack
) -> dict[str, Any]:
    """A stage's options as typed, none of which is out of its range."""
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    role = "actor_" if stage in ("rlhf", "distill") else ""
    named = {f"{role}model_name_or_path": model, "data_path": data}
    given = {name: value for name, value in named.items() if value is not None}
    config_class = STAGES[stage].config
    values = option_values(config_class, {**options, **given}, stack)
    typed = options_in_python(config_class, values)
    return typed | typed_options(with_verb_defaults(build_config(config_class, typed)))
