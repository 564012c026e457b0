"""What can be found wrong with writing and judging texts before anything heavy is loaded."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dschat_lora.config import DataConfig
from dschat_lora.data.rows import check_sources
from dschat_lora.models.source import find_model
from dschat_lora.nlg.config import DecodeConfig, EvaluateConfig
from dschat_lora.preflight import check_can_be_made, check_task, verify_adapter

# The categories of WebNLG 2017 with texts to train on.
SEEN = {
    *("Airport", "Astronaut", "Building", "City", "ComicsCharacter", "Food", "Monument"),
    *("SportsTeam", "University", "WrittenWork"),
}


@dataclass(frozen=True)
class Prediction:
    """One line of what decode wrote."""

    text: str
    references: tuple[str, ...]
    category: str | None


def check_decode(config: DecodeConfig) -> DecodeConfig:
    """The config, if its model and its data can be there.

    Raises:
        ValueError: naming option, value and remedy.
    """
    source = find_model(config.model_name_or_path)
    if config.lora_path is not None:
        _check_lora_only(config.lora_path, config.model_name_or_path, source.adapter)
    elif config.lora_alpha is not None or config.enable_lora:
        name = "enable_lora" if config.lora_alpha is None else "lora_alpha"
        raise ValueError(f"--{name} describes a --lora_path, and there is none")
    if source.adapter is not None:
        verify_adapter(source.adapter)
    check_task(source, ("CAUSAL_LM",))
    check_sources(DataConfig(data_path=config.data_path), "prompts")
    _check_output_file(config.output_path)
    return config


def check_evaluate(config: EvaluateConfig) -> EvaluateConfig:
    """The config, if its predictions can be read and the metrics' packages are there.

    Raises:
        ValueError: naming option, value and remedy, or the file and line.
    """
    chosen_predictions(config)
    for package in ("sacrebleu", "nltk"):
        if find_spec(package) is None:
            raise ValueError(f"evaluate needs {package}: pip install 'dschat_lora[nlg]'")
    if config.output_path is not None:
        _check_output_file(config.output_path)
    return config


def chosen_predictions(config: EvaluateConfig) -> list[Prediction]:
    """The lines of ``--predictions`` that ``--filter`` leaves.

    Raises:
        ValueError: naming the file and line, or what is empty.
    """
    path = Path(config.predictions).expanduser()
    if not path.is_file():
        raise ValueError(f"--predictions {config.predictions} is no file; decode writes one")
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_prediction(f"{path}:{number}", line))
    uncategorised = next((p for p in found if p.category is None), None)
    if config.filter != "all" and uncategorised is not None:
        raise ValueError(
            f"--filter {config.filter} needs the category of every meaning, which WebNLG's files "
            f"have and {path} lacks"
        )
    if config.filter != "all":
        wanted = config.filter == "seen"
        found = [each for each in found if (each.category in SEEN) == wanted]
    if not found:
        raise ValueError(f"--predictions {path} has no meaning for --filter {config.filter}")
    return found


def _prediction(location: str, line: bytes) -> Prediction:
    try:
        values: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{location}: not valid JSON ({error.msg})") from error
    values = values if isinstance(values, dict) else {}
    text, references = values.get("prediction"), values.get("references")
    category = values.get("category")
    if not isinstance(text, str) or not isinstance(references, list):
        raise ValueError(f"{location}: a line has 'prediction' (text) and 'references' (a list)")
    if not references or not all(isinstance(r, str) and r.strip() for r in references):
        raise ValueError(f"{location}: 'references' must be one text or more, none empty")
    return Prediction(text, tuple(references), category if isinstance(category, str) else None)


def _check_output_file(name: str) -> None:
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"--output_path {name} is a directory; name a file")
    check_can_be_made(path.parent, option="output_path")


def _check_lora_only(path: str, base: str | None, adapter: Path | None) -> None:
    if base is None:
        raise ValueError(
            f"--lora_path {path} holds LoRA factors alone; name their base in --model_name_or_path"
        )
    if adapter is not None:
        raise ValueError(
            f"--model_name_or_path {base} has an adapter of its own; --lora_path {path} goes on a "
            "base without one"
        )
    if not Path(path).expanduser().is_file():
        raise ValueError(f"--lora_path {path} is no file; give a .safetensors, .pt or .bin")
