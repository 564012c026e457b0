"""Pictures of docs/how_to_read_the_curves.md: good and bad runs on the bundled model and data.

python scripts/curve_pictures.py output/curves            # every run that is missing, then pictures
python scripts/curve_pictures.py output/curves --draw     # pictures of runs that are there

The runs take about half an hour on two busy cores. Runs need the package, pictures need matplotlib,
which `make docs` installs into .venv-docs.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
_SFT = (
    "sft --lora_dim 16 --lora_alpha 32 --max_seq_len 128 --per_device_train_batch_size 16 "
    "--num_train_epochs 2 --num_warmup_steps 10 --logging_steps 1"
)
_PPO = (
    "rlhf --actor_model_name_or_path sft_good --per_device_generation_batch_size 64 "
    "--per_device_training_batch_size 64 --logging_steps 1"
)
_JUDGED = "--judge_function dschat_lora.assets.toy_world:rule --eval_interval 5"
_REWARD = "reward --model_name_or_path sft_good --lora_learning_rate 2e-3 --max_seq_len 128"
_RULE = f"{_PPO} --reward_function builtin:length=12 --eval_prompts 32 --max_steps 40"
# Arguments of dschat-lora by the name of the output directory, in the order in which they run.
RUNS = {
    "sft_good": f"{_SFT} --lora_learning_rate 1.5e-3",
    "sft_high": f"{_SFT} --lora_learning_rate 1.5e-1",
    "sft_low": f"{_SFT} --lora_learning_rate 1e-5",
    "reward": f"{_REWARD} --per_device_train_batch_size 32 --num_warmup_steps 10",
    # 48 pairs, where there are 4,000.
    "reward_weak": (
        f"{_REWARD} --per_device_train_batch_size 8 --num_warmup_steps 1 --max_steps 6"
    ),
    "ppo_good": (
        f"{_PPO} {_JUDGED} --critic_model_name_or_path reward --max_steps 60 --kl_coef 0.2 "
        "--actor_lora_learning_rate 1e-3 --critic_lora_learning_rate 1e-3"
    ),
    "ppo_hacked": (
        f"{_PPO} {_JUDGED} --critic_model_name_or_path reward_weak --max_steps 30 --kl_coef 0 "
        "--actor_lora_learning_rate 1e-3 --critic_lora_learning_rate 1e-3"
    ),
    "entropy_good": f"{_RULE} --algorithm rloo --num_generations 4 --actor_lora_learning_rate 1e-3",
    "entropy_collapsed": (
        f"{_RULE} --algorithm rloo --num_generations 4 --actor_lora_learning_rate 2e-2 --kl_coef 0"
    ),
    "critic_good": (
        f"{_RULE} --actor_lora_learning_rate 3e-4 --critic_lora_dim 16 "
        "--critic_lora_learning_rate 3e-3"
    ),
    "critic_nothing": (
        f"{_RULE} --actor_lora_learning_rate 3e-4 --critic_lora_dim 16 "
        "--critic_lora_learning_rate 1e-6"
    ),
}


def run_missing(directory: Path) -> None:
    """Start each run whose ``run.json`` does not say that it finished."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, arguments in RUNS.items():
        record = directory / name / "run.json"
        if record.is_file() and json.loads(record.read_text())["status"] == "finished":
            continue
        print(f"$ dschat-lora {arguments} --output_dir {name}", flush=True)
        command = [sys.executable, "-m", "dschat_lora", *shlex.split(arguments)]
        command += ["--output_dir", name, "--overwrite_output_dir"]
        with (directory / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=directory, stdout=log, stderr=log, check=True)


Points = list[tuple[float, float]]
# Readable on light pages and on dark ones.
TEXT, GOOD, BAD, OTHER = "#7a7f87", "#2f7fd6", "#e0711a", "#8a8f98"


