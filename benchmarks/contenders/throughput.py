"""Ways to train adapters on one base in one process, and ours with parts of it left out.

DeepSpeed-Chat's way is written anew, as in :mod:`benchmarks.contenders.common`.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.common.engine import make_engine
from benchmarks.common.ppo_task import word_tokenizer
from benchmarks.common.turns import DeviceTimer, has_trl
from benchmarks.contenders.common import (
    ALPHA,
    CHAT,
    OURS,
    ChatSteps,
    TrlSteps,
    add_chat_lora_,
    draw_adapters_,
    trl_options,
)
from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import DTYPES, TrainEngine
from dschat_lora.engine.distributed import device
from dschat_lora.lora.experts import fused_experts
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.loading import share_parameters
from dschat_lora.supervised.loop import evaluate, queue_steps
from dschat_lora.supervised.objectives import SUPERVISED

if TYPE_CHECKING:
    from peft import PeftModel

T = TypeVar("T")
PEFT, NARROW, TRL = "PEFT", "PEFT, 16-bit factors", "TRL"
RECOMPUTING = {"use_reentrant": False}


class Way(Protocol):
    """A way to train.

    Attributes:
        model: transformers' with adapters.
        adam: of its adapters.
        update: timer of the latest step's clipping and update.
        skips_padding: whether real tokens alone are computed.
        all_logits: whether those of every position are.
    """

    model: PreTrainedModel
    adam: torch.optim.Optimizer
    update: DeviceTimer
    skips_padding: bool
    all_logits: bool

    def step(self, batches: Sequence[Batch]) -> bool:
        """An optimizer step; whether it was skipped."""

    def loss(self, batch: Batch) -> float:
        """Mean loss per supervised token."""


class OurLoop:
    """The package's engine, loop and loss, over a model that shares its adapters."""

    all_logits = False

    def __init__(
        self, engine: TrainEngine, model: PreTrainedModel, *, by_spans: bool = True
    ) -> None:
        self.model, self.adam, self.update = model.train(), engine.adam, DeviceTimer()
        self._engine, self._trunk = engine, Backbone(model)
        self._trunk.by_spans &= by_spans
        self.skips_padding = self._trunk.skips_padding(device())

    def step(self, batches: Sequence[Batch]) -> bool:
        """An optimizer step; whether it was skipped."""
        self._take_place()
        (read,) = queue_steps(self._engine, [batches], SUPERVISED, [1.0])
        return read().outcome.skipped

    def loss(self, batch: Batch) -> float:
        """Mean loss per supervised token."""
        self._take_place()
        return evaluate(self._engine, [batch], SUPERVISED).loss

    def _take_place(self) -> None:
        engine = self._engine
        engine.module.backbone = self._trunk
        engine.queue_step = partial(_timed, self.update, partial(TrainEngine.queue_step, engine))


class ChatLoop:
    """Rows padded to the longest allowed, all logits, a loss on prompts too."""

    skips_padding = False
    all_logits = True

    def __init__(self, steps: ChatSteps, model: PreTrainedModel) -> None:
        self.model, self.adam, self.update = model.train(), steps.adam, DeviceTimer()
        self._steps = steps

    def step(self, batches: Sequence[Batch]) -> bool:
        """An optimizer step, which is never skipped."""
        steps = self._steps
        steps.update = partial(_timed, self.update, partial(ChatSteps.update, steps))
        steps.step([partial(self._loss, batch) for batch in batches])
        return False

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        """Mean loss per supervised token, of which prompts have none here."""
        labels = torch.full_like(batch.input_ids, IGNORE_INDEX).flatten()
        labels[batch.logit_positions + 1] = batch.target_ids
        return float(self._loss(batch, labels.view_as(batch.input_ids)))

    def _loss(self, batch: Batch, labels: Tensor | None = None) -> Tensor:
        mask = (batch.segment_ids > 0).long()
        if labels is None:
            labels = batch.input_ids.masked_fill(mask == 0, IGNORE_INDEX)
        inputs = {"input_ids": batch.input_ids, "attention_mask": mask, "labels": labels}
        moved = {name: value.to(device()) for name, value in inputs.items()}
        return self.model(**moved, use_cache=False).loss


class TrlLoop:
    """TRL's ``SFTTrainer`` over PEFT's layers: its collator, loss, clipping and AdamW.

    Its ``training_step`` recomputes blocks only where rows do not fit without; its data loader,
    logging and callbacks are left out.
    """

    skips_padding = False
    all_logits = False

    def __init__(self, model: PreTrainedModel, dtype: str, directory: str) -> None:
        from datasets import Dataset, disable_progress_bars
        from trl import SFTConfig, SFTTrainer

        disable_progress_bars()
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                **trl_options(dtype, directory, max_length=None),
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=Dataset.from_list([{"input_ids": [4, 5], "labels": [4, 5]}]),
            processing_class=word_tokenizer(model.config.vocab_size),
        )
        self._steps, self.update = TrlSteps(trainer), DeviceTimer()
        self.model, self.adam = model.train(), trainer.optimizer

    def step(self, batches: Sequence[Batch]) -> bool:
        """An optimizer step, which is never skipped."""
        self._steps.examples = [row for batch in batches for row in _examples(batch)]
        numbers = iter(range(len(self._steps.examples)))
        window = [[next(numbers) for _ in _examples(batch)] for batch in batches]
        with self.update:
            self._steps.step(window)
        return False

    def loss(self, batch: Batch) -> float:
        """Mean loss per supervised token."""
        return self._steps.loss(_examples(batch))


