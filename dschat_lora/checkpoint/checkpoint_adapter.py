"""The adapter in a checkpoint of a run, read as one in PEFT's layout is."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.checkpoint.history import STATE_FILE, read_state
from dschat_lora.checkpoint.manifest import read_manifest
from dschat_lora.config.groups import OWN_SETTINGS
from dschat_lora.lora.names import adapted_modules, is_of_expert

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
    options = read_state(directory)["config"]
    return not (options.get("apply_lora") or options.get("apply_adapter"))


def describe_checkpoint(directory: str | Path) -> CheckpointAdapter:
    """The adapter of a checkpoint; of step 3 that of the actor.

    Raises:
        ValueError: if it is damaged, or holds anything but an adapter with plain factors.
    """
    directory = Path(directory)
    files = read_manifest(directory, kind="checkpoint")["files"]
    state = read_state(directory)
    stage, options = state["identity"].get("stage"), state["config"]
    if "engines" not in state:
        raise ValueError(
            f"{directory} is a checkpoint of transformers' Trainer, for --resume_from_checkpoint; "
            "let the run end and take what it leaves, or make an adapter of it by dschat-lora "
            "extract"
        )
    engine = "actor" if "actor" in state["engines"] else "model"
    prefix = "actor_" if engine == "actor" else ""
    trained_from = options.get(f"{prefix}model_name_or_path")
    if not isinstance(trained_from, str | None):
        raise ValueError(f"{directory / STATE_FILE} is not the state of a run")
    where = {
        key.removeprefix(WEIGHT): name
        for name, entry in files.items()
        if name.startswith(f"{engine}-")
        for key in entry.get("tensors", {})
        if key.startswith(WEIGHT)
    }
    # (r, in) of a layer's A, (E, r, in) of experts'
    ranks = {
        key.removeprefix(WEIGHT).removesuffix(".lora_A"): tensor["shape"][-2]
        for name, entry in files.items()
        if name.startswith(f"{engine}-")
        for key, tensor in entry.get("tensors", {}).items()
        if key.endswith(".lora_A") and len(tensor["shape"]) > 1
    }
    _check_adapter_alone(directory, options, prefix)
    if OWN_SETTINGS in str(state["identity"].get("adapter")):
        raise ValueError(
            f"{directory} is a checkpoint with {OWN_SETTINGS} (rank_pattern, alpha_pattern), which "
            "it does not list; let the run end, and take its adapter/"
        )
    task = "SEQ_CLS" if stage == "reward" else "CAUSAL_LM"
    try:
        config = _config(options, prefix, where, ranks, task=task)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{directory / STATE_FILE} is damaged: {error}") from None
    return CheckpointAdapter(
        config,
        engine,
        trained_from,
        bool(options.get("add_eot_token") or options.get("chat_template")),
        where,
    )


def _check_adapter_alone(directory: Path, options: Mapping[str, Any], prefix: str) -> None:
    rank = options.get(f"{prefix}lora_dim") or 0
    if not rank or not options.get(
        f"{prefix}only_optimize_lora", options.get("only_optimize_lora")
    ):
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
    options: Mapping[str, Any],
    prefix: str,
    names: Collection[str],
    ranks: Mapping[str, int],
    *,
    task: str,
) -> AdapterConfig:
    def value(name: str) -> Any:
        return options.get(prefix + name, options.get(name))

    saved = {name.partition(".trained.")[0] for name in names if ".trained." in name}
    targets = sorted(adapted_modules(names))
    experts = [name for name in targets if is_of_expert(name)]
    alpha = value("expert_lora_alpha")
    return AdapterConfig(
        base_model_name_or_path=value("model_name_or_path"),
        task_type=task,
        r=int(value("lora_dim")),
        lora_alpha=float(value("lora_alpha")),
        lora_dropout=float(value("lora_dropout") or 0.0),
        use_rslora=bool(value("use_rslora")),
        bias=str(value("train_bias") or "none"),
        target_modules=tuple(targets),
        modules_to_save=tuple(sorted(saved)),
        fan_in_fan_out=False,
        rank_pattern={f"^{name}": ranks[name] for name in experts},
        alpha_pattern={f"^{name}": float(alpha) for name in experts if alpha is not None},
        base_bits=int(options.get("base_bits") or 16),
    )
