"""What ways to train have in common, each in a process of its own that does a step when asked."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from benchmarks.common.shapes import draw_weights_, model_config, opt_shape
from benchmarks.common.turns import Work, forget_peak, timed
from dschat_lora.algos.seeds import permutation
from dschat_lora.config.groups import ModelConfig
from dschat_lora.data.batch import Batch
from dschat_lora.data.loader import StepLoader
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import device
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import seeded_generator
from dschat_lora.models.loading import load_causal_lm
from dschat_lora.models.reward_model import load_reward_model

SEED = 0
ALPHA = 32.0
RATE = 1e-5
CHECKED = 8  # samples whose loss is compared
WARM_UPS = 2
OURS, CHAT = "ours", "DeepSpeed-Chat's way"
# DeepSpeed-Chat's names of the layers inside "decoder.layers."; all six linear layers of OPT.
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
Kind = Literal["sft", "reward", "dpo"]


@dataclass(frozen=True)
class ModelSize:
    """An OPT decoder that all ways train, and for how long.

    Attributes:
        hidden_size, num_layers, num_heads, vocab_size: of the decoder.
        lora_dim: r, on all six linear layers of each block.
        max_seq_len: tokens of the longest sequence.
        rounds: steps of each, at most.
        seconds: that they may take; what is counted in them is the part's to say.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    lora_dim: int
    max_seq_len: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Task:
    """What all ways train: the same weights, samples and adapters.

    Attributes:
        kind: supervised fine-tuning, reward model or DPO.
        size: of the decoder.
        samples: of the kind: of :class:`dschat_lora.data.samples.Sample` or ``PairSample``.
        tokenizer: from :mod:`benchmarks.common.pair_data`.
        micro_batch: samples. accumulation: micro-batches of a step.
        dtype: of the base. threads: of a CPU.
    """

    kind: Kind
    size: ModelSize
    samples: list[Any]
    tokenizer: str
    dtype: str
    threads: int
    micro_batch: int = 4
    accumulation: int = 4

    def amount(self, samples: Sequence[int]) -> int:
        """Tokens of samples without padding, or how many pairs they are."""
        if self.kind != "sft":
            return len(samples)
        return sum(len(self.samples[number].input_ids) for number in samples)

    def rows_like_samples(self, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch, and micro-batches of a step, where rows hold several samples.

        A step then takes about as many samples as without. All samples are in ``num_rows``.
        """
        share = num_rows / len(self.samples)
        rows = max(1, round(self.micro_batch * share))
        return rows, max(1, round(self.micro_batch * self.accumulation * share / rows))

    def windows(
        self, num_rows: int, micro_batch: int, accumulation: int
    ) -> Iterator[list[list[int]]]:
        """Row numbers of each micro-batch of each whole step, in the order of our loader."""
        per_step = micro_batch * accumulation
        assert num_rows >= per_step, "too few samples for a step"
        for epoch in count():
            order = permutation(num_rows, "epoch", SEED, epoch).tolist()
            for first in range(0, num_rows - per_step + 1, per_step):
                starts = range(first, first + per_step, micro_batch)
                yield [order[start : start + micro_batch] for start in starts]


class Contender(Protocol):
    """A way to train."""

    model: PreTrainedModel

    def step(self) -> Work:
        """The next optimizer step."""

    def loss(self, samples: list[int]) -> float:
        """Mean loss of samples."""


class InTurns:
    """A way to train, its adapters drawn at random, whose steps are timed.

    ``ready`` is the loss of the first samples, before any step.
    """

    def __init__(self, build: Callable[[Task], Contender], task: Task) -> None:
        self._way = build(task)
        draw_adapters_(self._way.model)
        self.ready = self._way.loss(list(range(min(CHECKED, len(task.samples)))))
        for _ in range(WARM_UPS):
            self._way.step()
        forget_peak()
        self._ended = time.process_time()

    def step(self) -> Work:
        """The next optimizer step."""
        idle = time.process_time() - self._ended
        work = replace(timed(self._way.step), idle_cpu_seconds=idle)
        self._ended = time.process_time()
        return work


def base_model(task: Task) -> PreTrainedModel:
    """The base on its device, weights drawn there: the same for all."""
    size = task.size
    shape = opt_shape(
        size.hidden_size, size.num_layers, size.num_heads, size.vocab_size, size.lora_dim
    )
    config = model_config(shape)
    options = {"dtype": DTYPES[task.dtype], "meta": True}
    if task.kind == "reward":
        model = load_reward_model("random", config, ModelConfig(), seed=SEED, **options)
    else:
        model = load_causal_lm("random", config, ModelConfig(), **options)
    draw_weights_(model, device())
    return model


def whole_windows(loader: StepLoader) -> Iterator[list[Batch]]:
    """Our loader's windows, epoch after epoch, without the last one of each, which may be short."""
    whole = loader.num_rows // loader.rows_per_step
    assert whole, "too few samples for a step"
    for epoch in count():
        yield from islice(loader.epoch(epoch), whole)


class ChatLora(nn.Module):
    """DeepSpeed-Chat's: ``x W^T + b + x R L s``, R (in, r) and L (r, out)."""

    def __init__(self, base: nn.Linear, r: int, scaling: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scaling = base.weight, base.bias, scaling
        options = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.right = nn.Parameter(torch.zeros(base.in_features, r, **options))
        self.left = nn.Parameter(torch.zeros(r, base.out_features, **options))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(x, self.weight, self.bias) + (x @ self.right @ self.left) * self.scaling


def chat_model(task: Task) -> PreTrainedModel:
    """The base frozen, with DeepSpeed-Chat's adapters on all six linear layers."""
    model = base_model(task)
    names = [name for name, _ in model.named_modules() if name.endswith(LINEARS)]
    add_chat_lora_(model, names, task.size.lora_dim)
    return model


def add_chat_lora_(model: nn.Module, names: Iterable[str], lora_dim: int) -> None:
    """Freeze the model, and put DeepSpeed-Chat's adapters in place of these linear layers."""
    model.requires_grad_(False)
    for name in names:
        model.set_submodule(name, ChatLora(model.get_submodule(name), lora_dim, ALPHA / lora_dim))


class ChatSteps:
    """Steps of DeepSpeed-Chat's way: micro-batches, clipping, torch's AdamW without an engine."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(self._trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> None:
        """A step on micro-batches, each given as what computes its mean loss."""
        self._model.train()
        for loss in losses:
            (loss() / len(losses)).backward()
        self.update()

    def update(self) -> None:
        """Clip, and let AdamW step."""
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self.adam.step()
        self.adam.zero_grad()


def leave_group() -> None:
    """Have TRL, or a command that is started, know of no group of processes.

    One of a single process would have TRL wrap the model for distributed training.
    """
    places = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*places, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def trl_options(dtype: str, directory: str, **more: object) -> dict[str, object]:
    """Of any of its trainers: no recomputation, no 16-bit types where the base has none."""
    leave_group()
    return {
        "output_dir": directory,
        "learning_rate": RATE,
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "gradient_checkpointing": False,
        "use_cpu": device().type == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }


class TrlSteps:
    """Steps of one of TRL's trainers: its collator, ``training_step``, clipping and AdamW.

    Its data loader, logging and callbacks are left out.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.create_optimizer_and_scheduler(10**6)
        self.model, self._optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped = self.model
        self.examples = list(trainer.train_dataset)

    def step(self, window: list[list[int]]) -> int:
        """A step on micro-batches of examples; its positions."""
        collate = self.trainer.data_collator
        batches = (collate([self.examples[n] for n in micro]) for micro in window)
        inputs = self.step_on(batches, len(window))
        return sum(each["input_ids"].numel() for each in inputs)

    def step_on(self, batches: Iterator[Any], count: int) -> list[Any]:
        """A step on the next ``count`` micro-batches, which are returned."""
        inputs, targets = self.trainer.get_batch_samples(batches, count, device())
        self.trainer.current_gradient_accumulation_steps = count
        for each in inputs:
            self.trainer.training_step(self.model, each, targets)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.model.zero_grad()
        return inputs

    @torch.no_grad()
    def loss(self, examples: list[dict[str, list[int]]]) -> float:
        """Its loss of one micro-batch."""
        inputs = self.trainer._prepare_inputs(self.trainer.data_collator(examples))
        return float(self.trainer.compute_loss(self.model, inputs))


@torch.no_grad()
def draw_adapters_(model: nn.Module) -> None:
    """The same random factors whatever the layers are: their loss says more than that of zeros."""
    for name, module in model.named_modules():
        generator = seeded_generator(SEED, name.removeprefix("base_model.model."))
        for factor in _factors(module):
            factor.copy_(torch.empty(factor.shape).normal_(std=0.02, generator=generator))


def _factors(module: nn.Module) -> tuple[Tensor, ...]:
    """(r, in) and (out, r), as views; none of other layers."""
    if isinstance(module, LoraLinear):
        return module.lora_A, module.lora_B
    if isinstance(module, ChatLora):
        return module.right.T, module.left.T
    if type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "lora_B"):
        factors = (getattr(module, name)["default"] for name in ("lora_A", "lora_B"))
        return tuple(factor.weight for factor in factors)
    return ()
