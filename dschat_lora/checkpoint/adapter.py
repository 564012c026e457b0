"""Adapters on disk: write, read and load ``adapter_model.safetensors`` in PEFT's layout."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dschat_lora.checkpoint.adapter_config import (
    CONFIG_FILE,
    WEIGHT,
    WEIGHTS_FILE,
    WEIGHTS_METADATA,
    AdapterConfig,
    describe_checkpoint,
    more_metadata,
    peft_fields,
    read_adapter_config,
    verify_adapter,
)
from dschat_lora.checkpoint.adapter_tensors import (
    NumberT,
    check_scaling,
    check_tensors,
    factor_of_experts,
    file_name,
    flat_factor,
    groups_of,
    is_of_experts,
    lora_settings,
    our_name,
)
from dschat_lora.checkpoint.history import is_checkpoint
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.checkpoint.tensors import TensorFiles, save_weights
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.staging import staged_directory
from dschat_lora.lora.groups import PARTS
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import (
    AdapterLayout,
    adapter_parameters,
    base_names,
    lora_layers,
    lora_scaling,
    saved_buffers,
)
from dschat_lora.lora.names import adapted_modules, is_ending, is_expert_weight
from dschat_lora.lora.parallel import own_part


@dataclass(frozen=True)
class Adapter:
    """An adapter as read from disk."""

    config: AdapterConfig
    tensors: dict[str, Tensor]  # float32, by the names of ``adapter_parameters``
    # weights of the base that PEFT stored too (of adapted embeddings), by their pretrained names
    base_tensors: dict[str, Tensor]


def write_adapter(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    *,
    layout: AdapterLayout,
    base_model_name_or_path: str,
    base_bits: int = 16,
    base_fingerprint: str = "",
    rope_scaling: str | None = None,
    task_type: str = "CAUSAL_LM",
    write_more: Callable[[Path], None] | None = None,
) -> AdapterConfig:
    """Write an adapter that stock PEFT loads, replacing ``directory`` in one step.

    Everything is written to a temporary directory, read back and compared before it takes the
    final name, so an interrupted write leaves the earlier adapter whole. Call on one rank.
    ``tensors`` are whole, by the names of :func:`adapter_parameters`. Factors for k parts of
    packed layers are written as one pair of k times the rank, with zeros. ``base_bits``,
    ``base_fingerprint`` and ``rope_scaling`` are those of the base that it was trained on.
    ``write_more`` adds files such as the tokenizer's to the directory that it is given.

    Raises:
        ValueError: if a factor is missing, of a wrong shape, or not finite.
        OSError: if what was read back differs from what was written.
    """
    final = Path(directory)
    tensors = {**tensors, **layout.buffers}
    check_tensors(tensors, config, where=str(final), groups=layout.groups)
    adapted = adapted_modules(tensors)
    described = AdapterConfig(
        base_model_name_or_path=base_model_name_or_path,
        task_type=task_type,
        r=config.lora_dim,
        lora_alpha=config.lora_alpha,
        # PEFT knows no dropout of the input of a parameter.
        lora_dropout=0.0 if layout.target_parameters else config.lora_dropout,
        use_rslora=config.use_rslora,
        bias=config.train_bias,
        target_modules=layout.target_modules
        if isinstance(layout.target_modules, str)
        else tuple(layout.target_modules),
        modules_to_save=tuple(layout.modules_to_save),
        fan_in_fan_out=layout.fan_in_fan_out,
        target_parameters=tuple(layout.target_parameters),
        enable_lora=tuple(part for part in PARTS if part in config.enable_lora),
        group_sizes=() if layout.groups is None else layout.groups.sizes,
        rank_pattern=_patterns(config.ranks, layout, adapted),
        alpha_pattern=_patterns(config.alphas, layout, adapted),
        base_bits=base_bits,
        base_fingerprint=base_fingerprint,
        rope_scaling=rope_scaling,
    )
    stored = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().float()
        if layout.groups is not None and name.endswith(".lora_B"):
            whole = layout.groups.expand(whole)
        stored[file_name(name, adapted)] = flat_factor(name, whole).contiguous()
    with staged_directory(final) as staging:
        fields = json.dumps(peft_fields(described), indent=2, sort_keys=True) + "\n"
        (staging / CONFIG_FILE).write_text(fields, encoding="utf-8")
        metadata = WEIGHTS_METADATA | more_metadata(described)
        save_weights(staging / WEIGHTS_FILE, stored, metadata)
        if write_more is not None:
            write_more(staging)
        _verify_written(staging, described, config, tensors)
        write_manifest(staging, kind="adapter")
    return described


def read_adapter(directory: str | Path) -> Adapter:
    """An adapter written here or by PEFT, or that of a checkpoint, checked to be complete.

    Raises:
        ValueError: if files are missing, damaged or other than the manifest says, or hold
            anything but LoRA factors of the stated rank; the message names file and tensor.
    """
    verify_adapter(directory)
    directory = Path(directory)
    if not is_checkpoint(directory):
        return _load(directory)
    described = describe_checkpoint(directory)
    files = TensorFiles([directory / name for name in sorted(set(described.files.values()))])
    tensors = {name: files.read(f"{WEIGHT}{name}") for name in described.files}
    check_tensors(tensors, lora_settings(described.config, tensors), where=str(directory))
    return Adapter(described.config, tensors, {})


def lora_config_of(directory: str | Path) -> LoraConfig:
    """The settings with which :func:`apply_lora` adds the parameters of this adapter.

    Modules are listed by their whole path, as found in the file, whatever rule PEFT was given.
    Errors are those of :func:`read_adapter`.
    """
    adapter = read_adapter(directory)
    config, names = adapter.config, adapter.tensors
    targets = adapted_modules(names)
    saved = {name.partition(".trained.")[0] for name in names if ".trained." in name}
    has_biases = any(name.endswith(".trained_bias") for name in names)
    bias = cast(Literal["none", "all", "lora_only"], config.bias if has_biases else "none")
    return replace(
        lora_settings(config, names),
        target_modules=tuple(sorted(targets)),
        train_bias=bias,
        modules_to_save=tuple(sorted(saved)),
    )


@torch.no_grad()
def load_adapter(
    model: nn.Module, directory: str | Path, *, new: Collection[str] = ()
) -> list[str]:
    """Copy an adapter into ``model`` after :func:`apply_lora`; returns the parameters' names.

    Parameters on the meta device are checked and left as they are. ``new`` ones keep their values,
    whether the adapter has none for them or one of another shape, such as another task's head.

    Raises:
        ValueError: as :func:`read_adapter`, and if the adapter does not fit the model: other
            modules, shapes or scaling, or another base.
    """
    adapter = read_adapter(directory)
    check_fits(model, adapter, where=str(directory), new=new)
    parameters = {**adapter_parameters(model), **saved_buffers(model)}
    loaded = [name for name in adapter.tensors if name not in new]
    for name in loaded:
        parameters[name].copy_(own_part(parameters[name], adapter.tensors[name]))
    return loaded


def check_fits(
    model: nn.Module, adapter: Adapter, *, where: str, new: Collection[str] = ()
) -> None:
    """Refuse an adapter made for other modules, shapes, scaling or base weights.

    It need not hold ``new`` parameters, or not in their shape.

    Raises:
        ValueError: naming ``where`` and the difference.
    """
    parameters: dict[str, Tensor] = dict(adapter_parameters(model))
    missing = sorted(parameters.keys() - adapter.tensors.keys() - set(new))
    parameters |= saved_buffers(model)
    surplus = sorted(adapter.tensors.keys() - parameters.keys())
    if missing:
        raise ValueError(f"{where} lacks {_some(missing)}, which the model has")
    if surplus:
        raise ValueError(f"{where} contains {_some(surplus)}, which the model does not have")
    for name, tensor in adapter.tensors.items():
        shape = tuple(full_shape(parameters[name]))
        if tuple(tensor.shape) != shape and name not in new:
            raise ValueError(f"{where}: {name} is {tuple(tensor.shape)}, the model has {shape}")
    config = adapter.config
    check_scaling(model, lora_settings(config, adapter.tensors), where=where)
    for name, layer in lora_layers(model).items():
        if getattr(layer, "groups", None) != groups_of(config):
            raise ValueError(
                f"{where} was trained with --enable_lora {' '.join(config.enable_lora) or 'absent'}"
                f"; the factors of {name} are for other parts"
            )
    _check_base(model, adapter.base_tensors, where)


def _load(directory: Path) -> Adapter:
    """:func:`read_adapter` without the manifest, which is written last."""
    config = read_adapter_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        reason = ""
        if path.with_name("adapter_model.bin").is_file():
            reason = (
                ", only a pickled adapter_model.bin, which can run code when loaded; "
                "load it with PEFT and save it again"
            )
        raise ValueError(f"{directory} has no {WEIGHTS_FILE}{reason}")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    tensors: dict[str, Tensor] = {}
    base_tensors: dict[str, Tensor] = {}
    groups = groups_of(config)
    settings = lora_settings(config, (our_name(key, config, path)[0] for key in stored))
    for key, tensor in stored.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{path}: {key} has dtype {tensor.dtype}, which is not valid for a weight"
            )
        name, is_base = our_name(key, config, path)
        if is_base:
            base_tensors[name] = tensor
            continue
        tensors[name] = tensor.float()
        if is_of_experts(name) and tensor.ndim == 2:
            rank = settings.of_module(name.rpartition(".")[0]).lora_dim
            tensors[name] = factor_of_experts(name, tensor.float(), rank, path)
        if groups is not None and name.endswith(".lora_B"):
            try:
                tensors[name] = groups.compact(tensors[name])
            except ValueError as error:
                raise ValueError(f"{path}: {name}: {error}") from None
    check_tensors(tensors, lora_settings(config, tensors), where=str(path), groups=groups)
    return Adapter(config, tensors, base_tensors)


def _verify_written(
    staging: Path, config: AdapterConfig, settings: LoraConfig, tensors: Mapping[str, Tensor]
) -> None:
    """Read back what was written, and raise OSError if it differs."""
    back = _load(staging)
    same = back.config == config and back.tensors.keys() == tensors.keys()
    read = lora_settings(back.config, back.tensors)
    for name in adapted_modules(tensors):
        same &= lora_scaling(read.of_module(name)) == lora_scaling(settings.of_module(name))
    if not same or not all(torch.equal(back.tensors[n], t.float()) for n, t in tensors.items()):
        raise OSError(f"{staging}: the adapter read back differs from the one written")


def _check_base(model: nn.Module, base_tensors: Mapping[str, Tensor], where: str) -> None:
    names, state = base_names(model), model.state_dict(keep_vars=True)
    for name, tensor in base_tensors.items():
        if name not in names:
            raise ValueError(f"{where} contains {name}, which the model does not have")
        own = state[names[name]]
        if own.is_meta:
            continue
        same = full_shape(own) == tensor.shape
        if not same or not torch.equal(own.detach().cpu(), own_part(own, tensor).to(own.dtype)):
            raise ValueError(
                f"{where} holds {name} of another base: resized or trained in full; "
                "merge it into its base with PEFT and train on the result"
            )


def _patterns(
    own: Iterable[tuple[str, NumberT]], layout: AdapterLayout, adapted: Collection[str]
) -> dict[str, NumberT]:
    """PEFT's ``rank_pattern`` or ``alpha_pattern`` of those ``adapted`` modules with a number.

    PEFT compares it with whole names, of adapted parameters where it finds a layer by one: the
    ending of such is a pattern where all that end in it have the number.
    """

    def weight(name: str) -> str:
        return name if is_expert_weight(name) else f"{name}.weight"

    numbers, patterns = dict(own), dict[str, NumberT]()
    for name, value in numbers.items():
        key = f"^{name}"
        for ending in layout.target_parameters:
            if is_ending(weight(name), ending):
                alike = (numbers.get(n) for n in adapted if is_ending(weight(n), ending))
                key = ending if all(n == value for n in alike) else f"^{weight(name)}"
        patterns[key] = value
    return patterns


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
