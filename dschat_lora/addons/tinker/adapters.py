"""Adapters in training on a base, each with gradients and an AdamW, and those that were saved."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from dschat_lora.addons.tinker.bases import Base, copy_values
from dschat_lora.addons.tinker.losses import DatumLoss, Numbers
from dschat_lora.addons.tinker.processes import agreed
from dschat_lora.algos.segments import Spans
from dschat_lora.checkpoint.adapter import lora_config_of, read_adapter, write_adapter
from dschat_lora.checkpoint.export import write_beside
from dschat_lora.checkpoint.tensors import save_tensors
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import PaddedRows, batch_to_device
from dschat_lora.engine.distributed import rank, sum_over_ranks, sum_tensor_, world_size
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.blocks import recompute_blocks
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.loading import end_ids, stop_at

OPTIMIZER_FILE = "optimizer.safetensors"
CHECKPOINT_FILE = "checkpoint.json"
_LARGE = 1e30  # well within fp32
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Datum:
    """Tokens, and at each of them what follows: K tokens, of which each has numbers.

    Attributes:
        tokens: (T,) int64. targets: (T,) or (T, K) int64.
        numbers: fp32 in the shape of ``targets``, by name.
    """

    tokens: Tensor
    targets: Tensor
    numbers: Numbers


@dataclass(frozen=True)
class DatumBatch:
    """Examples as rows; the fields are the arguments of a ``CausalLMLogprobs``, in their order."""

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    branch_ids: Tensor
    logit_positions: Tensor
    target_ids: Tensor
    spans: Spans


@dataclass(frozen=True)
class AdamParams:
    """Of a step of AdamW, with the names and defaults of the protocol."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            below = 1.0 if name.startswith("beta") else _LARGE
            if not 0 <= value < below:
                raise ValueError(f"adam_params.{name} must be in [0, {below:g}), got {value}")


