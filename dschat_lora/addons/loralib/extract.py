"""Extraction of LoRA factors and head from a full checkpoint into PEFT's layout."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from dschat_lora.addons.loralib.lora_only import (
    LoraOnly,
    is_factor,
    lora_config_of_file,
    match_names,
    rank_of,
    read_lora_only,
)
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.checkpoint.adapter_config import is_adapter_directory
from dschat_lora.checkpoint.manifest import WEIGHTS_INDEX, weight_map
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.plurals import counted
from dschat_lora.lora.model import adapter_layout, apply_lora, lora_layers

_FILES = ("model.safetensors", "pytorch_model.bin")
_TOKENIZER = ["tokenizer*.json", "vocab.*", "merges.txt", "special_tokens_map.json", "*.model"]
# Last layer of the head of transformers' classifiers, one row for each label.
_LAST_LAYERS = ("classifier.out_proj.weight", "classifier.weight", "score.weight")


def extract(
    checkpoint: str | Path,
    *,
    base: str,
    lora_alpha: float | None,
    enable_lora: tuple[str, ...] = (),
    output_dir: str | Path | None = None,
    say: Callable[[str], None],
) -> Path:
    """Write the trained parameters of ``checkpoint`` as an adapter; returns its directory.

    ``checkpoint`` is a directory of a full model with factors, such as the Trainer's checkpoint-N
    or one of microsoft/LoRA, or a file of its weights or of the factors alone; ``base`` the hub
    name or directory of the clean base. ``lora_alpha`` is that of the training, which a checkpoint
    does not record. ``output_dir`` is ``adapter/`` in a checkpoint directory by default, or next
    to a file. ``say`` receives lines on what was found.

    Raises:
        ValueError: if the checkpoint holds no factors or does not fit the base, or if something is
            in ``output_dir``; an adapter in the default place is replaced.
    """
    path = Path(checkpoint).expanduser()
    directory = _output_directory(path, output_dir)
    # It would show bars, and miss the head that every base lacks.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    file = read_checkpoint(path)
    settings = _settings_of(base)
    labels = next((len(file.tensors[name]) for name in _LAST_LAYERS if name in file.tensors), None)
    settings.num_labels = labels or settings.num_labels
    auto = AutoModelForCausalLM if labels is None else AutoModelForSequenceClassification
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(settings)
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    for name in file.targets:
        if not {name, prefix + name, name.removeprefix(prefix)} & modules.keys():
            raise ValueError(
                f"--base {base} is a {settings.model_type} model without the layer {name}, which "
                f"{path} adapts; give the base it was trained on"
            )
    own = {n: t for n, t in file.tensors.items() if is_factor(n) or is_head(model, n)}
    trained = replace(file, tensors=own)
    config = lora_config_of_file(trained, lora_alpha=lora_alpha, enable_lora=enable_lora)
    write_trained(
        directory,
        trained,
        config,
        model,
        base_model_name_or_path=base,
        write_more=lambda staging: _copy_tokenizer(path, staging),
    )
    count = sum(tensor.numel() for tensor in trained.tensors.values())
    say(
        f"{directory}: {counted(len(trained.tensors), 'tensor')}, "
        f"{counted(count, 'parameter')}, rank {file.r}"
    )
    _report(*compare_base(model, file, base), file, base, say)
    return directory


def write_trained(
    directory: str | Path,
    trained: LoraOnly,
    config: LoraConfig,
    model: PreTrainedModel,
    *,
    base_model_name_or_path: str,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write factors, and a head in full, as an adapter that stock PEFT loads; call on one rank.

    ``trained`` has them by their names in a state dict. ``model``, on the meta device without
    adapters, receives them; ``write_more`` adds files to the directory that it is given.

    Raises:
        ValueError: if a tensor is missing, unknown to the model or of another shape.
        OSError: if what was read back differs from what was written.
    """
    heads = {name.partition(".")[0] for name in trained.tensors if is_head(model, name)}
    config = replace(config, modules_to_save=tuple(sorted(heads)))
    apply_lora(model, config, seed=0)
    names = match_names(model, trained)
    write_adapter(
        directory,
        {name: trained.tensors[key].cpu() for key, name in names.items()},
        config,
        layout=adapter_layout(model),
        base_model_name_or_path=base_model_name_or_path,
        task_type="SEQ_CLS" if heads else "CAUSAL_LM",
        write_more=write_more,
    )


