"""Files that come with the package: a tiny model, data, recipes, and DeepSpeed JSON files."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1] / "assets"

BUNDLED_MODEL = _ROOT / "model"
BUNDLED_DATA = {split: _ROOT / "data" / f"{split}.jsonl" for split in ("train", "eval", "test")}
OTHER_NAMES = _ROOT / "other_names.txt"  # options of other trainers; see config.other_names
CONFIGS = Path(__file__).parents[1] / "configs"  # of the checkout, or as installed


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe of the package."""

    name: str  # such as opt-1.3b_opt-350m or glue/roberta-base_cola
    path: Path
    kind: str  # the verb that takes it: pipeline, or the name of its folder

    @property
    def summary(self) -> str:
        """The first sentence of the comment that the file begins with."""
        lines = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#") or line == "#":
                break
            lines.append(line.removeprefix("#").strip())
        return re.split(r"[.:](?:\s|$)", " ".join(lines), maxsplit=1)[0]

    @property
    def command(self) -> str:
        """A command line that runs it."""
        verb = self.kind if self.kind == "pipeline" else f"{self.kind} --config"
        return f"dschat-lora {verb} {self.name}"


def recipes() -> list[ShippedRecipe]:
    """All recipes of the package, those of pipelines first."""
    home = CONFIGS / "recipes"
    found = [ShippedRecipe(path.stem, path, "pipeline") for path in sorted(home.glob("*.yaml"))]
    for folder in sorted((path for path in home.glob("*") if path.is_dir()), reverse=True):
        kind = folder.name
        paths = sorted(folder.glob("*.yaml"))
        found += [ShippedRecipe(f"{kind}/{path.stem}", path, kind) for path in paths]
    return found


def find_recipe(given: str, *, label: str) -> Path:
    """The YAML file in a path or, where there is none, the recipe of that name.

    A name may lack its folder, and be the beginning of one name alone: ``opt-1.3b``.

    Raises:
        ValueError: if there is neither; ``label`` begins the message.
    """
    known = {recipe.name: recipe.path for recipe in recipes()}
    known |= {path.stem: path for path in known.values()}
    return _find(
        given, known, label=label, listing="dschat-lora recipes lists those of the package"
    )


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
        raise ValueError(f"{label} is the beginning of several names: {', '.join(begun)}")
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]}?" if close else listing
    raise ValueError(
        f"{label} cannot be read: it is no file, and no name of the package's; {meant}"
    )