class TrainedAdapter:
    """An adapter in training: its factors, their gradients, and AdamW's moments.

    Gradients of one call are added to those of the last ones until a step takes them. What a call
    returns depends on its examples and on the calls before it alone. Every process has the factors,
    and a part of each call's examples. With ZeRO each has the moments of some factors alone, and at
    stage 2 their gradients alone. :meth:`forward` and :meth:`step` are called on every rank.

    Attributes:
        base: whose weights it shares.
        lora: its options, layers by their whole names.
        steps: of the optimizer so far.
        losses: of the calls since then whose gradients are there.
    """

    def __init__(
        self,
        base: Base,
        lora: LoraConfig,
        *,
        seed: int = 0,
        tokens_per_device: int = 16384,
        zero_stage: int = 0,
    ) -> None:
        adapted = base.adapted(lora, seed=seed)
        self.base, self.lora, self.steps = base, adapted.lora, 0
        self._adapted, self._tokens_per_device = adapted, tokens_per_device
        self.model = adapted.model
        if base.recomputes:
            recompute_blocks(self.model)
        self._module = CausalLMLogprobs(self.model)
        self._module.fit_to_architecture(len(base.tokenizer), self.model.device)
        self.parameters = adapter_parameters(self.model)
        self._zero_stage = zero_stage if world_size() > 1 else 0
        self._shards = _shards(self.parameters) if self._zero_stage else []
        own = self._shards[rank()] if self._zero_stage else [*self.parameters]
        self._stepped = {name: self.parameters[name] for name in own}  # by this process
        group = {"params": [*self._stepped.values()]}
        self._adam = torch.optim.AdamW([group], lr=1e-4, foreach=True)
        # Of several processes' gradients those since the last step, by name.
        self._summed: dict[str, Tensor] = {}
        self._casts = FactorCasts(self._module)
        self.losses: list[float] = []

    def forward(
        self, examples: Sequence[Datum], loss: DatumLoss, *, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """The summed loss and each example's log-probabilities, fp32 on the CPU.

        With ``backward`` the gradient is added to those since the last step; one that is not
        finite is dropped with all of them.

        Raises:
            ValueError: if the loss is not finite.
        """
        try:
            own = agreed(lambda: self._own_part(examples, loss, backward=backward))
        except BaseException:
            if backward:  # those of some batches are no gradient of anything
                self.drop_gradients()
            raise
        return self.merged(*own, backward=backward)

    def _own_part(
        self, examples: Sequence[Datum], loss: DatumLoss, *, backward: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """What :meth:`forward` returns, of this process's examples; 0 for those of others."""
        all_logprobs = [torch.zeros(each.targets.shape) for each in examples]
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self.model.train(backward)
        try:
            with torch.set_grad_enabled(backward), self._casts.in_use():
                for numbers in self.batches(examples):
                    chosen = [examples[n] for n in numbers]
                    rows = batch_to_device(make_batch(chosen, self.base.pad_id), self.model.device)
                    flat = self._module(*vars(rows).values())
                    logprobs = in_shapes(flat, [each.targets for each in chosen])
                    part = loss(logprobs, numbers_on(total.device, chosen))
                    if backward:
                        part.backward()  # type: ignore[no-untyped-call]
                    total += part.detach()
                    for n, values in zip(numbers, logprobs, strict=True):
                        all_logprobs[n] = values.detach().float().cpu()
        finally:
            self.model.eval()
        return total, all_logprobs

    def merged(
        self, total: Tensor, all_logprobs: list[Tensor], *, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """The loss and log-probabilities of all processes; gradients are summed; on every rank.

        Raises:
            ValueError: if the loss is not finite; gradients are dropped then.
        """
        if world_size() > 1:
            sum_tensor_(total)
            flat = torch.cat([each.flatten() for each in all_logprobs]).to(total.device)
            all_logprobs = in_shapes(sum_tensor_(flat).cpu(), all_logprobs)
        if not math.isfinite(value := float(total)):
            if backward:
                self.drop_gradients()
            raise ValueError(f"the loss is not finite: {value}; its gradient was dropped")
        if backward:
            self.losses.append(value)
            self._sum_gradients()
        return value, all_logprobs

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Add the gradients of all processes to those since the last step."""
        if world_size() == 1:  # autograd has
            return
        parameters = self.parameters.values()
        here = [float(p.grad is not None) for p in parameters]  # not of experts without tokens
        counts = dict(zip(self.parameters, sum_over_ranks(here), strict=True))
        for owner, shard in enumerate(self._shards if self._zero_stage == 2 else [[*counts]]):
            chosen = {name: self.parameters[name] for name in shard if counts[name]}
            if not chosen:
                continue
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen.values()]
            flat = torch.cat([each.flatten() for each in own])
            if self._zero_stage == 2:
                dist.reduce(flat, owner)
                if owner != rank():
                    continue
            else:
                sum_tensor_(flat)
            for name, part in zip(chosen, in_shapes(flat, own), strict=True):
                self._summed[name] = self._summed[name] + part if name in self._summed else part
        for parameter in parameters:
            parameter.grad = None

    def batches(self, examples: Sequence[Datum]) -> Iterator[list[int]]:
        """Numbers of this process's examples of like length, whose rows fit into one pass."""
        batch: list[int] = []
        order = sorted(range(len(examples)), key=lambda n: -len(examples[n].tokens))
        for n in order[rank() :: world_size()]:
            width = len(examples[(batch or [n])[0]].tokens)
            if batch and (len(batch) + 1) * width > self._tokens_per_device:
                yield batch
                batch = []
            batch.append(n)
        if batch:
            yield batch

    def head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(N,) log-probabilities of (N,) targets after (N, H) hidden states, by its own head."""
        logprobs: Tensor = self._module.head(hidden, targets)
        return logprobs

    def step(self, params: AdamParams) -> dict[str, float]:
        """An AdamW step from the gradients since the last one, which are then gone.

        Returns:
            Figures of the step by name; ``grad_norm`` is that before it is clipped.

        Raises:
            ValueError: without a gradient, or with one that is not finite: nothing has changed.
        """
        if not self.losses:
            raise ValueError("optim_step needs a gradient: call forward_backward before it")
        for name, gradient in self._summed.items():
            self.parameters[name].grad = gradient
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters.values() if p.grad is not None]
        )
        if self._zero_stage == 2:  # of this process's shard
            (square,) = sum_over_ranks([float(norm) ** 2])
            norm = torch.tensor(math.sqrt(square), device=self.model.device)
        if not math.isfinite(value := float(norm)):
            self.drop_gradients()
            raise ValueError(f"the gradient is not finite, and was dropped: its norm is {value}")
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), params.grad_clip_norm, norm
            )
        (group,) = self._adam.param_groups
        group |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }
        agreed(self._adam.step)
        if self._zero_stage:
            self._share_factors()
        self.drop_gradients()
        self.steps += 1
        return {"grad_norm": value}

    @torch.no_grad()
    def _share_factors(self) -> None:
        """Give every process the factors that one has stepped."""
        for owner, shard in enumerate(self._shards):
            chosen = [self.parameters[name] for name in shard]
            if not chosen:
                continue
            flat = torch.cat([each.flatten() for each in chosen])
            dist.broadcast(flat, owner)
            for each, part in zip(chosen, in_shapes(flat, chosen), strict=True):
                each.copy_(part)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._summed.clear()
        self.losses.clear()

    def values(self) -> dict[str, Tensor]:
        """The factors, by the names of adapter files; copies."""
        return {name: each.detach().clone() for name, each in self.parameters.items()}

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments and steps, by ``MOMENT/NAME``; empty before the first step.

        With ZeRO those of this process's shard.
        """
        return {
            f"{key}/{name}": value.detach().clone()
            for name, parameter in self._stepped.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def load(self, values: Mapping[str, Tensor], moments: Mapping[str, Tensor], steps: int) -> None:
        """Become what was saved; without moments AdamW begins anew.

        Raises:
            ValueError: if the values are those of another adapter.
        """
        copy_values(self.parameters, values)
        self._adam.state.clear()
        self.drop_gradients()
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            if (parameter := self._stepped.get(name)) is None:
                continue
            place = parameter.device if kind in _MOMENTS else value.device
            self._adam.state[parameter][kind] = value.to(place, copy=True)
        self.steps = steps

    def write(
        self, directory: Path, moments: Mapping[str, Tensor], facts: Mapping[str, object]
    ) -> None:
        """Write the adapter as PEFT reads it, and beside it what training goes on from.

        ``moments`` are those of all processes; none are written of a sampler. Call on one rank.
        """
        stop_at(self.model, end_ids(self.base.tokenizer))
        training = {"optimizer steps": self.steps}
        card = {"data": {}, "training": training, "metrics": {}, "versions": {}}

        def write_more(staging: Path) -> None:
            write_beside(staging, self.model, self.base.tokenizer, card)
            if moments:
                cpu = {key: value.cpu() for key, value in moments.items()}
                save_tensors(cpu, staging / OPTIMIZER_FILE)
            content = {**facts, "steps": self.steps}
            (staging / CHECKPOINT_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

        write_adapter(
            directory,
            {name: value.cpu() for name, value in self.values().items()},
            self.lora,
            layout=adapter_layout(self.model),
            base_model_name_or_path=self.base.source.base,
            base_bits=self._adapted.base_bits,
            write_more=write_more,
        )


def _shards(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Names for each process, of about as many values."""
    shards: list[list[str]] = [[] for _ in range(world_size())]
    sizes = [0] * world_size()
    for name in sorted(parameters, key=lambda name: -parameters[name].numel()):
        least = sizes.index(min(sizes))
        shards[least].append(name)
        sizes[least] += parameters[name].numel()
    return shards


def make_batch(examples: Sequence[Datum], pad_id: int) -> DatumBatch:
    """Examples as rows, padded on the right; all their targets are predicted."""
    width = max(len(each.tokens) for each in examples)
    rows = PaddedRows(len(examples), width, pad_id)
    positions: list[Tensor] = []
    for row, each in enumerate(examples):
        size = len(each.tokens)
        rows.put(row, each.tokens.numpy(), np.arange(size), (size,))
        copies = each.targets[0].numel()
        positions.append((row * width + torch.arange(size)).repeat_interleave(copies))
    return DatumBatch(
        input_ids=torch.from_numpy(rows.input_ids),
        position_ids=torch.from_numpy(rows.positions),
        segment_ids=torch.from_numpy(rows.segments),
        branch_ids=torch.from_numpy(rows.branches),
        logit_positions=torch.cat(positions),
        target_ids=torch.cat([each.targets.flatten() for each in examples]),
        spans=rows.spans(),
    )


def in_shapes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """(N,) values as tensors of the shapes of others, one behind the other."""
    parts = torch.split(flat, [each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def numbers_on(device: torch.device, examples: Sequence[Datum]) -> list[Numbers]:
    """The numbers of examples, on a device."""
    return [{key: each.to(device) for key, each in own.numbers.items()} for own in examples]


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter as :meth:`Adapter.write` has written it."""

    lora: LoraConfig
    values: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    steps: int


def read_saved(directory: Path) -> SavedAdapter:
    """What is in a directory.

    Raises:
        ValueError: if it is not there, or damaged.
    """
    if not (directory / CHECKPOINT_FILE).is_file():
        raise ValueError("there are no such weights; they were deleted, or never saved")
    optimizer = directory / OPTIMIZER_FILE
    return SavedAdapter(
        lora_config_of(directory),
        read_adapter(directory).tensors,
        load_file(optimizer) if optimizer.is_file() else {},
        json.loads((directory / CHECKPOINT_FILE).read_text(encoding="utf-8"))["steps"],
    )
