"""The backbone of a transformers model: last hidden states of rows with several sequences."""

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig, PreTrainedModel

from dschat_lora.algos.segments import Spans, block_causal_mask, find_spans, lengthened
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.attention import fits, flex_mask, has_varlen, understand_spans
from dschat_lora.models.training_graphs import TrainingGraphs

Mask = Tensor | BlockMask
# Kinds of layers, by transformers' names, that take no mask but one of padding.
WITHOUT_MASK = {"linear_attention", "conv", "mlp", "moe"}


def sequence_lengths(segment_ids: Tensor) -> Tensor:
    """(B, T) fp32 tokens of the sequence that each token is of, of (B, T) ids from 0 to T."""
    counts = segment_ids.new_zeros(len(segment_ids), segment_ids.shape[1] + 1)
    counts = counts.scatter_add(1, segment_ids, torch.ones_like(segment_ids))
    return counts.gather(1, segment_ids).float()


class Backbone:
    """Runs the model below its head, every sequence of a row by itself.

    Attributes:
        model: the whole transformers model.
        records_routers: keep what routers of experts score each token with, in
            ``router_logits``, (tokens, E) of each layer of the last forward pass.
        noise_alpha: NEFTune's alpha: embeddings of tokens get uniform noise of up to
            ``alpha / sqrt(L d)``, L the tokens of the sequence and d the width; 0: none.
        graphs: passes of training as CUDA graphs, which record neither routers nor noise; None:
            every operation is launched.
        own_mask: the model makes its own mask, from which positions are padding, for
            architectures that take no other; rows must hold one sequence each.
        by_spans: whether the model's layers accept spans: which tokens are a sequence.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._windows = attention_windows(model.config)
        self._recurrent, self._attends = bool(recurrent_layers(model)), attends(model.config)
        self.own_mask = self._windows is None
        self.by_spans = self._windows is not None and _takes_spans(model, self._windows)
        if self.by_spans:
            understand_spans()
            separate_sequences(model)
        self.noise_alpha, self._magnitudes = 0.0, None  # type: tuple[float, Tensor | None]
        self.records_routers = False
        self.graphs: TrainingGraphs | None = None
        self.router_logits: tuple[Tensor, ...] = ()
        self._group = group_of(model)
        accepted = inspect.signature(model.base_model.forward).parameters
        self._takes_positions = "position_ids" in accepted

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor | None = None,
        spans: Spans | None = None,
    ) -> Tensor:
        """(B, T, H) last hidden states, zeros on padding that is not computed.

        Tensors are (B, T), as in ``Batch`` or ``PairBatch``. Without ``branch_ids`` there are no
        trees. Without ``spans`` they are found, for which the device is waited for.
        """
        inputs, count, places = self.prepare(
            input_ids, position_ids, segment_ids, branch_ids, spans
        )
        if self.records_routers:
            inputs["output_router_logits"] = True
        if self.noise_alpha:
            lengths = sequence_lengths(segment_ids)
            if places is not None:
                lengths = lengths.flatten()[places][None]
            magnitudes = self.noise_alpha / lengths.clamp(min=1).sqrt()
            extra = inputs["input_ids"].shape[1] - magnitudes.shape[1]  # which ranks share
            self._magnitudes = _longer(magnitudes, extra)
        replayed: Tensor | None = None
        if self.graphs is not None and self.model.training and torch.is_grad_enabled():
            replayed = self.graphs(inputs)
        if replayed is None:
            try:
                output = self.model.base_model(**inputs)
            finally:
                self._magnitudes = None
            if self.records_routers:
                self.router_logits = output.router_logits
            replayed = output.last_hidden_state
        hidden = replayed[:, :count].flatten(0, 1)
        if places is not None:
            padded = hidden.new_zeros(input_ids.numel(), hidden.shape[-1])
            hidden = padded.index_copy(0, places, hidden)
        return hidden.view(*input_ids.shape, -1)

    def add_noise(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        """The forward hook of the embedding that adds NEFTune's noise (arXiv:2310.05914)."""
        if self._magnitudes is None:
            return None
        size = (self._magnitudes / output.shape[-1] ** 0.5)[..., None].to(output.dtype)
        return output + torch.empty_like(output).uniform_(-1, 1) * size

    def prepare(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor | None = None,
        spans: Spans | None = None,
    ) -> tuple[dict[str, Any], int, Tensor | None]:
        """What the model is called with, so that every sequence of a row is computed by itself.

        Returns:
            Keyword arguments of the model, whole or below its head; how many columns of its
            output are meant; and the places in the flattened (B T) of the tokens that were
            computed, in ascending order, None where all were.
        """
        divided = spans is not None and spans.context is not None
        if divided or self.skips_padding(input_ids.device):
            spans = find_spans(segment_ids, branch_ids) if spans is None else spans
            if spans.lengths:
                tokens = _real(input_ids, spans)
                count = tokens.shape[1]
                extra = self._lacking(count)
                inputs: dict[str, Any] = {
                    "input_ids": _longer(tokens, extra),
                    "spans": lengthened(spans, extra),
                    "use_cache": False,
                }
                if self._attends:
                    # Of this shape, it keeps the model from making one.
                    inputs["attention_mask"] = input_ids.new_zeros(1, 1, 1, 1)
                if self._takes_positions:
                    inputs["position_ids"] = _longer(_real(position_ids, spans), extra)
                return inputs, count, spans.places
        width = input_ids.shape[1]
        extra = self._lacking(width)
        rows = input_ids, position_ids, segment_ids
        ids, positions, segments = (_longer(x, extra) for x in rows)
        branches = None if branch_ids is None else _longer(branch_ids, extra)
        return self.inputs(ids, positions, segments, branches), width, None

    def _lacking(self, count: int) -> int:
        """Tokens to add for ranks that compute as many each."""
        if self._group is None or not self._group.sequence_parallel:
            return 0
        return -count % self._group.size

    @property
    def is_divisible(self) -> bool:
        """Whether ranks can divide the tokens of a row: nothing but attention mixes them."""
        return self.by_spans and not (self.own_mask or self._recurrent)

    def skips_padding(self, device: torch.device | None, *, sharded: bool = False) -> bool:
        """Whether real tokens alone are computed on ``device``, each among its sequence.

        None is a GPU that is planned for. One without a kernel for that takes less time for a dense
        mask than for many calls. Weights are ``sharded``, or will be, at ZeRO 3.
        """
        if not self.by_spans or self.own_mask:
            return False
        # Layers gather their weights when called, of which ranks have unlike numbers.
        if self._recurrent and (
            sharded or any(hasattr(p, "ds_id") for p in self.model.parameters())
        ):
            return False
        if device is not None and device.type == "cpu":
            return True
        # Whether the kernel has the options that layers of this architecture use.
        config = self.model.config
        heads = getattr(config, "num_attention_heads", None) or 1
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        options = ("attention_dropout", "attn_pdrop", "attn_logit_softcapping")
        used = any(getattr(config, name, None) for name in options)
        return has_varlen(device, self.model.dtype) and fits(size) and not used

    @property
    def _takes_masks(self) -> bool:
        """Whether rows that are computed with their padding come with masks of ours."""
        return not self.own_mask and self._windows is not None and self._attends

    @property
    def _is_flex(self) -> bool:
        return bool(self.model.config._attn_implementation == "flex_attention")

    def mask_bytes(
        self, device: torch.device | None, *, length: int, recomputes: bool, sharded: bool = False
    ) -> int:
        """Bytes of masks for each (query, key) pair of a row, at the peak of a training step.

        Rows are of ``length`` positions; ``device`` and ``sharded`` are as for
        :meth:`skips_padding`. Of masks that layers make for themselves the backward pass keeps all,
        or where it ``recomputes`` blocks one, beside the booleans that it is made of.
        """
        width, windows = self.model.dtype.itemsize, self._windows
        if not self.skips_padding(device, sharded=sharded):
            if self._takes_masks:
                return 0 if self._is_flex else width * len(windows or ())
        elif device is None or device.type != "cpu":
            return 0  # the kernel knows windows
        # Layers that do not see all that precedes make their own.
        kinds = getattr(self.model.config, "layer_types", None)
        kinds = kinds or list(windows or ()) * self.model.config.num_hidden_layers
        if windows is None:
            own = [kind for kind in kinds if kind not in {"full_attention", *WITHOUT_MASK}]
        else:
            own = [kind for kind in kinds if (windows.get(kind) or length) < length]
        return (width + 1 if recomputes else width * len(own)) if own else 0

    def inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of the model for these rows."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": self._mask(position_ids, segment_ids, branch_ids),
            "use_cache": False,
        }
        return inputs | ({"position_ids": position_ids} if self._takes_positions else {})

    def _mask(
        self, position_ids: Tensor, segment_ids: Tensor, branch_ids: Tensor | None
    ) -> Mask | dict[str, Mask]:
        """What the model takes as ``attention_mask``: one mask, or one for each kind of layer."""
        if not self._takes_masks:
            return (segment_ids > 0).long()
        assert self._windows is not None
        if self._is_flex:
            make: Callable[..., Mask] = partial(flex_mask, segment_ids, position_ids)
        else:
            positions = None if branch_ids is None else position_ids
            dtype = self.model.dtype
            make = partial(block_causal_mask, segment_ids, dtype, position_ids=positions)
        masks = {k: make(window=w, branch_ids=branch_ids) for k, w in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class BackboneModel(nn.Module):
    """A transformers model and its backbone: what the network of every stage has."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.backbone = Backbone(model)


def _takes_spans(model: PreTrainedModel, windows: dict[str, int | None]) -> bool:
    """Whether every layer passes unknown options on, and its window if it has one.

    That is what transformers means by support of its backends, and of flash attention. Types with
    recurrent layers pass options on without that mark, all that a look at packed rows has shown;
    those that have no attention are called eager.
    """
    windowless = windows == {"full_attention": None}
    passes_window = windowless or bool(getattr(model, "_supports_flash_attn", False))
    sdpa = model.config._attn_implementation == "sdpa"
    if recurrent_layers(model):
        return passes_window and (sdpa or not attends(model.config))
    return sdpa and bool(getattr(model, "_supports_attention_backend", False)) and passes_window


def _longer(values: Tensor, extra: int) -> Tensor:
    """(B, T + extra) of (B, T), with zeros: padding where they are segments."""
    return nn.functional.pad(values, (0, extra)) if extra else values


def _real(values: Tensor, spans: Spans) -> Tensor:
    """(1, N) of (B, T): those that are no padding. A copy, as compiled blocks tell views apart."""
    if spans.places is None:
        return values.reshape(1, -1).clone()
    return values.flatten()[spans.places[None]]


def attends(config: PretrainedConfig) -> bool:
    """Whether any layer has attention, of which a state alone needs no mask and no kernel."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return not kinds or bool(kinds - WITHOUT_MASK)


def attention_windows(config: PretrainedConfig) -> dict[str, int | None] | None:
    """Sliding window of each kind of attention layer, None for all that precedes.

    Returns:
        ``{kind: window}`` by transformers' names of kinds; None where the model has layers
        whose mask is none of ours (linear, chunked, ...).
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - WITHOUT_MASK
    if "hybrid" in kinds:
        kinds = kinds - {"hybrid"} | {"full_attention"}
    if kinds - {"full_attention", "sliding_attention"}:
        return None
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return {"full_attention": None}
    return {k: None if k == "full_attention" else window for k in kinds or {"sliding_attention"}}


def cache_argument(module: nn.Module) -> str | None:
    """The argument by which a module of transformers takes a cache; None where it takes none.

    It is ``cache`` since transformers 5.24.
    """
    return _cache_argument(type(module).forward)


@cache
def _cache_argument(forward: Callable[..., Any]) -> str | None:
    accepted = inspect.signature(forward).parameters
    names = ("cache", "past_key_values", "cache_params")
    return next((name for name in names if name in accepted), None)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that carry a state along the sequence: a convolution's, and a recurrence's if any.

    State-space models, gated linear attention and LFM2 all convolve their inputs over time.
    """
    layers = model.modules()
    return [m for m in layers if any(isinstance(child, nn.Conv1d) for child in m.children())]


def separate_sequences(model: nn.Module) -> None:
    """Have recurrent layers take ``spans``, in this process; without them they do what they did.

    Layers that are computed again in the backward pass are given their options again.
    """
    for kind in {type(layer) for layer in recurrent_layers(model)}:
        if not hasattr(kind.forward, "by_sequence"):
            kind.forward = _by_sequence(kind.forward)


def _by_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a layer, applied to each sequence of ``spans`` from its first token on."""

    @wraps(forward)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def by_sequence(
        self: nn.Module, *inputs: object, spans: Spans | None = None, **options: object
    ) -> object:
        if spans is None:
            return forward(self, *inputs, **options)
        batches, places = spans.batches
        row = (1, len(places))

        def of(value: object, tokens: Tensor) -> object:
            if isinstance(value, Tensor) and value.shape[:2] == row:
                return value[0, tokens]
            return value

        outputs = [
            forward(
                self,
                *(of(value, tokens) for value in inputs),
                **{name: of(value, tokens) for name, value in options.items()},
            )
            for tokens in batches
        ]
        if isinstance(outputs[0], tuple):  # states beside, which nothing reads without a cache
            return _joined([hidden for hidden, *_ in outputs], places), None
        return _joined(outputs, places)

    vars(by_sequence)["by_sequence"] = True
    return by_sequence


def _joined(outputs: list[Tensor], places: Tensor) -> Tensor:
    return torch.cat([each.flatten(0, 1) for each in outputs])[places][None]
