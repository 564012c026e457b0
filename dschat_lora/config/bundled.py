"""Paths of the bundled tiny model and data set, and of the table of types of models."""

from pathlib import Path

_ROOT = Path(__file__).parents[1] / "assets"

BUNDLED_MODEL = _ROOT / "model"
BUNDLED_DATA = {split: _ROOT / "data" / f"{split}.jsonl" for split in ("train", "eval", "test")}
FAMILIES = _ROOT / "families.json"  # what types of models can do; see models.families
