"""Ways to train on pairs, each in a process of its own that does a step when asked.

DeepSpeed-Chat's way is written anew here, from what its step 2 does: it is no run of its code.
Its optimizer, without DeepSpeed's engine around it, costs less than the original's.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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
    Kind,
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
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.stages import DpoConfig, RewardConfig
from dschat_lora.data.batch import PairCollator, PairLayout
from dschat_lora.data.loader import StepLoader, make_rows
from dschat_lora.data.samples import PairSample, TokenSet, write_samples
from dschat_lora.engine.distributed import device
from dschat_lora.engine.process_group import init_distributed
from dschat_lora.engine.zero import Snapshot
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.supervised.dpo_reference import WithReference, logprobs_at, reference_logprobs
from dschat_lora.supervised.loop import evaluate, train_steps
from dschat_lora.supervised.pair_objectives import dpo_objective, reward_objective

BETA = 0.1


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
        lora = LoraConfig(lora_dim=task.size.lora_dim, lora_alpha=ALPHA, modules_to_save=head)
        apply_lora(self.model, lora, seed=SEED)
        network = (RewardModel if task.kind == "reward" else CausalLMLogprobs)(self.model)
        self.engine = make_engine(
            network, task, micro_batch=task.micro_batch, accumulation=task.accumulation
        )
        self._collate = PairCollator(PAD_ID, layout)
        self._directory = tempfile.TemporaryDirectory()
        tokens = self._stored(task.samples)
        capacity = 2 * task.size.max_seq_len
        lengths = self._collate.counts(tokens).positions
        rows = make_rows(lengths, max_seq_len=capacity, packing=packing, seed=SEED)
        micro, _ = task.rows_like_samples(len(rows))
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
        self._steps = train_steps(self.engine, whole_windows(loader), self._objective, repeat(1.0))

    def _stored(self, pairs: list[PairSample]) -> TokenSet:
        path = Path(self._directory.name) / "pairs.arrow"
        write_samples(path, pairs, "pairs")
        return TokenSet.read(path, "pairs")

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
            share={"rank": 0, "world_size": 1},
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


class DeepSpeedChat:
    """DeepSpeed-Chat's way: both sequences padded to the longest allowed, stacked (2 B, T)."""

    def __init__(self, task: Task) -> None:
        self._task, self.reference_seconds = task, None
        self.model = chat_model(task)
        self._reference = base_model(task) if task.kind == "dpo" else None
        if task.kind == "reward":
            self.model.score.requires_grad_(True)
        self._steps = ChatSteps(self.model)
        self._windows = task.windows(len(task.samples), task.micro_batch, task.accumulation)
        # Its data set keeps every sequence padded.
        self._padded = [(self._pad(p.chosen), self._pad(p.rejected)) for p in task.samples]
        self._prompts = [pair.prompt_length for pair in task.samples]

    def step(self) -> Work:
        """The next optimizer step."""
        window = next(self._windows)
        self._steps.step([partial(self._loss, micro) for micro in window])
        pairs = sum(map(len, window))
        return Work(pairs, 2 * pairs * self._task.size.max_seq_len)

    @torch.no_grad()
    def loss(self, pairs: list[int]) -> float:
        """Mean loss of pairs."""
        return float(self._loss(pairs))

    def _pad(self, ids: Any) -> Tensor:
        padded = torch.full((self._task.size.max_seq_len,), PAD_ID)
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
        self._task, self.reference_seconds = task, None
        self._directory = tempfile.TemporaryDirectory()
        self._steps = TrlSteps(self._make_trainer(task, precompute))
        self.model = self._steps.trainer.model
        self._windows = task.windows(len(task.samples), task.micro_batch, task.accumulation)

    def _make_trainer(self, task: Task, precompute: bool) -> Any:
        from datasets import Dataset
        from peft import LoraConfig as PeftConfig
        from trl import DPOConfig as TrlDpoConfig
        from trl import DPOTrainer, RewardTrainer
        from trl import RewardConfig as TrlRewardConfig

        reward = task.kind == "reward"
        options = trl_options(task, self._directory.name)
        peft = PeftConfig(
            r=task.size.lora_dim,
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
                for p in task.samples
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
            for p in task.samples
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
        window = next(self._windows)
        return Work(sum(map(len, window)), self._steps.step(window))

    def loss(self, pairs: list[int]) -> float:
        """Mean loss of pairs."""
        return self._steps.loss([self._steps.examples[number] for number in pairs])


CONTENDERS: dict[Kind, dict[str, Callable[[Task], Contender]]] = {
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


def serve(connection: Any, name: str, task: Task) -> None:
    """Be a contender of the task's kind; see :func:`benchmarks.contenders.common.answer`."""
    answer(connection, CONTENDERS[task.kind][name], task)
