"""Decoding steps as CUDA graphs, each recorded the second time that its shape comes."""

import warnings
from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

from dschat_lora.generation.kv_cache import in_shards
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.cuda_graphs import (
    Record,
    Step,
    cuda_graphs,
    first_cause,
    has_failed,
    run_watching,
)

DecodeStep = Step
MOST_SHAPES = 64  # that are recorded at a time, as each takes memory


def graphs_for(model: PreTrainedModel) -> Record | None:
    """What captures steps of a model on a GPU; None where no capture would succeed.

    That is with collectives, which are not captured, and in a process in which one has failed.
    """
    divided = in_shards(model) or group_of(model) is not None
    return None if has_failed() or divided else cuda_graphs()


class RecordedSteps:
    """Steps by their shape: the first of each runs as it is, is recorded then, and replayed.

    Args:
        record: turns a step of one shape into its replay, as what :func:`graphs_for` returns does;
            None runs every step anew.
        of: what the steps do, for a warning where they cannot be recorded.
    """

    def __init__(self, record: Record | None, *, of: str = "decoding") -> None:
        self._record, self._of = record, of
        self._recorded: dict[Hashable, Step] = {}
        self._tried: set[Hashable] = set()

    def run(self, shape: Hashable, step: Step, device: torch.device) -> None:
        """Run ``step``, or replay what was recorded of one of its shape."""
        if self._record is not None and has_failed():
            self._give_up()
        if self._record is None or shape in self._recorded:
            self._recorded.get(shape, step)()
        elif shape not in self._tried:
            # What a graph contains has to have run before: libraries set themselves up then. It
            # also shows whether the step can be captured.
            self._tried.add(shape)
            if device.type != "cuda":
                step()
            elif (place := run_watching(step)) is not None:
                self._give_up(f"the model synchronizes with the GPU at {place}")
        else:
            if len(self._recorded) == MOST_SHAPES:
                self._recorded.clear()
            try:
                self._recorded[shape] = self._record(step)
            except RuntimeError as error:
                self._give_up(first_cause(error))
            self._recorded.get(shape, step)()

    def forget(self) -> None:
        """Replay nothing of before: tensors that it refers to have moved."""
        self._recorded.clear()
        self._tried.clear()

    def _give_up(self, reason: str | None = None) -> None:
        if reason is not None:
            warnings.warn(f"{self._of} without CUDA graphs, more slowly: {reason}", stacklevel=2)
        self._record = None
        self.forget()
