"""Files that come with the package: a tiny model, data, recipes, and DeepSpeed JSON files."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[1] / "assets"

BUNDLED_MODEL = _ROOT / "model"
BUNDLED_DATA = {split: _ROOT / "data" / f"{split}.jsonl" for split in ("train", "eval", "test")}
OTHER_NAMES = _ROOT / "other_names.txt"  # options of other trainers; see config.other_names
CONFIGS = Path(__file__).parents[1] / "configs"  # of the checkout, or as installed


def recipes() -> dict[str, Path]:
    """The YAML files of the package's recipes by name: ``bundled``, and those of folders last."""
    home = CONFIGS / "recipes"
    folders = sorted((path for path in home.glob("*") if path.is_dir()), reverse=True)
    files = [path for each in (home, *folders) for path in sorted(each.glob("*.yaml"))]
    return {path.relative_to(home).with_suffix("").as_posix(): path for path in files}


def find_recipe(given: str, *, label: str) -> Path:
    """The YAML file in a path or, where there is none, the recipe of that name.

    A name may lack its folder, and be the beginning of one name alone: ``opt-1.3b``.

    Raises:
        ValueError: if there is neither; ``label`` begins the message.
    """
    known = recipes()
    known |= {path.stem: path for path in known.values()}
    return _find(given, known, label=label, listing="dschat-lora recipes lists the bundled ones")


def find_deepspeed_json(given: str, *, option: str = "deepspeed_config") -> Path:
    """The JSON file in a path or, where there is none, the package's of that name: ``zero2``.

    Raises:
        ValueError: if there is neither.
    """
    known = {path.stem: path for path in sorted((CONFIGS / "ds").glob("*.json"))}
    listing = f"the package has {', '.join(known)}"
    return _find(given, known, label=f"--{option} {given}", listing=listing)


def _find(given: str, known: Mapping[str, Path], *, label: str, listing: str) -> Path:
    path = Path(given).expanduser()
    if path.exists():
        return path
    name = re.sub(r"^configs/(recipes|ds)/|\.(yaml|json)$", "", given)
    begun = sorted(each for each in known if name and each.startswith(name))
    if name in known or len(begun) == 1:
        return known[name if name in known else begun[0]]
    if begun:
        raise ValueError(f"{label} is ambiguous: {', '.join(begun)}")
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]}?" if close else listing
    raise ValueError(f"{label} cannot be read: it is neither a file nor a bundled name; {meant}")
