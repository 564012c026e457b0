"""Names of tensors in PEFT's files, from ours and back."""

from collections.abc import Collection
from pathlib import Path

from dschat_lora.checkpoint.adapter_config import AdapterConfig

_PREFIX = "base_model.model."


def file_name(name: str, adapted: Collection[str]) -> str:
    """Key in the file for a name of :func:`dschat_lora.lora.model.adapter_parameters`.

    PEFT keeps the bias of ``adapted`` modules, those with LoRA factors, one level deeper.
    """
    module, _, part = name.rpartition(".")
    if ".trained." in name:
        return _PREFIX + name.replace(".trained.", ".", 1)
    if part in ("lora_A", "lora_B"):
        return f"{_PREFIX}{name}.weight"
    if part == "trained_bias":
        owner = f"{module}.base_layer" if module in adapted else module
        return f"{_PREFIX}{owner}.bias"
    return _PREFIX + name


def our_name(key: str, config: AdapterConfig, path: Path) -> tuple[str, bool]:
    """Our name for a key of the file, and whether it is a weight of the base.

    Raises:
        ValueError: at a name that PEFT does not give to plain LoRA.
    """
    name = key.removeprefix(_PREFIX).replace(".modules_to_save.", ".")
    module, _, part = name.rpartition(".")
    if module.endswith((".lora_A", ".lora_B")) and part == "weight":
        module, part = module.rsplit(".", 1)
    is_factor = part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    if not key.startswith(_PREFIX) or ("lora_" in name and not is_factor):
        raise ValueError(f"{path}: unexpected tensor {key!r}")
    if is_factor:
        return f"{module}.{part}", False
    if ".original_module." in name:
        return name.replace(".original_module.", "."), True
    saved = _saved_parent(module, config.modules_to_save)
    if saved is not None:
        return f"{saved}.trained.{name.removeprefix(f'{saved}.')}", False
    module = module.removesuffix(".base_layer")
    if part == "bias" and config.bias != "none":
        return f"{module}.trained_bias", False
    return f"{module}.{part}", True


def _saved_parent(module: str, endings: tuple[str, ...]) -> str | None:
    """The outermost module on the path ``module`` that PEFT's ``modules_to_save`` names."""
    parts = module.split(".")
    paths = (".".join(parts[: length + 1]) for length in range(len(parts)))
    return next((path for path in paths if path.endswith(endings)), None)
