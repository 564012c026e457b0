"""Forward and backward passes of training below a model's head, as CUDA graphs of a few shapes.

A graph replays the operations of one shape on the same memory. So the tokens of a micro-batch are
padded to a number that many have, and so are its sequences, whose ends the kernel of attention
reads on the device. Padding is a sequence of its own: what real tokens give is not changed.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dschat_lora.algos.segments import Spans
from dschat_lora.kernels.support import next_power_of_2
from dschat_lora.models.blocks import CHECKPOINT
from dschat_lora.models.cuda_graphs import Record, Step, first_cause, has_failed, run_watching

MOST_SHAPES = 32  # that are recorded, as each takes memory; others run as they are
_PARTS = 16  # numbers of tokens are multiples of this part of the next power of two
_FEWEST_TOKENS, _FEWEST_SEQUENCES, _SHORTEST = 64, 8, 512
_HEADROOM = 1.5  # of the activations, for temporaries of the passes
Inputs = Mapping[str, Any]  # of the model below its head, as Backbone.prepare gives them


class Shape(NamedTuple):
    """What two micro-batches have in common that one graph can compute."""

    tokens: int
    keys: int  # 0: those of the tokens alone
    sequences: int
    longest: int  # no sequence has more keys


def shape_of(spans: Spans, tokens: int) -> Shape:
    """The shape that so many tokens in these sequences are padded to."""
    padded = _rounded(tokens, _FEWEST_TOKENS)
    extra = padded - tokens
    keys = 0
    if spans.keys is not None:
        keys = _rounded(len(spans.keys) + extra, _FEWEST_TOKENS)
    sequences = next_power_of_2(max(len(spans.lengths) + 1, _FEWEST_SEQUENCES))
    return Shape(padded, keys, sequences, next_power_of_2(max(*spans.longest, extra, _SHORTEST)))


def _rounded(count: int, least: int) -> int:
    step = max(next_power_of_2(count) // _PARTS, least)
    return -(-count // step) * step


class DeviceSpans:
    """What attention reads of :class:`Spans` on the device, of lengths that the host may not read.

    The attributes are those of ``Spans``.
    """

    places = context = mutual = None

    def __init__(self, shape: Shape, device: torch.device) -> None:
        ends = partial(torch.zeros, shape.sequences + 1, dtype=torch.int32, device=device)
        self.longest = (shape.longest, shape.longest)
        self.query_ends = ends()
        self.key_ends = ends() if shape.keys else self.query_ends
        self.keys: Tensor | None = None
        if shape.keys:
            self.keys = torch.zeros(shape.keys, dtype=torch.int64, device=device)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Refused: a graph would replay those of one micro-batch."""
        raise RuntimeError("a layer reads the lengths of sequences on the host")

    def fill(self, spans: Spans, tokens: int) -> None:
        """Take other sequences, and one of the rest of so many tokens.

        Which keys the rest has does not matter: nothing reads what it attends to.
        """
        count, keys = (sum(column) for column in zip(*spans.lengths, strict=True))
        known = len(spans.query_ends)
        # Sequences after that of padding have no token.
        self.query_ends[:known].copy_(spans.query_ends)
        self.query_ends[known:].fill_(tokens)
        if self.keys is not None:
            assert spans.keys is not None
            self.key_ends[:known].copy_(spans.key_ends)
            self.key_ends[known:].fill_(keys + tokens - count)
            self.keys[:keys].copy_(spans.keys)


class Pass:
    """Both passes over micro-batches of one shape, on tensors that stay where they are.

    Attributes:
        hidden: (1, N, H) what the forward pass gives.
        forward, backward: the passes, replayed once they are recorded.
    """

    def __init__(self, graphs: "TrainingGraphs", shape: Shape, inputs: Inputs) -> None:
        self._graphs, ids = graphs, inputs["input_ids"]
        self._tokens, self._device = shape.tokens, ids.device
        self._spans = DeviceSpans(shape, ids.device)
        self._inputs = dict(inputs) | {"spans": self._spans}
        self._rows = [name for name in ("input_ids", "position_ids") if name in inputs]
        self._inputs |= {name: ids.new_zeros(1, shape.tokens) for name in self._rows}
        self._leaves = graphs.leaves()
        self.hidden = torch.empty(0)
        self._gradient = torch.empty(0)
        self._kept = 0  # bytes of the device after the forward pass
        self.forward: Step = self._compute
        self.backward: Step = self._differentiate

    def fill(self, inputs: Inputs) -> None:
        """Take the micro-batch that is computed next."""
        for name in self._rows:
            count = inputs[name].shape[1]
            self._inputs[name][:, :count].copy_(inputs[name])
            self._inputs[name][:, count:].zero_()
        self._spans.fill(inputs["spans"], self._tokens)

    def record(self, record: Record) -> str | None:
        """Record both passes; what keeps them from it, if anything does.

        What a graph contains has to have run before: libraries set themselves up then.
        """
        try:
            if (reason := self._warm_up()) is not None:
                return reason
            # Anew: autograd ties a leaf to the stream that it was first used on.
            self._leaves = self._graphs.leaves()
            # In one go: the memory of one is that of the other, and of no other shape.
            self.forward, self.backward = record(self._compute), record(self._differentiate)
        except RuntimeError as error:
            return first_cause(error)
        self.hidden, self._leaves = self.hidden.detach(), {}
        return None

    def differentiate(self, gradient: Tensor) -> None:
        """Add to the gradients of parameters, for the gradient of what the forward pass gave."""
        self._gradient.copy_(gradient)
        self._graphs.hold_gradients()
        self.backward()

    def _warm_up(self) -> str | None:
        """Run both passes, which change no gradient: that of their result is 0.

        Returns:
            what keeps a GPU from recording them, if anything does.
        """
        device = self._device
        if device.type != "cuda":
            self._both()
            return None
        before = torch.cuda.memory_allocated(device)
        if (place := run_watching(self._both)) is not None:
            return f"the model synchronizes with the GPU at {place}"
        # A capture that runs out of memory would end all of this process.
        kept = self._kept - before
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free < _HEADROOM * kept:
            return f"there is no memory for {kept / 2**30:.3g} GiB of activations"
        return None

    def _both(self) -> None:
        self._compute()
        if self._device.type == "cuda":
            self._kept = torch.cuda.memory_allocated(self._device)
        self._gradient = torch.zeros_like(self.hidden)
        self._differentiate()
        self.hidden = self.hidden.detach()

    def _compute(self) -> None:
        with torch.enable_grad():
            output = functional_call(self._graphs.model, self._leaves, (), self._inputs)
        self.hidden = output.last_hidden_state

    def _differentiate(self) -> None:
        torch.autograd.backward(self.hidden, self._gradient, inputs=[*self._leaves.values()])


