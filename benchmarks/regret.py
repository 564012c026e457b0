"""The claims of "LoRA Without Regret" on the bundled model: which hold there, and which do not.

The claims are those of Thinking Machines (2025, thinkingmachines.ai/blog/lora), whose models have
a thousand to a hundred thousand times as many parameters. A grid of short runs varies the rate, the
rank (0 trains every weight), the layers that are adapted, the batch and the seed, on three tasks:

* ``style``: supervised fine-tuning on the bundled rows, few bits of which are new to the model;
* ``codes``: random numbers of names, learned by heart, so that each row is new;
* ``grpo``: reinforcement learning by the bundled world's rule, from the base model.

    python -m benchmarks.regret run benchmarks/results/regret.json   # what is missing; 90 minutes
    python -m benchmarks.regret page benchmarks/results/regret.json docs/lora_regret.md

Runs go one after another, each in a process of its own with one thread; a file of results that is
there is gone on with. The pictures of the page need matplotlib, as ``make docs`` installs it.
"""

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from benchmarks.common.grid import read_cells, run_cells
from benchmarks.common.report import with_tables

SEEDS = (1, 2, 3)
FULL = 0  # the "rank" of a run that trains every weight
RANKS = (1, 4, 16, 64, FULL)
ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
MLP = ("fc1", "fc2")
LAYERS: Mapping[str, tuple[str, ...]] = {
    "all": (*ATTENTION, *MLP),
    "attention": ATTENTION,
    "mlp": MLP,
}
ADAPTER_RATES = (5e-4, 1.5e-3, 5e-3, 1.5e-2, 5e-2)
FULL_RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3, 5e-3)
VARIANTS = ("lora", "rslora", "dora", "pissa", "lora-fa")
VISITS = 20  # of each row of codes
DIGITS = 4


@dataclass(frozen=True)
class Cell:
    """A run of the grid.

    ``batch`` counts rows of a step or, of grpo, responses; ``rows`` is the number of codes.
    """

    task: str
    rank: int
    rate: float
    seed: int
    layers: str = "all"
    batch: int = 16
    rows: int = 0
    variant: str = ""  # of PEFT, in a plain loop


def grid() -> list[Cell]:
    """All cells."""

    def cells(
        task: str,
        ranks: Sequence[int],
        seeds: Sequence[int],
        rates: int = len(FULL_RATES),
        **more: Any,
    ) -> list[Cell]:
        return [
            Cell(task, rank, rate, seed, **more)
            for rank, seed in product(ranks, seeds)
            for rate in (ADAPTER_RATES if rank else FULL_RATES)[:rates]
        ]

    codes: dict[str, Any] = {"batch": 32, "rows": 256}
    return [
        *cells("style", RANKS, SEEDS),
        *cells("style", (4,), SEEDS, layers="attention"),
        *cells("style", (4,), SEEDS, layers="mlp"),
        *cells("codes", (16, FULL), SEEDS, **codes),
        *cells("codes", (16, FULL), SEEDS, batch=128, rows=256),
        *cells("grpo", (1, 16, FULL), SEEDS, batch=64),
        *(
            cell
            for variant in VARIANTS
            for cell in cells("codes", (16,), SEEDS, rates=4, variant=variant, **codes)
        ),
        # at the rate that is best for 256 of them, whatever trains
        *(Cell("codes", rank, 1.5e-3, SEEDS[0], batch=32, rows=1024) for rank in RANKS),
    ]


