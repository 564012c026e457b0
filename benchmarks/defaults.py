"""Do the defaults do? Rates by rule beside grids, algorithms on unseen rules, the demo by seeds.

Three studies on models of a million parameters and fewer:

* ``auto``: --learning_rate auto beside a grid of multiples of its rate, for OPT models of eight
  widths in each stage. Each base is trained from scratch on the bundled world for 600 steps; later
  stages begin with an adapter of step 1.
* ``rules``: PPO, RLOO and GRPO with default options on five rules, 100 steps, three seeds.
* ``demo``: the stages of ``dschat-lora demo`` by five seeds, judged by the bundled rule.

    python -m benchmarks.defaults run benchmarks/results/defaults.json   # what is missing; 3 hours
    python -m benchmarks.defaults page benchmarks/results/defaults.json docs/defaults_measured.md

Runs go one after another, each in a process of its own with one thread; a file of results that is
there is gone on with.
"""

import argparse
import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.common.grid import read_cells, run_cells
from benchmarks.common.report import with_tables

WIDTHS = (32, 48, 64, 80, 96, 128, 160, 192)
STAGES = ("sft", "reward", "rlhf", "dpo")
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
WITHIN = 0.05  # of the grid's best
ALGORITHMS = ("ppo", "rloo", "grpo")
SEEDS = (1, 2, 3)
DEMO_SEEDS = (1234, 1, 2, 3, 4)
BASE_STEPS = 600
MARKS = ("correct", "polite", "ends", "score")
MODELS = Path(os.environ.get("BENCH_MODELS", "output/defaults"))  # bases and adapters, kept
QUIET = {
    "save_interval": 0,
    "sample_generations": 0,
    "logging_steps": 1000,
    "dtype": "fp32",
    "quiet": True,
}
SFT = QUIET | {"packing": False, "per_device_train_batch_size": 16, "num_warmup_steps": 6}
GRPO = QUIET | {
    "algorithm": "grpo",
    "num_generations": 8,
    "kl_coef": 0.0,
    "eval_prompts": 100,
    "max_answer_seq_len": 32,
    "per_device_generation_batch_size": 64,
    "per_device_training_batch_size": 64,
}


@dataclass(frozen=True)
class Cell:
    """A run: a stage at a multiple of its rate by rule, an algorithm on a rule, or the demo."""

    study: str
    case: str = ""  # the stage, or the rule
    algorithm: str = ""
    width: int = 0
    multiple: float = 0.0
    seed: int = 1


def starts_with_t(responses: Sequence[str]) -> list[float]:
    """Whether each begins with T."""
    return [float(text.strip()[:1] == "T") for text in responses]


def two_sentences(responses: Sequence[str]) -> list[float]:
    """Whether each has two sentences."""
    return [float(sum(map(text.count, ".!?")) == 2) for text in responses]


def no_comma(responses: Sequence[str]) -> list[float]:
    """Whether each says something without a comma."""
    return [float(bool(text.strip()) and "," not in text) for text in responses]


def first_word_is_short(responses: Sequence[str]) -> list[float]:
    """Whether the first word of each has at most three letters."""
    words = [text.split() for text in responses]
    return [float(bool(each) and len(each[0].strip(",.!")) <= 3) for each in words]


RULES = {
    "starts with T": "benchmarks.defaults:starts_with_t",
    "about 18 tokens": "builtin:length=18",
    "two sentences": "benchmarks.defaults:two_sentences",
    "no comma": "benchmarks.defaults:no_comma",
    "first word is short": "benchmarks.defaults:first_word_is_short",
}


def cells() -> list[Cell]:
    """All runs."""
    return [
        *(Cell("demo", seed=seed) for seed in DEMO_SEEDS),
        *(
            Cell("auto", stage, width=width, multiple=multiple)
            for width, stage, multiple in product(WIDTHS, STAGES, MULTIPLES)
        ),
        *(
            Cell("rules", rule, algorithm, seed=seed)
            for seed, rule, algorithm in product(SEEDS, RULES, ALGORITHMS)
        ),
    ]


