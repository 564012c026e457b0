"""The adapter in a checkpoint of a run, read as one in PEFT's layout is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.checkpoint.history import STATE_FILE
from dschat_lora.checkpoint.manifest import read_manifest
from dschat_lora.config.files import read_json
from dschat_lora.config.groups import OWN_SETTINGS

#: prefix of trained parameters in a checkpoint, beside the moments of AdamW
WEIGHT = "weight:"


@dataclass(frozen=True)
class CheckpointAdapter:
    """What a checkpoint says of the adapter in it.

    Attributes:
        config: its settings, with the base as the run was given it.
        engine: the part of the run it is of: ``model`` or, in step 3, ``actor``.
        trained_from: what the run's ``--model_name_or_path`` was; None for the bundled model.
        changes_tokenizer: whether the run had a tokenizer of its own.
        files: by name of a parameter, the file of the checkpoint that holds it.
    """

    config: AdapterConfig
    engine: str
    trained_from: str | None
    changes_tokenizer: bool
    files: Mapping[str, str]


def is_whole_model(directory: Path) -> bool:
    """Whether a checkpoint is a model that transformers loads: of GLUE in full, by the Trainer."""
    if not (directory / "config.json").is_file():
        return False
    options = read_json(directory / STATE_FILE)["config"]
    return not (options["apply_lora"] or options["apply_adapter"])


def describe_checkpoint(directory: str | Path) -> CheckpointAdapter:
    """The adapter of a checkpoint; of step 3 that of the actor.

    Raises:
        ValueError: if it is damaged, or holds anything but an adapter with plain factors.
    """
    directory = Path(directory)
    files = read_manifest(directory, kind="checkpoint")["files"]
    state = read_json(directory / STATE_FILE)
    stage, options = state["identity"]["stage"], state["config"]
    if "engines" not in state:
        raise ValueError(
            f"{directory} is a checkpoint of transformers' Trainer, for --resume_from_checkpoint; "
            "let the run end and take what it leaves, or make an adapter of it by dschat-lora "
            "extract"
        )
    engine = "actor" if "actor" in state["engines"] else "model"
    prefix = "actor_" if engine == "actor" else ""
    where = {
        key.removeprefix(WEIGHT): name
        for name, entry in files.items()
        if name.startswith(f"{engine}-")
        for key in entry.get("tensors", {})
        if key.startswith(WEIGHT)
    }
    _check_adapter_alone(directory, options, prefix)
    if OWN_SETTINGS in str(state["identity"].get("adapter")):
        raise ValueError(
            f"{directory} is a checkpoint with {OWN_SETTINGS} (rank_pattern, alpha_pattern), which "
            "it does not list; let the run end, and take its adapter/"
        )
    config = _config(options, prefix, where, task="SEQ_CLS" if stage == "reward" else "CAUSAL_LM")
    return CheckpointAdapter(
        config,
        engine,
        options.get(f"{prefix}model_name_or_path"),
        bool(options.get("add_eot_token") or options.get("chat_template")),
        where,
    )


def _check_adapter_alone(directory: Path, options: Mapping[str, Any], prefix: str) -> None:
    rank = options.get(f"{prefix}lora_dim") or 0
    if not rank or not options.get(f"{prefix}only_optimize_lora", options["only_optimize_lora"]):
        raise ValueError(
            f"{directory} is a checkpoint of a run that trains more than an adapter; let the run "
            "end, and take its model/"
        )
    if options.get(f"{prefix}enable_lora") or options.get("enable_lora"):
        raise ValueError(
            f"{directory} is a checkpoint with packed layers (--enable_lora); let the run end, and "
            "take its adapter/"
        )


def _config(
    options: Mapping[str, Any], prefix: str, names: Mapping[str, str], *, task: str
) -> AdapterConfig:
    def value(name: str) -> Any:
        return options.get(prefix + name, options.get(name))

    saved = {name.partition(".trained.")[0] for name in names if ".trained." in name}
    return AdapterConfig(
        base_model_name_or_path=value("model_name_or_path"),
        task_type=task,
        r=int(value("lora_dim")),
        lora_alpha=float(value("lora_alpha")),
        lora_dropout=float(value("lora_dropout") or 0.0),
        use_rslora=bool(value("use_rslora")),
        bias=str(value("train_bias") or "none"),
        target_modules=tuple(sorted({n.rpartition(".")[0] for n in names if ".lora_" in n})),
        modules_to_save=tuple(sorted(saved)),
        fan_in_fan_out=False,
        base_bits=int(options.get("base_bits") or 16),
    )