def write_codes(path: Path, rows: int) -> None:
    """Rows of SFT, each three names and a number of ``DIGITS`` digits, the same in every run."""
    from dschat_lora.assets.toy_world import NAMES

    drawn = random.Random(0)
    people = drawn.sample(list(product(NAMES, repeat=3)), rows)
    lines = [
        {"prompt": f"{' '.join(each)}:", "completion": f" {drawn.randrange(10**DIGITS):0{DIGITS}}"}
        for each in people
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def train(cell: Cell, directory: Path) -> float:
    """Held-out loss of a run, of codes on the rows that it learned, or reward of GRPO."""
    if cell.variant:
        return train_variant(cell, directory)
    import dschat_lora as dl

    common = {
        "seed": cell.seed,
        "save_interval": 0,
        "sample_generations": 0,
        "logging_steps": 1000,
        "eval_interval": 100_000,
        "dtype": "fp32",
        "output_dir": str(directory / "run"),
        "lr_scheduler_type": "constant_with_warmup",
    }
    adapter = {"lora_dim": cell.rank, "target_modules": LAYERS[cell.layers]} if cell.rank else {}
    rate = {"lora_learning_rate" if cell.rank else "learning_rate": cell.rate}
    if cell.task == "grpo":
        run = dl.rlhf(
            algorithm="grpo",
            num_generations=8,
            kl_coef=0.0,
            rewards="dschat_lora.assets.toy_world:rule",
            judge_function="dschat_lora.assets.toy_world:rule",
            eval_prompts=100,
            max_answer_seq_len=32,
            max_steps=24,
            per_device_generation_batch_size=cell.batch,
            per_device_training_batch_size=cell.batch,
            **{
                f"actor_{name}": value for name, value in ({"lora_dim": 0} | adapter | rate).items()
            },
            **common,
        )
        return float(run.summary["last"]["judge"])
    options: dict[str, Any] = {"max_steps": 60}
    if cell.task == "codes":
        data = directory / "codes.jsonl"
        write_codes(data, cell.rows)
        options = {"data_path": str(data), "eval_data_path": str(data)}
        options |= {"max_steps": VISITS * cell.rows // cell.batch}
    run = dl.sft(
        per_device_train_batch_size=cell.batch,
        packing=False,
        num_warmup_steps=min(6, options["max_steps"] // 10),
        **({"lora_dim": 0} | adapter | rate),
        **options,
        **common,
    )
    return float(run.summary["last"]["loss"])


def train_variant(cell: Cell, directory: Path) -> float:
    """Loss of a variant of PEFT's on the codes that it learned, in a plain loop."""
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_lorafa_optimizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dschat_lora.config.bundled import BUNDLED_MODEL

    torch.manual_seed(cell.seed)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    adapter = LoraConfig(
        r=cell.rank,
        lora_alpha=32,
        target_modules=list(LAYERS[cell.layers]),
        use_dora=cell.variant == "dora",
        use_rslora=cell.variant == "rslora",
        init_lora_weights="pissa" if cell.variant == "pissa" else True,
    )
    model = get_peft_model(base, adapter)
    if cell.variant == "lora-fa":
        optimizer = create_lorafa_optimizer(model, r=cell.rank, lora_alpha=32, lr=cell.rate)
    else:
        own = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=cell.rate, betas=(0.9, 0.95), weight_decay=0.0)
    write_codes(directory / "codes.jsonl", cell.rows)
    rows = [json.loads(line) for line in (directory / "codes.jsonl").open(encoding="utf-8")]
    samples = []
    for row in rows:
        asked, said = (tokenizer(row[part])["input_ids"] for part in ("prompt", "completion"))
        said = [*said, tokenizer.eos_token_id]
        samples.append((asked + said, [-100] * len(asked) + said))

    def loss_of(batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        longest = max(len(ids) for ids, _ in batch)
        pad = [longest - len(ids) for ids, _ in batch]
        ids, labels, mask = (
            torch.tensor(values)
            for values in (
                [ids + [0] * n for (ids, _), n in zip(batch, pad, strict=True)],
                [labels + [-100] * n for (_, labels), n in zip(batch, pad, strict=True)],
                [[1] * len(ids) + [0] * n for (ids, _), n in zip(batch, pad, strict=True)],
            )
        )
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        return found

    order, steps = random.Random(cell.seed), VISITS * cell.rows // cell.batch
    warmup, queue = min(6, steps // 10), list[tuple[list[int], list[int]]]()
    for step in range(steps):
        if len(queue) < cell.batch:
            queue = order.sample(samples, len(samples))
        batch, queue = queue[: cell.batch], queue[cell.batch :]
        for group in optimizer.param_groups:
            group["lr"] = cell.rate * min(1.0, (step + 1) / max(1, warmup))
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(loss_of(samples))


class Best(NamedTuple):
    """The best rate of a group of cells, its mean over seeds and the standard error of that."""

    rate: float
    value: float
    error: float

    def __str__(self) -> str:
        error = f" ± {self.error:.3f}" if self.error else ""  # of one seed there is none
        return f"{self.value:.3f}{error} at {self.rate:g}"

    def differs(self, other: "Best") -> bool:
        """Whether two means are more than two standard errors of their difference apart."""
        return abs(self.value - other.value) > 2 * math.hypot(self.error, other.error)


class Results:
    """What the runs came to."""

    def __init__(self, path: Path) -> None:
        """Read a file of results."""
        found = read_cells(Cell, path).items()
        self.values = {cell: math.nan if value is None else value for cell, value in found}

    def curve(self, **fields: Any) -> dict[float, list[float]]:
        """Values by rate, of the cells that have these fields."""
        found: dict[float, list[float]] = {}
        for cell, value in self.values.items():
            if all(getattr(cell, name) == wanted for name, wanted in fields.items()):
                found.setdefault(cell.rate, []).append(value)
        return dict(sorted(found.items()))

    def best(self, task: str, rank: int, **fields: Any) -> Best:
        """The best rate; one at which a run failed is none."""
        fields = {"layers": "all", "variant": "", **fields}
        sign = -1 if task == "grpo" else 1
        curve = self.curve(task=task, rank=rank, **fields).items()
        means = {
            rate: sign * mean(values) for rate, values in curve if not any(map(math.isnan, values))
        }
        rate = min(means, key=lambda each: means[each])
        values = dict(curve)[rate]
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return Best(rate, mean(values), error)


def name_of(rank: int) -> str:
    """Of a rank in tables."""
    return f"rank {rank}" if rank else "all weights"


class Claim(NamedTuple):
    """A sentence of the paper, what was found, and whether it holds here."""

    words: str
    found: str
    holds: bool


def claims(results: Results) -> list[Claim]:
    """Each claim with its figures; see the page for the rules by which one holds."""
    style = {rank: results.best("style", rank) for rank in RANKS}
    many = {rank: results.best("codes", rank, batch=32, rows=1024) for rank in RANKS}
    few = {
        (rank, batch): results.best("codes", rank, batch=batch, rows=256)
        for rank in (16, FULL)
        for batch in (32, 128)
    }
    parts = {name: results.best("style", 4, layers=name) for name in LAYERS}
    grpo = {rank: results.best("grpo", rank) for rank in (1, 16, FULL)}
    adapted = [rank for rank in RANKS if rank]
    rates = [style[rank].rate for rank in adapted]
    gaps = {batch: few[16, batch].value - few[FULL, batch].value for batch in (32, 128)}
    noise = math.hypot(*(few[rank, batch].error for rank in (16, FULL) for batch in (32, 128)))
    orders = [many[rank].value for rank in RANKS]
    ratio, rl_ratio = style[16].rate / style[FULL].rate, grpo[16].rate / grpo[FULL].rate
    joined = "; ".join

    def listed(found: Mapping[Any, Best], names: Mapping[Any, str]) -> str:
        return joined(f"{names[key]} {best}" for key, best in found.items())

    ranks = {rank: name_of(rank) for rank in RANKS}
    return [
        Claim(
            "On data of the size of post-training, adapters of enough rank lose nothing to all "
            "weights",
            f"style, held-out loss: {listed(style, ranks)}",
            not style[16].differs(style[FULL]) or style[16].value < style[FULL].value,
        ),
        Claim(
            "Where the data holds more than the adapter can, lower ranks learn more slowly",
            f"1,024 codes, loss: {listed(many, ranks)}",
            all(low > high for low, high in pairwise(orders)),
        ),
        Claim(
            "The best rate of adapters is about 10 times that of all weights (3 to 30 here)",
            f"style: {style[16].rate:g} against {style[FULL].rate:g}, {ratio:.3g} times",
            3 <= ratio <= 30,
        ),
        Claim(
            "The best rate hardly depends on the rank (one step of the grid)",
            joined(f"{name_of(rank)} {style[rank].rate:g}" for rank in adapted),
            max(rates) / min(rates) < 4,
        ),
        Claim(
            "Larger batches cost adapters more than all weights",
            "256 codes, loss of rank 16 above that of all weights: "
            + joined(f"batch {batch}: {gap:.3f}" for batch, gap in gaps.items()),
            gaps[128] - gaps[32] > 2 * noise,
        ),
        Claim(
            "Adapters of attention alone learn less than those of the MLP, and all layers bring "
            "no more than the MLP",
            f"style, rank 4: {listed(parts, {name: name for name in LAYERS})}",
            parts["attention"].value > parts["mlp"].value
            and parts["attention"].differs(parts["mlp"])
            and not parts["all"].differs(parts["mlp"]),
        ),
        Claim(
            "Reinforcement learning needs hardly any capacity: rank 1 does as well as all weights",
            f"grpo, reward: {listed(grpo, ranks)}",
            not grpo[1].differs(grpo[FULL]) or grpo[1].value > grpo[FULL].value,
        ),
        Claim(
            "... and there, too, the best rate of adapters is about 10 times that of all weights",
            f"{grpo[16].rate:g} against {grpo[FULL].rate:g}, {rl_ratio:.3g} times",
            3 <= rl_ratio <= 30,
        ),
    ]


def draw(results: Results, path: Path) -> None:
    """Curves over rates, one panel a task."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "regret", "svg.fonttype": "none"}
    from matplotlib import pyplot

    panels: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
        ("style", "held-out loss", [(name_of(r), {"rank": r, "layers": "all"}) for r in RANKS]),
        (
            "codes",
            "loss, 256 codes",
            [
                (f"{name_of(r)}, batch {b}", {"rank": r, "batch": b, "rows": 256, "variant": ""})
                for r in (16, FULL)
                for b in (32, 128)
            ],
        ),
        ("grpo", "reward, sampled", [(name_of(r), {"rank": r}) for r in (1, 16, FULL)]),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axis, (task, title, lines) in zip(axes, panels, strict=True):
        for label, fields in lines:
            curve = results.curve(task=task, **fields)
            rates = [rate for rate, values in curve.items() if not any(map(math.isnan, values))]
            means = [mean(curve[rate]) for rate in rates]
            axis.plot(rates, means, "o-" if fields["rank"] else "s--", label=label)
        axis.set(xscale="log", xlabel="learning rate", title=f"{task}: {title}")
        if task != "grpo":
            axis.set_ylim(*((0.1, 0.2) if task == "style" else (0, 2.5)))
        axis.minorticks_off()
        axis.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def tables(results: Results) -> dict[str, str]:
    """Those of docs/lora_regret.md, by the names of their places."""
    verdicts = [
        f"| {each.words} | {'held' if each.holds else '**not held**'} | {each.found} |"
        for each in claims(results)
    ]
    variants = [
        f"| {name} | {results.best('codes', 16, batch=32, rows=256, variant=name)} |"
        for name in VARIANTS
    ]
    return {
        "claims": "\n".join(["| claim | here | found |", "|---|---|---|", *verdicts, ""]),
        "variants": "\n".join(["| variant | loss |", "|---|---|", *variants, ""]),
    }


def main() -> None:
    """Run the grid, or put its tables into the page, and its picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?", default=Path("docs/lora_regret.md"))
    given = parser.parse_args()
    if given.what == "run":
        return run_cells(grid(), train, given.results)
    results = Results(given.results)
    draw(results, given.page.parent / "pictures" / "lora_regret.svg")
    text = given.page.read_text(encoding="utf-8")
    given.page.write_text(with_tables(text, tables(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
