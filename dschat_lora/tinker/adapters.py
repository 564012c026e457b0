"""Base models, and the adapters that are trained on them: each with gradients and an AdamW."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dschat_lora.algos.segments import Spans
from dschat_lora.checkpoint.adapter import lora_config_of, read_adapter
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.checkpoint.tensors import save_tensors
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.batch import PaddedRows, batch_to_device
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.generation.generate import check_cache
from dschat_lora.lora.layers import FactorCasts
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.targets import choose_targets
from dschat_lora.models.blocks import recompute_blocks
from dschat_lora.models.build import AdaptedModel, build_causal_lm
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.loading import (
    PreTrainedModel,
    Tokenizer,
    end_ids,
    load_causal_lm,
    load_config,
    load_tokenizer,
    stop_at,
)
from dschat_lora.models.source import ModelSource
from dschat_lora.tinker.losses import DatumLoss, Numbers

OPTIMIZER_FILE = "optimizer.safetensors"
CHECKPOINT_FILE = "checkpoint.json"
LORA_ALPHA = 32.0  # the update is scaled by it over the rank, so that one rate fits all ranks
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_LARGE = 1e30  # well within fp32
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Adapting:
    """Which layers of a base train, and of what rank."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


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
    """Examples as rows; the fields are those of a ``CausalLMLogprobs``'s call."""

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    branch_ids: Tensor
    logit_positions: Tensor
    target_ids: Tensor
    spans: Spans

    @property
    def inputs(self) -> tuple[Any, ...]:
        ids = self.input_ids, self.position_ids, self.segment_ids, self.branch_ids
        return *ids, self.logit_positions, self.target_ids, self.spans


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


@dataclass(frozen=True, eq=False)
class Base:
    """A model whose weights no request changes, and its tokenizer.

    Attributes:
        name: that requests know it by.
        limit: most tokens of a sequence.
    """

    name: str
    source: ModelSource
    model: PreTrainedModel
    tokenizer: Tokenizer
    options: ModelConfig
    limit: int
    recomputes: bool
    attention: tuple[str, ...]  # layers, by whole name
    others: tuple[str, ...]
    head: str

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(end_ids(self.tokenizer))

    @property
    def pad_id(self) -> int:
        """Any token, which masks hide."""
        return int(self.tokenizer.pad_token_id)

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def lora_of(self, how: Adapting) -> LoraConfig:
        """The options of an adapter.

        Raises:
            ValueError: if nothing would train, or the rank does not fit.
        """
        width = int(self.model.get_input_embeddings().embedding_dim)
        if not 1 <= how.rank <= width:
            raise ValueError(
                f"lora_config.rank must be from 1 to {width}, the width of {self.name}, got "
                f"{how.rank}"
            )
        chosen = [
            *(self.attention if how.train_attn else ()),
            *(self.others if how.train_mlp else ()),
            *((self.head,) if how.train_unembed else ()),
        ]
        if not chosen:
            raise ValueError(
                "lora_config trains nothing: train_mlp, train_attn and train_unembed are all false"
            )
        return LoraConfig(lora_dim=how.rank, lora_alpha=LORA_ALPHA, target_modules=tuple(chosen))

    def adapted(
        self, lora: LoraConfig, *, seed: int = 0, tensors: Mapping[str, Tensor] | None = None
    ) -> AdaptedModel:
        """Another model on the same weights, with an adapter that is new or has these values."""
        adapted = build_causal_lm(
            self.source,
            self.tokenizer,
            self.options,
            lora,
            dtype=self.model.dtype,
            seed=seed,
            meta=False,
            base=self.model,
        )
        adapted.model.to(self.model.device).eval()
        if tensors is not None:
            copy_values(adapter_parameters(adapted.model), tensors)
        return adapted


def open_base(name: str, source: ModelSource, options: ModelConfig, *, recomputes: bool) -> Base:
    """Load a base.

    Raises:
        ValueError: if it cannot be loaded, or trained in its type.
    """
    if source.adapter is not None:
        raise ValueError(
            f"{name} is an adapter: name its base, or merge it first (dschat-lora merge)"
        )
    dtype = resolve_dtype(options.dtype)
    if dtype == "fp16":
        raise ValueError("--dtype fp16 needs loss scaling, which is not built here: bf16 or fp32")
    config = load_config(source.base, options)
    model = load_causal_lm(source.base, config, options, dtype=DTYPES[dtype], meta=False)
    model = model.requires_grad_(False).to(device()).eval()
    check_cache(model)
    tokenizer = load_tokenizer(source.tokenizer, options)
    linear = choose_targets(model, LoraConfig(lora_dim=1))
    heads = [n for n, m in model.named_modules() if m is model.get_output_embeddings()]
    return Base(
        name,
        source,
        model,
        tokenizer,
        options,
        limit=int(getattr(model.config, "max_position_embeddings", None) or 2**31),
        recomputes=recomputes,
        attention=tuple(each for each in linear if _ATTENTION.search(each)),
        others=tuple(each for each in linear if not _ATTENTION.search(each)),
        head=heads[0],
    )


