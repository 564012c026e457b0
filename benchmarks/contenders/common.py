"""What ways to train have in common, each in a process of its own that does a step when asked."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, Literal, Protocol

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OPTConfig

from benchmarks.common.pair_data import PAD_ID
from benchmarks.common.shapes import draw_weights_
from benchmarks.common.turns import forget_peak, peak_bytes
from dschat_lora.algos.seeds import permutation
from dschat_lora.config.groups import ModelConfig, OptimConfig
from dschat_lora.data.loader import StepLoader
from dschat_lora.engine.build import DTYPES, EngineSettings, TrainEngine
from dschat_lora.engine.distributed import device
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import seeded_generator
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.loading import load_causal_lm
from dschat_lora.models.reward_model import load_reward_model
from dschat_lora.perf.throughput import synchronize

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


@dataclass(frozen=True)
class Work:
    """What a step went through."""

    amount: int  # pairs, or tokens without padding
    positions: int  # with padding
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0  # since its last step, while others took theirs


@dataclass(frozen=True)
class Ready:
    """A contender before its first step.

    Attributes:
        loss: of the first samples, adapters drawn at random.
        reference_seconds: to compute the reference of all pairs beforehand; None: not done.
    """

    loss: float
    reference_seconds: float | None


class Contender(Protocol):
    """A way to train."""

    model: Any
    reference_seconds: float | None

    def step(self) -> Work:
        """The next optimizer step."""

    def loss(self, samples: list[int]) -> float:
        """Mean loss of samples."""


def base_model(task: Task) -> Any:
    """The base on its device, weights drawn there: the same for all."""
    config = OPTConfig(
        hidden_size=task.size.hidden_size,
        word_embed_proj_dim=task.size.hidden_size,
        num_hidden_layers=task.size.num_layers,
        num_attention_heads=task.size.num_heads,
        ffn_dim=4 * task.size.hidden_size,
        vocab_size=task.size.vocab_size,
        max_position_embeddings=max(512, task.size.max_seq_len),
        pad_token_id=PAD_ID,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
    )
    options = {"dtype": DTYPES[task.dtype], "meta": True}
    if task.kind == "reward":
        model: Any = load_reward_model("random", config, ModelConfig(), seed=SEED, **options)
    else:
        model = load_causal_lm("random", config, ModelConfig(), **options)
    draw_weights_(model, device())
    return model


def make_engine(
    network: nn.Module, task: Task, *, micro_batch: int, accumulation: int
) -> TrainEngine:
    """Our engine, as the package's defaults set it, over a network whose adapters train."""
    optim = OptimConfig(lora_learning_rate=RATE)
    settings = EngineSettings(
        dtype=task.dtype,
        zero_stage=0,
        offload=False,
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        max_grad_norm=1.0,
        betas=(optim.adam_beta1, optim.adam_beta2),
        epsilon=optim.adam_epsilon,
        deepspeed_json={},
    )
    return TrainEngine(network, parameter_groups(network.model, optim), settings)


def whole_windows(loader: StepLoader) -> Iterator[Any]:
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


def chat_model(task: Task) -> Any:
    """The base frozen, with DeepSpeed-Chat's adapters on all six linear layers."""
    model = base_model(task)
    names = [name for name, _ in model.named_modules() if name.endswith(LINEARS)]
    add_chat_lora_(model, names, task.size.lora_dim)
    return model


def add_chat_lora_(model: nn.Module, names: Iterable[str], lora_dim: int) -> None:
    """Freeze the model, and put DeepSpeed-Chat's adapters in place of these linear layers."""
    model.requires_grad_(False)
    for name in names:
        base: Any = model.get_submodule(name)
        model.set_submodule(name, ChatLora(base, lora_dim, ALPHA / lora_dim))


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


