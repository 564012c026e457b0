"""A model with its optimizer as primitives, for training loops of one's own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from dschat_lora.addons.trainer.build import (
    OPTIONS,
    TrainerConfig,
    TrainerParts,
    check_options,
    close_parts,
    load_state,
    open_parts,
    save_state,
)
from dschat_lora.addons.trainer.losses import Loss, TokenLoss, make_loss
from dschat_lora.addons.trainer.sampling import (
    Key,
    Prompt,
    Sample,
    check_fits,
    draw,
    make_sampling,
    make_seeds,
)
from dschat_lora.addons.trainer.sequences import (
    SequenceBatch,
    TrainerSequence,
    check_sequences,
    check_tokens,
    make_batch,
    make_batches,
)
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.api.options import Model, with_options
from dschat_lora.api.tracebacks import api_boundary
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.engine import failure_detection
from dschat_lora.engine.build import StepOutcome
from dschat_lora.engine.distributed import (
    data_rank,
    data_world_size,
    is_destroyed,
    max_over_ranks,
    raise_together,
    sum_over_ranks,
    world_size,
)
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.models.loading import Tokenizer, end_ids, stop_at
from dschat_lora.report.record import package_versions
from dschat_lora.runtime.loop import broken_unless_finite


@api_boundary
class Trainer:
    """A language model, its AdamW and its decoder; call methods on every rank.

    ``model`` is a hub name, a path as ``--model_name_or_path`` takes it, a run, or (model,
    tokenizer); without one it is the bundled model. ``options`` are those of the command line that
    load, adapt and optimise a model, with its names and defaults: of LoRA, the types and kernels,
    AdamW, ZeRO, and ``per_device_train_batch_size``, the sequences (or pairs) of a forward and
    backward pass.
    ``gradient_checkpointing`` is off unless it is True.

    Under ``deepspeed`` or ``torchrun`` each rank passes sequences and prompts of its own, perhaps
    none, and results are as if those of all ranks were one batch.

    Several Trainers may be open in one process. ``close()``, also as a context manager, frees the
    memory, and with the last one leaves the process group.

    Raises:
        TypeError: for an option that is unknown.
        ValueError: for a value that is not allowed, or a model that cannot be trained so.
    """

    @with_options(TrainerConfig, only=OPTIONS)
    def __init__(self, model: Model | None = None, **options: object) -> None:
        """Load the model, put in or continue its adapter, and build its engine."""
        self._parts: TrainerParts | None = None
        self._parts = open_parts(*check_options(model, options))
        #: optimizer steps so far
        self.step = 0
        self._calls = 0  # of forward_backward since the last step
        self._failed = False  # whether one of them did not come to its end
        self._casts = FactorCasts(self._parts.engine.module)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._open().tokenizer

    @property
    def rank(self) -> int:
        """Which share of the data this process has, from 0."""
        return data_rank()

    @property
    def world_size(self) -> int:
        """Shares of the data: processes, or groups of them that hold one model between them."""
        return data_world_size()

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt: of a text, of messages by the chat template, or the tokens given.

        Raises:
            ValueError: if there is none, or one that is no token.
        """
        parts, ids, messages = self._open(), prompt, list[dict[str, Any]]()
        if not isinstance(prompt, str):
            messages = [dict(each) for each in prompt if isinstance(each, Mapping)]
        if messages:
            ids = make_chat(parts.tokenizer, None).render_prompt(messages)
        if isinstance(ids, str):
            (ids,) = make_encoder(parts.tokenizer).encode([ids])
        tokens = check_tokens(ids, vocab_size=parts.vocab_size, where="a prompt")
        return [int(token) for token in tokens]

    def forward_backward(
        self,
        sequences: Sequence[Mapping[str, Any]],
        loss: str | TokenLoss = "cross_entropy",
        **options: object,
    ) -> float:
        """Add the gradient of the mean loss of ``sequences`` to those since the last step.

        The mean is over the tokens that count, by their weights, of all ranks; of ``dpo`` over the
        pairs.

        Args:
            sequences: dicts with ``tokens``, ``weights`` and what the loss reads, each as long.
                Entry t belongs to token t; the first token never counts.
            loss: ``cross_entropy``, ``importance_sampling``, ``dpo``, that of an ``--algorithm``
                such as ``ppo``, ``cispo``, ``gspo`` or ``sapo``, or a function of (T,)
                log-probabilities and the sequence that returns (T,) losses.
            **options: of the loss, with the command line's names and defaults.

        An error in a function of the caller's drops all gradients since the last step.

        Raises:
            ValueError: for sequences or an option that cannot be used, on every rank.
        """
        parts = self._open()
        chosen, checked = raise_together(lambda: self._checked(sequences, loss, options))
        total = _total_weight(checked, chosen)
        batches = self._same_number(
            make_batches(
                checked,
                size=parts.config.batch.per_device_train_batch_size,
                unit=chosen.sequences_per_unit,
                pad_id=parts.pad_id,
                counted_only=chosen.token_loss is None,
            )
        )
        try:
            summed = self._backward(batches, checked, chosen, total)
        except BaseException:
            # Those of some of the batches are no gradient of anything.
            if world_size() == 1:
                self._drop_gradients(unfinished=True)
            else:
                self._failed = True
            raise
        self._calls += 1
        return sum_over_ranks([summed])[0] / total

    def optim_step(self, learning_rate: float) -> StepOutcome:
        """An AdamW step from the gradients of ``forward_backward``, which are then gone.

        All that trains has this rate, but for ``loraplus_lr_ratio``. The gradient's norm is clipped
        to ``max_grad_norm``. A gradient that is not finite changes nothing: the outcome, which has
        ``grad_norm``, is then ``skipped``.

        Raises:
            ValueError: without a gradient, or for a rate that is none.
        """
        parts = self._open()
        if not self._calls:
            raise ValueError("optim_step needs a gradient: call forward_backward before it")
        usable = isinstance(learning_rate, Real) and math.isfinite(learning_rate)
        if not usable or learning_rate < 0:
            raise ValueError(f"learning_rate must be a number >= 0, got {learning_rate!r}")
        engine = parts.engine
        engine.set_rates(float(learning_rate))
        self._end_window()
        outcome = engine.step()
        failure_detection.after_a_step()
        self.step, self._calls = self.step + 1, 0
        return outcome

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """(T,) fp32 log-probabilities of each sequence's tokens, in nats, on CPU; the first is 0.

        Without dropout. ``tokens`` is all that is read of a sequence.
        """
        parts = self._open()
        checked = raise_together(lambda: self._sequences(sequences, ()))
        batches = make_batches(
            checked,
            size=parts.config.batch.per_device_eval_batch_size,
            unit=1,
            pad_id=parts.pad_id,
            counted_only=False,
        )
        parts.engine.eval()
        result = [torch.zeros(0)] * len(checked)
        with self._casts.in_use():
            for batch in self._same_number(batches):
                batch = batch.to(parts.engine.device)
                table = batch.table(parts.engine(*batch.inputs)).cpu()
                for row, number in enumerate(batch.numbers):
                    result[number] = table[row, : len(checked[number])].clone()
        return result

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: Key | Sequence[Key] = 0,
    ) -> list[list[Sample]]:
        """``num_samples`` continuations of each prompt, up to an end token or ``max_tokens``.

        ``temperature`` 0 takes the likeliest tokens. A continuation depends on the weights, its
        prompt and its random numbers alone, not on what is sampled beside it, up to rounding. Those
        of sample k of prompt n are a function of (``seed``, n, k), and of (seed of the prompt, k)
        where ``seed`` is a list with one for each prompt. A seed is a whole number or a tuple of
        them, such as (1234, iteration).

        Raises:
            ValueError: for prompts or an option that cannot be used, or weights that are not
                finite; on every rank.
        """
        parts = self._open()

        def check() -> tuple[list[list[int]], Sampling, list[list[int]]]:
            if isinstance(prompts, str):
                raise ValueError(
                    f"prompts must be a list of prompts, got one text: {prompts!r:.60}"
                )
            ids = [self.encode(prompt) for prompt in prompts]
            sampling = make_sampling(max_tokens, temperature, top_p, top_k)
            check_fits(ids, max_tokens, parts.max_length)
            return ids, sampling, make_seeds(seed, len(ids), num_samples)

        ids, sampling, seeds = raise_together(check)
        return draw(parts, ids, sampling, seeds)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write weights that train, AdamW's state and the step, which ``load`` takes back.

        The directory appears complete or not at all, in place of an earlier one.

        Raises:
            ValueError: with gradients that no step has used, which are not saved.
        """
        parts = self._open()
        if self._calls:
            raise ValueError(
                "save comes after optim_step: the gradients of "
                f"{self._calls} call(s) of forward_backward are not saved"
            )
        save_state(parts, Path(directory), step=self.step)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Become what was saved, bit for bit, whatever the ZeRO stage and the number of processes.

        Gradients that no step has used are dropped.

        Raises:
            ValueError: if nothing sound was saved there, or by a Trainer of another model or
                adapter.
        """
        parts = self._open()
        self._drop_gradients()
        self.step = load_state(parts, Path(directory))

    def export_adapter(self, directory: str | os.PathLike[str]) -> None:
        """Write the adapter as PEFT reads it, with the tokenizer and a model card.

        Raises:
            ValueError: if more than an adapter trains.
        """
        parts = self._open()
        adapted, source = parts.adapted, parts.source
        if not (adapted.lora.lora_dim and adapted.lora.only_optimize_lora):
            raise ValueError(
                "export_adapter needs an adapter, but all weights are trained: create the Trainer "
                "with lora_dim=16, and without only_optimize_lora=False"
            )
        stop_at(adapted.model, end_ids(parts.tokenizer))
        save_adapter(
            Path(directory),
            adapted.model,
            adapted.lora,
            base=source.base,
            tokenizer=parts.tokenizer,
            card={
                "data": {},
                "training": {"optimizer steps": self.step, "processes": world_size()},
                "metrics": {},
                "versions": package_versions(),
            },
            base_bits=adapted.base_bits,
            base_fingerprint=weights_fingerprint(source.base) if adapted.base_bits == 4 else "",
            rope_scaling=adapted.rope_scaling,
        )

    def close(self) -> None:
        """Give back the engine, its memory and, with the last Trainer, the process group."""
        self._close(together=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error the other ranks may not come.
        self._close(together=error is None or world_size() == 1)

    def __del__(self) -> None:
        parts = getattr(self, "_parts", None)
        if parts is not None and not parts.closed:
            # Ranks collect garbage at times of their own.
            self._close(together=world_size() == 1)

    def _close(self, *, together: bool) -> None:
        parts, self._parts = self._parts, None
        self._casts = FactorCasts()
        if parts is not None and not parts.closed:
            close_parts(parts, together=together)

    def _open(self) -> TrainerParts:
        if self._parts is None:
            raise ValueError("the Trainer is closed: create a new one")
        if is_destroyed(self._parts.engine.deepspeed):
            raise ValueError(
                "a run in this process has destroyed the Trainer's process group: close() it "
                "before a run, and create a new one afterwards"
            )
        if self._failed:
            raise ValueError(
                "forward_backward has failed on this rank only, so processes are out of step: "
                "create a new Trainer"
            )
        return self._parts

    def _checked(
        self, sequences: object, loss: object, options: Mapping[str, Any]
    ) -> tuple[Loss, list[TrainerSequence]]:
        chosen = make_loss(loss, options)
        checked = self._sequences(sequences, chosen.reads, loss=f"loss {chosen.name!r}")
        if len(checked) % chosen.sequences_per_unit:
            raise ValueError(
                f"loss {chosen.name!r} needs pairs, the chosen sequence before the rejected one, "
                f"but got {len(checked)} sequences"
            )
        if not checked and world_size() == 1:
            raise ValueError("sequences is empty: there is nothing to train on")
        return chosen, checked

    def _sequences(
        self, sequences: object, needed: Sequence[str], loss: str = ""
    ) -> list[TrainerSequence]:
        parts = self._open()
        return check_sequences(
            sequences,
            vocab_size=parts.vocab_size,
            max_length=parts.max_length,
            needed=needed,
            loss=loss,
        )

    def _same_number(self, batches: list[SequenceBatch]) -> list[SequenceBatch]:
        """As many batches on every rank, some perhaps empty, for all run the same passes."""
        count = int(max_over_ranks(float(len(batches))))
        empty = make_batch([], [], pad_id=self._open().pad_id, counted_only=False)
        return batches + [empty] * (count - len(batches))

    def _backward(
        self,
        batches: Sequence[SequenceBatch],
        sequences: Sequence[TrainerSequence],
        loss: Loss,
        total: float,
    ) -> float:
        """Backward passes of the batches, divided by ``total``; this rank's summed loss."""
        engine = self._open().engine
        summed = torch.zeros((), dtype=torch.float64, device=engine.device)
        engine.train()
        with self._casts.in_use(), self._dropout_seed():
            for batch in batches:
                batch = batch.to(engine.device)
                logprobs = engine(*batch.inputs)
                part = logprobs.sum()  # the graph of each pass spans the model
                if batch.numbers:
                    given = [sequences[number].given for number in batch.numbers]
                    part = loss(batch.table(logprobs), batch.tables, given) + 0.0 * part
                summed += part.detach()
                engine.backward(broken_unless_finite(part / total, part.detach()), last=False)
        return float(summed)

    def _end_window(self, factor: float = 0.0) -> None:
        """A last backward pass, in which ZeRO reduces gradients, of ``factor`` times any loss.

        Of 0 it adds nothing, of NaN the step is skipped.
        """
        engine, pad_id = self._open().engine, self._open().pad_id
        engine.train()
        with self._dropout_seed():
            # Two tokens, of which the second is predicted.
            shortest = TrainerSequence({}, torch.full((2,), pad_id), {})
            batch = make_batch([shortest], [0], pad_id=pad_id, counted_only=False)
            loss = engine(*batch.to(engine.device).inputs).sum() * factor
            engine.backward(loss, last=True)

    def _drop_gradients(self, *, unfinished: bool = False) -> None:
        """Forget the gradients since the last step; call on every rank."""
        engine = self._open().engine
        if engine.zero_stage == 0:
            engine.forget_gradients()
        elif self._calls or unfinished:
            self._end_window(math.nan)
            assert engine.step().skipped
        self._calls = 0

    @contextmanager
    def _dropout_seed(self) -> Iterator[None]:
        """Inside, dropout draws from (seed, step, rank, call) alone; the caller's state stays."""
        parts = self._open()
        here = parts.engine.device
        key = ("dropout", parts.config.run.seed, self.step, data_rank())
        with torch.random.fork_rng(devices=[here] if here.type == "cuda" else []):
            torch.manual_seed(stream_seed(*key, *([self._calls] if self._calls else [])))
            yield


def _total_weight(sequences: Sequence[TrainerSequence], loss: Loss) -> float:
    """What divides the loss: weights of tokens that count, or the number of pairs, of all ranks.

    Raises:
        ValueError: if there is nothing to learn from, on every rank.
    """
    if loss.sequences_per_unit > 1:
        own = len(sequences) / loss.sequences_per_unit
    else:
        own = sum(float(each.numbers["weights"][1:].double().sum()) for each in sequences)
    total, count = sum_over_ranks([own, float(len(sequences))])
    if count == 0:
        raise ValueError("sequences is empty on every rank: there is nothing to learn from")
    if total == 0:
        raise ValueError(
            "no token counts: all weights are 0, except those of first tokens, which never count"
        )
    return total
