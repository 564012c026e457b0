"""Sequences of a Trainer: checked, and as padded batches whose numbers stand in tables.

A sequence is a dict with ``tokens`` and numbers that are each as long; entry t belongs to token t,
and nothing predicts the first token. A table is (N, T), a row for each sequence of a batch.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dschat_lora.algos.segments import Spans
from dschat_lora.config.plurals import counted
from dschat_lora.data.batch import PaddedRows, batch_to_device

Numbers = Mapping[str, Tensor]  # of a sequence, by name, (T,) fp32 each
_WHAT = "a list of numbers, one for each of its tokens"


@dataclass(frozen=True)
class TrainerSequence:
    """A sequence that was checked."""

    given: Mapping[str, Any]  # as it came
    tokens: Tensor  # (T,) int64
    numbers: Numbers

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class SequenceBatch:
    """Rows of one sequence each, right-padded; without any, a row of one padding token."""

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64
    segment_ids: Tensor  # (B, T) int64, 1 on tokens, 0 on padding
    branch_ids: Tensor  # (B, T) int64, 0
    logit_positions: Tensor  # (K,) int64 into the flattened (B T), one before the predicted token
    target_ids: Tensor  # (K,) int64 those tokens
    row: Tensor  # (K,) int64 and column: the place of each in a table
    column: Tensor
    spans: Spans
    numbers: tuple[int, ...]  # of the sequences, by their places in what was given
    tables: Mapping[str, Tensor]  # (N, T) fp32 by name, 0 in the padding

    def to(self, device: torch.device) -> "SequenceBatch":
        """The same batch on ``device``."""
        tables = {name: table.to(device) for name, table in self.tables.items()}
        return replace(batch_to_device(self, device), tables=tables)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What a ``CausalLMLogprobs`` is called with."""
        ids = self.input_ids, self.position_ids, self.segment_ids, self.branch_ids
        return *ids, self.logit_positions, self.target_ids, self.spans

    def table(self, values: Tensor) -> Tensor:
        """(N, T) of the (K,) values of predicted tokens, 0 elsewhere, with gradient."""
        empty = values.new_zeros(len(self.numbers), self.input_ids.shape[1])
        return empty.index_put((self.row, self.column), values)


def check_sequences(
    sequences: object,
    *,
    vocab_size: int,
    max_length: int | None,
    needed: Collection[str] = (),
    loss: str = "",
) -> list[TrainerSequence]:
    """The sequences, checked, with the numbers that are ``needed``, such as ``weights``.

    Raises:
        ValueError: at the first mistake, naming the sequence and what is wrong with it.
    """
    if not isinstance(sequences, Iterable) or isinstance(sequences, str | Mapping):
        raise ValueError(
            f"sequences must be a list of dicts such as {{'tokens': [1, 2], 'weights': [0, 1]}}, "
            f"got {type(sequences).__name__}"
        )
    checked = []
    for number, given in enumerate(sequences):
        where = f"sequences[{number}]"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where} must be a dict with 'tokens', got {type(given).__name__}")
        lacking = [name for name in ("tokens", *needed) if name not in given]
        if lacking:
            reads = f", which {loss} reads" if loss else ""
            raise ValueError(f"{where} lacks {lacking[0]!r}{reads}; it has {sorted(given)}")
        tokens = check_tokens(given["tokens"], vocab_size=vocab_size, where=f"{where}['tokens']")
        if max_length is not None and len(tokens) > max_length:
            raise ValueError(
                f"{where} has {counted(len(tokens), 'token')}, "
                f"and the model has {max_length} positions"
            )
        numbers = {
            name: _numbers(given[name], len(tokens), f"{where}[{name!r}]") for name in needed
        }
        if "weights" in numbers and bool((numbers["weights"] < 0).any()):
            raise ValueError(
                f"{where}['weights'] must be 0 or more, 0 where a token does not count"
            )
        checked.append(TrainerSequence(given, tokens, numbers))
    return checked


