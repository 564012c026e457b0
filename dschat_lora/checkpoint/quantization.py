"""How the files of a model hold its weights, by its configuration. Imports no model library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

FIELD = "quantization_config"  # of a model's configuration
GGUF = ".gguf"

# Of the blocks: NF4 as it is, or values of 16 bits that are made of the codes as they are read.
Kind = Literal["nf4", "int8", "gptq", "awq", "fp8", "mxfp4", "gguf"]
_UNPACKED: Mapping[str, Kind] = {each: each for each in ("gptq", "awq", "fp8", "mxfp4")}


def quantization(fields: Mapping[str, Any]) -> dict[str, Any]:
    """How a model's configuration says that its files are quantised; empty where they are not."""
    inner = fields.get("text_config")
    found = fields.get(FIELD) or (inner.get(FIELD) if isinstance(inner, dict) else None) or {}
    if not isinstance(found, dict):  # of a model that is there
        found = found.to_dict() if hasattr(found, "to_dict") else {"quant_method": str(found)}
    return found


def stored_kind(fields: Mapping[str, Any], name: str) -> Kind | None:
    """How the files of a model hold the weights of its blocks; None where they are not quantised.

    Args:
        fields: of the model's configuration.
        name: of the model.

    Raises:
        ValueError: if neither they nor values made of them can be trained on.
    """
    if name.endswith(GGUF):
        return "gguf"
    found = quantization(fields)
    if not found:
        return None
    method = str(found.get("quant_method", "bitsandbytes"))
    bits, kind = found.get("bits", found.get("w_bit", 4)), found.get("bnb_4bit_quant_type", "fp4")
    known = _UNPACKED.get(method)
    if method == "bitsandbytes":
        known = "int8" if found.get("load_in_8bit") else "nf4" if kind == "nf4" else None
        method = f"bitsandbytes {kind}"
    layout = str(found.get("checkpoint_format") or found.get("version") or "").lower()
    if method == "gptq" and not (bits in (2, 4, 8) and layout in ("", "gptq", "gptq_v2")):
        known, method = None, f"gptq of {bits} bits, {layout or 'gptq'}"
    if method == "awq" and not (bits == 4 and layout in ("", "gemm")):
        known, method = None, f"awq of {bits} bits, {layout or 'gemm'}"
    if known is None:
        raise ValueError(
            f"--model_name_or_path {name} is quantised ({method}), which cannot be trained on: "
            "bitsandbytes' nf4 is, in 4 bits, and in 16 bits what is unpacked from bitsandbytes' "
            "int8, fp8, mxfp4, gptq of 2, 4 and 8 bits, awq (gemm) and GGUF; give the original "
            "16-bit model, with --base_bits 4 to hold it in 4 bits"
        )
    return known


def stored_bits(fields: Mapping[str, Any], name: str) -> int:
    """Bits that the weights of a model's blocks take as they are loaded: 4 of NF4, else 16.

    Raises:
        ValueError: as :func:`stored_kind`.
    """
    return 4 if stored_kind(fields, name) == "nf4" else 16


def located(base: str) -> tuple[str, dict[str, str]]:
    """Where transformers finds a base, and the file to name besides if it is of GGUF.

    Such a base is the path of a file, or ``repository:file`` of the hub.
    """
    if not base.endswith(GGUF):
        return base, {}
    path = Path(base)
    where, _, file = base.rpartition(":")
    if path.is_file() or not where:
        where, file = str(path.parent), path.name
    return where, {"gguf_file": file}