def base_of(width: int) -> Path:
    """A model of the bundled world, trained where it is not there yet."""
    home = MODELS / f"base-{width}"
    if not (home / "config.json").exists():
        sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
        from transformers import AutoTokenizer

        from dschat_lora.config.bundled import BUNDLED_MODEL

        tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
        torch.manual_seed(0)
        scripts = importlib.import_module("bundled_base")
        model = scripts.new_model(tokenizer, width)
        scripts.train(model, tokenizer, steps=BASE_STEPS, rng=Random(f"base {width}"))
        tokenizer.save_pretrained(home)
        model.eval().save_pretrained(home)
    return home


def tuned_of(width: int) -> Path:
    """An adapter of step 1 on that model, from which the later stages begin."""
    import dschat_lora as dl

    home = MODELS / f"sft-{width}"
    if not (home / "adapter").exists():
        dl.sft(
            base_of(width), lora_dim=16, learning_rate="auto", max_steps=60, output_dir=home, **SFT
        )
    return home


def train_auto(cell: Cell, directory: Path) -> dict[str, float]:
    """The last held-out loss of a stage, or the reward of GRPO."""
    import dschat_lora as dl
    from dschat_lora.config.groups import LoraConfig
    from dschat_lora.lora.rates import ruled_rates

    rates = ruled_rates("opt", cell.width, stage=cell.case, lora=LoraConfig(lora_dim=16))
    by_rule = cell.multiple == 1
    rate = {} if by_rule else {"lora_learning_rate": rates.adapter * cell.multiple}
    rate["learning_rate"] = "auto" if by_rule else rates.base
    if cell.case == "rlhf":
        run = dl.rlhf(
            tuned_of(cell.width),
            rewards=RULES["about 18 tokens"],
            judge_function=RULES["about 18 tokens"],
            max_steps=40,
            seed=cell.seed,
            output_dir=directory / "run",
            **GRPO,
            **{f"actor_{name}": value for name, value in rate.items()},
        )
        return {"judge": run.summary["last"]["judge"], "before": run.summary["first"]["judge"]}
    is_sft = cell.case == "sft"
    run = getattr(dl, cell.case)(
        base_of(cell.width) if is_sft else tuned_of(cell.width),
        max_steps=60,
        seed=cell.seed,
        output_dir=directory / "run",
        **({"lora_dim": 16} | SFT if is_sft else SFT),
        **rate,
    )
    return {"loss": run.summary["last"]["loss"], "before": run.summary["first"]["loss"]}


def train_rule(cell: Cell, directory: Path) -> dict[str, float]:
    """The score of sampled answers to held-out prompts, before and after."""
    import dschat_lora as dl

    groups = {} if cell.algorithm == "ppo" else {"num_generations": 4}
    run = dl.rlhf(
        algorithm=cell.algorithm,
        rewards=RULES[cell.case],
        judge_function=RULES[cell.case],
        actor_lora_dim=16,
        max_steps=100,
        eval_prompts=200,
        max_answer_seq_len=32,
        seed=cell.seed,
        output_dir=directory / "run",
        **groups,
        **QUIET,
    )
    first, last = run.summary["first"], run.summary["last"]
    return {"before": first["judge"], "judge": last["judge"], "kl": last["kl"]}


def train_demo(cell: Cell, directory: Path) -> dict[str, float]:
    """Shares of test answers, greedy and sampled, after SFT and after PPO."""
    import dschat_lora as dl
    from dschat_lora.addons.demo.demo import stage_options
    from dschat_lora.addons.demo.judge import evaluate_by_rule

    homes = {name: directory / name for name in ("sft", "reward", "rlhf")}
    for name, options in stage_options(homes).items():
        getattr(dl, name)(seed=cell.seed, quiet=True, **options)
    judged = evaluate_by_rule(homes["sft"], homes["rlhf"] / "actor")
    return {
        f"{model} {way} {mark}": getattr(judged[model], way)[mark].mean
        for model, way, mark in product(("SFT", "PPO"), ("greedy", "sampled"), MARKS)
    }


