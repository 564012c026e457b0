"""What ``dschat-lora models MODEL`` says of a model, by its configuration alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from dschat_lora.addons.planning.config import ModelsConfig
from dschat_lora.addons.planning.families import COLUMNS, Families, read_families, short, word
from dschat_lora.addons.planning.plan_search import plan_stage, planning
from dschat_lora.addons.planning.published import with_placeholders
from dschat_lora.config.groups import ModelConfig
from dschat_lora.models.loading import read_config
from dschat_lora.models.option_checks import check_divides
from dschat_lora.models.source import find_model
from dschat_lora.perf.coverage import coverage
from dschat_lora.perf.shape import describe
from dschat_lora.report.terminal import log_once, print_json, wrapped
from dschat_lora.runtime.roles import OneRole

# What each stage needs beside the model, to check whether it would start.
_STAGES: Mapping[str, Mapping[str, Any]] = {
    "sft": {"lora_dim": 16},
    "rlhf": {
        "actor_lora_dim": 16,
        "algorithm": "grpo",
        "reward_function": ("dschat_lora.world:reward",),
        "num_generations": 4,
    },
}


def show_model(config: ModelsConfig) -> bool:
    """Print what is known of the model; returns whether a run on it would start.

    Raises:
        ValueError: if it has no configuration that can be read.
    """
    name = config.model_name_or_path
    assert name is not None
    facts = model_facts(name, read_families())
    if config.json:
        print_json(facts)
    else:
        log_once("\n".join(_lines(facts)))
    return not facts["refused"]


def model_facts(name: str, families: Families) -> dict[str, Any]:
    """What is known of a model, JSON-ready: its type, what learns, what is refused, its cells."""
    with planning() as home:
        values = with_placeholders("sft", {"model_name_or_path": name}, home)
        config = read_config(find_model(values["model_name_or_path"]).base, ModelConfig())
        kinds = [config.model_type, config.get_text_config(decoder=True).model_type]
        facts: dict[str, Any] = {"model": name, "type": kinds[0], "refused": {}}
        for stage, options in _STAGES.items():
            option = "actor_model_name_or_path" if stage == "rlhf" else "model_name_or_path"
            try:
                planned = plan_stage(stage, {option: name, **options}, home / stage, card=None)
            except ValueError as error:
                facts["refused"][stage] = str(error)
            else:
                plan = planned.plan
                if isinstance(plan.models, OneRole):
                    model = plan.models.adapted.model
                    learning = coverage(model)
                    facts |= {"parameters": plan.parameters[0], "learns": learning.to_dict()}
                    facts["warning"] = learning.warning
                    try:
                        facts["uncounted"] = describe(model).uncounted or None
                    except ValueError as error:
                        facts["uncounted"] = str(error)
        cells = next((families.types[kind] for kind in kinds if kind in families.types), None)
        if cells is not None:
            try:
                check_divides(config.to_dict(), 2)
                divides: bool | str = True
            except ValueError as error:
                divides = str(error)
            cells = {**cells, "tensor_parallel": divides}
        facts |= {"transformers": families.transformers, "cells": cells}
        facts["left_out"] = families.left_out.get(kinds[0]) if cells is None else None
    return facts


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['model']}: {facts['type']}"
    said = {}
    if "parameters" in facts:
        said["parameters"] = f"{facts['parameters']:,} with adapters of rank 16"
        said["learns"] = facts["learns"]["words"]
        said["warning"], said["unknown"] = facts["warning"], facts["uncounted"]
    for stage in _STAGES:
        refused = facts["refused"].get(stage)
        said[stage] = f"refused: {refused}" if refused else "starts, by its configuration"
    yield from (wrapped(f"  {name:<13}{text}") for name, text in said.items() if text)
    if facts["cells"] is None:
        why = f" ({facts['left_out']})" if facts["left_out"] else ""
        yield (
            f"Its type was not tested with transformers {facts['transformers']}{why}: the check "
            "at the start of a run decides."
        )
        return
    yield f"tested for its type with transformers {facts['transformers']}:"
    for column in COLUMNS:
        cell = facts["cells"].get(column)
        reason = f": {cell}" if isinstance(cell, str) else ""
        yield wrapped(f"  {short(column):<13}{word(cell)}{reason}")
