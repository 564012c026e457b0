"""The rows of a batch that decodes: what the model is given at each step, and who stays."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.generation.kv_cache import KVCache
from dschat_lora.generation.sampling import Responses
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.backbone import attention_windows

ROW_BUCKETS = (8, 16, 32, 64, 128)
COLUMN_BUCKET = 128
DecodeStep = Callable[[], None]


class Rows(Protocol):
    """What the decoding loop needs of a way to compute."""

    sequences: list[int]

    def start(self) -> None:
        """Read the prompts and choose every sequence's first token."""

    def step(self) -> None:
        """Choose the next token of every row."""

    def keep(self, alive: Sequence[bool]) -> None:
        """Let go of the sequences that have ended, where that pays."""


def takes_cache(model: Any) -> bool:
    """Whether the model works with our masks, positions and cache."""
    accepted = inspect.signature(model.forward).parameters
    return (
        {"position_ids", "past_key_values", "logits_to_keep"} <= accepted.keys()
        and attention_windows(model.config) is not None
        and model.config._attn_implementation in ("sdpa", "eager")
        and bool(getattr(model, "_supports_attention_backend", False))
    )


def in_shards(model: Any) -> bool:
    """Whether ZeRO 3 holds parameters that have their values during their layer's forward alone.

    Gathered ones keep them for as long as they are.
    """
    sizes = ((p.numel(), getattr(p, "ds_numel", p.numel())) for p in model.parameters())
    return any(here != whole for here, whole in sizes)


class CachedRows:
    """Rows that hold keys and values of what they have read: a step computes one token.

    Prompts stand right-aligned, so every row writes its next token to the same column. All
    that a step reads and writes stays where it is; with ``buckets`` its shapes change rarely
    too, so that a GPU replays it as a graph.

    Args:
        model: that takes a cache.
        prompts: token ids.
        responses: where the tokens go.
        copies: sequences of each prompt.
        pad_id: any token.
        device: where the model computes.
        buckets: whether rows and columns come in few sizes.
        record: makes of a step of one shape what repeats it, such as :func:`cuda_graphs`; None
            computes every step anew.

    Attributes:
        sequences: which sequence each row in use holds.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        *,
        copies: int,
        pad_id: int,
        device: torch.device,
        buckets: bool = False,
        record: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        self._model, self._prompts, self._responses = model, prompts, responses
        self._agreed = _agreed(model)
        self._pad_id, self._copies = pad_id, copies
        self._buckets, self._record = buckets, record
        self.sequences = list(range(len(prompts) * copies))
        self._filled = max(len(prompt) for prompt in prompts)
        capacity = (
            self._row_bucket(len(self.sequences)),
            self._column_bucket(self._filled + responses.limit),
        )
        self._cache = KVCache(capacity, copies=copies, device=device)
        self._windows: dict[str, int | None] = attention_windows(model.config) or {}
        rows = capacity[0]
        self._ids = torch.full((rows, 1), pad_id, device=device)
        self._positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._sequence = torch.full((rows,), len(self.sequences), device=device)
        self._masks = {kind: self._empty_mask(window) for kind, window in self._windows.items()}
        self._recorded: dict[tuple[int, int], DecodeStep] = {}
        self._warm = False

    def start(self) -> None:
        """Read each prompt once, for all its copies, and choose the first tokens."""
        ids, segments = padded_left(self._prompts, self._pad_id, self._ids.device)
        positions = (segments.cumsum(-1) - 1).clamp(min=0)
        masks = {
            kind: block_causal_mask(segments, self._model.dtype, window=window)
            for kind, window in self._windows.items()
        }
        logits = self._forward(ids, positions, masks).repeat_interleave(self._copies, 0)
        count, width = len(self.sequences), self._filled
        self._cache.copies = 0
        self._cache.column.fill_(width)
        self._sequence[:count] = torch.arange(count, device=ids.device)
        self._positions[:count] = positions[:, -1:].repeat_interleave(self._copies, 0)
        for kind, window in self._windows.items():
            last = masks[kind][:, :, -1:].repeat_interleave(self._copies, 0)
            self._masks[kind][:count, :, :, window or 0 :][..., :width] = last
        self._ids[:count, 0] = self._responses.advance(logits, self._sequence[:count], self._agreed)

    def step(self) -> None:
        """Choose the next token of every row."""
        self._filled += 1
        self._cache.columns = self._column_bucket(self._filled)
        shape = (self._cache.rows, self._cache.columns)
        # The first step is never recorded: libraries set themselves up in it.
        if self._record is not None and self._warm and shape not in self._recorded:
            self._recorded[shape] = self._record_step(self._record)
        self._recorded.get(shape, self.advance)()
        self._warm = True

    def _record_step(self, record: Callable[[DecodeStep], DecodeStep]) -> DecodeStep:
        try:
            return record(self.advance)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(f"decoding without CUDA graphs, slowly: {reason}", stacklevel=2)
            self._record = None
            return self.advance

    def advance(self) -> None:
        """One token for every row, from and to tensors that stay where they are."""
        cache = self._cache
        rows = cache.rows
        self._positions += 1
        masks = {kind: self._open_column(kind, w) for kind, w in self._windows.items()}
        logits = self._forward(self._ids[:rows], self._positions[:rows], masks)
        cache.column += 1
        self._ids[:rows, 0] = self._responses.advance(logits, self._sequence[:rows], self._agreed)

    def keep(self, alive: Sequence[bool]) -> None:
        """Move living rows into the places of ended ones, and use the first rows alone.

        Args:
            alive: of each row in use; at least one is.
        """
        living = [row for row, lives in enumerate(alive) if lives]
        rows = self._row_bucket(len(living))
        if self._cache.rows - rows < max(1, self._cache.rows // 16):
            return
        sources = [row for row in living if row >= rows]
        targets = [row for row in range(rows) if row >= len(alive) or not alive[row]]
        self._move(sources, targets[: len(sources)])
        self._cache.rows = rows
        self.sequences = self.sequences[:rows]

    def _move(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        source, target = (torch.tensor(x, device=self._ids.device) for x in (sources, targets))
        self._cache.move(source, target)
        for state in (self._ids, self._positions, self._sequence, *self._masks.values()):
            state.index_copy_(0, target, state.index_select(0, source))
        for source_row, target_row in zip(sources, targets, strict=True):
            self.sequences[target_row] = self.sequences[source_row]

    def _forward(self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor]) -> Tensor:
        """(B, V) logits after the last column."""
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def _empty_mask(self, window: int | None) -> Tensor:
        """(rows, 1, 1, window + columns) that shows nothing.

        The first ``window`` columns stand before the cache's: what leaves the window there is
        closed like any other column.
        """
        rows, columns = self._cache.capacity
        hidden = torch.finfo(self._model.dtype).min
        shape = (rows, 1, 1, (window or 0) + columns)
        return torch.full(shape, hidden, dtype=self._model.dtype, device=self._ids.device)

    def _open_column(self, kind: str, window: int | None) -> Tensor:
        """The mask of a step: the new token sees itself, and loses what its window left."""
        mask, cache = self._masks[kind], self._cache
        mask.index_fill_(3, cache.column + (window or 0), 0.0)
        if window is not None:
            mask.index_fill_(3, cache.column, torch.finfo(mask.dtype).min)
        return mask[: cache.rows, :, :, window or 0 :][..., : cache.columns]

    def _row_bucket(self, rows: int) -> int:
        if not self._buckets:
            return rows
        largest = ROW_BUCKETS[-1]
        fitting = (bucket for bucket in ROW_BUCKETS if bucket >= rows)
        return next(fitting, -(-rows // largest) * largest)

    def _column_bucket(self, columns: int) -> int:
        return -(-columns // COLUMN_BUCKET) * COLUMN_BUCKET if self._buckets else columns


def cuda_graphs() -> Callable[[DecodeStep], DecodeStep]:
    """What makes of a step the replay of all that it launches, without running it.

    Replays follow one another, so all share one memory for what lasts no longer than a step.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(step: DecodeStep) -> DecodeStep:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        replay: DecodeStep = graph.replay
        return replay

    return record