def train(cell: Cell, directory: Path) -> dict[str, float]:
    """The figures of a run."""
    return {"auto": train_auto, "rules": train_rule, "demo": train_demo}[cell.study](
        cell, directory
    )


def spread(values: Sequence[float]) -> str:
    """Mean and its standard error."""
    return f"{mean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"


def signed(value: Mapping[str, float] | None) -> float:
    """What is to be small: the loss, or what a reward lacks to 1; infinity of a failed run."""
    if value is None:
        return math.inf
    return value["loss"] if "loss" in value else 1 - value["judge"]


def auto_table(results: Mapping[Cell, Any]) -> str:
    """For each stage and width the best of the grid, and how far ``auto`` is from it."""
    lines = ["| stage | width | best of the grid | at x its rate | `auto` | from the best |"]
    lines.append("|---|---|---|---|---|---|")
    for stage in STAGES:
        hits = 0
        for width in WIDTHS:
            own = {
                cell.multiple: signed(value)
                for cell, value in results.items()
                if (cell.study, cell.case, cell.width) == ("auto", stage, width)
            }
            best = min(own, key=lambda multiple: own[multiple])
            # Of rewards near 1 what is missing is small: the share is of the reward.
            low, here = own[best], own[1.0]
            away = (here - low) / (1 - low) if stage == "rlhf" else here / low - 1
            hits += away <= WITHIN
            shown = [1 - each if stage == "rlhf" else each for each in (low, here)]
            lines.append(
                f"| {stage} | {width} | {shown[0]:.4f} | {best:g} | {shown[1]:.4f} | {away:.1%} |"
            )
        lines.append(f"| {stage}: within {WITHIN:.0%} | | | | | **{hits} of {len(WIDTHS)}** |")
    return "\n".join([*lines, ""])


def rules_table(results: Mapping[Cell, Any]) -> str:
    """For each rule the score before, and the share of the possible gain of each algorithm."""
    lines = ["| rule | before | PPO | RLOO | GRPO |", "|---|---|---|---|---|"]
    for rule in RULES:
        row, before = list[str](), list[float]()
        for algorithm in ALGORITHMS:
            own = [
                value
                for cell, value in results.items()
                if (cell.study, cell.case, cell.algorithm) == ("rules", rule, algorithm)
            ]
            before += [each["before"] for each in own]
            gains = [(v["judge"] - v["before"]) / (1 - v["before"]) for v in own]
            row.append(spread(gains))
        lines.append(" | ".join([f"| {rule}", f"{mean(before):.3f}", *row]) + " |")
    return "\n".join([*lines, ""])


def demo_table(results: Mapping[Cell, Any]) -> str:
    """Means over seeds after SFT and after PPO, and of their difference."""
    lines = ["| answers | | after SFT | after PPO | difference |", "|---|---|---|---|---|"]
    own = [value for cell, value in results.items() if cell.study == "demo"]
    words = {"correct": "right", "polite": "polite", "ends": "end", "score": "all three"}
    for way, mark in product(("greedy", "sampled"), MARKS):
        sft, ppo = ([each[f"{model} {way} {mark}"] for each in own] for model in ("SFT", "PPO"))
        differences = [late - early for early, late in zip(sft, ppo, strict=True)]
        row = [f"| {way}", words[mark], *map(spread, (sft, ppo, differences))]
        lines.append(" | ".join(row) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the studies, or put their tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?", default=Path("docs/defaults_measured.md"))
    parser.add_argument("--study", choices=["auto", "rules", "demo"], help="by default all")
    given = parser.parse_args()
    if given.what == "run":
        chosen = [cell for cell in cells() if given.study in (None, cell.study)]
        return run_cells(chosen, train, given.results)
    results = read_cells(Cell, given.results)
    tables = {"auto": auto_table, "rules": rules_table, "demo": demo_table}
    text = given.page.read_text(encoding="utf-8")
    made = {name: table(results) for name, table in tables.items()}
    given.page.write_text(with_tables(text, made), encoding="utf-8")


if __name__ == "__main__":
    main()
