"""``adapter_config.json`` in PEFT's layout, and what a checkpoint says of its adapter.

Imports no torch.
"""

import json
import math
import os
import reprlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.history import STATE_FILE, is_checkpoint, read_state
from dschat_lora.checkpoint.manifest import (
    MANIFEST,
    DamagedError,
    read_manifest,
    safetensors_header,
    verify,
    write_manifest,
)
from dschat_lora.config.files import read_json
from dschat_lora.config.groups import OWN_SETTINGS
from dschat_lora.config.values import fits_fp32, parse_rope_scaling
from dschat_lora.lora.names import adapted_modules, is_of_expert

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Metadata of weights that were written here: a directory with them needs its manifest.
WEIGHTS_METADATA = {"format": "pt", "manifest": MANIFEST}
# Keys of further metadata, which PEFT knows nothing of: of packed layers, and of the base.
_PACKED, _BASE, _ROPE = "packed", "base", "rope_scaling"
# The model card, which people edit.
_UNCHECKED = frozenset({"README.md"})

# Options of PEFT that leave the meaning of a factor alone, or say where it sits, which its
# name says too.
_HARMLESS = {
    *("auto_mapping", "eva_config", "exclude_modules", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "loftq_config"),
}
# Ways to start that leave the base weights as they are; others train against a changed base.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of an adapter directory, by PEFT's names.

    ``enable_lora`` are parts of packed layers with factors of their own, each of rank ``r``; if
    empty, layers have one pair. PEFT sees one pair of rank ``k * r`` of k parts.
    """

    base_model_name_or_path: str | None  # hub name or directory; None if not recorded
    task_type: str | None  # such as CAUSAL_LM or SEQ_CLS
    r: int
    lora_alpha: float  # scaling is lora_alpha / r, or over sqrt(r) with rsLoRA
    lora_dropout: float
    use_rslora: bool
    bias: str
    target_modules: tuple[str, ...] | str  # name endings, or one regular expression
    modules_to_save: tuple[str, ...]  # name endings of modules stored in full
    fan_in_fan_out: bool
    target_parameters: tuple[str, ...] = ()  # name endings; fused weights of experts, as a rule
    enable_lora: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()  # outputs of q, k and v in packed layers
    # By regular expressions of names or their ends; the first that matches counts.
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # in place of r
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # in place of lora_alpha
    base_bits: int | None = 16  # in which the base was held in training; None: not recorded
    base_fingerprint: str = ""  # of the base's files: where it has 4 bits, and of rollouts
    rope_scaling: str | None = None  # --rope_scaling of training


def is_adapter_directory(path: str | Path) -> bool:
    """Whether ``path`` is a directory that holds an ``adapter_config.json``."""
    return (Path(path) / CONFIG_FILE).is_file()


def read_adapter_config(directory: str | Path) -> AdapterConfig:
    """The adapter's settings, checked.

    Raises:
        ValueError: if the file is missing, damaged, or describes anything but LoRA factors on an
            unchanged base; the message names file and field.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        fields = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{directory} is not an adapter: it has no {CONFIG_FILE}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(fields).__name__}")
    _check_plain_lora(fields, path)
    r, alpha = _field(fields, path, "r", int), _field(fields, path, "lora_alpha", (int, float))
    if r <= 0 or alpha <= 0:
        raise ValueError(f"{path}: r and lora_alpha must be > 0, got {r} and {alpha!s:.40}")
    if not fits_fp32(alpha):
        raise ValueError(f"{path}: lora_alpha is {reprlib.repr(alpha)}, which is beyond fp32")
    dropout = _field(fields, path, "lora_dropout", (int, float), 0.0)
    if not 0 <= dropout < 1:
        raise ValueError(f"{path}: lora_dropout must be in [0, 1), got {dropout!s:.40}")
    targets = _field(fields, path, "target_modules", (list, str), [])
    saved = _field(fields, path, "modules_to_save", list, [])
    parameters = _field(fields, path, "target_parameters", list, [])
    for name in (*saved, *parameters, *(targets if isinstance(targets, list) else ())):
        if not isinstance(name, str):
            raise ValueError(f"{path} names modules by text, got {name!r:.40}")
    described = AdapterConfig(
        base_model_name_or_path=_field(fields, path, "base_model_name_or_path", str, None),
        task_type=_field(fields, path, "task_type", str, None),
        r=r,
        lora_alpha=float(alpha),
        lora_dropout=float(dropout),
        use_rslora=_field(fields, path, "use_rslora", bool, False),
        bias=_field(fields, path, "bias", str, "none"),
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        modules_to_save=tuple(saved),
        fan_in_fan_out=_field(fields, path, "fan_in_fan_out", bool, False),
        target_parameters=tuple(parameters),
        rank_pattern=_pattern(fields, path, "rank_pattern", int),
        alpha_pattern=_pattern(fields, path, "alpha_pattern", (int, float)),
    )
    return _with_metadata(described, Path(directory) / WEIGHTS_FILE)


