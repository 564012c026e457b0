"""What ``--model_name_or_path`` names: a base model, or an adapter on one, also in a checkpoint.

Imports no model library, so that a wrong path is reported at once.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dschat_lora.checkpoint.adapter_config import (
    WEIGHTS_FILE,
    AdapterConfig,
    describe_checkpoint,
    is_adapter_directory,
    is_whole_model,
    read_adapter_config,
)
from dschat_lora.checkpoint.history import is_checkpoint, newest_valid
from dschat_lora.checkpoint.quantization import base_file
from dschat_lora.config.addons import load, provided
from dschat_lora.config.bundled import BUNDLED_MODEL
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.values import parse_rope_scaling

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """Where the base comes from, and the adapter to continue if there is one."""

    base: str  # hub name or absolute directory
    adapter: Path | None = None
    adapter_config: AdapterConfig | None = None
    tokenizer_of_run: str | None = None  # of a checkpoint, which has none itself
    # of an adapter that is planned: there are no weights of it yet
    planned: LoraConfig | None = None

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer comes from: beside the adapter if it was saved there."""
        if self.tokenizer_of_run is not None:
            return self.tokenizer_of_run
        if self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file():
            return str(self.adapter)
        return self.base

    @property
    def base_bits(self) -> int | None:
        """Bits of the base that the adapter was trained on; None without an adapter."""
        return None if self.adapter_config is None else self.adapter_config.base_bits

    @property
    def rope_scaling(self) -> str | None:
        """``--rope_scaling`` that the adapter was trained with; None for the base's own."""
        return None if self.adapter_config is None else self.adapter_config.rope_scaling

    @property
    def bundled(self) -> bool:
        """Whether the base is the tiny model that comes with the package."""
        return self.base == str(BUNDLED_MODEL.resolve())


def trained_rope(asked: str | None, source: ModelSource) -> str | None:
    """``--rope_scaling`` as it was asked for, or as the adapter was trained with.

    Raises:
        ValueError: if they differ.
    """
    own = source.rope_scaling
    if asked is None or own is None or parse_rope_scaling(asked) == parse_rope_scaling(own):
        return asked if own is None else own
    raise ValueError(
        f"--rope_scaling {asked}: the adapter {source.adapter} was trained with {own}; drop the "
        "option"
    )


def find_model(name: str | None) -> ModelSource:
    """The base model (and adapter) behind ``name``; the bundled model for None.

    ``name`` may be a hub name, a transformers directory, an adapter directory, a checkpoint, or a
    stage's output directory: its ``adapter/`` or ``model/``, those of step 3's actor or, before
    there are any, its newest sound checkpoint.

    Raises:
        ValueError: if nothing usable is there; the message names the option and what was found.
    """
    if name is None:
        return ModelSource(str(BUNDLED_MODEL.resolve()))
    if not name:
        raise ValueError("--model_name_or_path is empty; omit it to use the bundled model")
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_directory(name, path)
    file = base_file(name)
    if file is not None and (base := file.base(name)) is not None:
        return ModelSource(base)
    # Beside a local directory, or where stages write by default, no hub name was meant.
    is_near_a_path = len(path.parts) > 1 and (path.parent.is_dir() or path.parts[0] == "output")
    if path.exists() or file is not None or not HUB_NAME.fullmatch(name) or is_near_a_path:
        state = "is a file" if path.is_file() else "does not exist"
        if not path.exists() and HUB_NAME.fullmatch(name) and path.parent.is_dir():
            state += f" in {path.parent}/ (a hub name cannot begin with a directory that is here)"
        files = "".join(f"{load(each).named}, " for each in provided("base_file").values())
        raise ValueError(
            f"--model_name_or_path {name} {state}; give a hub name, a model directory, {files}or "
            "the output directory of an earlier stage"
        )
    return ModelSource(name)


def _in_directory(name: str, path: Path) -> ModelSource:
    if is_checkpoint(path) and not is_whole_model(path):
        return _from_checkpoint(path)
    actor = path / "actor"
    for candidate in (path, path / "adapter", path / "model", actor / "adapter", actor / "model"):
        if is_adapter_directory(candidate):
            return _from_adapter(candidate)
        if (candidate / "config.json").is_file():
            return ModelSource(str(candidate.resolve()))
    if newest := newest_valid(path).path:
        return _from_checkpoint(newest)
    names = ", ".join(sorted(child.name for child in path.iterdir())[:6]) or "nothing"
    raise ValueError(
        f"--model_name_or_path {name} holds neither config.json nor adapter_config.json, nor an "
        f"adapter/ or model/ with one; it holds {names}"
    )


def _from_checkpoint(path: Path) -> ModelSource:
    described = describe_checkpoint(path)
    name, run = described.trained_from, path.resolve().parents[1]
    try:
        origin = find_model(name)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint {path} is of a run of the model {name}, which was not found; use the "
            f"directory in which the run was started ({error})"
        ) from None
    saved = [home for home in (run / "adapter", run / "actor" / "adapter") if home.is_dir()]
    if described.changes_tokenizer and not saved:
        raise ValueError(
            f"the checkpoint {path} is of a run that changed the tokenizer (--add_eot_token, "
            "--chat_template); finish the run and use its adapter/"
        )
    tokenizer = str(saved[0]) if saved else origin.tokenizer
    return ModelSource(origin.base, path.resolve(), described.config, tokenizer)


def _from_adapter(path: Path) -> ModelSource:
    config = read_adapter_config(path)
    if not (path / WEIGHTS_FILE).is_file():
        raise ValueError(f"the adapter {path} is not complete: it has no {WEIGHTS_FILE}")
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(f"{path}/adapter_config.json has no base_model_name_or_path")
    file = base_file(base)
    if file is not None and (named := file.base(base)) is not None:
        base = named
    elif Path(base).is_dir():
        if not (Path(base) / "config.json").is_file():
            raise ValueError(f"the base {base} of the adapter {path} holds no config.json")
        base = str(Path(base).resolve())
    elif Path(base).is_absolute() or not HUB_NAME.fullmatch(base):
        raise ValueError(
            f"the base of the adapter {path} is missing: its adapter_config.json names {base}"
        )
    return ModelSource(base, path.resolve(), config)
