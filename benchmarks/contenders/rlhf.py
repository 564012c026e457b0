"""Ways to make iterations of PPO and GRPO, each in a process that makes one when asked."""

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.ppo_task import EOS_ID, PpoTask, Setting
from benchmarks.common.turns import Work, timed
from benchmarks.contenders.common import RATE, SEED, TrlSteps, trl_options
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.config.options import parse_config
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import device
from dschat_lora.generation import sampling
from dschat_lora.rl.draw.source import PromptOrder
from dschat_lora.rl.learn.engines import Engines
from dschat_lora.rl.learn.update import Updater
from dschat_lora.rl.loop import trainer
from dschat_lora.rl.loop.build import build_engines
from dschat_lora.rl.loop.schedule import RlhfProgress
from dschat_lora.rl.loop.setup import RlhfSetup, set_up
from dschat_lora.rl.loop.trainer import RlhfTrainer
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.watch.throughput import PHASES, PhaseTimer
from dschat_lora.runtime.run import open_run

KL_COEF, LAM, CLIP, CLIP_VALUE, CLIP_REWARD = 0.1, 0.95, 0.2, 0.2, 5.0
ALMOST_ZERO = 1e-300  # a random number that draws the first token
GRPO_KL_COEF = 0.04


@dataclass(frozen=True)
class IterationWork:
    """Seconds of an iteration's phases and of the rest, of the clock and of the processor."""

    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    generated: int  # tokens
    figures: dict[str, float | None] = field(default_factory=dict)  # of the package's own log


@dataclass(frozen=True)
class Found:
    """What an iteration made of responses, before the first step. Arrays are (N, R) or (N,)."""

    responses: list[tuple[tuple[int, ...], tuple[int, ...]]]  # prompt and tokens
    arrays: dict[str, NDArray[np.float32]]
    losses: dict[str, float]


@dataclass
class PhaseClock(PhaseTimer):
    """Also counts the time of the processor."""

    cpu_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as that of a phase."""
        start = time.process_time()
        with super().phase(name):
            yield
        self.cpu_seconds[name] += time.process_time() - start

    def take_cpu(self) -> dict[str, float]:
        """The processor's seconds by phase; begins anew."""
        taken, self.cpu_seconds = self.cpu_seconds, dict.fromkeys(PHASES, 0.0)
        return taken