def verify_adapter(directory: str | Path) -> None:
    """Check an adapter against the manifest it was written with; the model card may be edited.

    An adapter of stock PEFT has no manifest and passes. A checkpoint is checked as one.

    Raises:
        ValueError: naming the first file that is missing or differs, and what to do.
    """
    directory = Path(directory)
    if is_checkpoint(directory):
        verify(directory, kind="checkpoint")
        return
    manifest, weights = directory / MANIFEST, directory / WEIGHTS_FILE
    try:
        if os.path.lexists(manifest):
            verify(directory, kind="adapter", unchecked=_UNCHECKED)
        elif os.path.lexists(weights) and "manifest" in weights_metadata(weights):
            raise DamagedError(f"{manifest} is missing")
    except DamagedError as error:
        try:
            is_ours = "manifest" in weights_metadata(weights)
            remedy = f"if PEFT has saved the adapter again, delete {manifest}"
            if is_ours:
                remedy = (
                    "copy the adapter again or, if the change is intended, run dschat-lora accept "
                    f"{shlex.quote(str(directory))}"
                )
        except DamagedError:
            remedy = "copy or save the adapter again"
        raise ValueError(f"{error}; {remedy}") from None


def weights_metadata(weights: Path) -> dict[str, str]:
    """The metadata of an adapter's weights; without ``manifest`` they were not written here.

    Raises:
        DamagedError: if they have no readable header.
    """
    metadata: dict[str, str] = safetensors_header(weights).get("__metadata__", {})
    return metadata


def accept_adapter(directory: str | Path) -> None:
    """Rewrite the manifest of an adapter after an intended change.

    Raises:
        ValueError: as :func:`read_adapter_config`, or if the weights have no readable header.
    """
    read_adapter_config(directory)
    write_manifest(Path(directory), kind="adapter")


def peft_fields(config: AdapterConfig) -> dict[str, Any]:
    """The JSON object that stock PEFT and the tools around it read."""
    alpha = config.lora_alpha * _packed_factor(config)
    return {
        "alpha_pattern": dict(config.alpha_pattern),
        "auto_mapping": None,
        "base_model_name_or_path": config.base_model_name_or_path,
        "bias": config.bias,
        "fan_in_fan_out": config.fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        # Some readers want an integer here; 32.0 and 32 mean the same.
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.lora_dropout,
        "modules_to_save": list(config.modules_to_save) or None,
        "peft_type": "LORA",
        "r": config.r * max(1, len(config.enable_lora)),
        "rank_pattern": dict(config.rank_pattern),
        "revision": None,
        "target_modules": config.target_modules
        if isinstance(config.target_modules, str)
        else list(config.target_modules),
        "target_parameters": list(config.target_parameters) or None,
        "task_type": config.task_type,
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }


def more_metadata(config: AdapterConfig) -> dict[str, str]:
    """Metadata of the weights that say what PEFT's file cannot: packed layers, and the base."""
    notes = {}
    if config.base_bits == 4 or config.base_fingerprint:
        base = {"bits": config.base_bits, "fingerprint": config.base_fingerprint}
        notes[_BASE] = json.dumps(base)
    if config.rope_scaling is not None:
        notes[_ROPE] = config.rope_scaling
    if config.enable_lora:
        packed = {"enable_lora": config.enable_lora, "group_sizes": config.group_sizes}
        notes[_PACKED] = json.dumps(packed)
    return notes


def _with_metadata(config: AdapterConfig, weights: Path) -> AdapterConfig:
    """PEFT's ``config`` with what the metadata of ``weights`` say besides.

    PEFT drops them when it saves an adapter anew, which is then a plain one, on a base of which
    nothing is known.
    """
    if not weights.is_file():
        return config
    notes = weights_metadata(weights)
    if "manifest" not in notes:
        config = replace(config, base_bits=None)
    config = _as_packed(config, weights, notes.get(_PACKED))
    if scaling := notes.get(_ROPE):
        try:
            parse_rope_scaling(scaling)
        except ValueError as error:
            raise ValueError(f"{weights} is damaged: {error}") from None
        config = replace(config, rope_scaling=scaling)
    if (note := notes.get(_BASE)) is None:
        return config
    try:
        base = json.loads(note)
        bits, fingerprint = int(base["bits"]), str(base["fingerprint"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{weights} is damaged: it notes {note!r} of the base") from None
    return replace(config, base_bits=bits, base_fingerprint=fingerprint)


def _as_packed(config: AdapterConfig, weights: Path, note: str | None) -> AdapterConfig:
    """PEFT's ``config`` in terms of the packed layers that ``note`` of ``weights`` describes."""
    if note is None:
        return config
    try:
        packed = json.loads(note)
        parts = tuple(str(part) for part in packed["enable_lora"])
        sizes = tuple(int(size) for size in packed["group_sizes"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{weights} is damaged: it notes {note!r} of packed layers") from None
    if config.rank_pattern or config.alpha_pattern:
        raise ValueError(
            f"{weights} holds factors for parts of packed layers, and {CONFIG_FILE} has a "
            "rank_pattern or alpha_pattern, which mean whole layers"
        )
    if not parts or config.r % len(parts):
        raise ValueError(
            f"{weights} holds factors for the parts {' '.join(parts)} of packed layers, which r "
            f"{config.r} of {CONFIG_FILE} is no multiple of"
        )
    described = replace(config, r=config.r // len(parts), enable_lora=parts, group_sizes=sizes)
    # Twelve digits undo the rounding of the product that was written.
    alpha = float(f"{config.lora_alpha / _packed_factor(described):.12g}")
    return replace(described, lora_alpha=alpha)


def _packed_factor(config: AdapterConfig) -> float:
    """Factor from our alpha to PEFT's, so that its scaling with k times the rank is ours."""
    parts = max(1, len(config.enable_lora))
    return math.sqrt(parts) if config.use_rslora else parts


def _check_plain_lora(fields: Mapping[str, Any], path: Path) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: peft_type {kind!r} is not supported, only 'LORA'")
    init = fields.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise ValueError(
            f"{path}: init_lora_weights {init!r} is not supported: it trains against a changed "
            "base; let PEFT convert the adapter to plain LoRA when saving it"
        )
    known = AdapterConfig.__dataclass_fields__.keys() | _HARMLESS
    for name, value in fields.items():
        # Variants of LoRA are switched on by true, a list or an object; numbers and strings
        # alone only tune a variant, and say something in every file.
        is_switch = value is True or (isinstance(value, (list, dict)) and len(value) > 0)
        if is_switch and name not in known:
            raise ValueError(
                f"{path}: {name} {value!r} is not supported: every adapted layer must have plain "
                "LoRA factors"
            )


def _pattern(
    fields: Mapping[str, Any], path: Path, name: str, kind: type | tuple[type, ...]
) -> dict[str, Any]:
    """``fields[name]``: by patterns of module names, numbers above 0."""
    pattern: dict[str, Any] = _field(fields, path, name, dict, {})
    for key, value in pattern.items():
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not (value > 0 and fits_fp32(value)):
            raise ValueError(f"{path}: {name} of {key!r} must be a number > 0, got {value!r:.40}")
    return pattern


def _field(
    fields: Mapping[str, Any], path: Path, name: str, kind: type | tuple[type, ...], *default: Any
) -> Any:
    """``fields[name]`` of a type in ``kind``; null or absent gives the default."""
    value = fields.get(name)
    if value is None and default:
        return default[0]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # A JSON true is no number, though Python's bool is an int.
    is_wrong_bool = isinstance(value, bool) and bool not in kinds
    if not isinstance(value, kinds) or is_wrong_bool:
        wanted = " or ".join(each.__name__ for each in kinds)
        raise ValueError(f"{path}: {name} must be {wanted}, got {value!r}")
    return value


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
    options = state["config"]
    if "engines" not in state:
        raise ValueError(
            f"{directory} is a checkpoint of transformers' Trainer, for --resume_from_checkpoint; "
            "finish the run and use its output, or convert it with dschat-lora extract"
        )
    engine, prefix = ("actor", "actor_") if "actor" in state["engines"] else ("model", "")
    trained_from = options.get(f"{prefix}model_name_or_path")
    if not isinstance(trained_from, str | None):
        raise ValueError(f"{directory / STATE_FILE} is not the state of a run")
    _check_adapter_alone(directory, state, prefix)
    names, shapes = dict[str, str](), dict[str, list[int]]()
    for file, entry in files.items():
        tensors = entry.get("tensors", {}) if file.startswith(f"{engine}-") else {}
        for key, tensor in tensors.items():
            if key.startswith(WEIGHT):
                name = key.removeprefix(WEIGHT)
                names[name], shapes[name] = file, tensor["shape"]
    task = "SEQ_CLS" if state["identity"].get("stage") == "reward" else "CAUSAL_LM"
    try:
        config = _config_in_state(options, prefix, shapes, task=task)
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise ValueError(f"{directory / STATE_FILE} is damaged: {error}") from None
    own_tokenizer = bool(options.get("add_eot_token") or options.get("chat_template"))
    return CheckpointAdapter(config, engine, trained_from, own_tokenizer, names)


def _check_adapter_alone(directory: Path, state: Mapping[str, Any], prefix: str) -> None:
    """Refuse a run that trained more than factors of whole layers, of one rank and alpha."""
    options = state["config"]
    frozen = options.get(f"{prefix}only_optimize_lora", options.get("only_optimize_lora"))
    if not (options.get(f"{prefix}lora_dim") and frozen):
        raise ValueError(
            f"{directory} is a checkpoint of a run that trains more than an adapter; finish the "
            "run and use its model/"
        )
    if options.get(f"{prefix}enable_lora") or options.get("enable_lora"):
        raise ValueError(
            f"{directory} is a checkpoint with packed layers (--enable_lora); finish the run and "
            "use its adapter/"
        )
    if OWN_SETTINGS in str(state["identity"].get("adapter")):
        raise ValueError(
            f"{directory} is a checkpoint with {OWN_SETTINGS} (rank_pattern, alpha_pattern), "
            "which it does not list; finish the run and use its adapter/"
        )


def _config_in_state(
    options: Mapping[str, Any], prefix: str, shapes: Mapping[str, list[int]], *, task: str
) -> AdapterConfig:
    """The adapter whose run had these options, and parameters of these shapes."""

    def value(name: str) -> Any:
        return options.get(prefix + name, options.get(name))

    saved = {name.partition(".trained.")[0] for name in shapes if ".trained." in name}
    targets = sorted(adapted_modules(shapes))
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
        # A is (r, in) of a layer, (E, r, in) of experts
        rank_pattern={f"^{name}": shapes[f"{name}.lora_A"][-2] for name in experts},
        alpha_pattern={f"^{name}": float(alpha) for name in experts if alpha is not None},
        base_bits=int(options.get("base_bits") or 16),
        rope_scaling=options.get("rope_scaling"),
    )