def read_checkpoint(path: Path) -> LoraOnly:
    """Every tensor of a checkpoint directory or file, float32 on CPU.

    Raises:
        ValueError: if it cannot be read or holds no factors.
    """
    if not path.is_dir():
        return read_lora_only(path)
    for name in _FILES:
        if (path / name).is_file():
            return read_lora_only(path / name)
    if not (path / WEIGHTS_INDEX).is_file():
        raise ValueError(f"{path} holds no {', '.join(_FILES)} or {WEIGHTS_INDEX}")
    try:
        shards = weight_map(path / WEIGHTS_INDEX).values()
        parts = [load_file(path / name) for name in sorted(set(shards))]
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    tensors = {name: tensor.float() for part in parts for name, tensor in part.items()}
    return LoraOnly(path, rank_of(tensors, path), tensors, None)


@torch.no_grad()
def compare_base(model: PreTrainedModel, file: LoraOnly, base: str) -> tuple[list[str], list[str]]:
    """Weights of the base that differ in ``file`` by the update, and otherwise.

    The update is the difference if the checkpoint was saved while merged: it is counted twice when
    that is loaded unchanged. ``model`` is on the meta device, with the adapter.
    """
    body, layers = f"{model.base_model_prefix}.", lora_layers(model)
    own = {n: t for n, t in file.tensors.items() if n.startswith(body) and not is_factor(n)}
    merged: list[str] = []
    other: list[str] = []
    if not own:
        return merged, other
    clean = type(model).from_pretrained(base, config=model.config, dtype=torch.float32)
    state = clean.state_dict()
    shared = [own[name] for name in state if name in own]
    # Files of any type are read as float32; the coarsest that represents all values is theirs.
    coarse = (
        each
        for each in (torch.bfloat16, torch.float16)
        if all(torch.equal(tensor, tensor.to(each).float()) for tensor in shared)
    )
    dtype = next(coarse, torch.float32)
    for name, tensor in state.items():
        if name not in own or torch.equal(own[name], tensor.to(dtype).float()):
            continue
        is_update, stem = False, name.removesuffix("weight")
        if (layer := layers.get(stem.removesuffix("."))) is not None:
            factors = [file.tensors[f"{stem}lora_{each}"] for each in "AB"]
            # Weight and factors were rounded to the stored type, and their sum again.
            size = tensor.abs() + layer.delta(*(each.abs() for each in factors))
            off = (own[name] - tensor - layer.delta(*factors)).abs()
            is_update = bool((off <= 1e-5 + torch.finfo(dtype).eps * size).all())
        (merged if is_update else other).append(name)
    return merged, other


def is_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter lies in a classifier's head, outside the model's body."""
    causal = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None
    return not causal and not is_factor(name) and not name.startswith(f"{model.base_model_prefix}.")


def empty_classifier(settings: PretrainedConfig) -> PreTrainedModel:
    """A classifier without values, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(settings)
    return model


def _settings_of(base: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(base)
    except Exception as error:  # a damaged file leads transformers to any
        raise ValueError(
            f"--base {base} is not a model: give a hub name or a directory with config.json "
            f"({next(iter(str(error).strip().splitlines()), type(error).__name__)})"
        ) from error


def _output_directory(checkpoint: Path, given: str | Path | None) -> Path:
    default = checkpoint / "adapter" if checkpoint.is_dir() else checkpoint.with_suffix(".adapter")
    directory = default if given is None else Path(given).expanduser()
    taken = directory.is_file() or (directory.is_dir() and any(directory.iterdir()))
    if taken and not (directory.resolve() == default.resolve() and is_adapter_directory(directory)):
        raise ValueError(
            f"--output_dir {directory} is not empty; only an adapter in {default} is replaced"
        )
    return directory


def _copy_tokenizer(checkpoint: Path, directory: Path) -> None:
    if checkpoint.is_dir():
        for path in {each for pattern in _TOKENIZER for each in checkpoint.glob(pattern)}:
            shutil.copy(path, directory / path.name)


def _report(
    merged: list[str], other: list[str], file: LoraOnly, base: str, say: Callable[[str], None]
) -> None:
    if merged:
        say(
            f"note: {file.path} was saved while merged: {len(merged)} weights already contain the "
            f"update ({merged[0]}, ...). Loading it directly would apply the update twice; the "
            "adapter written here, on the unmodified base, does not"
        )
    if other:
        reason = "the adapter was trained on another base"
        if {name.removesuffix(".weight") for name in other} <= set(file.targets):
            reason += ", or saved while merged with another --lora_alpha"
        say(
            f"note: {len(other)} weights of the base differ between {file.path} and {base} "
            f"({other[0]}, ...): {reason}"
        )