class TrainingGraphs:
    """Passes of a model below its head by their shape: the first of each runs as it is.

    The second of a shape is recorded, and replayed as are all that follow. Gradients are added up
    in tensors that stay, which ``grad`` of each parameter then is.

    Args:
        model: below its head, in training; without dropout, its parameters where they stay.
        record: turns a step into its replay, as those of
            :func:`~dschat_lora.models.cuda_graphs.cuda_graphs` do. Passes of other models may come
            between a forward pass and its backward pass, so that no other model has the same one.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model, self._record = model, record
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._weights = list(model.parameters())
        takes_casts = (m for m in model.modules() if getattr(m, "takes_casts", False))
        self._adapted = next(takes_casts, None)
        self._gradients: list[Tensor] = []
        self._passes: dict[Shape, Pass] = {}
        self._seen: set[Shape] = set()
        self._fails = False
        self._pending: Callable[[], object] = lambda: None
        # Addresses of what is computed with, and copies of factors, whose addresses stay theirs.
        self._memory: list[int] = []
        self._casts: tuple[Tensor, Tensor] | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                # Nothing is drawn, and the state of what would is not to be read in a graph.
                again = partial(vars(module)[CHECKPOINT], preserve_rng_state=False)
                vars(module)[CHECKPOINT] = again

    def __call__(self, inputs: Inputs) -> Tensor | None:
        """(1, N', H) last hidden states of N <= N' tokens, which stay until the next call.

        None where the pass is to run as it is: the first of its shape, one of too many shapes or
        without sequences, and one while another's backward pass is still to come.
        """
        spans = inputs.get("spans")
        if self._fails or not isinstance(spans, Spans) or self._pending() is not None:
            return None
        if spans.context is not None or spans.mutual is not None:
            return None
        self._forget_moved()
        if has_failed():
            self._give_up("recording failed before")
            return None
        shape = shape_of(spans, inputs["input_ids"].shape[1])
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        if shape not in self._passes and not self._add(shape, inputs):
            return None
        token = _Token()
        self._pending = weakref.ref(token)
        self._passes[shape].fill(inputs)
        hidden: Tensor = _Replay.apply(self._anchor, self._passes[shape], token)  # type: ignore[no-untyped-call]
        return hidden

    def leaves(self) -> dict[str, Tensor]:
        """Tensors to differentiate by in place of parameters, with their memory, by name."""
        pairs = zip(self._parameters.items(), self._gradients, strict=True)
        leaves: dict[str, Tensor] = {}
        for (name, parameter), gradient in pairs:
            leaves[name] = nn.Parameter(parameter.detach())
            leaves[name].grad = gradient
        return leaves

    def hold_gradients(self) -> None:
        """Have every parameter's gradient, if it has one, where graphs add to it; else 0."""
        fresh = []
        for parameter, held in zip(self._parameters.values(), self._gradients, strict=True):
            if parameter.grad is held:
                continue
            if parameter.grad is None:
                fresh.append(held)
            else:
                held.copy_(parameter.grad)
            parameter.grad = held
        if fresh:
            torch._foreach_zero_(fresh)

    def _add(self, shape: Shape, inputs: Inputs) -> bool:
        """Record passes of a shape; whether that was done."""
        if len(self._passes) == MOST_SHAPES:
            return False
        if not self._gradients:
            self._gradients = [torch.zeros_like(p) for p in self._parameters.values()]
        made = Pass(self, shape, inputs)
        made.fill(inputs)
        reason = made.record(self._record)
        if reason is not None:
            self._give_up(reason)
            return False
        self._passes[shape] = made
        return True

    def _forget_moved(self) -> None:
        """Forget what was recorded, if it refers to memory that weights or factors have left."""
        casts = getattr(self._adapted, "casts", None)
        memory = [p.data_ptr() for p in (*self._weights, *(casts or ()))]
        if memory != self._memory:
            self._memory, self._casts = memory, casts
            self._passes.clear()
            self._seen.clear()

    def _give_up(self, reason: str) -> None:
        warnings.warn(f"training without CUDA graphs, more slowly: {reason}", stacklevel=2)
        self._fails = True
        self._passes.clear()


class _Token:
    """Lives as long as a forward pass waits for its backward pass."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, recorded: Pass, token: _Token) -> Tensor:
        ctx.recorded, ctx.token = recorded, token
        recorded.forward()
        return recorded.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if ctx.token is None:
            raise RuntimeError("a pass that CUDA graphs replay can be differentiated once")
        ctx.recorded.differentiate(gradients[0])
        ctx.token = None
        return None, None, None