@dataclass(frozen=True)
class SamePrompts(PromptOrder):
    """The same prompts at every iteration."""

    numbers: tuple[int, ...] = ()

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts."""
        return list(self.numbers)


class Ours:
    """PPO by the package, as ``training/step3_rlhf/main.py`` runs it."""

    def __init__(self, task: PpoTask) -> None:
        self._task, self._closing = task, ExitStack()
        self._closing.enter_context(redirect_stdout(io.StringIO()))
        self._setup, self._metrics = _set_up(task, _ppo_options(task), self._closing)
        stored = self._setup.data.prompts.train
        prompts = [stored[number].input_ids.tolist() for number in range(len(stored))]
        assert prompts == task.prompts, "prompts are tokenised as they were drawn"
        engines = build_engines(self._setup)
        self._progress = RlhfProgress(kl_coef=self._setup.config.ppo.kl_coef)
        self._clock, self._iterations = PhaseClock(device()), {}
        for name, setting in task.settings.items():
            made = _make_iterations(self._setup, engines, self._progress, setting.numbers)
            made.throughput.timer = made.sampler.timer = self._clock
            self._iterations[name] = made
        self.weight_bytes = bytes_of([self._setup.models.roles.whole()])  # what is shared once

    def iterate(self, name: str) -> IterationWork:
        """The next iteration in a setting."""
        with self._ending(self._task.settings[name]):
            self._iterations[name].iterate()
        figures = _last_line(self._metrics)
        seconds = {phase: figures[f"{phase}_seconds"] for phase in PHASES}
        names = [*(f"{phase}_tflops_per_device" for phase in PHASES), "tflops_per_device", "mfu"]
        logged = {name: figures[name] for name in [*names, "generation_bytes_per_second"]}
        return IterationWork(seconds, self._clock.take_cpu(), figures["supervised_tokens"], logged)

    def look(self, name: str) -> Found:
        """An iteration, and what was found on the way."""
        kept = []

        class Watched(Updater):
            """Keeps what it gives."""

            def queue_steps(self, *args: object, **options: object) -> Iterator[Callable[[], Any]]:
                for read in super().queue_steps(*args, **options):
                    result = read()
                    kept.append((self.experience, self.targets, result))
                    yield lambda result=result: result

        with mock.patch.object(trainer, "Updater", Watched):
            self.iterate(name)
        ((known, targets, result),) = kept
        assert targets is not None
        norms = {f"{n} gradient": outcome.grad_norm for n, outcome in result.outcomes.items()}
        tensors = {
            "log-probabilities": known.logprobs,
            "reference": known.ref_logprobs,
            "values": known.values,
            "scores": known.scores,
            "advantages": targets.advantages,
            "returns": targets.returns,
        }
        return Found(
            [(each.prompt, each.tokens) for each in known.responses],
            {key: array(value) for key, value in tensors.items()},
            {
                "actor loss": result.policy_loss,
                "critic loss": float(result.value_loss or 0.0),
                **{key: float(norm or 0.0) for key, norm in norms.items()},
            },
        )

    @contextmanager
    def _ending(self, setting: Setting) -> Iterator[None]:
        """Have responses end where the setting says."""
        if setting.lengths is None:
            yield
            return
        key = ("rollout", self._setup.config.run.seed, self._progress.iteration)
        ends = {stream_seed(*key, n, 0): length for n, length in enumerate(setting.lengths)}
        with mock.patch.object(sampling, "uniforms", partial(ending_at, sampling.uniforms, ends)):
            yield


def ending_at(
    draw: Callable[[Sequence[int], int], Tensor],
    ends: dict[int, int],
    seeds: Sequence[int],
    count: int,
) -> Tensor:
    """Random numbers of responses, such that each draws token 0 at its end.

    A draw takes the first token up to which probabilities sum to the random number.

    Args:
        draw: gives them otherwise.
        ends: tokens of the response of each seed, the last one included.
        seeds: of the responses.
        count: numbers for each.
    """
    assert EOS_ID == 0
    numbers = draw(seeds, count)
    for row, seed in enumerate(seeds):
        numbers[row, ends[seed] - 1] = ALMOST_ZERO
    return numbers


def _last_line(metrics: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
    return figures


def _set_up(
    task: PpoTask, options: Mapping[str, str], closing: ExitStack
) -> tuple[RlhfSetup, Path]:
    """Step 3 with options beside the task's own, and its metrics; ``closing`` ends the run."""
    pairs = (_options(task) | options).items()
    argv = [word for name, value in pairs for word in (f"--{name}", value) if word]
    config = check_rlhf(parse_config(RlhfConfig, argv))
    run = closing.enter_context(open_run(config, check=check_rlhf))
    assert run.directory is not None
    return set_up(run), run.directory / "metrics.jsonl"


def _make_iterations(
    setup: RlhfSetup,
    engines: Engines,
    progress: RlhfProgress,
    numbers: tuple[int, ...] | None = None,
) -> RlhfTrainer:
    """Iterations on the prompts of these numbers, or on all in turn."""
    made = RlhfTrainer(setup, engines)
    made.progress = made.sampler.progress = progress
    if numbers is not None:
        count, samples = len(numbers), setup.data.prompts.train
        source = SamePrompts(count, count, SEED, samples, numbers=numbers)
        made.schedule, made.sampler.source = replace(made.schedule, source=source), source
    return made


def _options(task: PpoTask) -> dict[str, str]:
    """Of step 3, whatever the algorithm."""
    size = task.size
    return {
        "actor_model_name_or_path": task.path("sft"),
        "data_path": task.path("prompts.jsonl"),
        "data_output_path": task.path("cache"),
        "eval_ratio": "0",
        "eval_prompts": "0",
        "max_prompt_seq_len": str(size.max_prompt),
        "max_answer_seq_len": str(size.max_answer),
        "per_device_generation_batch_size": str(size.responses),
        "per_device_training_batch_size": str(size.responses),
        "actor_lora_learning_rate": str(RATE),
        "lr_scheduler_type": "constant",
        "max_steps": "1000",
        "reward_scaling": "none",
        "dtype": task.dtype,
        "zero_stage": "0",
        "output_dir": task.path("output"),
        "logging_steps": str(10**6),
        "print_answers_interval": "0",
        "log_rollouts": "0",
    }


def _ppo_options(task: PpoTask) -> dict[str, str]:
    return {
        "critic_model_name_or_path": task.path("reward"),
        "critic_lora_learning_rate": str(RATE),
        "critic_learning_rate": str(RATE),
        "kl_coef": str(KL_COEF),
        "lam": str(LAM),
        "cliprange": str(CLIP),
        "cliprange_value": str(CLIP_VALUE),
        "clip_reward_value": str(CLIP_REWARD),
        "no-whiten_advantages": "",  # DeepSpeed-Chat's way does not
    }


