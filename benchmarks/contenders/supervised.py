"""Ways to fine-tune and to train on pairs, each in a process that does a step when asked.

DeepSpeed-Chat's way is written anew here, from what its steps 1 and 2 do: it is no run of its
code. Its optimizer, without DeepSpeed's engine around it, costs less than the original's.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from benchmarks.common.engine import make_engine
from benchmarks.common.pair_data import PAD_ID, load_tokenizer
from benchmarks.common.turns import Work
from benchmarks.contenders.common import (
    ALPHA,
    CHAT,
    LINEARS,
    OURS,
    RATE,
    SEED,
    ChatSteps,
    Contender,
    Kind,
    Task,
    TrlSteps,
    base_model,
    chat_model,
    trl_options,
    whole_windows,
)
from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.stages import DpoConfig, RewardConfig
from dschat_lora.data.batch import PairCollator, PairLayout, SampleCollator
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.packing import PackedRows, make_rows
from dschat_lora.data.samples import PairSample, SequenceSample, TokenSet, write_samples
from dschat_lora.engine.distributed import device
from dschat_lora.engine.process_group import init_distributed
from dschat_lora.engine.zero import Snapshot
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.supervised.dpo_reference import WithReference, logprobs_at, reference_logprobs
from dschat_lora.supervised.loop import evaluate, queue_steps
from dschat_lora.supervised.objectives import SUPERVISED, Objective
from dschat_lora.supervised.pair_objectives import dpo_objective, reward_objective

BETA = 0.1
NETWORKS = {"sft": CausalLMLoss, "reward": RewardModel, "dpo": CausalLMLogprobs}


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
        self._task, self.model = task, base_model(task)
        head = ("score",) if task.kind == "reward" else ()
        lora = LoraConfig(lora_dim=task.size.lora_dim, lora_alpha=ALPHA, modules_to_save=head)
        apply_lora(self.model, lora, seed=SEED)
        is_sft = task.kind == "sft"
        self._collate = SampleCollator(PAD_ID) if is_sft else PairCollator(PAD_ID, layout)
        self._directory = tempfile.TemporaryDirectory()
        path, kind = Path(self._directory.name) / "rows.arrow", "samples" if is_sft else "pairs"
        write_samples(path, task.samples, kind)
        self._samples = TokenSet.read(path, kind)
        rows = make_rows(
            self._collate.counts(self._samples).positions,
            max_seq_len=(1 if is_sft else 2) * task.size.max_seq_len,
            packing=packing,
            seed=SEED,
        )
        micro, accumulation = task.rows_like_samples(len(rows))
        self.engine = make_engine(
            self.model,
            network=NETWORKS[task.kind](self.model),
            dtype=task.dtype,
            rows=micro,
            accumulation_steps=accumulation,
            rate=RATE,
        )
        self._objective = self._make_objective(rows, micro, cached=cached_reference)
        loader = StepLoader(
            self._samples,
            rows=rows,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            rank=0,
            world_size=1,
            seed=SEED,
            collate=self._collate,
        )
        windows, rates = whole_windows(loader), repeat(1.0)
        self._steps = queue_steps(self.engine, windows, self._objective, rates)

    def _make_objective(self, rows: PackedRows, micro: int, *, cached: bool) -> Objective:
        if self._task.kind == "sft":
            return SUPERVISED
        if self._task.kind == "reward":
            return reward_objective(RewardConfig())
        if not cached:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            reference = partial(logprobs_at, Snapshot(trained), self.engine)
            return dpo_objective(DpoConfig(beta=BETA), reference)
        known = reference_logprobs(
            self.engine,
            self._samples,
            rows=rows,
            collate=self._collate,
            batch_size=micro,
            share={"rank": 0, "world_size": 1},
            cache=Path(self._directory.name),
            identity="benchmark",
        )
        self._samples = WithReference(self._samples, known)
        return dpo_objective(DpoConfig(beta=BETA), lambda batch: batch.reference)

    def step(self) -> Work:
        """The next optimizer step."""
        counts = next(self._steps)().counts
        is_sft = self._task.kind == "sft"
        return Work(counts.num_tokens if is_sft else counts.num_samples, counts.num_positions)

    def loss(self, samples: list[int]) -> float:
        """Mean loss of pairs, or per supervised token of samples."""
        batch = self._collate([[self._samples[number]] for number in samples])
        return evaluate(self.engine, [batch], self._objective).loss


class DeepSpeedChat:
    """DeepSpeed-Chat's way: sequences padded to the longest allowed, all logits.

    Both sequences of a pair are stacked (2 B, T). The loss of step 1 is over prompts too.
    Recomputation is an option of its, off by default.
    """

    def __init__(self, task: Task, *, recompute: bool = False) -> None:
        self._task, self.model = task, chat_model(task)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": True})
            self.model.enable_input_require_grads()
        self._reference = base_model(task) if task.kind == "dpo" else None
        if task.kind == "reward":
            self.model.score.requires_grad_(True)
        self._steps = ChatSteps(self.model)
        self._windows = task.windows(len(task.samples), task.micro_batch, task.accumulation)
        names = ("input_ids",) if task.kind == "sft" else ("chosen", "rejected")
        # Its data set keeps every sequence padded.
        self._padded = [
            [self._pad(getattr(sample, name), PAD_ID) for sample in task.samples] for name in names
        ]
        losses = {"sft": self._sft_loss, "reward": self._reward_loss, "dpo": self._dpo_loss}
        self._loss = losses[task.kind]

    def step(self) -> Work:
        """The next optimizer step."""
        window = next(self._windows)
        self._steps.step([partial(self._loss, micro) for micro in window])
        numbers = [number for micro in window for number in micro]
        positions = len(self._padded) * len(numbers) * self._task.size.max_seq_len
        return Work(self._task.amount(numbers), positions)

    @torch.no_grad()
    def loss(self, samples: list[int]) -> float:
        """Mean loss of pairs, or per token of samples that the others learn from."""
        if self._task.kind != "sft":
            return float(self._loss(samples))
        labels = [self._pad(self._task.samples[n].labels, IGNORE_INDEX) for n in samples]
        return float(self._sft_loss(samples, torch.stack(labels).to(device())))

    def _pad(self, values: np.ndarray, padding: int) -> Tensor:
        padded = torch.full((self._task.size.max_seq_len,), padding)
        padded[: len(values)] = torch.from_numpy(values.astype(np.int64))
        return padded

    def _rows(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids, of pairs all chosen ones first, and the mask."""
        ids = torch.stack([kind[number] for kind in self._padded for number in samples])
        ids = ids.to(device())
        return ids, (ids != PAD_ID).long()

    def _sft_loss(self, samples: Sequence[int], labels: Tensor | None = None) -> Tensor:
        ids, mask = self._rows(samples)
        if labels is None:
            labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        output = self.model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        loss: Tensor = output.loss
        return loss

    def _reward_loss(self, pairs: Sequence[int]) -> Tensor:
        ids, mask = self._rows(pairs)
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        return _loop_loss(ids, self.model.score(hidden).squeeze(-1))

    def _dpo_loss(self, pairs: Sequence[int]) -> Tensor:
        ids, mask = self._rows(pairs)
        prompts = [self._task.samples[number].prompt_length for number in pairs]
        starts = torch.tensor(prompts * 2, device=ids.device)
        answers = (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None]) & (mask > 0)
        own = _full_logprobs(self.model, ids, mask, answers)
        with torch.no_grad():
            reference = _full_logprobs(self._reference, ids, mask, answers)
        better, worse = (own - reference).chunk(2)
        return -F.logsigmoid(BETA * (better - worse)).mean()


