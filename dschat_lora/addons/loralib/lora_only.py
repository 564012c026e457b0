"""LoRA-only files: LoRA tensors alone, under loralib's names, as of microsoft/LoRA.

Such a file says nothing of the base: it is read into a model that has its base weights and the
adapters of :func:`dschat_lora.lora.model.apply_lora`.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.adapter_tensors import check_scaling
from dschat_lora.checkpoint.manifest import safetensors_header
from dschat_lora.checkpoint.tensors import save_weights
from dschat_lora.config.groups import OWN_SETTINGS, LoraConfig
from dschat_lora.config.staging import staged_file
from dschat_lora.lora.groups import PARTS, parts_of
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import adapter_parameters, lora_layers
from dschat_lora.lora.parallel import own_part

_SETTINGS = "lora"  # key of the settings beside the tensors
_STATE = "model_state_dict"  # where microsoft/LoRA's .pt files hold the tensors
_NOT_READ = (EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a LoRA-only file, which its tensors do not tell."""

    lora_alpha: float  # scaling is lora_alpha / r, or over sqrt(r) with rsLoRA
    use_rslora: bool = False
    enable_lora: tuple[str, ...] = ()  # parts of packed layers with factors; empty: one pair
    base: str | None = None  # hub name or directory of the base model


@dataclass(frozen=True)
class LoraOnly:
    """A LoRA-only file as read.

    ``tensors`` are float32, on CPU, by loralib's names: ``X.lora_A``, ``X.lora_B``, ``X.bias``,
    and the names of modules trained in full.
    """

    path: Path
    r: int  # rank of the factors, of each part where layers are packed
    tensors: dict[str, Tensor]
    settings: LoraSettings | None  # None in a file of microsoft/LoRA

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers with factors, as the file names them."""
        return tuple(dict.fromkeys(_owner(name) for name in self.tensors if is_factor(name)))


def write_lora_only(
    path: str | Path, tensors: Mapping[str, Tensor], config: LoraConfig, *, base: str | None = None
) -> None:
    """Write one file, ``.safetensors`` or, as ``{"model_state_dict": ...}``, ``.pt``.

    It takes its name when it is complete. ``tensors`` are whole, by the names of
    :func:`dschat_lora.lora.model.adapter_parameters`. Call on one rank.

    Raises:
        ValueError: if there is no factor, a value is not finite, or the ending is another.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{path}: a LoRA-only file ends in .safetensors or .pt")
    stored = {
        loralib_name(name): tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in tensors.items()
    }
    rank_of(stored, path)
    if config.alphas:
        raise ValueError(f"{path} has one alpha, and the adapter has {OWN_SETTINGS}")
    parts = tuple(part for part in PARTS if part in config.enable_lora)
    settings = asdict(LoraSettings(config.lora_alpha, config.use_rslora, parts, base))
    with staged_file(path) as staging:
        if path.suffix == ".pt":
            torch.save({_STATE: stored, _SETTINGS: settings}, staging)
        else:
            save_weights(staging, stored, {"format": "pt", _SETTINGS: json.dumps(settings)})


