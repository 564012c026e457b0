"""A transformers model up to its last hidden states, on rows that hold several sequences."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dschat_lora.attention import block_causal_mask
from dschat_lora.models.blocks import block_sizes, understand_blocks


class Trunk:
    """Runs the model below its head, every sequence of a row by itself.

    Attributes:
        model: the whole transformers model.
        own_mask: let the model make its mask from which positions are padding, for
            architectures that take no other; rows must hold one sequence each.
        by_blocks: compute on real tokens alone and attend within samples alone, on a CPU.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._windows = attention_windows(model.config)
        self.own_mask = self._windows is None
        self.by_blocks = (
            self._windows == {"full_attention": None}
            and model.config._attn_implementation == "sdpa"
            and bool(getattr(model, "_supports_attention_backend", False))
        )
        if self.by_blocks:
            understand_blocks()
        accepted = inspect.signature(model.base_model.forward).parameters
        self._takes_positions = "position_ids" in accepted

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor | None = None,
    ) -> Tensor:
        """(B, T, H) last hidden states; all arguments (B, T) as in ``Batch`` or ``PairBatch``."""
        if self.skips_padding(input_ids.device) and bool((segment_ids > 0).any()):
            return self._by_blocks(input_ids, position_ids, segment_ids, branch_ids)
        inputs = self.inputs(input_ids, position_ids, segment_ids, branch_ids)
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden

    def skips_padding(self, device: torch.device) -> bool:
        """Whether rows on ``device`` are computed by blocks: on a CPU, in float32.

        A GPU would wait for their sizes, and 16 bits on a CPU are there to do as a GPU does.
        """
        on_cpu = device.type == "cpu" and self.model.dtype == torch.float32
        return on_cpu and self.by_blocks and not self.own_mask

    def _by_blocks(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor | None,
    ) -> Tensor:
        """As :meth:`__call__`; zeros on padding, which is not computed."""
        (places,) = segment_ids.flatten().nonzero(as_tuple=True)
        inputs: dict[str, Any] = {
            "input_ids": input_ids.flatten()[places][None],
            "attention_mask": block_sizes(segment_ids, branch_ids),
            "use_cache": False,
        }
        if self._takes_positions:
            inputs["position_ids"] = position_ids.flatten()[places][None]
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state[0]
        if len(places) < input_ids.numel():
            rows = hidden.new_zeros(input_ids.numel(), hidden.shape[-1])
            hidden = rows.index_copy(0, places, hidden)
        return hidden.view(*input_ids.shape, -1)

    def inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments that make the model treat the rows so."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": self._mask(position_ids, segment_ids, branch_ids),
            "use_cache": False,
        }
        return inputs | ({"position_ids": position_ids} if self._takes_positions else {})

    def _mask(
        self, position_ids: Tensor, segment_ids: Tensor, branch_ids: Tensor | None
    ) -> Tensor | dict[str, Tensor]:
        """What the model takes as ``attention_mask``: one mask, or one for each kind of layer."""
        if self.own_mask or self._windows is None:
            return (segment_ids > 0).long()
        masks = {
            kind: block_causal_mask(
                segment_ids,
                self.model.dtype,
                window=window,
                branch_ids=branch_ids,
                position_ids=None if branch_ids is None else position_ids,
            )
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_windows(config: PretrainedConfig) -> dict[str, int | None] | None:
    """Sliding window of each kind of attention layer, None for all that precedes.

    Returns:
        ``{kind: window}`` by transformers' names of kinds; None where the model has layers
        whose mask is none of ours (linear, chunked, ...).
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return None
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return {"full_attention": None}
    return {k: None if k == "full_attention" else window for k in kinds or {"sliding_attention"}}
