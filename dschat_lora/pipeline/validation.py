"""Validation of all stages before the first starts, with placeholders for models to come."""

import io
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    more_metadata,
    peft_fields,
)
from dschat_lora.config.options import build_config
from dschat_lora.config.stages import RewardStageConfig, SupervisedConfig
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.pipeline.recipe import Recipe
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.runtime.checks import model_fields

# Of the machine's processes, which the launcher counts.
_OF_PROCESSES = ("deepspeed_config", "offload")


def check_stages(recipe: Recipe, *, done: Collection[str] = ()) -> dict[str, Any]:
    """The config of each stage as its own script resolves it, in order, but for ``done`` ones.

    A model that an earlier stage has yet to write is replaced by a placeholder with all that
    checks read: its rank, its base, its kind. Weights cannot be checked.

    Raises:
        ValueError: at the first thing that cannot work, naming file, stage, option and remedy.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, options in recipe.stages.items():
            if name in done:
                continue
            homes = {
                str(recipe.directory / each): str(Path(temporary).resolve() / each)
                for each in found
            }
            values = dict(options)
            for option_name, earlier in recipe.sources(name).items():
                home = str(recipe.directory / earlier)
                path = str(Path(values[option_name]).expanduser())
                values[option_name] = path.replace(home, homes.get(home, home), 1)
            try:
                found[name] = check_stage(name, values, recipe.launcher.processes)
            except (ValueError, OSError) as error:
                message = str(error)
                for home, stand_in in homes.items():
                    message = message.replace(stand_in, home)
                raise ValueError(f"{recipe.file}: stage {name}: {message}") from error
            if isinstance(found[name], SupervisedConfig):
                _write_stand_in(Path(temporary).resolve() / name, found[name])
    return found


def check_stage(name: str, values: Mapping[str, Any], processes: int | None) -> Any:
    """The stage's config after its own check, whose output is discarded.

    ``processes`` is how many the launcher will start; None where it decides.

    Raises:
        ValueError: as the stage would.
    """
    stage = STAGES[name]
    if processes is None and "deepspeed_config" in values:
        values = {k: v for k, v in values.items() if k not in _OF_PROCESSES}
    # Without a number the launcher uses every GPU, which only the stage can count.
    size = values.get("tensor_parallel_size", 1)
    least = size if isinstance(size, int) and size > 0 else 1
    with _as_one_of(processes or least), redirect_stdout(io.StringIO()):
        return stage.check(build_config(stage.config, values))


@contextmanager
def _as_one_of(processes: int) -> Iterator[None]:
    """Inside the block, checks see the number of processes that the launcher will start."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def _write_stand_in(home: Path, config: SupervisedConfig) -> None:
    """A placeholder for a run's output, with all that later stages' checks read."""
    source = find_model(config.model.model_name_or_path)
    scores = isinstance(config, RewardStageConfig)
    only_adapter = config.lora.lora_dim > 0 and config.lora.only_optimize_lora
    if only_adapter:
        _write_adapter(home / "adapter", config, source, scores=scores)
    if config.run.merge_adapter or not only_adapter:
        architecture = "ForSequenceClassification" if scores else "ForCausalLM"
        (home / "model").mkdir(parents=True)
        fields = model_fields(source) | {"architectures": [architecture]}
        _write_json(home / "model" / "config.json", fields)


def _write_adapter(
    directory: Path, config: SupervisedConfig, source: ModelSource, *, scores: bool
) -> None:
    lora = config.lora
    directory.mkdir(parents=True)
    adapter = AdapterConfig(
        base_model_name_or_path=source.base,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        r=lora.lora_dim,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        bias=lora.train_bias,
        target_modules=lora.target_modules,
        modules_to_save=("score",) if scores else (),
        fan_in_fan_out=False,
        enable_lora=lora.enable_lora,
        base_bits=config.model.base_bits,
    )
    _write_json(directory / CONFIG_FILE, peft_fields(adapter))
    head = {"dtype": "F32", "shape": [1, 0], "data_offsets": [0, 0]}
    tensors = {"base_model.model.score.weight": head} if scores else {}
    metadata = more_metadata(adapter)
    header = json.dumps(({"__metadata__": metadata} if metadata else {}) | tensors).encode()
    (directory / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
