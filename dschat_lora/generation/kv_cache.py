"""A static cache for decoding, and attention of a few new tokens to what it holds."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.kernels import support
from dschat_lora.kernels.attention import MOST_SIZE, OwnColumns, attend_own_columns
from dschat_lora.models.backbone import attends, attention_windows, cache_argument, recurrent_layers

# Writes keys and values of a step into (rows, heads, columns, D) of each, in (rows,) columns.
WriteHeads = Callable[[Tensor, Tensor, Tensor], None]
# Whether models gave with our cache what they give without, where that was tried.
TRIED: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
MAX_PRODUCT_TOKENS = 64  # for more, the fused kernel of attention is better
_BY_PRODUCTS, _ONE_TOKEN = "dschat_lora_decode", "dschat_lora_decode_one_token"
_BY_KERNEL = "dschat_lora_decode_own_columns"
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Options of attention layers without effect where a mask is given, out of training.
_WITHOUT_EFFECT = {
    *("dropout", "is_causal", "position_ids", "sliding_window", "use_cache"),
    "output_router_logits",  # of models with experts
}


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the model works with our masks, positions and cache.

    All that its layers keep of earlier tokens must be in the cache.
    """
    accepted = inspect.signature(model.forward).parameters.keys()
    own = {"logits_to_keep"} | ({"position_ids"} if attends(model.config) else set())
    layers = recurrent_layers(model)
    if layers:
        # Versions before have no such method of a cache; some types keep states in the layers.
        caches = all(map(cache_argument, layers))
        # Each length of prompts is read by a pass of its own, of which ranks have unlike numbers.
        keeps = caches and hasattr(Cache, "get_conv_state") and not in_shards(model)
    else:
        kinds = set(getattr(model.config, "layer_types", None) or ())
        backend = bool(getattr(model, "_supports_attention_backend", False))
        keeps = backend and not kinds & {"linear_attention", "conv"}
    return (
        keeps
        and own <= accepted
        and cache_argument(model) is not None
        and attention_windows(model.config) is not None
        and model.config._attn_implementation in ("sdpa", "eager")
        and TRIED.get(model, True)
    )


def in_shards(model: PreTrainedModel) -> bool:
    """Whether ZeRO 3 holds parameters in shards: layers gather them, and nothing else has."""
    sizes = ((p.numel(), getattr(p, "ds_numel", p.numel())) for p in model.parameters())
    return any(here != whole for here, whole in sizes)


@dataclass(frozen=True)
class SharedPrompts:
    """Keys and values of the first columns, which several rows have in common.

    A CPU reads them once for all responses to a prompt (Hydragen, arXiv:2402.05099, section 3.2);
    keys and values of a step have them as their attribute ``prompts``.

    Attributes:
        keys, values: (prompts, heads, W, D).
        sequences: (rows,) int64; row i answers prompt ``sequences[i] // copies``.
        copies: responses to a prompt.
    """

    keys: Tensor
    values: Tensor
    sequences: Tensor
    copies: int