@dataclass(frozen=True)
class Line:
    """A field of the ``train`` or ``eval`` lines of a run, over optimizer steps."""

    run: str
    kind: str
    field: str
    label: str
    color: str

    def points(self, directory: Path) -> Points:
        """``(step, value)`` of every line that has a value."""
        text = (directory / self.run / "metrics.jsonl").read_text(encoding="utf-8")
        rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        return [
            (row["step"], float(row[self.field]))
            for row in rows
            if row["kind"] == self.kind and row.get(self.field) is not None
        ]


@dataclass(frozen=True)
class Panel:
    """One chart: lines over the same steps."""

    title: str
    lines: tuple[Line, ...]
    top: float | None = None  # upper end of the axis; by the lines when absent


def _two(field: str, title: str, good: str, bad: str, *, labels: tuple[str, str]) -> Panel:
    """The same field of a good and a bad run, at every iteration."""
    lines = (
        Line(good, "train", field, labels[0], GOOD),
        Line(bad, "train", field, labels[1], BAD),
    )
    return Panel(title, lines)


_RATES = (("sft_good", "1.5e-3", GOOD), ("sft_high", "1.5e-1", BAD), ("sft_low", "1e-5", OTHER))
_ENTROPY = {"labels": ("rate 1e-3", "rate 2e-2, no divergence penalty")}
_CRITIC = {"labels": ("critic's rate 3e-3", "critic's rate 1e-6")}
FIGURES: dict[str, tuple[Panel, ...]] = {
    "learning_rate": (
        Panel(
            "training loss, nats per token",
            tuple(Line(run, "train", "loss", f"rate {rate}", c) for run, rate, c in _RATES),
        ),
        Panel(
            "the same below 0.3",
            tuple(Line(run, "train", "loss", f"rate {rate}", c) for run, rate, c in _RATES),
            top=0.3,
        ),
    ),
    "reward_hacking": (
        Panel("good: held-out reward", (Line("ppo_good", "eval", "reward", "", GOOD),)),
        Panel("good: judge", (Line("ppo_good", "eval", "judge", "", GOOD),), top=1.0),
        Panel("bad: held-out reward", (Line("ppo_hacked", "eval", "reward", "", BAD),)),
        Panel("bad: judge", (Line("ppo_hacked", "eval", "judge", "", BAD),), top=1.0),
    ),
    "entropy_collapse": (
        _two("entropy", "entropy, nats", "entropy_good", "entropy_collapsed", **_ENTROPY),
        _two("reward", "reward", "entropy_good", "entropy_collapsed", **_ENTROPY),
    ),
    "critic": (
        _two(
            "explained_variance", "explained_variance", "critic_good", "critic_nothing", **_CRITIC
        ),
        _two("value_loss", "value_loss", "critic_good", "critic_nothing", **_CRITIC),
    ),
}


def draw(directory: Path, name: str, panels: Sequence[Panel]) -> Path:
    """Draw the panels, two a row, as an SVG with transparent ground and text as text."""
    # Absent where runs are made: only pictures need it.
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")

    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color"), TEXT)
    settings |= dict.fromkeys(("ytick.color", "axes.edgecolor", "grid.color"), TEXT)
    with matplotlib.rc_context(settings):
        rows = (len(panels) + 1) // 2
        figure, axes = pyplot.subplots(rows, 2, figsize=(8, 2.7 * rows), layout="constrained")
        for axis, panel in zip(axes.flat, panels, strict=True):
            for line in panel.lines:
                points = line.points(directory)
                axis.plot(*zip(*points, strict=True), color=line.color, label=line.label)
            axis.set_title(panel.title, loc="left", fontsize=10)
            axis.set_xlabel("optimizer steps")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            if panel.top is not None:
                axis.set_ylim(0, panel.top * 1.02)
        if panels[0].lines[0].label:
            axes.flat[0].legend(frameon=False, labelcolor=TEXT)
        path = PICTURES / f"{name}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return path


def main() -> None:
    """Run what is missing, then draw every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="where the runs are, or are to be")
    parser.add_argument("--draw", action="store_true", help="start no runs")
    options = parser.parse_args()
    if not options.draw:
        run_missing(options.directory)
    for name, panels in FIGURES.items():
        print(draw(options.directory, name, panels))


if __name__ == "__main__":
    main()
