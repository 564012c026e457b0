"""The first difference between two output directories, digit for digit and bit for bit."""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

# Fields that are the clock's, or computed from it, or say how or by which commit a run was started,
# and files that are made from others.
LEFT_OUT = re.compile(
    r"time|.*seconds.*|.*_runtime|.*_per_second|.*tflops.*|mfu|peak_memory_bytes|started|"
    r"git_commit|command|resume_from_checkpoint|resumed|report\.html|manifest\.json"
)
# Also those that tell what was typed, or what was measured since a run was resumed.
LEFT_OUT_OF_RESUMED = re.compile(
    LEFT_OUT.pattern + r"|options|run\.json|(all|train)_results\.json|train_loss"
)
# Options that are gone, and what they were where they were off.
_GONE = {
    **{"config.lr_probe": 0, "config.prompt_lookup_num_tokens": 0, "config.reward_gate": []},
    **{"config.rollout_temperature": None, "config.oversample": 1.0},
    **{"config.target_entropy": 0.0, "parts.progress.entropy": 0.0},
    **{"config.layerwise_lr_decay": 1.0, "config.mixture_temperature": 1.0},
}
# State that was that of an option where the option that moved it was off.
_COPIES = {f"parts.progress.entropy_{name}": "config.entropy_coef" for name in ("coef", "start")}
_FIRST = ("metrics.jsonl", "rollouts.jsonl.gz")
Normalise = Callable[[str], str]


def first_difference(
    expected: Path,
    found: Path,
    *,
    normalise: tuple[Normalise, Normalise] = (str, str),
    left_out: re.Pattern[str] = LEFT_OUT,
) -> str:
    """Where two directories differ first, as ``file: key: value against value``, or ``""``.

    Metrics come first, then rollouts, then all other files by name. Text is compared by lines,
    JSON by fields, tensors by bits.

    Args:
        expected: the base's directory.
        found: the other one.
        normalise: for either, replaces what may differ in any text, such as its own path.
        left_out: names of files and fields that are not compared.
    """
    names = [_files_of(root, left_out) for root in (expected, found)]
    missing = sorted(names[0] ^ names[1])
    for name in sorted(names[0] & names[1], key=lambda name: (name not in _FIRST, name)):
        contents = [
            _leaves(root / name, change, left_out)
            for root, change in zip((expected, found), normalise, strict=True)
        ]
        if difference := _difference(*contents):
            return f"{name}: {difference}"
    if missing:
        return f"{missing[0]}: only in {'the base' if missing[0] in names[0] else 'this tree'}"
    return ""


def _files_of(root: Path, left_out: re.Pattern[str]) -> set[str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in files if not left_out.fullmatch(path.name)}


def _leaves(path: Path, normalise: Normalise, left_out: re.Pattern[str]) -> dict[str, Any]:
    """Values in a file by their place."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            metadata = {f"metadata.{k}": normalise(v) for k, v in (file.metadata() or {}).items()}
            return metadata | {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if path.suffix in (".pt", ".pth", ".bin"):
        return dict(_walk(torch.load(path, weights_only=False), left_out))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = normalise(data.decode())
    if path.suffix == ".json":
        return dict(_walk(json.loads(text), left_out))
    lines = text.splitlines()
    if ".jsonl" not in path.name:
        return {f"line {number}": line for number, line in enumerate(lines, 1)}
    return {
        f"line {number}: {place}": value
        for number, line in enumerate(lines, 1)
        for place, value in _walk(json.loads(line), left_out)
    }


def _walk(value: Any, left_out: re.Pattern[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts and lists by their place."""
    if isinstance(value, dict) and value:
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)) and value:
        pairs = enumerate(value)
    else:
        # The digits of an array would be cut short.
        yield place, torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return
    for key, each in pairs:
        if not left_out.fullmatch(str(key)):
            yield from _walk(each, left_out, f"{place}.{key}".lstrip("."))


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    for place in expected | found:
        if place not in expected and place.partition(".")[0] in ("config", "addons"):
            continue  # an option that the base does not have, or the add-on that has it
        if place not in found and place in _GONE and expected[place] == _GONE[place]:
            continue
        if place not in found and expected.get(_COPIES.get(place, ""), {}) == expected[place]:
            continue
        if place not in expected and re.search(r": prompts$|^parts\.watch\.", place):
            continue  # how many an iteration of step 3 has, and what warnings remember of it
        if place == "addons" and not expected[place]:
            continue  # no option of the base was an add-on's
        if place not in expected or place not in found:
            return f"{place}: only in {'the base' if place in expected else 'this tree'}"
        one, other = expected[place], found[place]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            difference = _tensor_difference(one, other)
        else:
            # Unlike ==, digits tell 1 from 1.0 and True, and NaN is NaN.
            difference = "" if repr(one) == repr(other) else f"{one!r} against {other!r}"
        if difference:
            return f"{place}: {difference}"
    return ""


def _tensor_difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    kinds = [f"{each.dtype} {tuple(each.shape)}" for each in (expected, found)]
    if kinds[0] != kinds[1]:
        return " against ".join(kinds)
    one, other = (each.reshape(-1).contiguous().view(torch.uint8) for each in (expected, found))
    if torch.equal(one, other):
        return ""
    unlike = (one != other).view(expected.numel(), -1).any(1)
    first = int(unlike.nonzero()[0])
    values = [each.reshape(-1)[first].item() for each in (expected, found)]
    return (
        f"{int(unlike.sum())} of {expected.numel()} numbers, number {first} "
        f"{values[0]!r} against {values[1]!r}"
    )
