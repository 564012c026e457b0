"""The checkpoint that a GLUE run resumes from, and its options."""

import math
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.manifest import safetensors_header
from dschat_lora.config.options import flatten, options_of, value_text
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.report.directory import read_object
from dschat_lora.runtime.resume import refuse_code

# Options of one process, not of the run: never taken from a checkpoint.
_OF_THE_PROCESS = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dry_run", "seeds"),
)
_DATA = (
    *("data_dir", "train_file", "validation_file", "validation_mismatched_file", "test_file"),
    "test_mismatched_file",
)
# Their product with the number of processes stays, not each of them.
_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Options that may change on resuming; all others give the state of a run its meaning.
_FREE = {
    *(*_OF_THE_PROCESS, *_DATA, *_ROWS, "bad_rows", "max_eval_samples", "pad_to_max_length"),
    *("trust_remote_code", "do_train", "do_eval", "do_predict", "per_device_eval_batch_size"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
    *("logging_steps", "gradient_checkpointing", "dataloader_num_workers", "logging_dir"),
    "use_deterministic_algorithms",
}


def settle(config: GlueConfig) -> GlueConfig:
    """The config with the checkpoint it resumes from; options not typed are those of its run.

    Raises:
        ValueError: if there is no sound checkpoint, or typed options differ from those of its run
            where they may not; the message lists every difference.
    """
    if config.resume_from_checkpoint is None:
        return config
    if config.overwrite_output_dir:
        raise ValueError(
            "--resume_from_checkpoint goes on with a run that --overwrite_output_dir would delete"
        )
    path, rejected = _choose(config.resume_from_checkpoint, config.output_dir)
    record = read_object(path.parent / "run.json")
    then = record.get("config")
    if record.get("stage") != "glue" or not isinstance(then, dict):
        raise ValueError(
            f"--resume_from_checkpoint {path}: {path.parent} holds no run.json of a GLUE "
            "run, which says how the checkpoint was made"
        )
    now = flatten(config)
    typed = config.given | (set(_DATA) if config.given & set(_DATA) else set())
    differences = [
        f"--{name} was {_shown(then[name])}, now {_shown(now[name])}"
        for name in now
        if name in typed & then.keys() and name not in _FREE and then[name] != now[name]
    ]
    refuse_code(then, config.given, path)
    taken = {n: v for n, v in then.items() if n in now and n not in {*typed, *_OF_THE_PROCESS}}
    given = {name: value for name, value in taken.items() if value is not None}
    inherited: dict[str, Any] = {
        **dict.fromkeys(taken.keys() - given.keys()),
        **options_of(GlueConfig, given, label=f"{path.parent / 'run.json'}: config"),
    }
    inherited = {n: tuple(v) if isinstance(v, list) else v for n, v in inherited.items()}
    merged = replace(config, **inherited, resume_from_checkpoint=str(path), rejected=rejected)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = [
        math.prod(int(options[name]) for name in _ROWS) * count
        for options, count in ((then, record.get("world_size", 1)), (flatten(merged), processes))
    ]
    if rows[0] != rows[1]:
        sizes = " x ".join(f"--{name} {getattr(merged, name)}" for name in _ROWS)
        differences.append(
            f"a step had {rows[0]} rows, now {sizes} x {processes} processes is {rows[1]}"
        )
    if differences:
        raise ValueError(
            f"--resume_from_checkpoint {path}: the run was another one: {'; '.join(differences)}"
        )
    return merged


def checkpoints(directory: Path) -> list[Path]:
    """``checkpoint-N`` in ``directory``, complete or not, by N."""
    found = {
        int(match[1]): path
        for path in directory.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return [found[step] for step in sorted(found)]


def check_sound(checkpoint: Path) -> None:
    """Refuse a checkpoint of the Trainer of which something is missing or cut off."""
    names = ["trainer_state.json", "optimizer.pt", "scheduler.pt"]
    if any(checkpoint.glob("global_step*")):
        names = names[:1]  # DeepSpeed keeps the others in files of its own
    for name in names:
        if not (checkpoint / name).is_file():
            raise ValueError(f"{checkpoint / name} is missing")
    if not isinstance(read_object(checkpoint / "trainer_state.json").get("global_step"), int):
        raise ValueError(f"{checkpoint / 'trainer_state.json'} is damaged")
    weights = sorted(checkpoint.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{checkpoint / 'model.safetensors'} is missing")
    for path in weights:
        tensors = [each for n, each in safetensors_header(path).items() if n != "__metadata__"]
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        if path.stat().st_size != start + max(each["data_offsets"][1] for each in tensors):
            raise ValueError(f"{path} is damaged: its header tells of another size")
    for path in sorted((*checkpoint.rglob("*.pt"), *checkpoint.glob("*.pth"))):
        if not zipfile.is_zipfile(path):  # as torch writes; the directory of the archive comes last
            raise ValueError(f"{path} is damaged: it is cut off")


def _choose(wanted: str, output_dir: str | None) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint, and why newer ones were passed over."""
    if wanted == "latest" and output_dir is None:
        raise ValueError("--resume_from_checkpoint latest needs --output_dir, where the run is")
    path = Path(output_dir if wanted == "latest" and output_dir else wanted).expanduser().absolute()
    if wanted != "latest" and path in checkpoints(path.parent):
        try:
            check_sound(path)
        except ValueError as error:
            raise ValueError(
                f"--resume_from_checkpoint {wanted} cannot be used: {error}; use latest to go on "
                "from the newest sound checkpoint"
            ) from error
        return path, ()
    rejected: list[str] = []
    for candidate in reversed(checkpoints(path)):
        try:
            check_sound(candidate)
        except ValueError as error:
            rejected.append(str(error))
        else:
            return candidate, tuple(rejected)
    if rejected:
        raise ValueError(
            f"--resume_from_checkpoint {wanted}: no checkpoint in {path} is sound: "
            f"{'; '.join(rejected)}"
        )
    if wanted == "latest":
        raise ValueError(f"--resume_from_checkpoint latest: {output_dir} holds no checkpoint-N")
    raise ValueError(
        f"--resume_from_checkpoint {wanted} must be latest, a checkpoint-N, or the output "
        "directory of a run with one"
    )


def _shown(value: object) -> str:
    return value_text(None if value == [] else value)
