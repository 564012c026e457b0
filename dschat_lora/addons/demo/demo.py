"""Demo: all stages on the bundled model and data, with a table of results."""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.report.html import render_report
from dschat_lora.addons.report.run_data import read_metrics, read_run
from dschat_lora.api.stages import train
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.groups import RunConfig
from dschat_lora.config.options import command_line
from dschat_lora.config.parser import Parser
from dschat_lora.config.staging import check_within, write_whole
from dschat_lora.report.directory import leftovers
from dschat_lora.report.terminal import fitted_command, log_once, table
from dschat_lora.runtime.directory import RunDirectory
from dschat_lora.runtime.stage_main import fail

if TYPE_CHECKING:
    from dschat_lora.addons.demo.judge import Judgement

SFT_OPTIONS = {
    "lora_dim": 16,
    "lora_alpha": 32,
    "lora_learning_rate": 1.5e-3,
    "max_seq_len": 128,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 2,
    "num_warmup_steps": 10,
    "logging_steps": 20,
}
REWARD_OPTIONS = {
    "lora_learning_rate": 2e-3,
    "max_seq_len": 128,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 1,
    "num_warmup_steps": 10,
    "logging_steps": 25,
}
PPO_OPTIONS = {
    "actor_lora_learning_rate": 1e-3,
    "critic_lora_learning_rate": 1e-3,
    # Manners are learnt within 20 steps; later ones move the facts, which the first ones leave.
    "kl_coef": 0.2,
    "per_device_generation_batch_size": 128,
    "per_device_training_batch_size": 128,
    "max_steps": 20,
    "eval_interval": 10,
    "logging_steps": 5,
    "judge_function": "dschat_lora.world:rule",
}
NAMES = ("sft", "reward", "rlhf")
Rows = list[list[str]]


def run_demo(output_dir: str | None, *, seed: int = 1234) -> None:
    """Run every stage as a Python program would, then judge answers to test prompts.

    Without ``output_dir`` it is the first free of output/demo, -2, -3, ...
    """
    if output_dir is not None and any(leftovers(Path(output_dir) / name) for name in NAMES):
        fail(f"--output_dir {output_dir} holds an earlier demo; choose another directory")
    directory = RunDirectory.claim(output_dir, name="demo").path
    homes = {name: directory / name for name in NAMES}
    for home in homes.values():
        check_within(home, directory)
    seconds = {}
    for name, options in stage_options(homes).items():
        start, options = time.monotonic(), options | {"seed": seed}
        command = shlex.join(["dschat-lora", name, *command_line(options)])
        log_once(fitted_command(command, "$ "))
        train(name, {}, options, of_command=True)
        seconds[name] = time.monotonic() - start
    log_once("scoring answers to test prompts by the rule, and the reward model on test pairs ...")
    tables = _tables(homes, seconds)
    for title, (header, rows) in tables.items():
        log_once("")
        for line in table([title, *header[1:]], rows):
            log_once(line)
    report = directory / "report.html"
    stories = [read_run(stage) for stage in homes.values()]
    write_whole(
        report, render_report("SFT, reward model and PPO on the bundled data", stories, tables)
    )
    log_once(
        f"\nadapters: {homes['sft']}/adapter, {homes['reward']}/adapter, "
        f"{homes['rlhf']}/actor/adapter"
    )
    log_once(f"report: {report}")


def stage_options(stages: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Options of each stage, with the outputs of earlier ones as its models."""
    test = {"eval_data_path": BUNDLED_DATA["test"]}
    sft, reward, rlhf = stages["sft"], stages["reward"], stages["rlhf"]
    return {
        "sft": SFT_OPTIONS | test | {"output_dir": sft},
        "reward": REWARD_OPTIONS | test | {"model_name_or_path": sft, "output_dir": reward},
        # Held-out prompts of the training are not those that are judged in the end.
        "rlhf": PPO_OPTIONS
        | {
            "actor_model_name_or_path": sft,
            "critic_model_name_or_path": reward,
            "output_dir": rlhf,
        },
    }


def _tables(
    stages: Mapping[str, Path], seconds: Mapping[str, float]
) -> dict[str, tuple[list[str], Rows]]:
    """Title -> header and rows."""
    from dschat_lora.addons.demo.judge import accuracy_by_flaw, evaluate_by_rule  # heavy

    judged = evaluate_by_rule(stages["sft"], stages["rlhf"] / "actor")
    evals = read_metrics(stages["rlhf"], "eval")
    answers = [
        *judgement_rows(judged),
        [
            *("learned reward, sampled (eval prompts)", ""),
            *(f"{evals[i]['reward']:.2f}" for i in (0, -1)),
        ],
        ["KL to SFT, nats per response", "", "0", f"{evals[-1]['kl']:.3f}"],
    ]
    pairs = read_metrics(stages["reward"], "eval")
    flaws = accuracy_by_flaw(stages["reward"])  # after training
    accuracy = [
        ["accuracy", *(f"{pairs[i]['accuracy']:.3f}" for i in (0, -1))],
        *([f"  rejected is {flaw}", "", f"{share:.3f}"] for flaw, share in flaws.items()),
    ]
    return {
        "test rows": (["", *judged], answers),
        "reward model, test pairs": (["", "before", "after"], accuracy),
        "time": (["stage", "with start-up"], [[n, f"{seconds[n]:.0f} s"] for n in stages]),
    }


def judgement_rows(judged: Mapping[str, "Judgement"]) -> Rows:
    """Perplexity and rule scores, one column for each model."""
    names = {
        "score": "rule score: right, polite, ends",
        "correct": "  right",
        "polite": "  polite",
        "ends": "  ends",
    }
    rows = [["perplexity of good answers", *(f"{j.perplexity:.3f}" for j in judged.values())]]
    for way in ("greedy", "sampled"):
        for key, label in names.items():
            shares = [str(getattr(j, way)[key]) for j in judged.values()]
            rows.append([f"{label} ({way})" if key == "score" else label, *shares])
    return rows


def demo(argv: list[str]) -> None:
    """Run ``dschat-lora demo``."""
    parser = Parser(
        "dschat-lora demo", "Run all stages on the bundled model and data, and show what changed."
    )
    parser.add_argument(
        "--output_dir", metavar="DIR", help="default: the first free of output/demo, -2, -3, ..."
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=1234,
        help="random seed of all stages (default: 1234)",
    )
    chosen = parser.values(argv, ["output_dir", "seed"])
    RunConfig(seed=chosen["seed"])  # refuses one that no stage takes, before anything is written
    run_demo(**chosen)