def _agreed(model: Any) -> Callable[[Tensor], Tensor] | None:
    """What makes the ranks that a model is divided among choose the same tokens."""
    group = group_of(model)
    return None if group is None else group.first


def padded_left(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(B, T) int64 tokens that end in the last column, and 1 where they are, else 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(real, device=device)


class RecomputedRows:
    """Rows that are read from their beginning at every step: slow, right for any causal model.

    Nothing is asked of the model but to take padding on the right, which no token before it
    sees.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        *,
        copies: int,
        pad_id: int,
        device: torch.device,
    ) -> None:
        self._model, self._responses, self._pad_id = model, responses, pad_id
        self._agreed = _agreed(model)
        self._texts = [list(prompt) for prompt in prompts for _ in range(copies)]
        self.sequences = list(range(len(self._texts)))
        self._device = device

    def start(self) -> None:
        """As :meth:`step`."""
        self.step()

    def step(self) -> None:
        """Choose the next token of every row."""
        texts = [self._texts[sequence] for sequence in self.sequences]
        width = max(len(text) for text in texts)
        rows = [text + [self._pad_id] * (width - len(text)) for text in texts]
        lengths = torch.tensor([len(text) for text in texts], device=self._device)
        real = torch.arange(width, device=self._device) < lengths[:, None]
        ids = torch.tensor(rows, device=self._device)
        output = self._model(input_ids=ids, attention_mask=real.long(), use_cache=False)
        places = torch.arange(len(texts), device=self._device)
        sequences = torch.tensor(self.sequences, device=self._device)
        tokens = self._responses.advance(
            output.logits[places, lengths - 1], sequences, self._agreed
        )
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)

    def keep(self, alive: Sequence[bool]) -> None:
        """Compute the living ones alone."""
        pairs = zip(self.sequences, alive, strict=True)
        self.sequences = [sequence for sequence, lives in pairs if lives]
