"""Recipe: a pipeline's YAML file, whose stages are all checked before the first one starts."""

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.addons.pipeline.placeholders import write_placeholder
from dschat_lora.commands.launch import LauncherConfig
from dschat_lora.commands.stages import STAGES, check_stage
from dschat_lora.config.files import parse_yaml
from dschat_lora.config.options import (
    build_config,
    option_names,
    options_of,
    read_mapping,
    typed_options,
)
from dschat_lora.config.parser import unknown_option
from dschat_lora.config.stages import StageConfig

_PARTS = ("output_dir", "launcher", "common", "stages")
# Options that the pipeline itself sets.
_OWN = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dry_run")
_OVERRIDE = re.compile(r"(\w+)\.([\w-]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """Stages of a pipeline with their options, and where to run them.

    ``stages`` are options by stage in the order they run, JSON-ready, with the outputs of earlier
    stages filled in.
    """

    file: str
    directory: Path  # receives a directory for each stage
    launcher: LauncherConfig
    stages: Mapping[str, Mapping[str, Any]]

    def sources(self, name: str) -> dict[str, str]:
        """By option, the earlier stage whose output is this stage's model."""
        sources = {}
        for option_name in STAGES[name].inputs:
            value = self.stages[name].get(option_name)
            for earlier in self.stages:
                home = self.directory / earlier
                if value is not None and Path(value).expanduser().is_relative_to(home):
                    sources[option_name] = earlier
        return sources


def read_recipe(
    file: str,
    *,
    output_dir: str | None = None,
    num_gpus: int | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The recipe of a YAML file; arguments override it, ``overrides`` by ``STAGE.OPTION=VALUE``.

    Raises:
        ValueError: at the first thing that is unknown or cannot be used, naming file, stage,
            option, value and what is allowed.
    """
    content = read_mapping(file, label=file)
    for name in content:
        if name not in _PARTS:
            raise ValueError(f"{file}: {_unknown(name, _PARTS)}")
    directory = output_dir if output_dir is not None else content.get("output_dir")
    if not isinstance(directory, str) or not directory:
        raise ValueError(
            f"{file}: output_dir must be a directory, got {directory!r}; name it in the file or "
            "by --output_dir"
        )
    home = Path(directory).expanduser()
    if home.is_file():
        raise ValueError(f"{file}: output_dir {home} is a file, not a directory")
    given = _part(file, content, "launcher") | ({} if num_gpus is None else {"num_gpus": num_gpus})
    values = options_of(LauncherConfig, given, label=f"{file}: launcher")
    try:
        launcher = build_config(LauncherConfig, values)
    except ValueError as error:
        raise ValueError(f"{file}: launcher: {error}") from error
    options = _stage_options(file, content, overrides)
    return Recipe(file, home, launcher, _with_inputs(file, home, options))


def options_of_stage(name: str, file: str) -> dict[str, Any]:
    """Options of one stage of a file: models are outputs of earlier ones, and it writes as there.

    Raises:
        ValueError: at the first thing that is unknown or cannot be used.
    """
    recipe = read_recipe(file)
    if name not in recipe.stages:
        raise ValueError(
            f"--config {file} has the stages {', '.join(recipe.stages)}, and no {name}"
        )
    return {**recipe.stages[name], "output_dir": str(recipe.directory / name)}


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
        if isinstance(config, StageConfig):
            write_placeholder(temporary / name, config)
        homes[str(recipe.directory / name)] = str(temporary / name)
        yield name, config


def _stage_options(
    file: str, content: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Options of each stage by file and command line, converted."""
    stages = _part(file, content, "stages")
    if not stages:
        raise ValueError(f"{file}: stages must name one or more of {', '.join(STAGES)}")
    for name in stages:
        if name not in STAGES:
            raise ValueError(f"{file}: stages: {_unknown(name, tuple(STAGES))}")
    common = _part(file, content, "common")
    known = {name: option_names(STAGES[name].config) for name in stages}
    anywhere = sorted({each for names in known.values() for each in names})
    for name in common:
        if name not in anywhere:
            raise ValueError(f"{file}: common: {unknown_option(f'--{name}', anywhere)}")
    options_of_stages = {}
    for name in stages:
        mine = {k: v for k, v in common.items() if k in known[name]}
        mine |= _part(file, stages, name, label=f"stage {name}")
        options_of_stages[name] = _converted(name, mine, label=f"{file}: stage {name}")
    for text in overrides:
        name, values = _override(text, tuple(stages))
        options_of_stages[name] |= _converted(name, values, label=f"--set {text}: stage {name}")
    return options_of_stages


def _converted(name: str, values: Mapping[str, Any], *, label: str) -> dict[str, Any]:
    for own in _OWN:
        if own in values:
            raise ValueError(
                f"{label}: {own} is the pipeline's to set: the stage writes to OUTPUT_DIR/{name}"
            )
    # For a model, null says that there is none; elsewhere it is as if nothing were said.
    kept = {k: v for k, v in values.items() if v is not None or k in STAGES[name].inputs}
    return options_of(STAGES[name].config, kept, label=label)


def _override(text: str, stages: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Stage and ``{option: value}`` of ``STAGE.OPTION=VALUE``."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise ValueError(f"--set {text} must be STAGE.OPTION=VALUE, such as {stages[0]}.seed=1")
    name, option_name, value = match.groups()
    if name not in stages:
        raise ValueError(f"--set {text}: the stages are {', '.join(stages)}, not {name}")
    try:
        return name, {option_name: parse_yaml(value)}
    except ValueError as error:
        raise ValueError(f"--set {text}: the value cannot be read: {error}") from error


def _with_inputs(
    file: str, home: Path, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The options with the outputs of earlier stages where no model is named, and validated."""
    completed: dict[str, dict[str, Any]] = {}
    for name, values in options.items():
        inputs = {}
        for option_name, wanted in STAGES[name].inputs.items():
            fitting = [each for each in completed if each in wanted]
            if option_name not in values and fitting:
                inputs[option_name] = str(home / fitting[-1])
        given = {k: v for k, v in values.items() if v is not None}
        try:
            completed[name] = typed_options(build_config(STAGES[name].config, given | inputs))
        except ValueError as error:
            raise ValueError(f"{file}: stage {name}: {error}") from error
    return completed


def _part(
    file: str, content: Mapping[str, Any], name: str, label: str | None = None
) -> dict[str, Any]:
    part = content.get(name)
    if part is not None and not isinstance(part, dict):
        raise ValueError(f"{file}: {label or name} must hold 'name: value' lines, got {part!r}")
    return part or {}


def _unknown(name: object, known: tuple[str, ...]) -> str:
    words = unknown_option(f"--{name}", known).replace("--", "").replace("option ", "")
    return f"{words.removesuffix('; see help')}; it may have {', '.join(known)}"