class RecurrentStates:
    """States of recurrent layers, a row for each sequence, by the methods of transformers' caches.

    Prompts are read without padding, which such layers would take for tokens.
    """

    copies = 0  # of each row whose prompts are read; 0 afterwards, and where each is read
    columns = 0  # in use

    def __init__(self) -> None:
        # Of each layer, kind (convolution or recurrence) and number, at fixed addresses.
        self._states: dict[tuple[int, str, int], Tensor] = {}

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        """Rows that a layer holds; the rows of each prompt's copies, or of a step their number."""
        raise NotImplementedError

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(rows, channels, width) of a step, changed in place; None where prompts are read."""
        return self._of_step((layer_idx, "convolution", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(rows, ...) likewise."""
        return self._of_step((layer_idx, "recurrence", state_idx))

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Keep the last of (B, channels, T) inputs of prompts; returns all."""
        width = inputs.shape[-1]
        last = F.pad(inputs, (max(0, conv_kernel_size - width), 0))[..., -conv_kernel_size:]
        self._store_state(last, (layer_idx, "convolution", state_idx))
        return inputs

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Keep the (B, ...) state after prompts or a step."""
        self._store_state(state, (layer_idx, "recurrence", state_idx))
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether steps are taken back."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use; some models call it, but with given positions none depends on it."""
        return self.columns

    def _move_states(self, sources: Tensor, targets: Tensor) -> None:
        for state in self._states.values():
            state.index_copy_(0, targets, state.index_select(0, sources))

    def _of_step(self, key: tuple[int, str, int]) -> Tensor | None:
        _, prompts, count = self._state_rows()
        state = self._states.get(key)
        return None if prompts is not None or self.copies or state is None else state[:count]

    def _store_state(self, state: Tensor, key: tuple[int, str, int]) -> None:
        most, prompts, count = self._state_rows()
        if key not in self._states:
            self._states[key] = state.new_zeros(most, *state.shape[1:])
        store = self._states[key]
        if prompts is None and self.copies:
            store[: len(state) * self.copies] = state.repeat_interleave(self.copies, 0)
        elif prompts is None:
            store[:count] = state
        else:
            store[prompts] = state.repeat_interleave(len(prompts) // len(state), 0)


class KVCache(RecurrentStates):
    """``past_key_values`` of a transformers model; layers are allocated as they are used.

    A layer's keys and values are (rows, heads, columns, D) each, at fixed addresses, one behind
    the other where their shapes are equal. They are zeros at first: masked entries must still be
    finite.

    Attributes:
        capacity: (rows, columns) that a layer holds.
        copies: of each row while the prompts are read, 0 afterwards.
        rows, columns: in use.
        is_compileable: that a mask may be left out where it hides nothing; models of transformers
            5.0 ask for it.
        column: (1,) int64, where the token of a step goes, on the device; counted by its owner.
    """

    is_compileable = False

    def __init__(self, capacity: tuple[int, int], column: Tensor) -> None:
        super().__init__()
        self.capacity, self.copies = capacity, 0
        self.rows, self.columns = capacity
        self.column = column
        # Row, step of the input and column of each token that follows rows which were taken.
        self.following: tuple[Tensor, Tensor, Tensor] | None = None
        # Keys and values: (2, rows, heads, columns, D), or one of each where their shapes differ.
        self._layers: dict[int, Tensor | tuple[Tensor, Tensor]] = {}
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # those that a CPU shares
        self._shared_by: tuple[Tensor, int] | None = None  # the rows' sequences, of how many copies
        self._part: tuple[Tensor, int] | None = None  # rows of some prompts, and their first column

    def start(self, rows: int, copies: int, sequences: Tensor | None = None) -> None:
        """Take the prompts of another batch; what masks do not hide is written anew.

        With ``sequences``, (rows,) int64 that their owner keeps up to date, :class:`SharedPrompts`
        come with the keys of a step.
        """
        self.rows, self.columns, self.copies = rows, self.capacity[1], copies
        self._prompts.clear()
        self._part = None
        self._shared_by = (sequences, copies) if sequences is not None and copies > 1 else None

    def read(self, rows: Tensor, column: int) -> None:
        """Take some of the prompts, whose copies go to ``rows``, into columns from one on."""
        self._part = rows, column

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        rows = self._part[0] if self._part is not None and self.copies else None
        return self.capacity[0], rows, self.rows

    def take(self, source: "KVCache", rows: Tensor, columns: Tensor) -> None:
        """Take what was computed before, from this cache or another.

        Column j of row i becomes column ``columns[i, j]`` of row ``rows[i]`` there: (B, W) and
        (B,) int64.
        """
        for index, stores in source._layers.items():
            taken = [
                store.index_select(0, rows).gather(
                    2, columns[:, None, :, None].expand(-1, store.shape[1], -1, store.shape[3])
                )
                for store in stores
            ]
            if index not in self._layers:
                self._layers[index] = self._allocate(taken[0], taken[1])
            for store, new in zip(self._layers[index], taken, strict=True):
                store[: len(rows), :, : columns.shape[1]] = new

    def step_columns(self) -> Tensor | None:
        """(rows,) int64 column of each row's next token; None while prompts are read."""
        reads = self.copies or self.following is not None
        return None if reads else self.column.expand(self.rows)

    def update(
        self,
        key: Tensor,
        value: Tensor,
        layer_idx: int,
        *_: object,
        write: WriteHeads | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Store (B, heads, T, D) of new tokens; returns all keys and values, (B, heads, ., D).

        In a step ``write`` may do so: see :meth:`step_columns`.
        """
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._allocate(key, value)
        stores = self._layers[layer_idx]
        if self.copies:
            for store, new in zip(stores, (key, value), strict=True):
                self._store_prompts(store, new)
            if self._shared_by is not None:
                self._prompts[layer_idx] = key.contiguous(), value.contiguous()
            return key, value
        if self.following is not None:
            rows, steps, columns = self.following
            for store, new in zip(stores, (key, value), strict=True):
                store[rows, :, columns] = new[rows, :, steps]
            keys, values = (store[: len(key), :, : self.columns] for store in stores)
            return keys, values
        self._store_step(stores, key, value, write)
        keys, values = (store[: self.rows, :, : self.columns] for store in stores)
        if layer_idx in self._prompts and self._shared_by is not None:
            sequences, copies = self._shared_by
            shared = SharedPrompts(*self._prompts[layer_idx], sequences[: self.rows], copies)
            vars(keys)["prompts"] = vars(values)["prompts"] = shared
        return keys, values

    def _allocate(self, key: Tensor, value: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        rows, columns = self.capacity
        keys, values = ((rows, x.shape[1], columns, x.shape[3]) for x in (key, value))
        if keys != values:
            return key.new_zeros(keys), value.new_zeros(values)
        return key.new_zeros(2, *keys)

    def _store_prompts(self, store: Tensor, new: Tensor) -> None:
        count, heads, width, size = new.shape
        if self._part is not None:
            rows, column = self._part
            store[rows, :, column : column + width] = new.repeat_interleave(self.copies, 0)
            return
        rows = store[: count * self.copies, :, :width]
        rows.view(count, self.copies, heads, width, size).copy_(new[:, None])

    def _store_step(
        self,
        stores: Tensor | tuple[Tensor, Tensor],
        key: Tensor,
        value: Tensor,
        write: WriteHeads | None,
    ) -> None:
        pair = _as_pair(key, value) if isinstance(stores, Tensor) else None
        if write is not None:
            write(stores[0][: self.rows], stores[1][: self.rows], self.column.expand(self.rows))
        elif isinstance(stores, Tensor) and pair is not None:
            stores[:, : self.rows].index_copy_(3, self.column, pair)
        else:
            for store, new in zip(stores, (key, value), strict=True):
                store[: self.rows].index_copy_(2, self.column, new)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the used columns of rows ``sources`` over those of rows ``targets``."""
        for layer in self._layers.values():
            for store in layer:
                used = store[:, :, : self.columns]
                used.index_copy_(0, targets, used.index_select(0, sources))
        self._move_states(sources, targets)

    def swap(self, first: Tensor, second: Tensor) -> None:
        """Exchange the used columns of rows ``first`` and of rows ``second``."""
        self.move(torch.cat([first, second]), torch.cat([second, first]))


def _as_pair(first: Tensor, second: Tensor) -> Tensor | None:
    """(2, ...) view of two tensors of one shape that lie in one storage, else None."""
    storages = (each.untyped_storage().data_ptr() for each in (first, second))
    distance = second.storage_offset() - first.storage_offset()
    alike = first.shape == second.shape and first.stride() == second.stride()
    if next(storages) != next(storages) or not alike or distance <= 0:
        return None
    size, stride = (2, *first.shape), (distance, *first.stride())
    return first.as_strided(size, stride, first.storage_offset())


@contextmanager
def fast_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, layers that use "sdpa" attend from few tokens as is best for their device.

    On a CPU that is by plain products: the fused kernel is made for many tokens, and took two to
    ten times as long for one. On a GPU see :func:`attend_by_kernel` and :func:`attend_one_token`.
    Masks must be given whole: transformers makes none for attention it does not know.
    """
    config, kind = model.config, model.device.type
    on_cpu, of_nvidia = kind == "cpu", kind == "cuda" and torch.version.hip is None
    if config._attn_implementation != "sdpa" or not (on_cpu or of_nvidia):
        yield
        return
    name, attend = (_BY_PRODUCTS, attend_by_products) if on_cpu else (_ONE_TOKEN, attend_one_token)
    if support.runs_kernels(model.device):
        name, attend = _BY_KERNEL, partial(attend_by_kernel, attend)
    AttentionInterface.register(name, attend)
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend_by_kernel(
    otherwise: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of one token to the columns that its row's mask shows.

    They come as the mask's attribute ``columns``, so that a model which adds to its mask, such as
    a bias of positions, is served ``otherwise``; so are options that change more than a mask does.
    Shapes are those of :func:`attend_by_products`.
    """
    columns: OwnColumns | None = getattr(attention_mask, "columns", None)
    given = {name for name, option in options.items() if option is not None}
    if columns is None or given - _WITHOUT_EFFECT or not _fits(query, key, value, columns):
        return otherwise(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_own_columns(query[:, :, 0], key, value, columns, scale=scale)[:, None], None


def _fits(query: Tensor, key: Tensor, value: Tensor, columns: OwnColumns) -> bool:
    """Whether one token of each row attends to stores that are alike."""
    rows, _, tokens, size = query.shape
    alike = key.shape == value.shape and key.stride() == value.stride() and size <= MOST_SIZE
    types = {query.dtype, key.dtype, value.dtype}
    return tokens == 1 and alike and len(columns.last) == rows == len(key) and len(types) == 1


def attend_one_token(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' "sdpa", to which it falls back for several tokens.

    Shapes are those of :func:`attend_by_products`. To a kernel the heads that share a key are
    several tokens under one mask, so that no key is copied for each of them. From compute
    capability 9 on that is cuDNN's, which took half the time of the others on an H100. It plans
    each new shape for 60 ms, and steps have few shapes.
    """
    rows, heads, tokens, size = query.shape
    unknown = bool(options.keys() - _WITHOUT_EFFECT)
    if unknown or attention_mask is None or tokens > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    query = query.reshape(rows, key.shape[1], -1, size)
    recent = torch.cuda.get_device_capability(query.device) >= (9, 0)
    with sdpa_kernel(_KERNELS, set_priority=True) if recent else nullcontext():
        output = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def attend_by_products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' "sdpa", to which it falls back for many tokens.

    Of (B, heads, T, D) queries, and (B, key heads, columns, D) keys and values, where heads are a
    multiple of key heads, under a (B, 1, T, columns) additive mask.

    Returns:
        (B, T, heads, D), and None for weights.
    """
    rows, heads, tokens, size = query.shape
    unknown = bool(options.keys() - _WITHOUT_EFFECT)
    if unknown or scaling is None or attention_mask is None or tokens > MAX_PRODUCT_TOKENS:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if scaling != 1:
        query = query * scaling
    # Heads that share a key (grouped-query attention) are rows of one product.
    grouped = query.reshape(rows, key.shape[1], -1, size)
    shared: SharedPrompts | None = getattr(key, "prompts", None)
    if shared is not None and (
        # most responses have ended, or the layer attends to other values than it has stored
        2 * len(shared.keys) > rows or getattr(value, "prompts", None) is not shared
    ):
        shared = None
    width = 0 if shared is None else shared.keys.shape[2]
    scores = torch.matmul(grouped, key[:, :, width:].transpose(2, 3))
    if shared is not None:
        before = _of_prompts(grouped, shared.keys.transpose(2, 3), shared)
        scores = torch.cat([before, scores], -1)
    scores = scores.view(rows, heads, tokens, -1).add_(attention_mask)
    weights = scores.softmax(-1).view(*grouped.shape[:3], -1)
    output = torch.matmul(weights[..., width:], value[:, :, width:])
    if shared is not None:
        output += _of_prompts(weights[..., :width], shared.values, shared)
    return output.view(rows, heads, tokens, -1).transpose(1, 2), None


def _of_prompts(rows: Tensor, matrices: Tensor, shared: SharedPrompts) -> Tensor:
    """(rows, heads, n, q) product of each row and the matrix of its prompt.

    ``rows`` are (rows, heads, n, p), ``matrices`` (prompts, heads, p, q).
    """
    _, heads, count, width = rows.shape
    prompts, copies = len(matrices), shared.copies
    ordered = rows.new_zeros(prompts * copies, heads, count, width)
    ordered.index_copy_(0, shared.sequences, rows)
    ordered = ordered.view(prompts, copies, heads, count, width).transpose(1, 2)
    products = torch.matmul(ordered.reshape(prompts, heads, copies * count, width), matrices)
    products = products.view(prompts, heads, copies, count, -1).transpose(1, 2)
    return products.flatten(0, 1).index_select(0, shared.sequences)
