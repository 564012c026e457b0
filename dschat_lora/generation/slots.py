"""Continuous batching: rows join and leave a running batch between any two tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.logprobs import token_logprobs
from dschat_lora.algos.segments import to_device
from dschat_lora.generation.batch_state import (
    COLUMN_BUCKET,
    ROW_BUCKETS,
    next_logits,
    padded_left,
)
from dschat_lora.generation.cuda_graphs import DecodeStep, RecordedSteps, graphs_for
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.kv_cache import fast_attention, takes_cache
from dschat_lora.generation.prefix_cache import (
    MIN_PREFIX,
    Layers,
    PrefixCache,
    can_keep_prefixes,
    common_prefix,
    prefix_tokens,
)
from dschat_lora.generation.sampling import Responses, Sampling, sample_tokens
from dschat_lora.generation.slot_cache import SlotCache
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.backbone import attention_windows, recurrent_layers
from dschat_lora.models.causal_lm import fp32_logits

SCORED_TOKENS = 512  # of a prompt, whose logits are held at a time


class ChosenAdapters(Protocol):
    """Which adapter each row of the next forward pass uses: 0 is the base, 1 the first one."""

    def choose(self, numbers: Sequence[int] | Tensor, width: int) -> None:
        """Set the adapter of each row of a batch that is ``width`` tokens wide."""
        ...


class SlotRows:
    """A batch whose rows come and go; each row may use another adapter.

    Where steps are recorded, and on a GPU, their shapes are few: rows are a power of two, or a
    multiple of 128; those that hold no sequence read and write where nobody else does.

    Args:
        model: in evaluation mode; whole, with a kind of attention that takes our cache.
        adapters: of the model's mixed layers; None where it has none.
        pad_id: any token.
        prefix_cache: take keys and values of other rows for prompts that begin with their tokens.
        retains: also of rows that have gone, which are kept for it.
        most_rows: that will be in use, as far as it is known: no room is made for more.
        record: see :class:`RecordedSteps`; by default CUDA graphs on a GPU.

    Raises:
        ValueError: if the architecture cannot decode with our cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: ChosenAdapters | None = None,
        *,
        pad_id: int,
        prefix_cache: bool = True,
        retains: bool = True,
        most_rows: int = 0,
        record: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        windows = attention_windows(model.config)
        if windows is None or not takes_cache(model):
            raise ValueError(
                f"{type(model).__name__} cannot decode several requests in one batch: it has "
                "layers whose states our cache does not hold"
            )
        self.model, self._adapters, self._pad_id = model, adapters, pad_id
        self._windows, self.device = windows, model.device
        self._recurrent = bool(recurrent_layers(model))
        self._cache, self._most_rows = SlotCache(), most_rows + -most_rows % ROW_BUCKETS[0]
        self._shares = prefix_cache and can_keep_prefixes(model)
        self._prefixes = PrefixCache() if retains and self._shares else None
        if record is None and self.device.type == "cuda":
            record = graphs_for(model)
        self._has_few_shapes = record is not None or self.device.type == "cuda"
        self._steps = RecordedSteps(record)
        # Of each row in a step: tokens in the cache, adapter and new token; logits after it.
        self._inputs = torch.zeros(0, 3, dtype=torch.int64, device=self.device)
        self._places = torch.zeros(0, 2, dtype=torch.int64, device=self.device)  # see draw
        self._logits = torch.zeros(0)
        self._tokens: list[list[int]] = []  # of each row in the cache
        self._numbers: list[int] = []  # adapter of each row
        self._linears: FastLinears | None = None

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._tokens)

    def prepare(self) -> FastLinears:
        """Make the copies of weights that :meth:`kernels` needs, unless they are there."""
        if self._linears is None:
            # Not stacked: several adapters have the same weight, which can lie in one stack alone.
            self._linears = FastLinears(self.model, stacked=False)
        return self._linears

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within, layers compute as is best for a few tokens; weights must not change."""
        with ExitStack() as stack:
            stack.enter_context(self.prepare().in_use())
            stack.enter_context(fp32_logits(self.model))
            stack.enter_context(fast_attention(self.model))
            yield

    def join(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Let prompts become the last rows, each with its adapter's number.

        Equal ones are read once, unless prompts take nothing of other rows.

        Returns:
            (B, V) logits after them, and how many tokens of each were not computed, as another row
            began with them.
        """
        numbers, first = range(len(prompts)), dict[tuple[int, ...], int]()
        keys = [(adapter, *prompt) for prompt, adapter in zip(prompts, adapters, strict=True)]
        alike = [first.setdefault(key, i) if self._shares else i for i, key in enumerate(keys)]
        self.reserve(len(self) + len(prompts), max(map(len, prompts)) + 1)
        known = {
            i: self._take_prefix(len(self) + i, prompts[i], adapters[i])
            for i in dict.fromkeys(alike)
        }
        # Recurrent layers would take padding for tokens. Beside a whole prompt, what follows a
        # prefix would be padded to its width.
        batches: dict[int, list[int]] = {}
        for i in known:
            batches.setdefault(len(prompts[i]) if self._recurrent else known[i] > 0, []).append(i)
        logits = torch.cat(
            [
                self._read(
                    [prompts[i] for i in batch],
                    [known[i] for i in batch],
                    rows=[len(self) + i for i in batch],
                    adapters=[adapters[i] for i in batch],
                )[:, -1]
                for batch in batches.values()
            ]
        )
        order = [i for batch in batches.values() for i in batch]
        copies = [i for i in numbers if alike[i] != i]
        if copies:
            self._cache.move(
                [len(self) + alike[i] for i in copies], [len(self) + i for i in copies]
            )
        self._tokens += map(list, prompts)
        self._numbers += adapters
        place = {i: n for n, i in enumerate(order)}
        return logits[[place[i] for i in alike]], [known[i] for i in alike]

    def prompt_logprobs(self, prompt: Sequence[int], adapter: int) -> list[float]:
        """Log-probabilities in nats of a prompt's tokens but the first; no row joins for them."""
        row, found = len(self), list[Tensor]()
        self.reserve(row + 1, len(prompt) + 1)
        self._cache.put(row, {}, 0)
        following = to_device(torch.tensor(prompt[1:], dtype=torch.int64), self.device)
        # Logits of all tokens at once would take much memory; recurrent layers read a row whole.
        size = len(prompt) if self._recurrent else SCORED_TOKENS
        for first in range(0, len(prompt) - 1, size):
            end = min(first + size, len(prompt) - 1)
            logits = self._read(
                [prompt[:end]], [first], rows=[row], adapters=[adapter], last=end - first
            )
            found.append(token_logprobs(logits[0], following[first:end]))
        return torch.cat(found).tolist() if found else []

    def _take_prefix(self, row: int, prompt: Sequence[int], adapter: int) -> int:
        """Put what is known of a prompt into a row; how many tokens, of which the last is none."""
        found: tuple[Layers, int] = ({}, 0)
        shareable = prefix_tokens(self.model, prompt[:-1])
        if self._prefixes is not None:
            found = self._prefixes.find(adapter, shareable)
        if self._shares:
            alike = (
                (common_prefix(tokens, shareable), running)
                for running, tokens in enumerate(self._tokens)
                if self._numbers[running] == adapter
            )
            length, running = max(alike, default=(0, 0))
            if length > max(found[1], MIN_PREFIX - 1):
                found = self._cache.copy_of(running, length), length
        self._cache.put(row, *found)
        return found[1]

    def _read(
        self,
        prompts: Sequence[Sequence[int]],
        known: Sequence[int],
        *,
        rows: Sequence[int],
        adapters: Sequence[int],
        last: int = 1,
    ) -> Tensor:
        """(B, last, V) logits at the ends of prompts, whose first ``known`` are in their rows."""
        rests = [prompt[first:] for prompt, first in zip(prompts, known, strict=True)]
        ids, real = padded_left(rests, self._pad_id, self.device)
        lengths, firsts, row = (
            to_device(torch.tensor(each), self.device)
            for each in ([*map(len, prompts)], known, rows)
        )
        positions = (real.cumsum(-1) - 1).clamp(min=0) + firsts[:, None]
        # Padding goes behind the prompt, where the next token will replace it.
        columns = torch.where(real > 0, positions, lengths[:, None])
        _, width = self._shape(0, max(map(len, prompts)))
        self._cache.read_prompts(row, columns, width)
        return self._forward(ids, positions, width, adapters, last)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """(B, V) logits after the next token of every row; recorded ones hold until the next."""
        lengths = [*map(len, self._tokens)]
        rows, width = self._shape(len(self), max(lengths) + 1)
        self.reserve(rows, width)
        given = torch.zeros(rows, 3, dtype=torch.int64)
        given[: len(self)] = torch.tensor([*zip(lengths, self._numbers, tokens, strict=True)])
        self._inputs[:rows].copy_(to_device(given, self.device))
        self._steps.run((rows, width), partial(self._advance, rows, width), self.device)
        for row, token in zip(self._tokens, tokens, strict=True):
            row.append(token)
        return self._logits[: len(self)]

    def draw(
        self,
        responses: Responses,
        sequences: Sequence[int],
        numbers: Sequence[int],
        tokens: Sequence[int],
        count: int,
    ) -> list[list[int]]:
        """The next ``count`` tokens of every row, drawn on the device, which is waited for once.

        A row holds one of the ``sequences`` of ``responses``, with ``numbers`` of tokens so far,
        the last of which is in ``tokens``.
        """
        lengths = [*map(len, self._tokens)]
        shapes = [self._shape(len(self), max(lengths) + step) for step in range(1, count + 1)]
        rows, _ = shapes[-1]
        self.reserve(*shapes[-1])
        # Rows that hold no sequence draw for none.
        given = torch.tensor([[0, 0, 0, responses.capacity, 0]]).repeat(rows, 1)
        table = zip(lengths, self._numbers, tokens, sequences, numbers, strict=True)
        given[: len(self)] = torch.tensor([*table])
        given = to_device(given, self.device)
        self._inputs[:rows].copy_(given[:, :3])
        self._places[:rows].copy_(given[:, 3:])
        for _, width in shapes:
            step = partial(self._advance_and_draw, responses, rows, width)
            self._steps.run((responses, rows, width), step, self.device)
        found = responses.drawn(sequences, numbers, count)
        for row, last, own in zip(self._tokens, tokens, found, strict=True):
            row += [last, *own[:-1]]
        return found

    def _advance_and_draw(self, responses: Responses, rows: int, width: int) -> None:
        """One token for each of the first rows, in place."""
        inputs, (sequences, numbers) = self._inputs[:rows], self._places[:rows].unbind(1)
        columns = inputs[:, :1]
        self._cache.read_tokens(columns, width)
        logits = self._forward(inputs[:, 2:3], columns, width, inputs[:, 1])[:, -1]
        inputs[:, 2] = responses.advance(logits, sequences, numbers, group_of(self.model))
        inputs[:, 0] += 1
        numbers += 1

    def _advance(self, rows: int, width: int) -> None:
        """Logits after a token of each of the first rows, which stay where they are."""
        inputs = self._inputs[:rows]
        self._cache.read_tokens(inputs[:, :1], width)
        logits = self._forward(inputs[:, 2:], inputs[:, :1], width, inputs[:, 1])[:, -1]
        if not self._has_few_shapes:
            self._logits = logits
            return
        if len(self._logits) < len(self._inputs):  # room for all shapes, as no graph is told
            self._logits = logits.new_zeros(len(self._inputs), logits.shape[1])
        self._logits[:rows] = logits

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape that a step of so many rows and columns takes, where shapes are to be few."""
        if not self._has_few_shapes:
            return rows, columns
        most = ROW_BUCKETS[-1]  # beyond that a power of two would take up to twice the memory
        bucket = rows + -rows % most if rows > most else 1 << max(0, rows - 1).bit_length()
        rows = min(bucket, self._most_rows) if rows <= self._most_rows else bucket
        return rows, columns + -columns % COLUMN_BUCKET

    def reserve(self, rows: int, columns: int) -> None:
        """Make room; where something moves for it, nothing recorded is replayed."""
        try:
            moved = self._cache.reserve(*self._shape(rows, columns))
        except BaseException:  # some may have moved
            self._steps.forget()
            raise
        if moved:
            self._inputs = self._inputs.new_zeros(self._cache.rows, 3)
            self._places = self._places.new_zeros(self._cache.rows, 2)
            self._steps.forget()

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self) - 1
        if self._prefixes is not None:
            self._prefixes.add(
                self._numbers[row],
                self._tokens[row],
                partial(self._cache.copy_of, row),
                token_bytes=self._cache.token_bytes,
            )
        if row != last:
            self._cache.move(last, row)
        lists: tuple[list[Any], ...] = (self._tokens, self._numbers)
        for each in lists:
            each[row] = each[last]
            each.pop()

    def forget(self) -> None:
        """Drop all rows, and what is kept of earlier ones."""
        self._tokens, self._numbers = [], []
        self._prefixes = None if self._prefixes is None else PrefixCache()

    def clear(self) -> None:
        """Drop all rows, what is kept of earlier ones, and free the cache."""
        self.forget()
        self._cache = SlotCache()
        self._steps.forget()

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        width: int,
        adapters: Sequence[int] | Tensor,
        last: int = 1,
    ) -> Tensor:
        """(B, last, V) logits after the last of (B, T) tokens, which attend to their row so far."""
        if self._adapters is not None:
            self._adapters.choose(adapters, ids.shape[1])
        columns, masks = torch.arange(width, device=self.device), {}
        for kind, window in self._windows.items():
            hidden = columns > positions[..., None]
            if window is not None:
                hidden |= columns <= positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None]
        return next_logits(self.model, ids, positions, masks, self._cache, last)


def sample_each(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> list[int]:
    """The next token of each row, by options of its own; see :func:`sample_tokens`.

    ``logits`` are (B, V); ``uniforms`` numbers in (0, 1], of which greedy rows take none.
    """
    rows: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows.setdefault(sampling, []).append(row)
    chosen = [0] * len(samplings)
    for sampling, own in rows.items():
        uniform = torch.tensor([uniforms[row] for row in own], dtype=torch.float64)
        part = logits
        if len(own) < len(chosen):
            part = logits[to_device(torch.tensor(own), logits.device)]
        tokens = sample_tokens(part, to_device(uniform, logits.device), sampling).tolist()
        for row, token in zip(own, tokens, strict=True):
            chosen[row] = token
    return chosen