class TrainedAdapter:
    """An adapter in training: its factors, their gradients, and AdamW's moments.

    Gradients of one call are added to those of the last ones until a step takes them. What a call
    returns depends on its examples and on the calls before it alone.

    Attributes:
        base: whose weights it shares.
        lora: its options, layers by their whole names.
        steps: of the optimizer so far.
    """

    def __init__(
        self, base: Base, lora: LoraConfig, *, seed: int = 0, tokens_per_device: int = 16384
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
        self._adam = torch.optim.AdamW(self.parameters.values(), lr=1e-4, foreach=True)
        self._casts = FactorCasts(self._module)
        self.pending = False  # whether there are gradients that no step has taken

    def forward(
        self, examples: Sequence[Datum], loss: DatumLoss, *, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """The summed loss and each example's log-probabilities, fp32 on the CPU.

        With ``backward`` the gradient is added to those since the last step; one that is not
        finite is dropped with all of them.

        Raises:
            ValueError: if the loss is not finite.
        """
        found: list[Tensor] = [torch.zeros(0)] * len(examples)
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self.model.train(backward)
        try:
            with torch.set_grad_enabled(backward), self._casts.in_use():
                for numbers in self.batches(examples):
                    chosen = [examples[n] for n in numbers]
                    logprobs = self._logprobs(chosen)
                    part = loss(logprobs, numbers_on(total.device, chosen))
                    if backward:
                        part.backward()  # type: ignore[no-untyped-call]
                        self.pending = True
                    total += part.detach()
                    for n, values in zip(numbers, logprobs, strict=True):
                        found[n] = values.detach().float().cpu()
        except BaseException:
            if backward:  # those of some batches are no gradient of anything
                self.drop_gradients()
            raise
        finally:
            self.model.eval()
        return self.checked(float(total), backward=backward), found

    def checked(self, total: float, *, backward: bool) -> float:
        """The summed loss.

        Raises:
            ValueError: if it is not finite; gradients are dropped then.
        """
        if not math.isfinite(total):
            if backward:
                self.drop_gradients()
            raise ValueError(f"the loss is not finite: {total}; its gradient was dropped")
        return total

    def batches(self, examples: Sequence[Datum]) -> Iterator[list[int]]:
        """Numbers of examples of like length, whose rows fit into one pass."""
        batch: list[int] = []
        for n in sorted(range(len(examples)), key=lambda n: -len(examples[n].tokens)):
            width = len(examples[(batch or [n])[0]].tokens)
            if batch and (len(batch) + 1) * width > self._tokens_per_device:
                yield batch
                batch = []
            batch.append(n)
        if batch:
            yield batch

    def _logprobs(self, examples: Sequence[Datum]) -> list[Tensor]:
        """Of each example's targets, in their shape."""
        batch = make_batch(examples, self.base.pad_id)
        flat = self._module(*batch_to_device(batch, self.model.device).inputs)
        return in_shapes(flat, examples)

    def head(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(N,) log-probabilities of (N,) targets after (N, H) hidden states, by its own head."""
        found: Tensor = self._module.head(hidden, targets)
        return found

    def step(self, params: AdamParams) -> dict[str, float]:
        """An AdamW step from the gradients since the last one, which are then gone.

        Returns:
            Figures of the step by name; ``grad_norm`` is that before it is clipped.

        Raises:
            ValueError: without a gradient, or with one that is not finite: nothing has changed.
        """
        if not self.pending:
            raise ValueError("optim_step needs a gradient: call forward_backward before it")
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters.values() if p.grad is not None]
        )
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
        self._adam.step()
        self.drop_gradients()
        self.steps += 1
        return {"grad_norm": value}

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._adam.zero_grad(set_to_none=True)
        self.pending = False

    def values(self) -> dict[str, Tensor]:
        """The factors, by the names of adapter files; copies."""
        return {name: each.detach().clone() for name, each in self.parameters.items()}

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments and steps, by ``MOMENT/NAME``; empty before the first step."""
        found = {}
        for name, parameter in self.parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                found[f"{key}/{name}"] = value.detach().clone()
        return found

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
            parameter = self.parameters[name]
            place = parameter.device if kind in _MOMENTS else value.device
            self._adam.state[parameter][kind] = value.to(place, copy=True)
        self.steps = steps

    def write(self, directory: Path, *, with_optimizer: bool, facts: Mapping[str, Any]) -> None:
        """Write the adapter as PEFT reads it, and beside it what training goes on from."""
        stop_at(self.model, end_ids(self.base.tokenizer))
        moments = {key: value.cpu() for key, value in self.moments().items()}

        def write_more(staging: Path) -> None:
            if with_optimizer and moments:
                save_tensors(moments, staging / OPTIMIZER_FILE)
            content = {**facts, "steps": self.steps}
            (staging / CHECKPOINT_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

        save_adapter(
            directory,
            self.model,
            self.lora,
            base=self.base.source.base,
            tokenizer=self.base.tokenizer,
            card={
                "data": {},
                "training": {"optimizer steps": self.steps},
                "metrics": {},
                "versions": {},
            },
            base_bits=self._adapted.base_bits,
            write_more=write_more,
        )


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


def in_shapes(flat: Tensor, examples: Sequence[Datum]) -> list[Tensor]:
    """(N,) values of all targets as those of each example, in their shape."""
    parts = torch.split(flat, [each.targets.numel() for each in examples])
    return [part.view(each.targets.shape) for part, each in zip(parts, examples, strict=True)]


def numbers_on(device: torch.device, examples: Sequence[Datum]) -> list[Numbers]:
    """The numbers of examples, on a device."""
    return [{key: each.to(device) for key, each in own.numbers.items()} for own in examples]


def copy_values(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values over the parameters of the same names.

    Raises:
        ValueError: if names or shapes differ.
    """
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    if shapes != {name: tuple(each.shape) for name, each in values.items()}:
        raise ValueError("the weights are those of an adapter of other layers or another rank")
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter as :meth:`Adapter.write` has written it."""

    lora: LoraConfig
    values: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    facts: Mapping[str, Any]


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
        json.loads((directory / CHECKPOINT_FILE).read_text(encoding="utf-8")),
    )
