"""DeepSpeed-Chat's way to make a PPO iteration.

It is written anew here, from what its step 3 does: it is no run of its code. Its optimizers,
without DeepSpeed's engines around them, cost less than the original's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from benchmarks.common.ppo_task import ALPHA, EOS_ID, PAD_ID, PpoTask, Setting
from benchmarks.contenders.common import RATE, SEED, ChatLora
from benchmarks.contenders.rlhf import (
    CLIP,
    CLIP_REWARD,
    CLIP_VALUE,
    KL_COEF,
    LAM,
    Found,
    IterationWork,
    PhaseClock,
    array,
    bytes_of,
)
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import device


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
        self._width = task.size.max_prompt
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
        everything = [self._actor, self._reference, self._critic, self._reward]
        self.weight_bytes = bytes_of(everything)
        torch.manual_seed(SEED)

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
        return sequences[(sequences[:, self._width :] != PAD_ID).sum(1) > 1]

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
        later = torch.zeros_like(rows.scores)
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
        figures = self._feed(rows)
        for role, adam in self._adams.items():
            norm = nn.utils.clip_grad_norm_(self._trained[role], 1.0)
            figures[f"{role} gradient"] = norm.item()
            adam.step()
            adam.zero_grad()
        return figures

    def _feed(self, rows: Rows) -> dict[str, float]:
        """Backward passes over all micro-batches; mean losses."""
        self._actor.train()
        self._critic.train()
        with torch.no_grad():
            advantages, returns = self._targets(rows)
        micro, total = self._task.size.chat_micro, rows.mask[:, self._width :].sum()
        losses = {"actor loss": 0.0, "critic loss": 0.0}
        for first in range(0, len(rows.ids), micro):
            part = slice(first, first + micro)
            few = Rows(*(getattr(rows, name)[part] for name in Rows.__dataclass_fields__))
            loss = self._actor_loss(few, advantages[part]) / total
            loss.backward()
            losses["actor loss"] += loss.item()
            loss = self._critic_loss(few, returns[part]) / total
            loss.backward()
            losses["critic loss"] += loss.item()
        return losses

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
        return Found(list(responses), {k: array(v) for k, v in tensors.items()}, losses)


def _end(width: int, lengths: Sequence[int], ids: Tensor, scores: Tensor) -> Tensor:
    """Logits with nothing but end-of-sequence left where a response is to end."""
    step = ids.shape[1] - width + 1
    rows = [row for row, length in enumerate(lengths) if length == step]
    if rows:
        scores[rows] = -torch.inf
        scores[rows, EOS_ID] = 0.0
    return scores


def _load(
    task: PpoTask, kind: type[_BaseAutoModelClass], base: str, adapter: str, *, trained: bool
) -> PreTrainedModel:
    """A model with its own copy of the base, its factors in layers of their own or merged."""
    options = {"num_labels": 1, "pad_token_id": PAD_ID} if base == "critic" else {}
    model = kind.from_pretrained(task.path(base), dtype=DTYPES[task.dtype], **options)
    model.to(device()).requires_grad_(False)
    tensors = read_adapter(task.path(adapter)).tensors
    scaling = ALPHA / task.size.actor.lora_dim
    for name in [key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")]:
        a, b = (tensors[f"{name}.lora_{which}"].to(device()) for which in "AB")
        layer = model.get_submodule(name)
        with torch.no_grad():
            if not trained:
                layer.weight += (scaling * (b @ a)).to(layer.weight.dtype)
                continue
            lora = ChatLora(layer, task.size.actor.lora_dim, scaling)
            lora.right.copy_(a.T)
            lora.left.copy_(b.T)
        model.set_submodule(name, lora)
    if base == "critic":
        with torch.no_grad():
            model.score.weight.copy_(tensors["score.trained.weight"])
        model.score.weight.requires_grad_(trained)
    return model.train(trained)


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """(B, L - 1) of the tokens from the second on."""
    every = torch.log_softmax(logits[:, :-1], dim=-1)
    return every.gather(-1, ids[:, 1:, None]).squeeze(-1)


def _token_scores(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: bool) -> Tensor:
    """(B, L) of the head at each position."""
    hidden = model.base_model(input_ids=ids, attention_mask=mask, **options).last_hidden_state
    scores: Tensor = model.score(hidden).squeeze(-1)
    return scores
