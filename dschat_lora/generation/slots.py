"""Continuous batching: rows join and leave a running batch between any two tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.logprobs import token_logprobs
from dschat_lora.algos.segments import to_device
from dschat_lora.generation.batch_state import (
    COLUMN_BUCKET,
    PROMPT_BUCKET,
    ROW_BUCKETS,
    next_logits,
)
from dschat_lora.generation.cuda_graphs import DecodeStep, RecordedSteps, graphs_for
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.kv_cache import fast_attention, takes_cache
from dschat_lora.generation.own_columns import Held, OwnColumnTable
from dschat_lora.generation.prefix_cache import (
    MIN_PREFIX,
    Layers,
    PrefixCache,
    can_keep_prefixes,
    common_prefix,
    prefix_tokens,
)
from dschat_lora.generation.sampling import Responses
from dschat_lora.generation.slot_cache import SlotCache
from dschat_lora.kernels.support import next_power_of_2
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.backbone import attention_windows, recurrent_layers
from dschat_lora.models.causal_lm import fp32_logits

SCORED_TOKENS = 512  # of a prompt, whose logits are held at a time
# Most of a pass that reads prompts, where shapes are few: with more, launches are hidden behind
# the computation, and graphs would hold more memory.
READ_TOKENS, READ_ROWS = 4096, 64
MOVED_ROWS = 16  # at a time, likewise
_KEYS = 4  # numbers before the tokens of a prompt that is read


class Reading(NamedTuple):
    """A prompt whose tokens but the first ``known`` are read into a place of the cache."""

    prompt: Sequence[int]
    known: int
    place: int
    adapter: int


class ChosenAdapters(Protocol):
    """Which adapter each row of the next forward pass uses: 0 is the base, 1 the first one."""

    def choose(self, numbers: Sequence[int] | Tensor, width: int) -> None:
        """Set the adapter of each row of a batch that is ``width`` tokens wide."""
        ...


class SlotRows:
    """A batch whose rows come and go; each row may use another adapter.

    Where steps are recorded, and on a GPU, their shapes are few: rows are a power of two, or a
    multiple of 128; those that hold no sequence read and write where nobody else does. Prompts are
    read in passes of few shapes, too, into the places of rows that have left.

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
                "layers whose states the KV cache does not support"
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
        self._reads = RecordedSteps(record, of="reading prompts")
        # Of each row in a step: tokens in the cache, adapter and new token; logits after it.
        self._inputs = torch.zeros(0, 3, dtype=torch.int64, device=self.device)
        self._places = torch.zeros(0, 2, dtype=torch.int64, device=self.device)  # see draw
        self._logits = self._read_logits = torch.zeros(0)
        # Of each prompt that is read: see _table.
        self._prompts = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._moves = torch.zeros(2, MOVED_ROWS, dtype=torch.int64, device=self.device)
        self._tokens: list[list[int]] = []  # of each row in the cache
        self._numbers: list[int] = []  # adapter of each row
        self._at: list[int] = []  # where each row lies in the cache
        self._asked: list[tuple[int, ...]] = []  # adapter and prompt of each row
        self._own = OwnColumnTable(0, self.device)
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
        first = dict[tuple[int, ...], int]()
        keys = [(adapter, *prompt) for prompt, adapter in zip(prompts, adapters, strict=True)]
        alike = [first.setdefault(key, i) if self._shares else i for i, key in enumerate(keys)]
        if not self._has_few_shapes:
            self._fill_gaps()
        count = len(self) + len(prompts)
        taken = {*self._at}
        places = [place for place in range(count) if place not in taken][: len(prompts)]
        self.reserve(count, max(map(len, prompts)) + 1)
        known = self._take_prefixes({i: (places[i], prompts[i], adapters[i]) for i in alike})
        passes, order = list[Tensor](), list[int]()
        for batch in self._batches({i: (len(prompts[i]), known[i]) for i in known}):
            rows = [Reading(prompts[i], known[i], places[i], adapters[i]) for i in batch]
            passes.append(self._read(rows)[:, -1])
            order += batch
        copies = [i for i in range(len(prompts)) if alike[i] != i]
        self._move([places[alike[i]] for i in copies], [places[i] for i in copies])
        self._tokens += map(list, prompts)
        self._numbers += adapters
        self._at += places
        self._asked += keys
        logits, place = torch.cat(passes), {i: n for n, i in enumerate(order)}
        if (rows_of := [place[i] for i in alike]) != [*range(len(logits))]:
            logits = logits[to_device(torch.tensor(rows_of), self.device)]
        return logits, [known[i] for i in alike]

    def prompt_logprobs(self, prompt: Sequence[int], adapter: int) -> list[float]:
        """Log-probabilities in nats of a prompt's tokens but the first; no row joins for them."""
        free, logprobs = min({*range(len(self) + 1)} - {*self._at}), list[Tensor]()
        self.reserve(len(self) + 1, len(prompt) + 1)
        following = to_device(torch.tensor(prompt[1:], dtype=torch.int64), self.device)
        # Logits of all tokens at once would take much memory; recurrent layers read a row whole.
        size = len(prompt) if self._recurrent else SCORED_TOKENS
        for first in range(0, len(prompt) - 1, size):
            end = min(first + size, len(prompt) - 1)
            logits = self._read([Reading(prompt[:end], first, free, adapter)], last=end - first)
            logprobs.append(token_logprobs(logits[0], following[first:end]))
        return torch.cat(logprobs).tolist() if logprobs else []

    def _take_prefixes(
        self, joining: Mapping[int, tuple[int, Sequence[int], int]]
    ) -> dict[int, int]:
        """Put what is known of prompts into their places; how many tokens, never a prompt's last.

        Each comes with its place and adapter; what is known is of ended or of running rows.
        """
        known, sources = dict[int, int](), dict[int, int]()  # of each place
        for i, (place, prompt, adapter) in joining.items():
            ended: tuple[Layers, int] = ({}, 0)
            shareable = prefix_tokens(self.model, prompt[:-1])
            if self._prefixes is not None:
                ended = self._prefixes.find(adapter, shareable)
            alike = (
                (common_prefix(tokens, shareable), running)
                for running, tokens in enumerate(self._tokens)
                if self._shares and self._numbers[running] == adapter
            )
            length, running = max(alike, default=(0, 0))
            known[i] = ended[1]
            if length > max(ended[1], MIN_PREFIX - 1):
                known[i], sources[place] = length, self._at[running]
            elif ended[1]:
                self._cache.put(place, *ended)
        self._move([*sources.values()], [*sources])
        return known

    def _batches(self, prompts: Mapping[int, tuple[int, int]]) -> Iterator[list[int]]:
        """Which prompts are read together, given their lengths and how many tokens are known."""
        # Recurrent layers would take padding for tokens. Beside a whole prompt, what follows a
        # prefix would be padded to its width.
        batches: dict[int, list[int]] = {}
        for i, (length, known) in prompts.items():
            batches.setdefault(length if self._recurrent else known > 0, []).append(i)
        if self._recurrent or not self._has_few_shapes:
            yield from batches.values()
            return
        for batch in batches.values():
            batch.sort(key=lambda i: prompts[i][0] - prompts[i][1], reverse=True)
            while batch:
                length, known = prompts[batch[0]]
                most = min(READ_ROWS, max(1, READ_TOKENS // _read_columns(length - known)))
                most = 1 << (most.bit_length() - 1)
                yield batch[:most]
                del batch[:most]

    def _read(self, rows: Sequence[Reading], last: int = 1) -> Tensor:
        """(B, last, V) logits at the ends of prompts; something is known of all, or of none."""
        tokens = max(len(row.prompt) - row.known for row in rows)
        _, width = self._shape(0, max(len(row.prompt) for row in rows))
        count, clears = len(rows), rows[0].known == 0
        columns, size = _read_columns(tokens), next_power_of_2(count)
        records = self._has_few_shapes and not self._recurrent and last == 1
        if not records or size * columns > READ_TOKENS:
            given = to_device(self._table(rows, tokens), self.device)
            return self._read_table(given, width, clears, last)
        # Rows that hold no prompt do again what the first one does.
        given = self._table([*rows, *[rows[0]] * (size - count)], columns)
        if not len(self._prompts):
            self._prompts = self._inputs.new_zeros(READ_TOKENS + READ_ROWS * _KEYS)
        table = self._prompts[: given.numel()].view_as(given)
        table.copy_(to_device(given, self.device))
        step = partial(self._read_recorded, table, width, clears)
        self._reads.run((*given.shape, width, clears), step, self.device)
        return self._read_logits[:count, None].clone()

    def _table(self, rows: Sequence[Reading], columns: int) -> Tensor:
        """(B, 4 + columns) of prompts: what is to be read, and its numbers before it.

        They are how many tokens are read and known, the place and the adapter; padding follows.
        """
        table = []
        for prompt, known, place, adapter in rows:
            rest = prompt[known:]
            padding = [self._pad_id] * (columns - len(rest))
            table.append([len(rest), known, place, adapter, *padding, *rest])
        return torch.tensor(table)

    def _read_table(self, table: Tensor, width: int, clears: bool, last: int) -> Tensor:
        """(B, last, V) logits after prompts, whose keys and values are stored."""
        lengths, known, places, adapters = table[:, :_KEYS].unbind(1)
        ids = table[:, _KEYS:]
        step = torch.arange(ids.shape[1], device=self.device) - (ids.shape[1] - lengths)[:, None]
        positions = step.clamp(min=0) + known[:, None]
        # Padding goes behind the prompt, where the next token will replace it.
        columns = torch.where(step >= 0, positions, (lengths + known)[:, None])
        self._cache.read_prompts(places, columns, width, clears=clears)
        return self._forward(ids, positions, width, adapters, last)

    def _read_recorded(self, table: Tensor, width: int, clears: bool) -> None:
        """The same in place."""
        logits = self._read_table(table, width, clears, 1)[:, -1]
        if not len(self._read_logits):
            self._read_logits = logits.new_zeros(READ_ROWS, logits.shape[1])
        self._read_logits[: len(logits)] = logits

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows of the cache over others; masks hide what follows the tokens of the new ones.

        It is finite, as the others' tokens could be drawn.
        """
        if not self._has_few_shapes:
            self._cache.move_each(sources, targets)
            return
        for first in range(0, len(sources), MOVED_ROWS):
            part = [list(each[first : first + MOVED_ROWS]) for each in (sources, targets)]
            size = next_power_of_2(len(part[0]))
            padded = torch.tensor([[*each, *each[:1] * (size - len(each))] for each in part])
            pairs = self._moves[:, :size]
            pairs.copy_(to_device(padded, self.device))
            self._reads.run(("move", size), partial(self._cache.move, *pairs), self.device)

    def _fill_gaps(self) -> None:
        """Move the last rows into places that others have left, where a step is smaller then."""
        most, _ = self._shape(len(self), 0)
        if max(self._at, default=0) < most:
            return
        late = [row for row, place in enumerate(self._at) if place >= most]
        gaps = sorted({*range(most)} - {*self._at})[: len(late)]
        self._move([self._at[row] for row in late], gaps)
        for row, place in zip(late, gaps, strict=True):
            self._at[row] = place

    def step(self, tokens: Sequence[int]) -> Tensor:
        """(B, V) logits after the next token of every row; recorded ones hold until the next."""
        self._fill_gaps()
        lengths = [*map(len, self._tokens)]
        rows, width = self._shape(len(self), max(lengths) + 1)
        self.reserve(rows, width)
        own = zip(lengths, self._numbers, tokens, strict=True)
        self._inputs[:rows].copy_(self._placed(own, [(0, 0, 0)] * rows))
        shape = rows, width, self._tell_columns()
        self._steps.run(shape, partial(self._advance, rows, width), self.device)
        for row, token in zip(self._tokens, tokens, strict=True):
            row.append(token)
        if self._at == [*range(len(self))]:
            return self._logits[: len(self)]
        return self._logits[to_device(torch.tensor(self._at), self.device)]

    def draw(
        self, responses: Responses, sequences: Sequence[int], numbers: Sequence[int], count: int
    ) -> list[list[int]]:
        """The last token of every row and the next ``count``; the host waits for the device once.

        A row holds one of the ``sequences`` of ``responses``, with ``numbers`` of tokens so far, at
        least one. The next are drawn on the device, which may know the last one alone.
        """
        if count:
            self._draw(responses, sequences, numbers, count)
        before = [number - 1 for number in numbers]
        tokens = responses.drawn(sequences, before, count + 1)
        for row, own in zip(self._tokens, tokens, strict=True):
            row += own[:-1]
        return tokens

    def _draw(
        self, responses: Responses, sequences: Sequence[int], numbers: Sequence[int], count: int
    ) -> None:
        self._fill_gaps()
        lengths = [*map(len, self._tokens)]
        shapes = [self._shape(len(self), max(lengths) + step) for step in range(1, count + 1)]
        rows, _ = shapes[-1]
        self.reserve(*shapes[-1])
        before = [number - 1 for number in numbers]
        own = zip(lengths, self._numbers, sequences, numbers, before, strict=True)
        # Rows that hold no sequence draw for none.
        given = self._placed(own, [(0, 0, responses.capacity, 0, 0)] * rows)
        self._inputs[:rows, :2] = given[:, :2]
        self._inputs[:rows, 2] = responses.tokens_at(given[:, 2], given[:, 4])
        self._places[:rows] = given[:, 2:4]
        shares = self._tell_columns()
        for _, width in shapes:
            step = partial(self._advance_and_draw, responses, rows, width)
            self._steps.run((responses, rows, width, shares), step, self.device)

    def _tell_columns(self) -> bool:
        """Have places without a row read nothing, and rows of one prompt it once; if any do."""
        rows, shares = zip(self._at, self._asked, strict=True), self._shares
        return self._own.tell(
            (at, Held(0, own if shares else at, len(own) - 1)) for at, own in rows
        )

    def _placed(self, own: Iterable[tuple[int, ...]], table: list[tuple[int, ...]]) -> Tensor:
        """(rows, n) numbers of each row at its place, and elsewhere what the table has."""
        for place, numbers in zip(self._at, own, strict=True):
            table[place] = numbers
        return to_device(torch.tensor(table), self.device)

    def _advance_and_draw(self, responses: Responses, rows: int, width: int) -> None:
        """One token for each of the first rows, in place."""
        inputs, (sequences, numbers) = self._inputs[:rows], self._places[:rows].unbind(1)
        columns = inputs[:, :1]
        self._cache.read_tokens(columns, width)
        logits = self._forward(inputs[:, 2:3], columns, width, inputs[:, 1], steps=True)[:, -1]
        inputs[:, 2] = responses.advance(logits, sequences, numbers, group_of(self.model))
        inputs[:, 0] += 1
        numbers += 1

    def _advance(self, rows: int, width: int) -> None:
        """Logits after a token of each of the first rows, which stay where they are."""
        inputs = self._inputs[:rows]
        self._cache.read_tokens(inputs[:, :1], width)
        ids, positions, numbers = inputs[:, 2:], inputs[:, :1], inputs[:, 1]
        logits = self._forward(ids, positions, width, numbers, steps=True)[:, -1]
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
        bucket = rows + -rows % most if rows > most else next_power_of_2(rows)
        rows = min(bucket, self._most_rows) if rows <= self._most_rows else bucket
        return rows, columns + -columns % COLUMN_BUCKET

    def reserve(self, rows: int, columns: int) -> None:
        """Make room; where something moves for it, nothing recorded is replayed."""
        try:
            moved = self._cache.reserve(*self._shape(rows, columns))
        except BaseException:  # some may have moved
            self._forget_recorded()
            raise
        if moved:
            self._inputs = self._inputs.new_zeros(self._cache.rows, 3)
            self._places = self._places.new_zeros(self._cache.rows, 2)
            self._own = OwnColumnTable(self._cache.rows, self.device)
            self._forget_recorded()

    def _forget_recorded(self) -> None:
        self._steps.forget()
        self._reads.forget()

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its number."""
        if self._prefixes is not None:
            self._prefixes.add(
                self._numbers[row],
                self._tokens[row],
                partial(self._cache.copy_of, self._at[row]),
                token_bytes=self._cache.token_bytes,
            )
        lists: tuple[list[Any], ...] = (self._tokens, self._numbers, self._at, self._asked)
        for each in lists:
            each[row] = each[-1]
            each.pop()

    def forget(self) -> None:
        """Drop all rows, and what is kept of earlier ones."""
        self._tokens, self._numbers, self._at, self._asked = [], [], [], []
        self._own.clear()
        self._prefixes = None if self._prefixes is None else PrefixCache()

    def clear(self) -> None:
        """Drop all rows, what is kept of earlier ones, and free the cache."""
        self.forget()
        self._cache = SlotCache()
        self._forget_recorded()

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        width: int,
        adapters: Sequence[int] | Tensor,
        last: int = 1,
        steps: bool = False,  # the first rows, one token of each
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
            if steps:
                self._own.mark(masks[kind], positions[:, 0], window)
        return next_logits(self.model, ids, positions, masks, self._cache, last)


def _read_columns(tokens: int) -> int:
    """Columns of a pass that reads so many tokens of a prompt."""
    if tokens < PROMPT_BUCKET:
        return next_power_of_2(tokens)
    return -(-tokens // PROMPT_BUCKET) * PROMPT_BUCKET
