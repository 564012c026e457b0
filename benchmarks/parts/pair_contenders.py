"""Ways to train on pairs, each in a process of its own that does a step when asked.

DeepSpeed-Chat's way is written anew here, from what its step 2 does: it is no run of its code.
Its optimizer, without DeepSpeed's engine around it, costs less than the original's.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OPTConfig

from benchmarks.parts.pair_data import PAD_ID, load_tokenizer
from benchmarks.parts.turns import forget_peak, peak_bytes
from dschat_lora.config import DpoConfig, LoraConfig, ModelConfig, OptimConfig, RewardConfig
from dschat_lora.data.batch import PairCollator, PairLayout
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.order import permutation
from dschat_lora.data.packing import make_rows
from dschat_lora.data.store import TokenSet, write_samples
from dschat_lora.data.tokenize import PairSample
from dschat_lora.engine.build import DTYPES, EngineSettings, TrainEngine
from dschat_lora.engine.distributed import device, init_distributed
from dschat_lora.engine.zero import Snapshot
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import apply_lora, seeded_generator
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.causal_lm import CausalLMLogprobs, load_causal_lm
from dschat_lora.models.reward_model import RewardModel, load_reward_model
from dschat_lora.objective import dpo_objective, reward_objective
from dschat_lora.perf.peak import synchronize
from dschat_lora.reference import WithReference, logprobs_at, reference_logprobs
from dschat_lora.trainer import evaluate, train_steps

SEED = 0
ALPHA = 32.0
BETA = 0.1
RATE = 1e-5
CHECKED_PAIRS = 8
# DeepSpeed-Chat's names of the layers inside "decoder.layers."; all six linear layers of OPT.
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
Kind = Literal["reward", "dpo"]


@dataclass(frozen=True)
class Task:
    """What all ways train: the same weights, pairs and adapters.

    Attributes:
        kind: reward model or DPO.
        hidden_size, num_layers, num_heads, vocab_size: of an OPT decoder.
        lora_dim: r, on all six linear layers of each block.
        max_seq_len: tokens of the longest sequence.
        pairs, tokenizer: from :mod:`benchmarks.parts.pair_data`.
        micro_batch: pairs. accumulation: micro-batches of a step.
        dtype: of the base. threads: of a CPU.
    """

    kind: Kind
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    lora_dim: int
    max_seq_len: int
    pairs: list[PairSample]
    tokenizer: str
    micro_batch: int
    accumulation: int
    dtype: str
    threads: int

    def windows(self) -> Iterator[list[list[int]]]:
        """Pair numbers of each micro-batch of each step, in the order in which ours takes them."""
        per_step = self.micro_batch * self.accumulation
        for epoch in count():
            order = permutation(len(self.pairs), "epoch", SEED, epoch).tolist()
            for first in range(0, len(order) - per_step + 1, per_step):
                window = order[first : first + per_step]
                size = self.micro_batch
                yield [window[i : i + size] for i in range(0, per_step, size)]


@dataclass(frozen=True)
class Work:
    """What a step went through."""

    pairs: int
    positions: int  # with padding
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Ready:
    """A contender before its first step.

    Attributes:
        loss: of the first pairs, adapters drawn at random.
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

    def loss(self, pairs: list[int]) -> float:
        """Mean loss of pairs."""


