"""A pretrained encoder with a head for a GLUE task, with LoRA on its queries and values."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from dschat_lora.addons.glue.bottleneck import add_adapters, is_adapter
from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.loralib.extract import is_head
from dschat_lora.addons.loralib.lora_only import is_factor, read_lora_only, read_tensors
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora, lora_layers, seeded_generator
from dschat_lora.models.loading import check_loaded, check_local_files, hub_errors

# Query and value projections by model type.
_TARGETS = {
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), ("query", "value")),
    "deberta-v2": ("query_proj", "value_proj"),
}
# Their positions are counted from the padding token's number on.
_OFFSET_POSITIONS = ("camembert", "roberta", "xlm-roberta")
_ORIGINAL_STD = 0.02  # of A in the original's DeBERTa


def build_model(config: GlueConfig, *, say: Callable[[str], None]) -> PreTrainedModel:
    """The model as training starts: float32, with its factors and head drawn or loaded.

    The head begins with the global random state; the factors have a state of their own. ``say`` is
    told what a reader should know, such as a head that was dropped.

    Raises:
        ValueError: if base, adapter and options do not fit each other.
    """
    model = _pretrained(config, say)
    if config.apply_adapter:
        std = model.config.initializer_range
        add_adapters(model, config.adapter_type, config.adapter_size, std=std)
        if config.adapter_path is not None and not config.checkpoint:
            _start_adapters(model, Path(config.adapter_path), say)
    adapt(model, config)
    if config.lora_path is not None and not config.checkpoint:
        start_from(model, Path(config.lora_path), lora_settings(model, config), say=say)
    return model


def adapt(model: PreTrainedModel, config: GlueConfig) -> None:
    """Put factors beside the chosen layers, and leave them and the head alone to train.

    The head is what lies outside the encoder: the classifier and, with DeBERTa, the pooler. It
    stays as it is, so that names in the state dict are those of the original.

    Raises:
        ValueError: if nothing is known of the model type and no ``--target_modules`` are given, or
            if they take a layer of the head.
    """
    if not config.apply_lora:
        return
    adapted = apply_lora(model, lora_settings(model, config), seed=config.seed)
    if heads := [name for name in adapted if is_head(model, name)]:
        raise ValueError(
            f"--target_modules {' '.join(config.target_modules)} matches {heads[0]} of the head, "
            "which is trained in full; use longer suffixes that exclude it, such as "
            "intermediate.dense"
        )
    for name, parameter in model.named_parameters():
        if is_head(model, name):
            parameter.requires_grad_(True)
    normal = config.lora_init == "auto" and model.config.model_type.startswith("deberta")
    if normal or config.lora_init == "normal":
        for name, layer in lora_layers(model).items():
            a = layer.get_parameter("lora_A")
            generator = seeded_generator(config.seed, f"{name}.lora_A")
            with torch.no_grad():
                a.copy_(_ORIGINAL_STD * torch.randn(a.shape, generator=generator))


def lora_settings(model: PreTrainedModel, config: GlueConfig) -> LoraConfig:
    """The settings of the model's adapter.

    Raises:
        ValueError: as :func:`adapt`.
    """
    kind = model.config.model_type
    targets = config.target_modules or _TARGETS.get(kind)
    if targets is None:
        raise ValueError(
            f"--apply_lora: for a model of type {kind!r} give --target_modules, the names of its "
            "query and value layers"
        )
    return LoraConfig(
        lora_dim=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
    )


def max_positions(settings: PretrainedConfig) -> int:
    """Tokens of an input that the model has positions for; those of DeBERTa may be relative."""
    if not getattr(settings, "position_biased_input", True):
        return sys.maxsize
    limit: int = getattr(settings, "max_position_embeddings", None) or sys.maxsize
    return limit - (settings.pad_token_id + 1 if settings.model_type in _OFFSET_POSITIONS else 0)


def trained_tensors(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Factors or adapters, and head, by their names in the state dict."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if is_head(model, name) or is_factor(name) or is_adapter(name)
    }


def start_from(
    model: PreTrainedModel, path: Path, config: LoraConfig, *, say: Callable[[str], None]
) -> None:
    """Copy the factors of another run into ``model``, and its head where that is of one shape.

    Of a head's modules (classifier, pooler) each is taken whole or not at all.

    ``path`` is an adapter directory or a file of LoRA weights; ``config`` is that of the model's
    adapter. ``say`` is told what became of the head.

    Raises:
        ValueError: if factors are missing or of other shape or scaling, or if something has no
            place.
    """
    own, prefix = trained_tensors(model), f"{model.base_model_prefix}."
    # The prefix may be missing there, as in match_names.
    given = {
        prefix + name if prefix + name in own else name: tensor
        for name, tensor in _tensors_of(path, config).items()
    }
    for name in filter(is_factor, own):
        if name not in given:
            raise ValueError(f"{path} lacks {name}, which the model has")
        if own[name].shape != given[name].shape:
            raise ValueError(
                f"{path}: {name} is {tuple(given[name].shape)}, the model has "
                f"{tuple(own[name].shape)}"
            )
    heads = {_top(name) for name in own if not is_factor(name)}
    for name in given:
        if name not in own and _top(name) not in heads:
            raise ValueError(f"{path} contains {name}, which the model does not have")
    _copy_fitting(own, given, is_factor, path, say)


def _start_adapters(model: PreTrainedModel, path: Path, say: Callable[[str], None]) -> None:
    """Copy bottleneck adapters of another run, and the modules of its head that fit.

    Raises:
        ValueError: naming an adapter's parameter that is missing or of another shape.
    """
    own, (given, _) = trained_tensors(model), read_tensors(path)
    for name in filter(is_adapter, own):
        if name not in given or given[name].shape != own[name].shape:
            has = "lacks" if name not in given else f"has {tuple(given[name].shape)} of"
            raise ValueError(
                f"--adapter_path {path} {has} {name}, which is {tuple(own[name].shape)} here"
            )
    _copy_fitting(own, given, is_adapter, path, say)


@torch.no_grad()
def _copy_fitting(
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    is_adapted: Callable[[str], bool],
    path: Path,
    say: Callable[[str], None],
) -> None:
    """Copy what was adapted, and the top modules of the head that are whole and alike."""
    kept, dropped = [], ""
    for top in dict.fromkeys(_top(name) for name in own if not is_adapted(name)):
        ours, theirs = (
            {name: tensor.shape for name, tensor in tensors.items() if _top(name) == top}
            for tensors in (own, given)
        )
        if ours == theirs:
            kept.append(top)
        elif theirs:
            other = "shapes" if ours.keys() == theirs.keys() else "parts"
            dropped += f"; dropped {top}, which has other {other} there"
    for name in own:
        if is_adapted(name) or _top(name) in kept:
            own[name].copy_(given[name])
    head = f"took {', '.join(kept)}" if kept else "starts anew"
    say(f"adapter: started from {path}; head: {head}{dropped}")


def _top(name: str) -> str:
    return name.partition(".")[0]


def _pretrained(config: GlueConfig, say: Callable[[str], None]) -> PreTrainedModel:
    task, name = config.task, config.model_name_or_path
    trust = config.trust_remote_code
    with hub_errors("--model_name_or_path", name, "configuration"):
        check_local_files(name, PretrainedConfig.get_config_dict(name)[0])
        settings = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    named = [str(label).lower() for _, label in sorted(settings.id2label.items())]
    settings.num_labels = task.num_labels
    settings.problem_type = "regression" if task.is_regression else "single_label_classification"
    if task.labels:
        settings.id2label = dict(enumerate(task.labels))
        settings.label2id = {label: number for number, label in enumerate(task.labels)}
    settings.finetuning_task = config.task_name
    if config.classifier_dropout is not None:
        # Of RoBERTa and BERT, and of DeBERTa.
        known = [each for each in ("classifier_dropout", "cls_dropout") if hasattr(settings, each)]
        deberta = settings.model_type.startswith("deberta")
        for each in known or (["cls_dropout"] if deberta else ["classifier_dropout"]):
            setattr(settings, each, config.classifier_dropout)
    with hub_errors("--model_name_or_path", name, "model"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=settings,
            dtype=torch.float32,
            trust_remote_code=trust,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        check_loaded(model, info["missing_keys"], new=info["missing_keys"])
    other = sorted(key for key, *_ in info["mismatched_keys"])
    absent = sorted(info["missing_keys"])
    for keys, what in ((other, "of another shape"), (absent, "missing")):
        if inside := [key for key in keys if not is_head(model, key)]:
            raise ValueError(f"--model_name_or_path {name}: {inside[0]} is {what}")
    if other:
        say(f"head: dropped {', '.join(other)} of {name}, which have other shapes there")
    if not absent and sorted(named) == sorted(task.labels) and named != list(task.labels):
        layers = [m for n, m in model.named_modules() if is_head(model, n)]
        last = [layer for layer in layers if isinstance(layer, nn.Linear)][-1]
        order = [named.index(label) for label in task.labels]
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.copy_(parameter[order])
        say(f"head: the labels of {name} ({', '.join(named)}) were put in the task's order")
    return model


def _tensors_of(path: Path, config: LoraConfig) -> dict[str, Tensor]:
    """Factors and head by their names in the state dict.

    Raises:
        ValueError: if they were trained with another rank or scaling, as far as that is recorded.
    """
    if path.is_file():
        file = read_lora_only(path)
        tensors, r = file.tensors, file.r
        alpha = config.lora_alpha if file.settings is None else file.settings.lora_alpha
        stabilised = file.settings is not None and file.settings.use_rslora
    else:
        adapter = read_adapter(path)
        tensors = {n.replace(".trained.", ".", 1): t for n, t in adapter.tensors.items()}
        r, alpha = adapter.config.r, adapter.config.lora_alpha
        stabilised = adapter.config.use_rslora
    if (r, alpha, stabilised) != (config.lora_dim, config.lora_alpha, False):
        how = " --use_rslora" if stabilised else ""
        raise ValueError(
            f"{path} was trained with --lora_r {r} --lora_alpha {alpha:g}{how}; this run has "
            f"--lora_r {config.lora_dim} --lora_alpha {config.lora_alpha:g}"
        )
    return tensors