def _examples(batch: Batch) -> list[dict[str, list[int]]]:
    """Tokens and labels of each sequence of a micro-batch, as TRL's rows."""
    labels = torch.full((batch.input_ids.numel(),), IGNORE_INDEX)
    labels[batch.logit_positions + 1] = batch.target_ids
    labels = labels.view_as(batch.input_ids)
    examples = []
    for ids, own, segments in zip(batch.input_ids, labels, batch.segment_ids, strict=True):
        for number in range(1, int(segments.max()) + 1):
            here = segments == number
            examples.append({"input_ids": ids[here].tolist(), "labels": own[here].tolist()})
    return examples


def _timed(timer: DeviceTimer, function: Callable[[], T]) -> T:
    with timer:
        return function()


def build_ways(
    base: PreTrainedModel, *, lora_dim: int, dtype: str, variants: bool
) -> dict[str, Way]:
    """Each way by name, its adapters on the weights of ``base``.

    Args:
        base: a transformers model without adapters.
        lora_dim: r, on all linear layers of the blocks; alpha is the same for all.
        dtype: of the base.
        variants: ours with its parts left out too, and theirs with recomputation.
    """
    model = share_parameters(base)
    lora = LoraConfig(lora_dim=lora_dim, lora_alpha=ALPHA)
    names = apply_lora(model, lora, seed=0)
    models = {OURS: model}
    if importlib.util.find_spec("peft") is not None:
        models[PEFT] = add_peft_lora(share_parameters(base), names, lora_dim, DTYPES[dtype])
    chat = share_parameters(base)
    add_chat_lora_(chat, names, lora_dim)
    for each in (*models.values(), chat):
        draw_adapters_(each)
    # Copies first: they would take an engine's hooks with them.
    recomputing, masked = share_parameters(model), share_parameters(model)
    recomputing.gradient_checkpointing_enable(RECOMPUTING)
    chat_recomputing = share_parameters(chat)
    chat_recomputing.gradient_checkpointing_enable({"use_reentrant": True})
    chat_recomputing.enable_input_require_grads()
    engines = {
        name: make_engine(each, dtype=dtype, rows=1, accumulation_steps=1)
        for name, each in models.items()
    }
    steps = ChatSteps(chat)
    ways: dict[str, Way] = {name: OurLoop(engines[name], models[name]) for name in models}
    ways[CHAT] = ChatLoop(steps, chat)
    if variants:
        ways[f"{CHAT}, recomputing"] = ChatLoop(steps, chat_recomputing)
        ways[f"{OURS}, recomputing"] = OurLoop(engines[OURS], recomputing)
        ways[f"{OURS}, dense mask"] = OurLoop(engines[OURS], masked, by_spans=False)
    return ways


def build_published_ways(
    base: PreTrainedModel, *, lora_dim: int, dtype: str, directory: str
) -> dict[str, Way]:
    """Ours, and where they are installed PEFT with 16-bit factors and TRL, on one base.

    Of experts ours alone, whose factors PEFT holds otherwise. ``directory`` is for what TRL writes.
    """
    model = share_parameters(base)
    names = apply_lora(model, LoraConfig(lora_dim=lora_dim, lora_alpha=ALPHA), seed=0)
    models = {OURS: model}
    if has_trl() and not any(fused_experts(base)):
        models[NARROW] = add_peft_lora(
            share_parameters(base), names, lora_dim, DTYPES[dtype], narrow=True
        )
        models[TRL] = peft_model(share_parameters(base), names, lora_dim, narrow=True)
    for each in models.values():
        draw_adapters_(each)
    engine = partial(make_engine, dtype=dtype, rows=1, accumulation_steps=1)
    ways: dict[str, Way] = {}
    for name, each in models.items():
        is_trl = name == TRL
        ways[name] = TrlLoop(each, dtype, directory) if is_trl else OurLoop(engine(each), each)
    return ways


def add_peft_lora(
    model: PreTrainedModel,
    names: Sequence[str],
    lora_dim: int,
    dtype: torch.dtype,
    *,
    narrow: bool = False,
) -> PreTrainedModel:
    """The model with PEFT's layers, which train fp32 factors under autocast as its users do.

    With ``narrow`` factors have the type of the base, and nothing is cast.
    """
    peft_model(model, names, lora_dim, narrow=narrow)
    for name in names:
        layer = model.get_submodule(name)
        for factors in (layer.lora_A, layer.lora_B):
            factors.to(device())
            if not narrow:
                factors.float()
        if (
            not narrow
        ):  # the layers alone: what else autocast would compute in fp32 stays as in ours
            layer.forward = partial(_under_autocast, dtype, layer.forward)
    return model


def peft_model(
    model: PreTrainedModel, names: Sequence[str], lora_dim: int, *, narrow: bool
) -> "PeftModel":
    """PEFT's model around this one, which is changed in place."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = PeftConfig(r=lora_dim, lora_alpha=int(ALPHA), target_modules=list(names))
    return get_peft_model(model, config, autocast_adapter_dtype=not narrow)


def _under_autocast(dtype: torch.dtype, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast(device().type, dtype):
        return function(x)


def held_bytes(adam: torch.optim.Optimizer) -> int:
    """What a way holds between steps besides the base: adapters, and two moments of each."""
    return 3 * sum(p.nbytes for group in adam.param_groups for p in group["params"])
