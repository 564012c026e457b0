"""Iterations of GRPO against TRL's GRPOTrainer, which decodes by transformers' ``generate``.

Both train LoRA factors of one random OPT on the same prompts, by turns, each in a process of its
own: groups of eight responses, all of the longest length, a reward from Python, a KL penalty
against the model without its factors, one update of one optimizer step. Ours decodes with the
factors added to copies of the weights (--merge_for_rollouts).

    python -m benchmarks.grpo [--rounds 9] [--max_prompt 64] [--max_answer 64] [--tiny]
"""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.ppo_task import (
    FULL,
    REAL,
    DecoderShape,
    IterationSize,
    PpoTask,
    write_task,
)
from benchmarks.common.report import print_table
from benchmarks.common.shapes import Shape
from benchmarks.common.turns import (
    Runner,
    all_run,
    peak_bytes,
    start_all,
    stop,
    take_turns,
    times_ours,
)
from benchmarks.contenders.common import leave_group
from dschat_lora.engine.build import DTYPES

OURS, TRL = "ours", "TRL"
SHAPE = DecoderShape(256, 4, 8)
SIZE = IterationSize(SHAPE, SHAPE, 4096, 16, 64, 64, 64, 16, (REAL, FULL), 9, 600.0)
TINY_SHAPE = DecoderShape(32, 2, 4)
TINY = IterationSize(TINY_SHAPE, TINY_SHAPE, 64, 4, 16, 8, 16, 8, (REAL, FULL), 2, 600.0)
RATE, KL_COEF = 1e-5, 0.04


@dataclass(frozen=True)
class Work:
    """An iteration's seconds, of the clock and of the processor, and its responses' tokens."""

    wall_seconds: float
    cpu_seconds: float
    generated: int
    amount: float = 1.0
    generation_seconds: float | None = None


@dataclass
class Clock:
    """Measures one iteration after another."""

    send: Callable[[Work], None]

    def start(self) -> None:
        """Begin an iteration."""
        self._begun = time.perf_counter(), time.process_time()

    def end(self, generated: int, **more: float) -> None:
        """Tell what the iteration took."""
        wall, cpu = self._begun
        self.send(Work(time.perf_counter() - wall, time.process_time() - cpu, generated, **more))


def reward(responses: Sequence[str]) -> list[float]:
    """The share of words with an even number."""
    words = [response.split() for response in responses]
    return [sum(word[-1] in "02468" for word in each) / max(1, len(each)) for each in words]


def serve_ours(connection: Any, task: PpoTask) -> None:
    """Iterate when asked."""
    from benchmarks.contenders.ppo import our_iterations

    options = {
        "algorithm": "grpo",
        "num_generations": str(task.size.group),
        "reward_function": "benchmarks.grpo:reward",
        "kl_coef": str(KL_COEF),
        "max_num_seqs": str(task.size.max_num_seqs),
        "overwrite_output_dir": "",  # of a run with other options
        **(_on_gpu(task) if torch.cuda.is_available() else {"merge_for_rollouts": ""}),
    }
    clock = Clock(connection.send)
    with ExitStack() as closing:
        closing.enter_context(redirect_stdout(StringIO()))
        trainer, metrics = our_iterations(task, options, closing)
        connection.send(True)
        while connection.recv() == "step":
            clock.start()
            trainer.iterate()
            (*_, line) = metrics.read_text(encoding="utf-8").splitlines()
            figures = json.loads(line)
            generation = figures["generation_seconds"]
            clock.end(figures["supervised_tokens"], generation_seconds=generation)
        connection.send(peak_bytes())


