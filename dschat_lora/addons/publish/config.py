"""Options of push and export."""

from dataclasses import dataclass
from typing import Literal

from dschat_lora.config.options import option


@dataclass(frozen=True)
class PushConfig:
    """Upload an adapter or a model, with its card, to the Hugging Face Hub.

    With HF_HUB_OFFLINE or --dry_run it only prints what it would upload.
    """

    path: str = option(
        help="output directory of a run, its adapter/ or model/; may be given as the first argument"
    )
    repo: str = option(
        help="name on the hub, such as me/my-adapter; may be given as the second argument"
    )
    private: bool = option(False, help="create a new repository as private")
    dry_run: bool = option(False, help="print what would be uploaded, and exit")
    json: bool = option(False, help="print one JSON object to standard output")


@dataclass(frozen=True)
class ExportConfig:
    """Convert an adapter or a model to GGUF with llama.cpp's converter.

    If the converter is not found, the commands to run are printed, and the exit code is 1.
    """

    path: str = option(
        help="output directory of a run, its adapter/ or model/; may be given as the first argument"
    )
    format: Literal["gguf"] = option("gguf", help="file format")
    outtype: Literal["f32", "f16", "bf16", "q8_0", "auto"] = option(
        "f16", help="dtype of the written weights"
    )
    output_path: str | None = option(
        None, help="file to write; default: DIRECTORY.gguf next to the directory"
    )
    llama_cpp: str | None = option(
        None, help="checkout of llama.cpp; needed if its converters are not on PATH"
    )
    json: bool = option(False, help="print one JSON object to standard output")