def check_tokens(tokens: object, *, vocab_size: int, where: str) -> Tensor:
    """(T,) int64 of a list of token ids.

    Raises:
        ValueError: if there is none, or one that is no id; ``where`` begins the message.
    """
    array = _array(tokens)
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{where} must be a list of whole numbers, got {tokens!r:.60}")
    if not array.size:
        raise ValueError(f"{where} is empty; a sequence has one token or more")
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{where} holds {outside[0]}, which is no token: ids are in [0, {vocab_size})"
        )
    return torch.from_numpy(array.astype(np.int64))


def _numbers(values: object, count: int, where: str) -> Tensor:
    """(count,) fp32."""
    array = _array(values)
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "biuf"):
        raise ValueError(f"{where} must be {_WHAT}, got {values!r:.60}")
    if len(array) != count:
        raise ValueError(
            f"{where} has {counted(len(array), 'value')} for {counted(count, 'token')}; "
            f"it must be {_WHAT}"
        )
    numbers = torch.from_numpy(array.astype(np.float32))
    if not bool(numbers.isfinite().all()):
        bad = int((~numbers.isfinite()).nonzero()[0])
        raise ValueError(f"{where}[{bad}] is {array[bad]}, which is not a finite number")
    return numbers


def _array(values: object) -> NDArray[Any] | None:
    """An array of a list, array or tensor; None of what is neither, or ragged."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        return None
    try:
        return np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except ValueError:
        return None


def make_batches(
    sequences: Sequence[TrainerSequence], *, size: int, unit: int, pad_id: int, counted_only: bool
) -> list[SequenceBatch]:
    """Batches of up to ``size`` units of ``unit`` consecutive sequences, the longest ones first.

    Log-probabilities are taken of all tokens but the first or, with ``counted_only``, of those
    with weight.
    """
    units = [range(first, first + unit) for first in range(0, len(sequences), unit)]
    units.sort(key=lambda own: -max(len(sequences[n]) for n in own))
    batches = []
    for first in range(0, len(units), size):
        numbers = [n for own in units[first : first + size] for n in own]
        batches.append(make_batch(sequences, numbers, pad_id=pad_id, counted_only=counted_only))
    return batches


def make_batch(
    sequences: Sequence[TrainerSequence],
    numbers: Sequence[int],
    *,
    pad_id: int,
    counted_only: bool,
) -> SequenceBatch:
    """The ``sequences`` of these ``numbers``; without any, one row of one padding token."""
    chosen = [sequences[n] for n in numbers]
    width = max(map(len, chosen), default=1)
    grid = PaddedRows(max(1, len(chosen)), width, pad_id)
    for row, each in enumerate(chosen):
        size = len(each)
        grid.put(row, each.tokens.numpy(), np.arange(size), (size,))
    mask = torch.arange(width) < torch.tensor([len(each) for each in chosen])[:, None]
    tables = {
        name: torch.stack([F.pad(each.numbers[name], (0, width - len(each))) for each in chosen])
        for name in (chosen[0].numbers if chosen else ())
    }
    if counted_only and chosen:
        mask = mask & (tables["weights"] > 0)
    mask = mask.reshape(len(chosen), width)
    mask[:, 0] = False  # nothing predicts the first token
    rows, columns = mask.nonzero().unbind(1)
    input_ids = torch.from_numpy(grid.input_ids)
    return SequenceBatch(
        input_ids=input_ids,
        position_ids=torch.from_numpy(grid.positions),
        segment_ids=torch.from_numpy(grid.segments),
        branch_ids=torch.from_numpy(grid.branches),
        logit_positions=rows * width + columns - 1,
        target_ids=input_ids[rows, columns],
        row=rows,
        column=columns,
        spans=grid.spans(),
        numbers=tuple(numbers),
        tables=tables,
    )