def _on_gpu(task: PpoTask) -> dict[str, str]:
    """Options of a published size: rows and recomputation are left to the package to choose."""
    size = task.size
    options = {"per_device_training_batch_size": str(size.chat_micro)}
    options["gradient_accumulation_steps"] = str(size.responses // size.chat_micro)
    if isinstance(size.actor, Shape) and size.actor.base_bits == 4:
        options["base_bits"] = "4"
    return options


def serve_trl(connection: Any, task: PpoTask) -> None:
    """Have the trainer wait between its steps."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    leave_group()
    size, generated = task.size, [0]

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        generated[0] += sum(map(len, completion_ids))
        return reward(completions)

    class Turns(TrainerCallback):
        """Takes a step when asked."""

        clock = Clock(connection.send)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Wait for the first turn."""
            connection.send(True)
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Tell what the step took; wait for the next turn."""
            self.clock.end(generated[0])
            self._wait(control)

        def _wait(self, control: Any) -> None:
            generated[0] = 0
            control.should_training_stop = connection.recv() != "step"
            self.clock.start()

    tokenizer = AutoTokenizer.from_pretrained(task.path("actor"), padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(task.path("actor"), dtype=DTYPES[task.dtype])
    base.to("cuda" if torch.cuda.is_available() else "cpu")
    model = PeftModel.from_pretrained(base, task.path("sft"), is_trainable=True)
    rows = Path(task.path("prompts.jsonl")).read_text(encoding="utf-8").splitlines()
    config = GRPOConfig(
        output_dir=task.path("trl"),
        per_device_train_batch_size=size.chat_micro,
        gradient_accumulation_steps=size.responses // size.chat_micro,
        num_generations=size.group,
        max_completion_length=size.max_answer,
        max_steps=10**6,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=KL_COEF,
        loss_type="grpo",
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=task.dtype == "bf16",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(list(map(json.loads, rows))),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()
    connection.send(peak_bytes())


def serve(connection: Any, name: str, task: PpoTask) -> None:
    """Run a contender; a text says that it failed."""
    torch.set_num_threads(task.threads)
    logging.disable(logging.WARNING)
    try:
        (serve_ours if name == OURS else serve_trl)(connection, task)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}"[:500])
        raise


def _row(runner: Runner, ours: Runner) -> list[Any]:
    """Medians, and the ratios to ours with their quartiles."""
    row: list[Any] = [runner.name, len(runner.works), runner.works[0].generated]
    measures = ("wall_seconds", "cpu_seconds")
    row += [median(getattr(work, measure) for work in runner.works) for measure in measures]
    for ratio in (times_ours(runner, ours, measure) for measure in measures):
        low, high = ratio["quartile_1"], ratio["quartile_3"]
        row.append(f"{ratio['median']:.2f} ({low:.2f} - {high:.2f})")
    return [*row, (runner.peak_bytes or 0) / 2**20]


def main() -> None:
    """Measure, and print a line for each contender."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=SIZE.rounds, help="iterations of each")
    parser.add_argument("--tiny", action="store_true", help="a model that means nothing")
    parser.add_argument("--max_prompt", type=int, help="tokens of the longest prompt")
    parser.add_argument("--max_answer", type=int, help="tokens of each response")
    chosen = parser.parse_args()
    size = TINY if chosen.tiny else SIZE
    lengths = {"max_prompt": chosen.max_prompt, "max_answer": chosen.max_answer}
    size = replace(size, **{name: n for name, n in lengths.items() if n is not None})
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    with tempfile.TemporaryDirectory() as directory:
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        task = write_task(Path(directory), size, dtype="fp32", threads=threads, device=where)
        runners = start_all((OURS, TRL), serve, task, optional=("trl", "peft", "datasets"))
        try:
            # The first turn warms up.
            take_turns(runners, rounds=chosen.rounds + 1, seconds=size.seconds)
        finally:
            stop(runners)
    for runner in runners:
        print(f"{runner.name}: {runner.problem}") if runner.problem else None
        runner.works = runner.works[1:]
    header = ["an iteration", "rounds", "tokens", "s", "CPU s", "x ours", "x ours' CPU", "MiB"]
    print_table(header, [_row(runner, runners[0]) for runner in runners if runner.works])
    if not all_run(runners):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