class Timed:
    """A way to make iterations, which are timed; ``ready`` are the bytes of all its weights."""

    def __init__(self, build: Callable[[PpoTask], Any], task: PpoTask) -> None:
        self._way = build(task)
        self.ready, self.look = self._way.weight_bytes, self._way.look

    def iterate(self, setting: str) -> IterationWork:
        """An iteration, with what it took besides its phases: counting, logging."""
        start, cpu = time.perf_counter(), time.process_time()
        work: IterationWork = self._way.iterate(setting)
        rest = time.perf_counter() - start - sum(work.seconds.values())
        cpu_rest = time.process_time() - cpu - sum(work.cpu_seconds.values())
        return replace(
            work,
            seconds=work.seconds | {"rest": rest},
            cpu_seconds=work.cpu_seconds | {"rest": cpu_rest},
        )


def even(responses: Sequence[str]) -> list[float]:
    """The share of words with an even number: a reward."""
    words = [response.split() for response in responses]
    return [sum(word[-1] in "02468" for word in each) / max(1, len(each)) for each in words]


class OurGrpo:
    """GRPO by the package, on a task's prompts in turn.

    On a GPU rows and recomputation are left to it to choose; on a CPU it decodes with the factors
    added to copies of the weights.
    """

    ready = True

    def __init__(self, task: PpoTask) -> None:
        size, self._closing = task.size, ExitStack()
        options = {
            "algorithm": "grpo",
            "num_generations": str(size.group),
            "reward_function": "benchmarks.contenders.rlhf:even",
            "kl_coef": str(GRPO_KL_COEF),
            "max_num_seqs": str(size.max_num_seqs),
            "overwrite_output_dir": "",  # of a run with other options
        }
        if torch.cuda.is_available():
            options["per_device_training_batch_size"] = str(size.chat_micro)
            options["gradient_accumulation_steps"] = str(size.responses // size.chat_micro)
            options["base_bits"] = str(size.actor.base_bits)
        else:
            options["merge_for_rollouts"] = ""
        self._closing.enter_context(redirect_stdout(io.StringIO()))
        setup, self._metrics = _set_up(task, options, self._closing)
        progress = RlhfProgress(kl_coef=setup.config.ppo.kl_coef)
        self._iterations = _make_iterations(setup, build_engines(setup), progress)

    def step(self) -> Work:
        """The next iteration."""
        return timed(self._iterate)

    def _iterate(self) -> Work:
        self._iterations.iterate()
        figures = _last_line(self._metrics)
        return Work(
            int(figures["supervised_tokens"]), generation_seconds=figures["generation_seconds"]
        )


class TrlGrpo:
    """TRL's ``GRPOTrainer``, which decodes by transformers' ``generate``."""

    ready = True

    def __init__(self, task: PpoTask) -> None:
        from datasets import Dataset
        from peft import PeftModel
        from trl import GRPOConfig, GRPOTrainer

        size = task.size
        base = AutoModelForCausalLM.from_pretrained(task.path("actor"), dtype=DTYPES[task.dtype])
        rows = Path(task.path("prompts.jsonl")).read_text(encoding="utf-8").splitlines()
        self._accumulation, self._generated = size.responses // size.chat_micro, 0
        config = GRPOConfig(
            **trl_options(task.dtype, task.path("trl")),
            per_device_train_batch_size=size.chat_micro,
            gradient_accumulation_steps=self._accumulation,
            num_generations=size.group,
            max_completion_length=size.max_answer,
            max_steps=10**6,
            lr_scheduler_type="constant",
            beta=GRPO_KL_COEF,
            loss_type="grpo",
        )
        trainer = GRPOTrainer(
            model=PeftModel.from_pretrained(base.to(device()), task.path("sft"), is_trainable=True),
            reward_funcs=self._score,
            args=config,
            train_dataset=Dataset.from_list(list(map(json.loads, rows))),
            processing_class=AutoTokenizer.from_pretrained(task.path("actor"), padding_side="left"),
        )
        self._steps = TrlSteps(trainer)
        self._batches = chain.from_iterable(repeat(trainer.get_train_dataloader()))

    def _score(
        self, completions: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        self._generated += sum(map(len, completion_ids))
        return even(completions)

    def step(self) -> Work:
        """The next iteration."""
        return timed(self._iterate)

    def _iterate(self) -> Work:
        self._generated = 0
        self._steps.step_on(self._batches, self._accumulation)
        return Work(self._generated)


def bytes_of(models: Sequence[nn.Module]) -> int:
    """Of all parameters, each shared one once."""
    parameters = nn.ModuleList(models).parameters()
    return sum(p.numel() * p.element_size() for p in parameters)


def array(values: Tensor | None) -> NDArray[np.float32]:
    """As numpy's, which other processes read."""
    assert values is not None
    numbers: NDArray[np.float32] = values.detach().float().cpu().numpy()
    return numbers
