"""Adapters and models for other programs: upload to the Hugging Face Hub, conversion to GGUF."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from dschat_lora.addons.publish.config import ExportConfig, PushConfig
from dschat_lora.checkpoint.adapter_config import (
    CONFIG_FILE,
    is_adapter_directory,
    read_adapter_config,
    verify_adapter,
)
from dschat_lora.checkpoint.history import is_checkpoint
from dschat_lora.config.staging import check_within, staged_file
from dschat_lora.report.terminal import fitted_command, log_once, note, print_json

REPOSITORY = "https://github.com/ggml-org/llama.cpp"


def saved_directory(given: str, *, first: Literal["adapter", "model"]) -> Path:
    """The adapter or model in a directory or run, ``first`` where a run has both.

    Raises:
        ValueError: if there is none, or its files are not those of its manifest.
    """
    path = Path(given).expanduser()
    if is_checkpoint(path):
        raise ValueError(
            f"--path {path} is a checkpoint, which other tools cannot read; dschat-lora merge "
            f"{path} --output_dir DIR turns it into a model"
        )
    names = sorted(("adapter", "model"), key=lambda name: name != first)
    homes = [path, *(path / name for name in names), *(path / "actor" / name for name in names)]
    for home in homes:
        if (home / "config.json").is_file():
            return home
        if is_adapter_directory(home):
            verify_adapter(home)
            return home
    what = "holds no" if path.is_dir() else "does not exist; give a directory with an"
    raise ValueError(f"--path {path} {what} {CONFIG_FILE} or config.json, its own or in a run")


def push_directory(config: PushConfig) -> None:
    """Upload an adapter or model to the hub, or say what would be, where the network is not used.

    Raises:
        ValueError: if there is nothing to upload, a link leads out of the directory, or the hub
            refuses the name or the token.
        OSError: if the hub cannot be reached.
    """
    from huggingface_hub import constants  # the conversion needs none of it

    directory = saved_directory(config.path, first="adapter")
    for path in directory.rglob("*"):
        try:
            check_within(path, directory)
        except ValueError as error:
            raise ValueError(f"--path {config.path}: {error}") from error
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    plan: dict[str, Any] = {
        "directory": str(directory),
        "repo": config.repo,
        "files": {str(path.relative_to(directory)): path.stat().st_size for path in files},
    }
    offline = constants.is_offline_mode() or bool(os.environ.get("HF_HUB_OFFLINE"))
    if config.dry_run or offline:
        last = f"nothing was uploaded: {'--dry_run' if config.dry_run else 'HF_HUB_OFFLINE is set'}"
        plan["uploaded"] = False
    else:
        url = _upload(directory, config)
        last = f"uploaded: {url}"
        plan |= {"uploaded": True, "url": url}
    if config.json:
        print_json(plan)
        return
    log_once(f"{plan['directory']} to {config.repo}:")
    for name, size in plan["files"].items():
        log_once(f"  {size:>14,} bytes  {name}")
    log_once(last)


def _upload(directory: Path, config: PushConfig) -> str:
    """Upload; returns where. Errors are those of :func:`push_directory`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.create_repo(config.repo, private=config.private or None, exist_ok=True)
        return str(api.upload_folder(repo_id=config.repo, folder_path=directory))
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise ValueError(f"--repo {config.repo}: {error}") from error
    except HfHubHTTPError as error:
        raise OSError(f"the hub rejects {config.repo}: {error}") from error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        raise OSError(
            f"the hub cannot be reached ({error}); --dry_run shows what would be uploaded"
        ) from error


def export_gguf(config: ExportConfig, run: Callable[[Sequence[str]], int]) -> bool:
    """Convert by llama.cpp, or print the commands that do; whether the file was written.

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
    base = read_adapter_config(directory).base_model_name_or_path if is_adapter else None
    if base:
        arguments += ["--base" if Path(base).is_dir() else "--base-model-id", base]
    converter = _converter(script, config.llama_cpp)
    if converter is None:
        commands = [
            f"git clone --depth 1 {REPOSITORY}",
            "pip install -r llama.cpp/requirements.txt",
            shlex.join(["python", f"llama.cpp/{script}", *arguments]),
        ]
    else:
        command = [sys.executable, str(converter), *arguments]
        commands = [shlex.join(command)]
        with staged_file(output) as staging:
            code = run([str(staging) if word == str(output) else word for word in command])
            if code or not staging.is_file():
                raise ValueError(f"{converter} ended with exit code {code} and wrote no file")
    written = converter is not None
    if config.json:
        print_json({"written": str(output) if written else None, "commands": commands})
    elif written:
        log_once(f"written: {output}")
    else:
        note(
            "nothing was converted, because llama.cpp's converter was not found; run these commands"
        )
        for line in commands:
            log_once(fitted_command(line, ""))
    return written


def _converter(script: str, checkout: str | None) -> Path | None:
    """llama.cpp's converter, in a checkout of it or on PATH; None where it is not there."""
    if checkout is None:
        program = shutil.which(script)
        return Path(program) if program else None
    path = Path(checkout).expanduser() / script
    if not path.is_file():
        raise ValueError(f"--llama_cpp {checkout} holds no {script}; give a checkout of llama.cpp")
    return path