def trl_options(task: Task, directory: str) -> dict[str, Any]:
    """Of any of its trainers: no recomputation, no 16-bit types where the task has none."""
    leave_group()
    return {
        "output_dir": directory,
        "per_device_train_batch_size": task.micro_batch,
        "gradient_accumulation_steps": task.accumulation,
        "learning_rate": RATE,
        "max_length": task.size.max_seq_len,
        "bf16": task.dtype == "bf16",
        "fp16": task.dtype == "fp16",
        "gradient_checkpointing": False,
        "use_cpu": device().type == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
    }


class TrlSteps:
    """Steps of one of TRL's trainers: its collator, ``training_step``, clipping and AdamW.

    Its data loader, logging and callbacks are left out.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.create_optimizer_and_scheduler(10**6)
        self.model, self._optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped = self.model
        self.examples = list(trainer.train_dataset)

    def step(self, window: list[list[int]]) -> int:
        """A step on micro-batches of examples; its positions."""
        batches = (self.collate([self.examples[n] for n in micro]) for micro in window)
        inputs, targets = self.trainer.get_batch_samples(batches, len(window), device())
        positions = sum(each["input_ids"].numel() for each in inputs)
        self.trainer.current_gradient_accumulation_steps = len(window)
        for each in inputs:
            self.trainer.training_step(self.model, each, targets)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.model.zero_grad()
        return positions

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Its batch of examples."""
        batch: dict[str, Any] = self.trainer.data_collator(examples)
        return batch

    @torch.no_grad()
    def loss(self, examples: list[Any]) -> float:
        """Its loss of one micro-batch."""
        inputs = self.trainer._prepare_inputs(self.collate(examples))
        return float(self.trainer.compute_loss(self.model, inputs))


@torch.no_grad()
def draw_adapters_(model: nn.Module) -> None:
    """The same random factors whatever the layers are: their loss says more than that of zeros."""
    for name, module in model.named_modules():
        name = name.removeprefix("base_model.model.")
        a, b, transposed = _factors(module)
        if a is not None and b is not None:
            generator = seeded_generator(SEED, name)
            for factor in (a, b):
                shape = factor.T.shape if transposed else factor.shape
                values = torch.empty(shape).normal_(std=0.02, generator=generator)
                factor.copy_(values.T if transposed else values)


def _factors(module: Any) -> tuple[Tensor | None, Tensor | None, bool]:
    if isinstance(module, LoraLinear):
        return module.lora_A, module.lora_B, False
    if isinstance(module, ChatLora):
        return module.right, module.left, True
    if type(module).__module__.startswith("peft.tuners.lora"):
        factors = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        if all(isinstance(each, nn.ModuleDict) for each in factors):
            first, second = (each["default"].weight for each in factors)  # type: ignore[index]
            return first, second, False
    return None, None, False


def answer(connection: Any, build: Callable[[Task], Contender], task: Task) -> None:
    """Build a contender, then take a step each time "step" comes, until "stop" does.

    Sends :class:`Ready`, a :class:`Work` for each step, last the peak memory in bytes above what
    the imported libraries take; a text where something fails.
    """
    torch.set_num_threads(task.threads)
    libraries = psutil.Process().memory_info().rss
    try:
        contender = build(task)
        draw_adapters_(contender.model)
        loss = contender.loss(list(range(min(CHECKED, len(task.samples)))))
        for _ in range(WARM_UPS):
            contender.step()
        forget_peak()
        connection.send(Ready(loss, contender.reference_seconds))
        ended = time.process_time()
        while connection.recv() == "step":
            idle = time.process_time() - ended
            connection.send(replace(_timed(contender), idle_cpu_seconds=idle))
            ended = time.process_time()
        connection.send(peak_bytes() - (libraries if device().type == "cpu" else 0))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}"[:500])
        raise


def _timed(contender: Contender) -> Work:
    synchronize(device())
    start, cpu = time.perf_counter(), time.process_time()
    work = contender.step()
    synchronize(device())
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return replace(work, seconds=seconds, cpu_seconds=cpu_seconds)
