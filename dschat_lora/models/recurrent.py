"""Recurrent layers of packed rows: the state of each sequence begins anew."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from dschat_lora.algos.segments import Spans


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
        self: nn.Module, *inputs: Any, spans: Spans | None = None, **options: Any
    ) -> Any:
        if spans is None:
            return forward(self, *inputs, **options)
        batches, places = spans.batches
        row = (1, len(places))

        def of(value: Any, tokens: Tensor) -> Any:
            per_token = isinstance(value, Tensor) and value.shape[:2] == row
            return value[0, tokens] if per_token else value

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