def read_lora_only(path: str | Path) -> LoraOnly:
    """A file of :func:`write_lora_only`, or a ``.bin`` or ``.pt`` of loralib's state dict.

    Pickles are read as tensors alone, so that nothing in them can run.

    Raises:
        ValueError: if it is missing or damaged, or holds no LoRA factors or ones of several
            ranks; the message names the file.
    """
    path = Path(path)
    tensors, settings = read_tensors(path)
    return LoraOnly(path, rank_of(tensors, path), tensors, settings)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], LoraSettings | None]:
    """The tensors of a state dict, float32 on CPU, and the settings that stand beside them.

    Raises:
        ValueError: if the file is missing or damaged, or holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file; a LoRA-only file is a .safetensors, .pt or .bin")
    read = _read_safetensors if path.suffix == ".safetensors" else _read_torch
    stored, settings = read(path)
    wrong = [name for name, value in stored.items() if not isinstance(value, Tensor)]
    if wrong:
        raise ValueError(f"{path} is not a state dict: {wrong[0]!r} is not a tensor")
    # Of DistributedDataParallel.
    tensors = {name.removeprefix("module."): tensor.float() for name, tensor in stored.items()}
    if settings is None:
        return tensors, None
    try:
        noted = LoraSettings(**settings)
        alpha, parts = float(noted.lora_alpha), tuple(map(str, noted.enable_lora))
        return tensors, LoraSettings(alpha, bool(noted.use_rslora), parts, noted.base)
    except (TypeError, ValueError):
        raise ValueError(f"{path} is damaged: its settings are {settings!r}") from None


def lora_config_of_file(
    file: LoraOnly, *, lora_alpha: float | None = None, enable_lora: tuple[str, ...] = ()
) -> LoraConfig:
    """The settings with which :func:`dschat_lora.lora.model.apply_lora` adds a file's parameters.

    ``lora_alpha`` and ``enable_lora`` are given where the file has no settings.

    Raises:
        ValueError: if a setting is neither in the file nor given.
    """
    settings = file.settings
    if settings is None:
        if lora_alpha is None:
            raise ValueError(f"{file.path} does not record its scaling; give --lora_alpha")
        settings = LoraSettings(lora_alpha, enable_lora=enable_lora)
    if lora_alpha not in (None, settings.lora_alpha):
        raise ValueError(
            f"--lora_alpha is {lora_alpha:g}, but {file.path} says {settings.lora_alpha:g}; drop it"
        )
    if enable_lora and set(enable_lora) != set(settings.enable_lora):
        raise ValueError(
            f"--enable_lora is {_spelt(enable_lora)}, but {file.path} says "
            f"{_spelt(settings.enable_lora)}; drop it"
        )
    parts = len(file.tensors[f"{file.targets[0]}.lora_A"]) // file.r
    if parts != max(1, len(settings.enable_lora)):
        raise ValueError(
            f"{file.path} holds factors for {parts} part(s) of each layer; give as many in "
            f"--enable_lora, not {_spelt(settings.enable_lora)}"
        )
    saved, biased = set[str](), set[str]()
    for name in file.tensors:
        owner = _owner(name)
        if owner in file.targets or f"{owner}.weight" not in file.tensors:
            biased |= {owner} if name.endswith(".bias") else set()
        else:
            saved.add(owner)
    kind: Literal["none", "all", "lora_only"] = "lora_only" if biased else "none"
    return LoraConfig(
        lora_dim=file.r,
        lora_alpha=settings.lora_alpha,
        use_rslora=settings.use_rslora,
        target_modules=file.targets,
        train_bias="all" if biased - set(file.targets) else kind,
        modules_to_save=tuple(sorted(saved)),
        enable_lora=settings.enable_lora,
    )


@torch.no_grad()
def load_lora_only(model: nn.Module, file: LoraOnly) -> list[str]:
    """Copy a file into ``model`` after ``apply_lora``; returns the parameters' names.

    Raises:
        ValueError: as :func:`match_names`; if the file was trained with another scaling or other
            parts of packed layers; or if the base has no values.
    """
    names = match_names(model, file)
    if (stored := file.settings) is not None:
        trained = LoraConfig(
            lora_dim=file.r, lora_alpha=stored.lora_alpha, use_rslora=stored.use_rslora
        )
        check_scaling(model, trained, where=str(file.path))
        for name, layer in lora_layers(model).items():
            if (parts := parts_of(getattr(layer, "groups", None))) != stored.enable_lora:
                raise ValueError(
                    f"{file.path} was trained with --enable_lora {_spelt(stored.enable_lora)}; "
                    f"{name} has {_spelt(parts)}"
                )
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"{file.path} contains only LoRA tensors, and {empty} of the model has no value: load "
            "the base first"
        )
    parameters = adapter_parameters(model)
    for key, name in names.items():
        parameters[name].copy_(own_part(parameters[name], file.tensors[key]))
    return list(names.values())


def match_names(model: nn.Module, file: LoraOnly) -> dict[str, str]:
    """Map of names in the file to parameters of ``model``, which may be on the meta device.

    The prefix of the base model (``transformer.``, ``roberta.``) may be on one side alone.

    Raises:
        ValueError: naming the first tensor that the model has no place for, that the file lacks
            or that has another shape; or if the model has no adapters.
    """
    if not lora_layers(model):
        raise ValueError(
            f"{file.path} contains only LoRA tensors: load its base and call apply_lora first"
        )
    parameters = adapter_parameters(model)
    places = {loralib_name(name): name for name in parameters}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names: dict[str, str] = {}
    for key in file.tensors:
        spellings = (key, prefix + key, key.removeprefix(prefix))
        name = next((places[each] for each in spellings if each in places), None)
        if name is None:
            raise ValueError(f"{file.path} contains {key}, which the model does not have")
        names[key] = name
    missing = sorted(parameters.keys() - names.values())
    if missing:
        raise ValueError(f"{file.path} lacks {loralib_name(missing[0])}, which the model has")
    for key, name in names.items():
        has, wants = tuple(file.tensors[key].shape), tuple(full_shape(parameters[name]))
        if has != wants:
            raise ValueError(f"{file.path}: {key} is {has}, the model has {wants}")
    return names


def loralib_name(name: str) -> str:
    """loralib's name for one of :func:`dschat_lora.lora.model.adapter_parameters`."""
    owner, _, part = name.replace(".trained.", ".", 1).rpartition(".")
    renamed = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B", "trained_bias": "bias"}
    return f"{owner}.{renamed.get(part, part)}"


