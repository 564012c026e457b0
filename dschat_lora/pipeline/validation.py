"""Validation of all stages before the first starts, with placeholders for models to come."""

import io
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from dschat_lora.config.options import build_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.pipeline.recipe import Recipe
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.pipeline.stand_ins import write_output

# Of the machine's processes, which the launcher counts.
_OF_PROCESSES = ("deepspeed_config", "offload")


def check_stages(recipe: Recipe, *, done: Collection[str] = ()) -> dict[str, Any]:
    """The config of each stage as its own script resolves it, in order, but for ``done`` ones.

    A model that an earlier stage has yet to write is replaced by a placeholder with all that
    checks read: its rank, its base, its kind. Weights cannot be checked.

    Raises:
        ValueError: at the first thing that cannot work, naming file, stage, option and remedy.
    """
    with tempfile.TemporaryDirectory() as temporary:
        return dict(checked_stages(recipe, Path(temporary).resolve(), done=done))


def checked_stages(
    recipe: Recipe, temporary: Path, *, done: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Name and config of each stage as :func:`check_stages`; placeholders are in ``temporary``.

    Errors are the same.
    """
    homes: dict[str, str] = {}
    for name, options in recipe.stages.items():
        if name in done:
            continue
        values = dict(options)
        for option_name, earlier in recipe.sources(name).items():
            home = str(recipe.directory / earlier)
            path = str(Path(values[option_name]).expanduser())
            values[option_name] = path.replace(home, homes.get(home, home), 1)
        try:
            config = check_stage(name, values, recipe.launcher.processes)
        except (ValueError, OSError) as error:
            message = str(error)
            for home, stand_in in homes.items():
                message = message.replace(stand_in, home)
            raise ValueError(f"{recipe.file}: stage {name}: {message}") from error
        if isinstance(config, SupervisedConfig):
            write_output(temporary / name, config)
        homes[str(recipe.directory / name)] = str(temporary / name)
        yield name, config


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
