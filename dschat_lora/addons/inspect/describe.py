"""What a directory is: a run, an adapter, a checkpoint or a model, said without loading weights."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import (
    WEIGHTS_FILE,
    AdapterConfig,
    describe_checkpoint,
    is_adapter_directory,
    read_adapter_config,
    verify_adapter,
)
from dschat_lora.checkpoint.history import checkpoints_of, is_checkpoint, read_state
from dschat_lora.checkpoint.manifest import read_manifest, safetensors_header, tensors_of, verify
from dschat_lora.config.options import option
from dschat_lora.data.media import media_reader
from dschat_lora.report.directory import read_object
from dschat_lora.report.terminal import log_once, print_json
from dschat_lora.runtime.checks import architecture_names

_PARTS = ("adapter", "model", "actor", "critic", "actor_ema")
# Of run.json: what tells how a model was trained.
_TRAINING = (
    *("model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path", "data_path"),
    *("learning_rate", "lora_learning_rate", "actor_lora_learning_rate", "lora_lr_multiplier"),
    *("num_train_epochs", "max_steps", "max_seq_len"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "loss_type", "algorithm"),
)


@dataclass(frozen=True)
class InspectConfig:
    """Describe a directory: adapter, checkpoint, run or model, and where it comes from.

    Weights are not loaded. The exit code is 1 if the files differ from their manifest.
    """

    path: str = option(
        help="directory to describe; may be given as the first argument, without the option"
    )
    json: bool = option(False, help="print one JSON object to standard output")


def inspect_directory(config: InspectConfig) -> bool:
    """Print what the directory is; returns whether its files are sound.

    Raises:
        ValueError: if it is none of the four.
    """
    path = Path(config.path).expanduser()
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"--path {path} {state}; give a run, an adapter, a checkpoint or a model")
    facts = describe(path)
    damage = facts.pop("damage", None)
    if config.json:
        print_json({**facts, "damage": damage})
    else:
        for name, value in facts.items():
            if isinstance(value, dict):
                value = [f"{key} {_text(each)}" for key, each in value.items()]
            text = ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)
            log_once(f"{name.replace('_', ' '):<30}{text or '-'}")
        log_once(f"{'damage':<30}{damage or 'none found'}")
    return damage is None


def describe(path: Path) -> dict[str, Any]:
    """The facts of a directory, JSON-ready; ``damage`` says what is wrong with it, if anything.

    Raises:
        ValueError: if nothing is known of it.
    """
    if is_adapter_directory(path):
        return _adapter(path)
    if is_checkpoint(path):
        return _checkpoint(path)
    if (path / "config.json").is_file():
        return _model(path)
    if (path / "run.json").is_file() or any((path / part).is_dir() for part in _PARTS):
        return _run(path)
    holds = ", ".join(sorted(child.name for child in path.iterdir())[:6]) or "nothing"
    raise ValueError(
        f"--path {path} is neither a run, an adapter, a checkpoint nor a model; it holds {holds}"
    )


def _adapter(path: Path) -> dict[str, Any]:
    facts = {"kind": "adapter", "path": str(path), **_settings(read_adapter_config(path))}
    if (path / WEIGHTS_FILE).is_file():
        facts |= _tensors(safetensors_header(path / WEIGHTS_FILE))
    return facts | _damage(lambda: verify_adapter(path))


def _checkpoint(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": "checkpoint", "path": str(path)}
    try:
        state, manifest = read_state(path), read_manifest(path, kind="checkpoint")
    except ValueError as error:
        return {**facts, "damage": str(error)}
    facts |= {"stage": state["identity"].get("stage"), "step": state["step"]}
    try:
        facts |= _settings(describe_checkpoint(path).config)
    except ValueError as error:
        facts["adapter"] = f"none: {error}"
    tensors: dict[str, Any] = {}
    for file in manifest["files"].values():
        tensors |= file.get("tensors", {})
    weights = {key: entry for key, entry in tensors.items() if key.startswith("weight:")}
    facts |= _tensors(weights or tensors) | _training(state["config"])
    return facts | _damage(lambda: verify(path, kind="checkpoint"))


def _model(path: Path) -> dict[str, Any]:
    fields = read_object(path / "config.json")
    facts = {
        "kind": "model",
        "path": str(path),
        "architecture": ", ".join(architecture_names(fields)) or None,
        "dtype": fields.get("dtype") or fields.get("torch_dtype"),
        **_beside_text(str(path)),
    }
    tensors: dict[str, Any] = {}
    try:
        for file in sorted(path.glob("*.safetensors")):
            tensors |= safetensors_header(file)
    except ValueError as error:
        return {**facts, "damage": str(error)}
    return facts | _tensors(tensors)


def _run(path: Path) -> dict[str, Any]:
    record = read_object(path / "run.json")
    facts: dict[str, Any] = {"kind": "run", "path": str(path)}
    facts |= {name: record.get(name) for name in ("stage", "status", "started", "world_size")}
    facts |= {name: record[name] for name in ("parameters", "results") if record.get(name)}
    learns = record.get("learns")
    learns = learns.items() if isinstance(learns, dict) else ()
    words = {role: each.get("words") for role, each in learns if isinstance(each, dict)}
    facts |= {"learns": words} if words else {}
    options = record.get("config")
    facts |= _training(options if isinstance(options, dict) else {})
    inside = [describe(path / part) for part in _PARTS if (path / part).is_dir()]
    facts["holds"] = [f"{each['kind']} {each['path']}" for each in inside]
    facts["checkpoints"] = [each.name for each in checkpoints_of(path)]
    damage = next((each["damage"] for each in inside if each.get("damage")), None)
    return facts if damage is None else facts | {"damage": damage}


def _settings(config: AdapterConfig) -> dict[str, Any]:
    task = {"SEQ_CLS": "reward model", "CAUSAL_LM": "language model"}
    targets = config.target_modules
    return {
        "base": config.base_model_name_or_path or "the bundled tiny model",
        **_beside_text(config.base_model_name_or_path),
        "task": task.get(config.task_type or "", config.task_type),
        "rank": config.r,
        "alpha": config.lora_alpha,
        **({"rank_pattern": dict(config.rank_pattern)} if config.rank_pattern else {}),
        **({"alpha_pattern": dict(config.alpha_pattern)} if config.alpha_pattern else {}),
        "rslora": config.use_rslora,
        "layers": [targets]
        if isinstance(targets, str)
        else sorted({name.rpartition(".")[2] for name in targets}),
        **({"experts": list(config.target_parameters)} if config.target_parameters else {}),
        "stored_in_full": list(config.modules_to_save),
    }


def _beside_text(base: str | None) -> dict[str, str]:
    """What a model takes beside text, if anything is known of it."""
    reader = None if not base else media_reader(None, None, base)
    words = "" if reader is None else reader.summary()
    return {"takes": f"text and {words}"} if words else {}


def _tensors(entries: Mapping[str, Any]) -> dict[str, Any]:
    tensors = tensors_of(entries).values()
    counted = Counter(" x ".join(map(str, each["shape"])) or "scalar" for each in tensors)
    return {
        "tensors": len(tensors),
        "parameters": sum(math.prod(each["shape"]) for each in tensors),
        "stored_as": sorted({str(each["dtype"]) for each in tensors}),
        "shapes": [f"{count} of {text}" for text, count in counted.items()],
    }


def _training(options: Mapping[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(_TRAINING)
    if options.get("lora_learning_rate") and options.get("only_optimize_lora"):
        del names["learning_rate"]  # that of base weights
    return {name: options[name] for name in names if options.get(name) not in (None, [], 0)}


def _damage(check: Callable[[], object]) -> dict[str, str]:
    try:
        check()
    except ValueError as error:
        return {"damage": str(error)}
    return {}


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