def _loop_loss(ids: Tensor, scores: Tensor) -> Tensor:
    """Its loss per token, pair by pair in Python, waiting for the device several times each."""
    half, length = len(ids) // 2, ids.shape[1]
    loss = scores.new_zeros(())
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


def _full_logprobs(model: nn.Module, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    """(2 B,) sums over the answers, from all logits."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logprobs * answers[:, 1:]).sum(1)


class Trl:
    """TRL's trainer over a PEFT model: its collator and ``training_step``, AdamW after them.

    Its defaults of bf16 and recomputation are off where the task is in fp32, and tokenisation,
    data loader, logging and callbacks are left out.
    """

    def __init__(
        self,
        task: Task,
        *,
        packing: Literal["wrapped", "bfd"] | None = None,
        precompute: bool = False,
    ) -> None:
        self._task, self._directory = task, tempfile.TemporaryDirectory()
        self._rows = [_trl_row(task.kind, sample) for sample in task.samples]
        self._steps = TrlSteps(self._make_trainer(packing, precompute))
        self.model: PreTrainedModel = self._steps.trainer.model
        num_rows = len(self._steps.examples)
        self._windows = task.windows(num_rows, *task.rows_like_samples(num_rows))

    def _make_trainer(self, packing: str | None, precompute: bool) -> Trainer:
        import trl
        from datasets import Dataset, disable_progress_bars
        from peft import LoraConfig as PeftConfig

        disable_progress_bars()

        class Tokenized(trl.DPOTrainer):
            """TRL's, on pairs that are tokenised already."""

            def _prepare_dataset(self, dataset: Dataset, *_: object, **__: object) -> Dataset:
                return dataset

        task = self._task
        options = trl_options(
            task.dtype,
            self._directory.name,
            max_length=task.size.max_seq_len,
            per_device_train_batch_size=task.micro_batch,
            gradient_accumulation_steps=task.accumulation,
        )
        if packing is not None:
            options |= {"packing": True, "packing_strategy": packing}
        if task.kind == "dpo":
            options |= {"beta": BETA, "precompute_ref_log_probs": precompute}
        is_reward = task.kind == "reward"
        make, arguments = {
            "sft": (trl.SFTTrainer, trl.SFTConfig),
            "reward": (trl.RewardTrainer, trl.RewardConfig),
            "dpo": (Tokenized, trl.DPOConfig),
        }[task.kind]
        path = Path(self._directory.name) / "rows"
        Dataset.from_list(self._rows).save_to_disk(path)
        return make(
            model=base_model(task),
            args=arguments(**options),
            train_dataset=Dataset.load_from_disk(path),
            processing_class=load_tokenizer(task.tokenizer),
            peft_config=PeftConfig(
                r=task.size.lora_dim,
                lora_alpha=ALPHA,
                target_modules=list(LINEARS),
                modules_to_save=["score"] if is_reward else None,
                task_type="SEQ_CLS" if is_reward else "CAUSAL_LM",
            ),
        )

    def step(self) -> Work:
        """The next optimizer step."""
        window = next(self._windows)
        rows = [self._steps.examples[number] for micro in window for number in micro]
        is_sft = self._task.kind == "sft"
        amount = sum(len(row["input_ids"]) for row in rows) if is_sft else len(rows)
        return Work(amount, self._steps.step(window))

    def loss(self, samples: list[int]) -> float:
        """Mean loss; of samples each by itself, as packed ones would mix."""
        if self._task.kind != "sft":
            return self._steps.loss([self._steps.examples[number] for number in samples])
        targets = [self._task.samples[number].num_supervised for number in samples]
        losses = [self._steps.loss([self._rows[number]]) for number in samples]
        return float(np.average(losses, weights=targets))


def _trl_row(kind: Kind, sample: SequenceSample | PairSample) -> dict[str, list[int]]:
    """A sample as its own preparation leaves it."""
    if isinstance(sample, SequenceSample):
        arrays = {"input_ids": sample.input_ids, "labels": sample.labels}
    elif kind == "reward":
        arrays = {"chosen_ids": sample.chosen, "rejected_ids": sample.rejected}
    else:
        start = sample.prompt_length
        answers = {"chosen_ids": sample.chosen[start:], "rejected_ids": sample.rejected[start:]}
        arrays = {"prompt_ids": sample.prompt, **answers}
    return {name: array.tolist() for name, array in arrays.items()}


CONTENDERS: dict[Kind, dict[str, Callable[[Task], Contender]]] = {
    "sft": {
        OURS: partial(Ours, packing=True),
        f"{OURS}, no-packing": Ours,
        CHAT: DeepSpeedChat,
        f"{CHAT}, recomputing": partial(DeepSpeedChat, recompute=True),
        "TRL, dynamic padding": Trl,
        "TRL, packing wrapped": partial(Trl, packing="wrapped"),
        "TRL, packing bfd": partial(Trl, packing="bfd"),
    },
    "reward": {
        OURS: Ours,
        f"{OURS}, packing": partial(Ours, packing=True),
        f"{OURS}, no-share_prompt": partial(Ours, layout="separate"),
        CHAT: DeepSpeedChat,
        "TRL": Trl,
    },
    "dpo": {
        OURS: Ours,
        f"{OURS}, packing": partial(Ours, packing=True),
        f"{OURS}, reference each time": partial(Ours, cached_reference=False),
        CHAT: DeepSpeedChat,
        "TRL, precomputed": partial(Trl, precompute=True),
        "TRL, reference each time": Trl,
    },
}
