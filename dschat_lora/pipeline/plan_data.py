"""Data of a planned stage: what would be dropped or cut, counted with the model's tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat_lora.config.stages import DpoStageConfig
from dschat_lora.data.audit import DataAudit
from dschat_lora.data.rows import config_sources
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.runtime.data_audit import STAGES
from dschat_lora.runtime.setup import prepare_data


def audit_of(name: str, config: Any, options: Mapping[str, Any]) -> DataAudit | str | None:
    """The audit that the run would show, why it cannot be made, or None where no data is named.

    The prepared data stays in the cache, where the run finds it. Nothing is downloaded.

    Args:
        name: of the stage.
        config: as its checks resolved it.
        options: as typed.

    Raises:
        ValueError: if rows cannot be used.
    """
    if not options.get("data_path"):
        return None
    if isinstance(config, RlhfConfig):
        data, model, model_name = config.data.data, config.actor.model(config.load), "actor_"
    else:
        data, model, model_name = config.data, config.model, ""
    source = find_model(model.model_name_or_path)
    if not (Path(source.tokenizer) / "tokenizer_config.json").is_file():
        return (
            f"not counted: the tokenizer of {options[f'{model_name}model_name_or_path']} is not "
            f"in a directory here; --dry_run of {name} counts"
        )
    if any(each.hub_name is not None for each in config_sources(data)):
        return f"not counted: it would be downloaded; --dry_run of {name} counts"
    phase, kind = STAGES[name]
    if isinstance(config, DpoStageConfig) and config.dpo.is_unpaired:
        kind = "unpaired"
    tokenizer = load_tokenizer(source.tokenizer, model)
    return prepare_data(data, tokenizer, seed=config.run.seed, phase=phase, kind=kind).audit
