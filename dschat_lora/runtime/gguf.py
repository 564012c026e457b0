"""Conversion to GGUF by llama.cpp's own converters."""

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dschat_lora.checkpoint.adapter_config import is_adapter_directory, read_adapter_config
from dschat_lora.checkpoint.staging import staged_file
from dschat_lora.config.verbs import ExportConfig
from dschat_lora.report.terminal import log_once, note, to_json
from dschat_lora.runtime.saved import saved_directory

REPOSITORY = "https://github.com/ggml-org/llama.cpp"


def export_gguf(config: ExportConfig, run: Callable[[Sequence[str]], int]) -> bool:
    """Convert, or print the commands that do; returns whether the file was written.

    ``run`` gives the exit code of a command.

    Raises:
        ValueError: if there is nothing to convert, or the converter fails.
    """
    directory = saved_directory(config.path, first="model")
    is_adapter = is_adapter_directory(directory)
    script = "convert_lora_to_gguf.py" if is_adapter else "convert_hf_to_gguf.py"
    default = directory.resolve().with_name(f"{directory.resolve().name}.gguf")
    output = Path(config.output_path).expanduser() if config.output_path else default
    arguments = [str(directory), "--outfile", str(output), "--outtype", config.outtype]
    if is_adapter:
        arguments += _base(directory)
    converter = find_converter(script, config.llama_cpp)
    if converter is None:
        commands = [
            f"git clone --depth 1 {REPOSITORY}",
            "pip install -r llama.cpp/requirements.txt",
            shlex.join(["python", f"llama.cpp/{script}", *arguments]),
        ]
        _say(config, None, commands)
        return False
    command = [sys.executable, str(converter), *arguments]
    with staged_file(output) as staging:
        there = [str(staging) if word == str(output) else word for word in command]
        code = run(there)
        if code or not staging.is_file():
            raise ValueError(f"{converter} ended with exit code {code} and wrote no file")
    _say(config, output, [shlex.join(command)])
    return True


def find_converter(script: str, checkout: str | None) -> Path | None:
    """llama.cpp's converter, in a checkout of it or on PATH; None where it is not there.

    Raises:
        ValueError: if a checkout is named that lacks it.
    """
    if checkout is None:
        found = shutil.which(script)
        return Path(found) if found else None
    path = Path(checkout).expanduser() / script
    if not path.is_file():
        raise ValueError(f"--llama_cpp {checkout} holds no {script}; give a checkout of llama.cpp")
    return path


def _base(adapter: Path) -> list[str]:
    """How the converter is told an adapter's base: a directory, or a name on the hub."""
    base = read_adapter_config(adapter).base_model_name_or_path
    if not base:
        return []
    return ["--base", base] if Path(base).is_dir() else ["--base-model-id", base]


def _say(config: ExportConfig, written: Path | None, commands: list[str]) -> None:
    if config.json:
        name = None if written is None else str(written)
        log_once(to_json({"written": name, "commands": commands}))
        return
    if written is not None:
        log_once(f"written: {written}")
        return
    note("nothing was converted: llama.cpp's converter is not here; these commands do it")
    for command in commands:
        log_once(command)
