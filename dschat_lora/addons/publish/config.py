"""Options of push and export."""

from dataclasses import dataclass
from typing import Literal

from dschat_lora.config.options import option


@dataclass(frozen=True)
class PushConfig:
    """Upload an adapter or a model, with its card, to the Hugging Face Hub.

    Where HF_HUB_OFFLINE is set, and with --dry_run, it says what it would upload.
    """

    path: str = option(help="output directory of a run, its adapter/ or model/; it may stand first")
    repo: str = option(help="name on the hub, such as me/my-adapter; it may stand second")
    private: bool = option(False, help="make the repository a private one, where it is new")
    dry_run: bool = option(False, help="say what would be uploaded, and stop")
    json: bool = option(False, help="one JSON object on standard output")


@dataclass(frozen=True)
class ExportConfig:
    """Convert an adapter or a model for llama.cpp, by llama.cpp's own converter.

    Where that is not found, the commands to type are printed, and the exit code is 1.
    """

    path: str = option(help="output directory of a run, its adapter/ or model/; it may stand first")
    format: Literal["gguf"] = option("gguf", help="file format")
    outtype: Literal["f32", "f16", "bf16", "q8_0", "auto"] = option(
        "f16", help="type of the weights written"
    )
    output_path: str | None = option(None, help="default: DIRECTORY.gguf beside the directory")
    llama_cpp: str | None = option(
        None, help="checkout of llama.cpp, where its converters are not on PATH"
    )
    json: bool = option(False, help="one JSON object on standard output")