def base_model(task: Task) -> Any:
    """The base on its device, weights drawn there: the same for all."""
    config = OPTConfig(
        hidden_size=task.hidden_size,
        word_embed_proj_dim=task.hidden_size,
        num_hidden_layers=task.num_layers,
        num_attention_heads=task.num_heads,
        ffn_dim=4 * task.hidden_size,
        vocab_size=task.vocab_size,
        max_position_embeddings=max(512, task.max_seq_len),
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
    model.to_empty(device=device())
    model.tie_weights()
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


class Ours:
    """The package: its loader, engine, objective and training loop."""

    def __init__(
        self,
        task: Task,
        *,
        layout: PairLayout = "shared",
        packing: bool = False,
        cached_reference: bool = True,
    ) -> None:
        init_distributed()
        self.model = base_model(task)
        head = ("score",) if task.kind == "reward" else ()
        lora = LoraConfig(lora_dim=task.lora_dim, lora_alpha=ALPHA, modules_to_save=head)
        apply_lora(self.model, lora, seed=SEED)
        network = (RewardModel if task.kind == "reward" else CausalLMLogprobs)(self.model)
        optim = OptimConfig(lora_learning_rate=RATE)
        settings = EngineSettings(
            dtype=task.dtype,
            zero_stage=0,
            offload=False,
            micro_batch_size=task.micro_batch,
            accumulation_steps=task.accumulation,
            max_grad_norm=1.0,
            betas=(optim.adam_beta1, optim.adam_beta2),
            epsilon=optim.adam_epsilon,
            deepspeed_json={},
        )
        self.engine = TrainEngine(network, parameter_groups(self.model, optim), settings)
        self._collate = PairCollator(PAD_ID, layout)
        self._directory = tempfile.TemporaryDirectory()
        tokens = self._stored(task.pairs)
        capacity = 2 * task.max_seq_len
        lengths = self._collate.lengths(tokens)
        rows = make_rows(lengths, max_seq_len=capacity, packing=packing, seed=SEED)
        fill = len(tokens) / len(rows) if packing else 1
        micro = max(1, round(task.micro_batch / fill))
        self.reference_seconds: float | None = None
        self._samples: Any = tokens
        self._set_objective(task, tokens, rows, micro, cached=cached_reference)
        loader = StepLoader(
            self._samples,
            rows=rows,
            micro_batch_size=micro,
            gradient_accumulation_steps=task.accumulation,
            rank=0,
            world_size=1,
            seed=SEED,
            collate=self._collate,
        )
        # Whole steps alone: the last one of an epoch may be short.
        whole = len(rows) // loader.rows_per_step
        assert whole, "too few pairs for a step"
        windows = (
            window
            for epoch in count()
            for number, window in enumerate(loader.epoch(epoch))
            if number < whole
        )
        self._steps = train_steps(self.engine, windows, self._objective, repeat(1.0))

    def _stored(self, pairs: list[PairSample]) -> TokenSet:
        path = Path(self._directory.name) / "pairs.arrow"
        write_samples(path, pairs, "pairs")
        return TokenSet(path, "pairs")

    def _set_objective(
        self, task: Task, tokens: TokenSet, rows: Any, micro: int, *, cached: bool
    ) -> None:
        if task.kind == "reward":
            self._objective = reward_objective(RewardConfig())
            return
        config = DpoConfig(beta=BETA)
        if not cached:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            reference = partial(logprobs_at, Snapshot(trained), self.engine)
            self._objective = dpo_objective(config, reference)
            return
        start = time.perf_counter()
        known = reference_logprobs(
            self.engine,
            tokens,
            rows=rows,
            collate=self._collate,
            batch_size=micro,
            cache=Path(self._directory.name),
            identity="benchmark",
        )
        self.reference_seconds = time.perf_counter() - start
        self._samples = WithReference(tokens, known)
        self._objective = dpo_objective(config, lambda batch: batch.reference)

    def step(self) -> Work:
        """The next optimizer step."""
        counts = next(self._steps).counts
        return Work(counts.num_samples, counts.num_positions)

    def loss(self, pairs: list[int]) -> float:
        """Mean loss of pairs."""
        batch = self._collate([[self._samples[number]] for number in pairs])
        return evaluate(self.engine, [batch], self._objective).loss


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


class DeepSpeedChat:
    """DeepSpeed-Chat's way: both sequences padded to the longest allowed, stacked (2 B, T)."""

    def __init__(self, task: Task) -> None:
        self._task, self.reference_seconds = task, None
        self.model = base_model(task)
        self._reference = deepcopy(self.model) if task.kind == "dpo" else None
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for layer in self.model.base_model.decoder.layers:
            for name in LINEARS:
                owner = layer.self_attn if name.endswith("_proj") else layer
                lora = ChatLora(getattr(owner, name), task.lora_dim, ALPHA / task.lora_dim)
                setattr(owner, name, lora)
        if task.kind == "reward":
            self.model.score.requires_grad_(True)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(self._trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._windows = task.windows()
        # Its data set keeps every sequence padded.
        self._padded = [(self._pad(p.chosen), self._pad(p.rejected)) for p in task.pairs]
        self._prompts = [pair.prompt_length for pair in task.pairs]

    def step(self) -> Work:
        """The next optimizer step."""
        self.model.train()
        window, positions = next(self._windows), 0
        for micro in window:
            loss = self._loss(micro)
            (loss / len(window)).backward()
            positions += 2 * len(micro) * self._task.max_seq_len
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._adam.step()
        self._adam.zero_grad()
        return Work(sum(map(len, window)), positions)

    @torch.no_grad()
    def loss(self, pairs: list[int]) -> float:
        """Mean loss of pairs."""
        return float(self._loss(pairs))

    def _pad(self, ids: Any) -> Tensor:
        padded = torch.full((self._task.max_seq_len,), PAD_ID)
        padded[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
        return padded

    def _loss(self, pairs: list[int]) -> Tensor:
        chosen, rejected = zip(*(self._padded[number] for number in pairs), strict=True)
        ids = torch.stack([*chosen, *rejected]).to(device())
        mask = (ids != PAD_ID).long()
        if self._task.kind == "reward":
            hidden = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            return _loop_loss(ids, self.model.score(hidden).squeeze(-1))
        starts = torch.tensor([self._prompts[number] for number in pairs] * 2, device=ids.device)
        answers = (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None]) & (mask > 0)
        own = _full_logprobs(self.model, ids, mask, answers)
        with torch.no_grad():
            reference = _full_logprobs(self._reference, ids, mask, answers)
        better, worse = (own - reference).chunk(2)
        return -F.logsigmoid(BETA * (better - worse)).mean()


def _loop_loss(ids: Tensor, scores: Tensor) -> Tensor:
    """Its loss per token, pair by pair in Python, waiting for the device several times each."""
    half, length = len(ids) // 2, ids.shape[1]
    loss: Any = 0.0
    ends = []
    for chosen, rejected, better, worse in zip(
        ids[:half], ids[half:], scores[:half], scores[half:], strict=True
    ):
        paddings = [(each == PAD_ID).nonzero() for each in (chosen, rejected)]
        first, second = (p[0].item() if len(p) else length for p in paddings)
        apart = (chosen != rejected).nonzero()
        end, begin = (max(first, second), apart[0].item()) if len(apart) else (length, length - 1)
        assert begin > 0
        ends.append((better[first - 1], worse[second - 1]))
        loss = loss - F.logsigmoid(better[begin:end] - worse[begin:end]).mean()
    return loss / half


def _full_logprobs(model: Any, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    """(2 B,) sums over the answers, from all logits."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logprobs * answers[:, 1:]).sum(1)


class Trl:
    """TRL's trainer over a PEFT model: its collator and ``training_step``, AdamW after them.

    Its defaults of bf16 and recomputation are off where the task is in fp32, and tokenisation is
    left out. Its data loader, logging and callbacks are left out too.
    """

    def __init__(self, task: Task, *, precompute: bool = False) -> None:
        # A group of one process would have it wrap the model for distributed training.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        self._task, self.reference_seconds = task, None
        self._directory = tempfile.TemporaryDirectory()
        self._trainer: Any = self._make_trainer(task, precompute)
        self._trainer.create_optimizer_and_scheduler(10**6)
        accelerator = self._trainer.accelerator
        model, optimizer = accelerator.prepare(self._trainer.model, self._trainer.optimizer)
        self.model = self._trainer.model
        self._prepared, self._optimizer = model, optimizer
        self._trainer.model_wrapped = model
        self._trainer.current_gradient_accumulation_steps = task.accumulation
        self._examples = list(self._trainer.train_dataset)
        self._windows = task.windows()

    def _make_trainer(self, task: Task, precompute: bool) -> Any:
        from datasets import Dataset
        from peft import LoraConfig as PeftConfig
        from trl import DPOConfig as TrlDpoConfig
        from trl import DPOTrainer, RewardTrainer
        from trl import RewardConfig as TrlRewardConfig

        reward = task.kind == "reward"
        options = {
            "output_dir": self._directory.name,
            "per_device_train_batch_size": task.micro_batch,
            "gradient_accumulation_steps": task.accumulation,
            "learning_rate": RATE,
            "max_length": task.max_seq_len,
            "bf16": task.dtype == "bf16",
            "fp16": task.dtype == "fp16",
            "gradient_checkpointing": False,
            "use_cpu": device().type == "cpu",
            "report_to": "none",
            "disable_tqdm": True,
        }
        peft = PeftConfig(
            r=task.lora_dim,
            lora_alpha=ALPHA,
            target_modules=list(LINEARS),
            modules_to_save=["score"] if reward else None,
            task_type="SEQ_CLS" if reward else "CAUSAL_LM",
        )
        common = {
            "model": base_model(task),
            "processing_class": load_tokenizer(task.tokenizer),
            "peft_config": peft,
        }
        if reward:
            rows = [
                {"chosen_ids": p.chosen.tolist(), "rejected_ids": p.rejected.tolist()}
                for p in task.pairs
            ]
            data = Dataset.from_list(rows)
            return RewardTrainer(args=TrlRewardConfig(**options), train_dataset=data, **common)

        class Tokenized(DPOTrainer):
            """TRL's, on pairs that are tokenised already."""

            def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
                return dataset

            def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = super()._precompute_ref_logps(*args, **kwargs)
                seconds.append(time.perf_counter() - start)
                return result

        seconds: list[float] = []
        rows = [
            {
                "prompt_ids": p.prompt.tolist(),
                "chosen_ids": p.chosen[p.prompt_length :].tolist(),
                "rejected_ids": p.rejected[p.prompt_length :].tolist(),
            }
            for p in task.pairs
        ]
        options |= {"beta": BETA, "precompute_ref_log_probs": precompute}
        path = Path(self._directory.name) / "rows"
        Dataset.from_list(rows).save_to_disk(path)
        trainer = Tokenized(
            args=TrlDpoConfig(**options), train_dataset=Dataset.load_from_disk(path), **common
        )
        self.reference_seconds = seconds[0] if seconds else None
        return trainer

    def step(self) -> Work:
        """The next optimizer step."""
        window, positions = next(self._windows), 0
        for micro in window:
            inputs = self._trainer.data_collator([self._examples[number] for number in micro])
            positions += inputs["input_ids"].numel()
            self._trainer.training_step(self._prepared, inputs)
        self._trainer.accelerator.clip_grad_norm_(self._prepared.parameters(), 1.0)
        self._optimizer.step()
        self._prepared.zero_grad()
        return Work(sum(map(len, window)), positions)

    @torch.no_grad()
    def loss(self, pairs: list[int]) -> float:
        """Mean loss of pairs."""
        inputs = self._trainer.data_collator([self._examples[number] for number in pairs])
        inputs = self._trainer._prepare_inputs(inputs)
        return float(self._trainer.compute_loss(self._prepared, inputs))


OURS, CHAT = "ours", "DeepSpeed-Chat's way"
CONTENDERS: dict[Kind, dict[str, Any]] = {
    "reward": {
        OURS: Ours,
        "ours, packing": partial(Ours, packing=True),
        "ours, no-share_prompt": partial(Ours, layout="separate"),
        CHAT: DeepSpeedChat,
        "TRL": Trl,
    },
    "dpo": {
        OURS: Ours,
        "ours, packing": partial(Ours, packing=True),
        "ours, reference each time": partial(Ours, cached_reference=False),
        CHAT: DeepSpeedChat,
        "TRL, precomputed": partial(Trl, precompute=True),
        "TRL, reference each time": Trl,
    },
}


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


def serve(connection: Any, name: str, task: Task) -> None:
    """Build a contender, then take a step each time "step" comes, until "stop" does.

    Sends :class:`Ready`, a :class:`Work` for each step, last the peak memory in bytes above what
    the imported libraries take; a text where something fails.
    """
    torch.set_num_threads(task.threads)
    libraries = psutil.Process().memory_info().rss
    try:
        contender: Contender = CONTENDERS[task.kind][name](task)
        draw_adapters_(contender.model)
        loss = contender.loss(list(range(min(CHECKED_PAIRS, len(task.pairs)))))
        contender.step()  # warm-up
        forget_peak()
        connection.send(Ready(loss, contender.reference_seconds))
        while connection.recv() == "step":
            connection.send(_timed(contender))
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