def rank_of(tensors: Mapping[str, Tensor], path: Path) -> int:
    """The rank of all factors: columns of B and rows of A, once or for each part.

    Raises:
        ValueError: naming the tensor that lacks its partner, is misshapen or not finite.
    """
    ranks = {}
    for name, tensor in tensors.items():
        check_finite(tensor, f"{path}: {name}")
        if not is_factor(name):
            continue
        owner = _owner(name)
        a, b = (tensors.get(f"{owner}.lora_{factor}") for factor in "AB")
        if a is None or b is None:
            raise ValueError(f"{path}: {name} lacks its counterpart")
        if a.ndim != 2 or b.ndim != 2 or 0 in (*a.shape, *b.shape) or len(a) % b.shape[1]:
            raise ValueError(
                f"{path}: the factors of {owner} are {tuple(a.shape)} and {tuple(b.shape)}; "
                "they must be (r, in) and (out, r), or (k * r, in) and (out of k parts, r)"
            )
        ranks[b.shape[1]] = owner
    if not ranks:
        is_peft = any(name.startswith("base_model.model.") for name in tensors)
        remedy = "; it is a file of PEFT: name its directory as an adapter" if is_peft else ""
        raise ValueError(f"{path} holds no LoRA factor{remedy}")
    if len(ranks) > 1:
        known = " and ".join(f"{rank} ({owner})" for rank, owner in ranks.items())
        raise ValueError(f"{path} holds factors of several ranks: {known}")
    return next(iter(ranks))


def _read_safetensors(path: Path) -> tuple[dict[str, Any], Any]:
    note = safetensors_header(path).get("__metadata__", {}).get(_SETTINGS)
    try:
        return load_file(path), None if note is None else json.loads(note)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _read_torch(path: Path) -> tuple[dict[str, Any], Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _NOT_READ as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"{path} is damaged, or holds more than tensors ({type(error).__name__}: {reason})"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict")
    if _STATE not in content:
        return dict(content), None
    return dict(content[_STATE]), content.get(_SETTINGS)


def _spelt(parts: tuple[str, ...]) -> str:
    return " ".join(parts) or "absent"


def is_factor(name: str) -> bool:
    """Whether a name in a state dict is that of a LoRA factor."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B")


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
