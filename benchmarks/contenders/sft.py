"""Ways to fine-tune, each in a process of its own that does a step when asked.

DeepSpeed-Chat's way is written anew here, from what its step 1 does: it is no run of its code.
Its optimizer, without DeepSpeed's engine around it, costs less than the original's.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.common.pair_data import PAD_ID, load_tokenizer
from benchmarks.contenders.common import (
    ALPHA,
    CHAT,
    LINEARS,
    OURS,
    SEED,
    ChatSteps,
    Contender,
    Task,
    TrlSteps,
    Work,
    answer,
    base_model,
    chat_model,
    make_engine,
    trl_options,
    whole_windows,
)
from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import StepLoader, make_rows
from dschat_lora.data.samples import TokenSet, write_samples
from dschat_lora.engine.distributed import device
from dschat_lora.engine.process_group import init_distributed
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.supervised.loop import evaluate, train_steps
from dschat_lora.supervised.objectives import SUPERVISED


class Ours:
    """The package: its loader, engine, objective and training loop."""

    reference_seconds = None

    def __init__(self, task: Task, *, packing: bool = True) -> None:
        init_distributed()
        self.model = base_model(task)
        apply_lora(self.model, LoraConfig(lora_dim=task.size.lora_dim, lora_alpha=ALPHA), seed=SEED)
        self._collate = SampleCollator(PAD_ID)
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name) / "samples.arrow"
        write_samples(path, task.samples, "samples")
        self._samples = TokenSet.read(path, "samples")
        lengths = self._samples.lengths
        rows = make_rows(lengths, max_seq_len=task.size.max_seq_len, packing=packing, seed=SEED)
        micro_batch, accumulation = task.rows_like_samples(len(rows))
        self.engine = make_engine(
            CausalLMLoss(self.model), task, micro_batch=micro_batch, accumulation=accumulation
        )
        loader = StepLoader(
            self._samples,
            rows=rows,
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            rank=0,
            world_size=1,
            seed=SEED,
            collate=self._collate,
        )
        self._steps = train_steps(self.engine, whole_windows(loader), SUPERVISED, repeat(1.0))

    def step(self) -> Work:
        """The next optimizer step."""
        counts = next(self._steps).counts
        return Work(counts.num_tokens, counts.num_positions)

    def loss(self, samples: list[int]) -> float:
        """Mean loss per supervised token of samples, all in a row."""
        batch = self._collate([[self._samples[number] for number in samples]])
        return evaluate(self.engine, [batch], SUPERVISED).loss


class DeepSpeedChat:
    """DeepSpeed-Chat's way: samples padded to the longest allowed, and all logits.

    Its loss is over prompts too. Recomputation is an option of its, off by default.
    """

    reference_seconds = None

    def __init__(self, task: Task, *, recompute: bool = False) -> None:
        self._task = task
        self.model = chat_model(task)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": True})
            self.model.enable_input_require_grads()
        self._steps = ChatSteps(self.model)
        self._windows = task.windows(len(task.samples), task.micro_batch, task.accumulation)
        # Its data set keeps every sample padded.
        self._ids = [self._padded(sample.input_ids, PAD_ID) for sample in task.samples]
        self._tokens = [len(sample.input_ids) for sample in task.samples]

    def step(self) -> Work:
        """The next optimizer step."""
        window = next(self._windows)
        self._steps.step([partial(self._loss, micro) for micro in window])
        numbers = [number for micro in window for number in micro]
        tokens = sum(self._tokens[number] for number in numbers)
        return Work(tokens, len(numbers) * self._task.size.max_seq_len)

    @torch.no_grad()
    def loss(self, samples: list[int]) -> float:
        """Mean loss of samples per token that the others learn from."""
        self.model.eval()
        labels = [self._padded(self._task.samples[n].labels, IGNORE_INDEX) for n in samples]
        return float(self._loss(samples, torch.stack(labels)))

    def _padded(self, values: Any, padding: int) -> Tensor:
        padded = torch.full((self._task.size.max_seq_len,), padding)
        padded[: len(values)] = torch.from_numpy(values)
        return padded

    def _loss(self, samples: list[int], labels: Tensor | None = None) -> Tensor:
        ids = torch.stack([self._ids[number] for number in samples])
        mask = (ids != PAD_ID).long()
        if labels is None:
            labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        moved = {name: value.to(device()) for name, value in inputs.items()}
        loss: Tensor = self.model(**moved, use_cache=False).loss
        return loss


class Trl:
    """TRL's ``SFTTrainer`` over a PEFT model; the loss is on completions.

    Its defaults of bf16 and recomputation are off where the task is in fp32, and tokenisation,
    data loader, logging and callbacks are left out.
    """

    reference_seconds = None

    def __init__(self, task: Task, *, packing: Literal["wrapped", "bfd"] | None = None) -> None:
        self._task = task
        self._directory = tempfile.TemporaryDirectory()
        # Tokens and labels of each sample, as its own preparation leaves them.
        self._samples = [
            {"input_ids": sample.input_ids.tolist(), "labels": sample.labels.tolist()}
            for sample in task.samples
        ]
        self._steps = TrlSteps(self._make_trainer(packing))
        self.model = self._steps.trainer.model
        rows = [len(row["input_ids"]) for row in self._steps.examples]
        self._tokens = rows
        self._windows = task.windows(len(rows), *task.rows_like_samples(len(rows)))

    def _make_trainer(self, packing: str | None) -> Any:
        from datasets import Dataset, disable_progress_bars
        from peft import LoraConfig as PeftConfig
        from trl import SFTConfig, SFTTrainer

        disable_progress_bars()
        task, options = self._task, trl_options(self._task, self._directory.name)
        if packing is not None:
            options |= {"packing": True, "packing_strategy": packing}
        return SFTTrainer(
            model=base_model(task),
            args=SFTConfig(**options),
            train_dataset=Dataset.from_list(self._samples),
            processing_class=load_tokenizer(task.tokenizer),
            peft_config=PeftConfig(
                r=task.size.lora_dim,
                lora_alpha=ALPHA,
                target_modules=list(LINEARS),
                task_type="CAUSAL_LM",
            ),
        )

    def step(self) -> Work:
        """The next optimizer step."""
        window = next(self._windows)
        positions = self._steps.step(window)
        return Work(sum(self._tokens[row] for micro in window for row in micro), positions)

    def loss(self, samples: list[int]) -> float:
        """Mean loss per supervised token of samples, each by itself: packed ones would mix."""
        targets = [self._task.samples[number].num_supervised for number in samples]
        losses = [self._steps.loss([self._samples[number]]) for number in samples]
        return _weighted_mean(losses, targets)


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    OURS: Ours,
    f"{OURS}, no-packing": partial(Ours, packing=False),
    CHAT: DeepSpeedChat,
    f"{CHAT}, recomputing": partial(DeepSpeedChat, recompute=True),
    "TRL, dynamic padding": Trl,
    "TRL, packing wrapped": partial(Trl, packing="wrapped"),
    "TRL, packing bfd": partial(Trl, packing="bfd"),
}


def serve(connection: Any, name: str, task: Task) -> None:
    """Be a contender; see :func:`benchmarks.contenders.common.answer`."""
    answer(connection, CONTENDERS[name], task)
