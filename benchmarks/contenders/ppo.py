"""Ways to make a PPO iteration, each in a process of its own that makes one when asked.

DeepSpeed-Chat's way is written anew here, from what its step 3 does: it is no run of its code.
Its optimizers, without DeepSpeed's engines around them, cost less than the original's.
"""

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LogitsProcessorList,
)
from transformers.utils import logging

from benchmarks.common.ppo_task import ALPHA, EOS_ID, PAD_ID, PpoTask, Setting
from benchmarks.common.turns import forget_peak, peak_bytes
from benchmarks.contenders.common import ChatLora
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.checkpoint.adapter import read_adapter
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
from dschat_lora.runtime.run import OpenRun, open_run

SEED = 0
RATE = 1e-5
KL_COEF, LAM, CLIP, CLIP_VALUE, CLIP_REWARD = 0.1, 0.95, 0.2, 0.2, 5.0
ALMOST_ZERO = 1e-300  # a random number that draws the first token
OURS, CHAT = "ours", "DeepSpeed-Chat's way"


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


@dataclass(frozen=True)
class PpoReady:
    """A contender before its first iteration."""

    weight_bytes: int


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


# ---------------------------------------------------------------------------- the package


@dataclass(frozen=True)
class SamePrompts(PromptOrder):
    """The same prompts at every iteration."""

    numbers: tuple[int, ...] = ()

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts."""
        return list(self.numbers)


class Ours:
    """The package, as ``training/step3_rlhf/main.py`` runs it."""

    def __init__(self, task: PpoTask) -> None:
        self._task, self._closing = task, ExitStack()
        self._closing.enter_context(redirect_stdout(io.StringIO()))
        self._setup, self._run = _set_up(task, _ppo_options(task), self._closing)
        assert self._run.directory is not None
        self._metrics = self._run.directory / "metrics.jsonl"
        stored = self._setup.data.prompts.train
        found = [stored[number].input_ids.tolist() for number in range(len(stored))]
        assert found == task.prompts, "prompts are tokenised as they were drawn"
        self._engines = build_engines(self._setup)
        self._progress = RlhfProgress(kl_coef=self._setup.config.ppo.kl_coef)
        self._clock = PhaseClock(device())
        self._iterations = {name: self._make(task.settings[name]) for name in task.settings}

    def _make(self, setting: Setting) -> RlhfTrainer:
        iterations = _make_iterations(self._setup, self._engines, self._progress, setting.numbers)
        iterations.throughput.timer = iterations.sampler.timer = self._clock
        return iterations

    def close(self) -> None:
        """End the run."""
        self._closing.close()

    @property
    def weight_bytes(self) -> int:
        """Of all roles, what they share once."""
        return _bytes_of([self._setup.models.roles.whole()])

    def iterate(self, name: str) -> IterationWork:
        """The next iteration in a setting."""
        with self._ending(self._task.settings[name]):
            self._iterations[name].iterate()
        lines = self._metrics.read_text(encoding="utf-8").splitlines()
        figures = json.loads(lines[-1])
        seconds = {phase: figures[f"{phase}_seconds"] for phase in PHASES}
        return IterationWork(
            seconds, self._clock.take_cpu(), figures["supervised_tokens"], _throughput(figures)
        )

    def look(self, name: str) -> Found:
        """An iteration, and what was found on the way."""
        kept = []

        class Watched(Updater):
            """Keeps what it gives."""

            def queue_steps(self, *args: Any, **options: Any) -> Any:
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
            {key: _array(value) for key, value in tensors.items()},
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
    found = draw(seeds, count)
    for row, seed in enumerate(seeds):
        found[row, ends[seed] - 1] = ALMOST_ZERO
    return found


def _throughput(figures: dict[str, Any]) -> dict[str, float | None]:
    names = [*(f"{phase}_tflops_per_device" for phase in PHASES), "tflops_per_device", "mfu"]
    return {name: figures[name] for name in [*names, "generation_bytes_per_second"]}


def our_iterations(
    task: PpoTask, options: Mapping[str, str], closing: ExitStack
) -> tuple[RlhfTrainer, Path]:
    """Iterations of another algorithm on a task's prompts, and the file of their metrics.

    ``options`` are those of step 3 beside the task's own; ``closing`` ends the run.
    """
    setup, run = _set_up(task, options, closing)
    assert run.directory is not None
    engines = build_engines(setup)
    progress = RlhfProgress(kl_coef=setup.config.ppo.kl_coef)
    iterations = _make_iterations(setup, engines, progress)
    return iterations, run.directory / "metrics.jsonl"


def _set_up(
    task: PpoTask, options: Mapping[str, str], closing: ExitStack
) -> tuple[RlhfSetup, OpenRun[RlhfConfig]]:
    pairs = (_options(task) | options).items()
    argv = [word for name, value in pairs for word in (f"--{name}", value) if word]
    config = check_rlhf(parse_config(RlhfConfig, argv))
    run = closing.enter_context(open_run(config, name=config.stage, check=check_rlhf))
    return set_up(run), run


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


# ---------------------------------------------------------------------------- DeepSpeed-Chat's way


@dataclass(frozen=True)
class Rows:
    """Its experience: L positions of prompt and response; index t is what chose token t + 1."""

    ids: Tensor  # (B, L)
    mask: Tensor  # (B, L), 0 on padding
    logprobs: Tensor  # (B, L - 1)
    reference: Tensor  # (B, L - 1)
    values: Tensor  # (B, L - 1)
    scores: Tensor  # (B,)


class DeepSpeedChat:
    """DeepSpeed-Chat's way: four models, prompts padded to the longest allowed.

    Its generation is greedy; it samples here, as the package does. Reference and reward model
    have their adapters merged, as its earlier steps save them.
    """

    def __init__(self, task: PpoTask) -> None:
        self._task, self._clock = task, PhaseClock(device())
        language, scorer = AutoModelForCausalLM, AutoModelForSequenceClassification
        self._actor = _load(task, language, "actor", "sft", trained=True)
        self._reference = _load(task, language, "actor", "sft", trained=False)
        self._critic = _load(task, scorer, "critic", "reward", trained=True)
        self._reward = _load(task, scorer, "critic", "reward", trained=False)
        self._trained = {
            "actor": [p for p in self._actor.parameters() if p.requires_grad],
            "critic": [p for p in self._critic.parameters() if p.requires_grad],
        }
        self._adams = {
            role: torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
            for role, parameters in self._trained.items()
        }
        torch.manual_seed(SEED)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def weight_bytes(self) -> int:
        """Of all four models."""
        return _bytes_of([self._actor, self._reference, self._critic, self._reward])

    def iterate(self, name: str) -> IterationWork:
        """The next iteration in a setting."""
        setting = self._task.settings[name]
        with self._clock.phase("generation"):
            ids = self._generate(setting)
        with self._clock.phase("scoring"):
            rows = self._look_at(ids)
        with self._clock.phase("training"):
            self._update(rows)
        generated = int((ids[:, self._width :] != PAD_ID).sum())
        return IterationWork(self._clock.take(), self._clock.take_cpu(), generated)

    @torch.no_grad()
    def _generate(self, setting: Setting) -> Tensor:
        """(B, L) prompts, left-padded, and responses, right-padded."""
        prompts = [self._task.prompts[number] for number in setting.numbers]
        ids = torch.tensor([[PAD_ID] * (self._width - len(p)) + p for p in prompts])
        ids = ids.to(device())
        ends = LogitsProcessorList()
        if setting.lengths is not None:
            ends.append(partial(_end, self._width, setting.lengths))
        self._actor.eval()
        sequences = self._actor.generate(
            input_ids=ids,
            attention_mask=(ids != PAD_ID).long(),
            max_length=self._width + self._task.size.max_answer,
            do_sample=True,
            top_k=0,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
            logits_processor=ends,
        )
        kept = []
        for row, length in enumerate((sequences[:, self._width :] != PAD_ID).sum(1)):
            if length > 1:
                kept.append(sequences[row : row + 1])
        return torch.cat(kept)

    @property
    def _width(self) -> int:
        return self._task.size.max_prompt

    @torch.no_grad()
    def _look_at(self, ids: Tensor) -> Rows:
        mask = (ids != PAD_ID).long()
        # Both models' logits are there at a time, as in the original.
        own = self._actor(input_ids=ids, attention_mask=mask).logits
        reference = self._reference(input_ids=ids, attention_mask=mask).logits
        token_scores = _token_scores(self._reward, ids, mask)
        scores = []
        for row, each in zip(ids, token_scores, strict=True):
            padding = (row[self._width :] == PAD_ID).nonzero()
            end = self._width + padding[0].item() if len(padding) else len(row)
            scores.append(each[int(end) - 1])
        values = _token_scores(self._critic, ids, mask)[:, :-1]
        return Rows(
            ids, mask, _logprobs(own, ids), _logprobs(reference, ids), values, torch.stack(scores)
        )

    def _targets(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Advantages and returns (B, answer) from the last token of the prompt on."""
        start, mask = self._width - 1, rows.mask[:, 1:]
        rewards = -KL_COEF * (rows.logprobs - rows.reference)
        scores = rows.scores.clamp(-CLIP_REWARD, CLIP_REWARD)
        ends = start + mask[:, start:].sum(1)
        values = rows.values.clone()
        for row, end in enumerate(ends):
            rewards[row, start:end][-1] += scores[row]
            rewards[row, end:] = 0
            values[row, end:] = 0
        later: Any = 0
        reversed_: list[Tensor] = []
        length = rewards.shape[1]
        for t in reversed(range(start, length)):
            following = values[:, t + 1] if t < length - 1 else 0.0
            later = rewards[:, t] + following - values[:, t] + LAM * later
            reversed_.append(later)
        advantages = torch.stack(reversed_[::-1], dim=1)
        return advantages, advantages + values[:, start:]

    def _update(self, rows: Rows) -> dict[str, float]:
        """A step of actor and critic; the losses, and norms of gradients before clipping."""
        found = self._feed(rows)
        for role, adam in self._adams.items():
            norm = nn.utils.clip_grad_norm_(self._trained[role], 1.0)
            found[f"{role} gradient"] = norm.item()
            adam.step()
            adam.zero_grad()
        return found

    def _feed(self, rows: Rows) -> dict[str, float]:
        """Backward passes over all micro-batches; mean losses."""
        self._actor.train()
        self._critic.train()
        with torch.no_grad():
            advantages, returns = self._targets(rows)
        micro, total = self._task.size.chat_micro, rows.mask[:, self._width :].sum()
        found = {"actor loss": 0.0, "critic loss": 0.0}
        for first in range(0, len(rows.ids), micro):
            part = slice(first, first + micro)
            few = Rows(*(getattr(rows, name)[part] for name in Rows.__dataclass_fields__))
            loss = self._actor_loss(few, advantages[part]) / total
            loss.backward()
            found["actor loss"] += loss.item()
            loss = self._critic_loss(few, returns[part]) / total
            loss.backward()
            found["critic loss"] += loss.item()
        return found

    def _actor_loss(self, rows: Rows, advantages: Tensor) -> Tensor:
        start = self._width - 1
        output = self._actor(input_ids=rows.ids, attention_mask=rows.mask, use_cache=False)
        logprobs, mask = _logprobs(output.logits, rows.ids)[:, start:], rows.mask[:, start + 1 :]
        ratio = torch.exp((logprobs - rows.logprobs[:, start:]) * mask)
        free, held = -advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
        return (torch.max(free, held) * mask).sum()

    def _critic_loss(self, rows: Rows, returns: Tensor) -> Tensor:
        start = self._width - 1
        values = _token_scores(self._critic, rows.ids, rows.mask, use_cache=False)[:, start:-1]
        old, mask = rows.values[:, start:], rows.mask[:, start + 1 :]
        near = torch.clamp(values, old - CLIP_VALUE, old + CLIP_VALUE)
        return 0.5 * (torch.max((values - returns) ** 2, (near - returns) ** 2) * mask).sum()

    def look(self, responses: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Found:
        """What it makes of given responses; learns nothing."""
        longest = max(len(tokens) for _, tokens in responses)
        padded = [
            [PAD_ID] * (self._width - len(prompt))
            + [*prompt, *tokens]
            + [PAD_ID] * (longest - len(tokens))
            for prompt, tokens in responses
        ]
        rows = self._look_at(torch.tensor(padded, device=device()))
        advantages, returns = self._targets(rows)
        losses = self._feed(rows)
        for role, parameters in self._trained.items():
            norms = [p.grad.float().norm() for p in parameters if p.grad is not None]
            losses[f"{role} gradient"] = torch.stack(norms).norm().item()
            self._adams[role].zero_grad()
        mask, start = rows.mask[:, self._width :], self._width - 1
        tensors = {
            "log-probabilities": rows.logprobs[:, start:] * mask,
            "reference": rows.reference[:, start:] * mask,
            "values": rows.values[:, start:] * mask,
            "scores": rows.scores,
            "advantages": advantages * mask,
            "returns": returns * mask,
        }
        return Found(list(responses), {k: _array(v) for k, v in tensors.items()}, losses)


def _end(width: int, lengths: Sequence[int], ids: Tensor, scores: Tensor) -> Tensor:
    """Logits with nothing but end-of-sequence left where a response is to end."""
    step = ids.shape[1] - width + 1
    rows = [row for row, length in enumerate(lengths) if length == step]
    if rows:
        scores[rows] = -torch.inf
        scores[rows, EOS_ID] = 0.0
    return scores


def _load(task: PpoTask, kind: Any, base: str, adapter: str, *, trained: bool) -> Any:
    """A model with its own copy of the base, its factors in layers of their own or merged."""
    options = {"num_labels": 1, "pad_token_id": PAD_ID} if base == "critic" else {}
    model: Any = kind.from_pretrained(task.path(base), dtype=DTYPES[task.dtype], **options)
    model.to(device()).requires_grad_(False)
    tensors = read_adapter(task.path(adapter)).tensors
    scaling = ALPHA / task.size.lora_dim
    for name in [key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")]:
        a, b = (tensors[f"{name}.lora_{which}"].to(device()) for which in "AB")
        layer = model.get_submodule(name)
        with torch.no_grad():
            if not trained:
                layer.weight += (scaling * (b @ a)).to(layer.weight.dtype)
                continue
            lora = ChatLora(layer, task.size.lora_dim, scaling)
            lora.right.copy_(a.T)
            lora.left.copy_(b.T)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, lora)
    if base == "critic":
        with torch.no_grad():
            model.score.weight.copy_(tensors["score.trained.weight"])
        model.score.weight.requires_grad_(trained)
    return model.train(trained)


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """(B, L - 1) of the tokens from the second on."""
    every = torch.log_softmax(logits[:, :-1], dim=-1)
    return every.gather(-1, ids[:, 1:, None]).squeeze(-1)


def _token_scores(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """(B, L) of the head at each position."""
    hidden = model.base_model(input_ids=ids, attention_mask=mask, **options).last_hidden_state
    scores: Tensor = model.score(hidden).squeeze(-1)
    return scores


# ---------------------------------------------------------------------------- both

CONTENDERS: dict[str, Any] = {OURS: Ours, CHAT: DeepSpeedChat}


def serve(connection: Any, name: str, task: PpoTask) -> None:
    """Build a contender, then do what messages say.

    ``("iterate", setting)`` answers with a :class:`IterationWork`, ``("look", ...)`` with a
    :class:`Found`, ``("forget",)`` begins to count the peak memory anew, ``("peak",)`` answers
    with it in bytes, above what the imported libraries take, ``("stop",)`` ends the process. A
    text says that something failed.
    """
    torch.set_num_threads(task.threads)
    logging.set_verbosity_error()
    libraries = psutil.Process().memory_info().rss
    try:
        contender = CONTENDERS[name](task)
        connection.send(PpoReady(contender.weight_bytes))
        while True:
            command, *arguments = connection.recv()
            if command == "peak":
                used = peak_bytes() - (libraries if device().type == "cpu" else 0)
                connection.send(used)
            elif command == "forget":
                forget_peak()
                connection.send(True)
            elif command == "stop":
                contender.close()
                connection.send(True)
                return
            elif command == "look":
                connection.send(contender.look(*arguments))
            else:
                connection.send(_timed(contender, *arguments))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}"[:500])
        raise


def _timed(contender: Any, setting: str) -> IterationWork:
    """An iteration, with what it took besides its phases: counting, logging."""
    start, cpu = time.perf_counter(), time.process_time()
    work: IterationWork = contender.iterate(setting)
    rest = time.perf_counter() - start - sum(work.seconds.values())
    cpu_rest = time.process_time() - cpu - sum(work.cpu_seconds.values())
    return replace(
        work,
        seconds=work.seconds | {"rest": rest},
        cpu_seconds=work.cpu_seconds | {"rest": cpu_rest},
    )


def _bytes_of(models: Sequence[nn.Module]) -> int:
    parameters = nn.ModuleList(models).parameters()  # each shared one once
    return sum(p.numel() * p.element_size() for p in parameters)


def _array(values: Tensor | None) -> NDArray[np.float32]:
    assert values is not None
    found: NDArray[np.float32] = values.detach().float().cpu().numpy()
    return found
