"""How the files of a model hold its weights, by its configuration. Imports no model library."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dschat_lora.config.addons import load, provided, provided_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

FIELD = "quantization_config"  # of a model's configuration


class StoredForm(Protocol):
    """Reads codes in the place of weights: of an add-on, by the ``quant_method`` of the files."""

    words: str  # what is read
    transformers_class: str  # configuration by which transformers gives values; empty: none does

    def unknown(self, settings: Mapping[str, Any]) -> str:
        """What of the settings of the files cannot be read; empty where nothing is."""

    def quantizer(self, settings: Mapping[str, Any], model: "PreTrainedModel") -> "HfQuantizer":
        """The ``HfQuantizer`` by which transformers' rules of conversion give values."""


class BaseFile(Protocol):
    """Reads a base in one file: of an add-on, by the ending of its name."""

    kind: str
    words: str  # what is read
    named: str  # how it is named

    def base(self, name: str) -> str | None:
        """The base of this name, as it is recorded; None where there is none."""

    def located(self, base: str) -> tuple[str, dict[str, str]]:
        """Where transformers finds it, and the argument that names the file."""

    def check_installed(self) -> None:
        """Raise ImportError where a package lacks."""

    def weights(self, model: "PreTrainedModel", file: str) -> tuple[dict[str, Any], list[Any]]:
        """Tensors of the file, and the rules of conversion that make weights of them."""


def quantization(fields: Mapping[str, Any]) -> dict[str, Any]:
    """How a model's configuration says that its files are quantised; empty where they are not."""
    inner = fields.get("text_config")
    settings = fields.get(FIELD) or (inner.get(FIELD) if isinstance(inner, dict) else None) or {}
    if not isinstance(settings, dict):  # of a model that is there
        named = {"quant_method": str(settings)}
        settings = settings.to_dict() if hasattr(settings, "to_dict") else named
    return settings


def base_file(name: str) -> BaseFile | None:
    """What reads the file that a base is; None of a directory or hub name."""
    file: BaseFile | None = _provided("base_file", name.rpartition(".")[2], name)
    return file


def stored_kind(fields: Mapping[str, Any], name: str) -> str | None:
    """How the files of a model hold the weights of its blocks; None where they are not quantised.

    That is nf4, or what values of 16 bits are made of as it is read.

    Args:
        fields: of the model's configuration.
        name: of the model.

    Raises:
        ValueError: if neither they nor values made of them can be trained on.
    """
    if (file := base_file(name)) is not None:
        return file.kind
    settings = quantization(fields)
    if not settings:
        return None
    kind = method = str(settings.get("quant_method", "bitsandbytes"))
    if method == "bitsandbytes":
        packed = settings.get("bnb_4bit_quant_type", "fp4")
        kind = "int8" if settings.get("load_in_8bit") else str(packed)
        method = f"bitsandbytes {packed}"
    if kind == "nf4":
        return kind
    form = _provided("stored_form", kind, name)
    unknown = method if form is None else form.unknown(settings)
    if not unknown:
        return kind
    seams = ("stored_form", "base_file")
    *others, last = [load(path).words for seam in seams for path in provided(seam).values()] or [""]
    read = f", and in 16 bits what is unpacked from {', '.join(others)} and {last}" if last else ""
    raise ValueError(
        f"--model_name_or_path {name} is quantised ({unknown}), which is not supported for "
        f"training: bitsandbytes' nf4 is, in 4 bits{read}; give the original 16-bit model, with "
        "--base_bits 4 to hold it in 4 bits"
    )


def stored_form(fields: Mapping[str, Any], name: str) -> StoredForm | None:
    """What reads the weights beside a configuration; None of whole ones, NF4, and one file."""
    kind = stored_kind(fields, name)
    form: StoredForm | None = None if kind is None else _provided("stored_form", kind, name)
    return form


def _provided(seam: str, value: str, name: str) -> Any:
    """What an add-on provides for a model of this name, None where there is no such thing."""
    known = provided_name(seam, value, shown=f"--model_name_or_path {name}: {value}")
    return load(provided(seam)[known]) if known else None


def stored_bits(fields: Mapping[str, Any], name: str) -> int:
    """Bits that the weights of a model's blocks take as they are loaded: 4 of NF4, else 16.

    Raises:
        ValueError: as :func:`stored_kind`.
    """
    return 4 if stored_kind(fields, name) == "nf4" else 16


def located(base: str) -> tuple[str, dict[str, str]]:
    """Where transformers finds a base, and the argument that names its file, if it is one."""
    file = base_file(base)
    return (base, {}) if file is None else file.located(base)
