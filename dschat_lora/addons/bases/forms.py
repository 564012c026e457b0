"""Forms in which files hold the weights of a base, as :mod:`dschat_lora.checkpoint.quantization`
asks for them. Imports no model library.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_lora.models.source import HUB_NAME
from dschat_lora.runtime.stage_main import late

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

Weights = Callable[["PreTrainedModel", str], tuple[dict[str, Any], list[Any]]]


@dataclass(frozen=True)
class Codes:
    """Codes and scales in the place of weights, which values are made of as they are read."""

    kind: str
    words: str
    transformers_class: str = ""

    def unknown(self, settings: Mapping[str, Any]) -> str:
        """What of the ``settings`` cannot be read."""
        if self.kind not in ("gptq", "awq"):
            return ""
        bits = settings.get("bits", settings.get("w_bit", 4))
        layout = str(settings.get("checkpoint_format") or settings.get("version") or "").lower()
        all_bits, own = {"gptq": ((2, 4, 8), "gptq"), "awq": ((4,), "gemm")}[self.kind]
        if bits in all_bits and layout in ("", own, *(["gptq_v2"] if own == "gptq" else [])):
            return ""
        return f"{self.kind} of {bits} bits, {layout or own}"

    def quantizer(self, settings: Mapping[str, Any], model: "nn.Module") -> "HfQuantizer":
        """What has transformers' rules of conversion give values."""
        quantizer: HfQuantizer = late("addons.bases.codes:dequantizer")(self.kind, settings, model)
        return quantizer


INT8 = Codes("int8", "bitsandbytes' int8")
FP8 = Codes("fp8", "fp8", "FineGrainedFP8Config")
MXFP4 = Codes("mxfp4", "mxfp4", "Mxfp4Config")
GPTQ = Codes("gptq", "gptq of 2, 4 and 8 bits")
AWQ = Codes("awq", "awq (gemm)")


class Gguf:
    """A GGUF file, of this disk (its path) or of the hub (``repository:file.gguf``)."""

    kind, words = "gguf", "GGUF"
    named = "a GGUF file (of the hub: repository:file.gguf)"

    def base(self, name: str) -> str | None:
        """The file that is named, absolute where it is of this disk; None where it is of neither.

        Raises:
            ValueError: if it cannot be read.
        """
        path = Path(os.path.expanduser(name))  # of anybody's: ~nobody is no error
        if not (path.is_file() or HUB_NAME.fullmatch(name.rpartition(":")[0])):
            return None
        if re.search(r"-\d{5}-of-\d{5}\.gguf$", name):
            raise ValueError(
                f"--model_name_or_path {name} is one of several parts of a model, which "
                "transformers cannot read: merge them with `llama-gguf-split --merge FIRST_PART "
                "WHOLE.gguf`"
            )
        return str(path.resolve()) if path.is_file() else name

    def located(self, base: str) -> tuple[str, dict[str, str]]:
        """Where transformers finds the file, and the argument that names it."""
        path = Path(base)
        where, _, file = base.rpartition(":")
        if path.is_file() or not where:
            where, file = str(path.parent), path.name
        return where, {"gguf_file": file}

    def check_installed(self) -> None:
        """Refuse to read one without its package.

        Raises:
            ImportError: saying how to install it.
        """
        if importlib.util.find_spec("gguf") is None:
            raise ImportError("GGUF files need a package: pip install 'dschat_lora[gguf]'")

    def weights(self, model: "PreTrainedModel", file: str) -> tuple[dict[str, Any], list[Any]]:
        """The tensors of a file, and the rules that make weights of ``model`` of them."""
        read: Weights = late("addons.bases.gguf_file:weights")
        return read(model, file)


GGUF = Gguf()
