"""Blocks recomputed in the backward pass, their inputs in host memory, and compiled blocks."""

import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")
CHECKPOINT = "_gradient_checkpointing_func"  # of a block of transformers
# Inputs on their way at a time; with fewer, one that is fetched would be given up again.
IN_TRANSIT = 2
# Variants of a block's code: of each role with and without adapters and gradients, on one row
# and on several. torch stops compiling beyond 8.
_MOST_VARIANTS = 64
FLEX_ATTENTION = "--attn_implementation flex_attention"


def recompute_blocks(model: PreTrainedModel, option: str = "gradient_checkpointing") -> None:
    """Keep the input of each block only, and compute its inside again in the backward pass.

    Raises:
        ValueError: if the architecture cannot, naming the ``option`` that asks for it.
    """
    if not can_recompute(model):
        raise ValueError(
            f"--{option}: {type(model).__name__} cannot recompute its blocks; use --no-{option}"
        )
    # The name changed within transformers 5; the first argument did not.
    old = model.gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", old)
    enable({"use_reentrant": False})


def can_recompute(model: PreTrainedModel) -> bool:
    """Whether transformers knows how to compute the blocks of this architecture again."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def offload_inputs(model: nn.Module) -> None:
    """Keep the input of each recomputed block in host memory; values stay bit for bit.

    Call it after :func:`~dschat_lora.models.blocks.recompute_blocks`. Without a GPU the inputs are
    copied all the same, and no memory is saved.
    """
    copies = HostCopies()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            around = partial(checkpoint_offloaded, copies, vars(module)[CHECKPOINT])
            vars(module)[CHECKPOINT] = around


def checkpoint_offloaded(
    copies: "HostCopies",
    checkpoint: Callable[..., T],
    function: Callable[..., object],
    *inputs: Tensor,
) -> T:
    """``checkpoint(function, *inputs)`` that keeps the first of ``inputs`` in ``copies``.

    That is the hidden states, the one input that each block has for itself: masks and tables of
    positions, which all blocks share, stay where they are. ``checkpoint`` is torch's without
    re-entering, which saves its inputs as autograd does.

    Raises:
        ValueError: if the first input is no tensor, so that there is nothing to move.
    """
    hidden = inputs[0] if inputs else None
    if not isinstance(hidden, Tensor):
        raise ValueError(
            "--offload_activations: the blocks of this model do not take the hidden states as "
            "first argument; drop the option"
        )

    # Not the tensor itself: autograd keeps both functions as long as what they return.
    kind = hidden.shape, hidden.dtype

    def keep(tensor: Tensor) -> "Tensor | HostCopy":
        return copies.keep(tensor) if (tensor.shape, tensor.dtype) == kind else tensor

    def take(kept: "Tensor | HostCopy") -> Tensor:
        return kept if isinstance(kept, Tensor) else copies.take(kept)

    with saved_tensors_hooks(keep, take):
        return checkpoint(function, *inputs)


class HostCopy:
    """A tensor in host memory, pinned if it came from a GPU.

    Attributes:
        here: the same on the device, while it is on its way to the host or back; else None.
        done: recorded on the copying stream at the end of the last copy of a GPU's tensor.
        before: the copy that was made before this one and is wanted after it, if it lives.
    """

    def __init__(self, tensor: Tensor, before: "HostCopy | None") -> None:
        on_gpu = tensor.device.type == "cuda"
        self.device = tensor.device
        self.here = tensor if on_gpu else None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self.done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.before = (lambda: None) if before is None else weakref.ref(before)


class HostCopies:
    """Copies of the inputs of a model's blocks, taken in the reverse order as a rule.

    What is being copied is referred to until the computing stream has waited for the copy: its
    memory is not used again before.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._moving: deque[HostCopy] = deque()
        self._last: Callable[[], HostCopy | None] = lambda: None

    def keep(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor to the host; on a GPU while it goes on computing."""
        tensor = tensor.detach()  # or the copy would keep the graph by which it is kept
        copy = HostCopy(tensor, self._last())
        self._last = weakref.ref(copy)
        if copy.done is None:
            copy.host.copy_(tensor)
        else:
            self._move(copy, copy.host, tensor)
        return copy

    def take(self, copy: HostCopy) -> Tensor:
        """The tensor on its device again, ready for what is queued next; may be taken twice."""
        if copy.done is None:
            return copy.host
        if copy.here is None:
            self._fetch(copy)
        torch.cuda.current_stream().wait_event(copy.done)
        here, copy.here = copy.here, None
        before = copy.before()
        if before is not None and before.here is None:
            self._fetch(before)
        assert here is not None
        return here

    def _fetch(self, copy: HostCopy) -> None:
        host = copy.host
        copy.here = torch.empty(host.shape, dtype=host.dtype, device=copy.device)
        self._move(copy, copy.here, host)

    def _move(self, copy: HostCopy, target: Tensor, source: Tensor) -> None:
        """Queue a copy behind what is queued on the computing stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream()
        self._stream.wait_stream(computing)
        assert copy.done is not None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copy.done.record(self._stream)
        if copy in self._moving:
            self._moving.remove(copy)
        self._moving.append(copy)
        if len(self._moving) > IN_TRANSIT:
            oldest = self._moving.popleft()
            assert oldest.done is not None
            computing.wait_event(oldest.done)
            oldest.here = None


def compiler_for(device: torch.device) -> tuple[str, str, str]:
    """Language, program and variable of what torch.compile calls: Triton's C compiler on a GPU."""
    if device.type == "cpu":
        return "C++", os.environ.get("CXX", "g++"), "CXX"
    default = next(filter(shutil.which, ("gcc", "clang")), "gcc")
    return "C", os.environ.get("CC", default), "CC"


def check_compiler(device: torch.device, option: str = "--compile") -> None:
    """Compile a trifle, to find out early whether this machine can, as ``option`` needs.

    Raises:
        ValueError: if it cannot, with the compiler's reason; of flex_attention on a CPU.
    """
    if option == FLEX_ATTENTION and device.type == "cpu":
        raise ValueError(f"{option} trains on a GPU only; use sdpa or eager on a CPU")
    trifle = torch.compile(lambda x: x.sin() + 1, options={"fx_graph_cache": False})
    try:
        trifle(torch.ones(4, device=device))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        language, program, variable = compiler_for(device)
        raise ValueError(
            f"{option} needs a {language} compiler such as {program} that works, and Python's "
            f"headers ({reason}); install them, name the compiler by the environment variable "
            f"{variable}, or drop the option"
        ) from error


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block of ``model`` in place, for lengths that vary from call to call.

    Every :class:`~dschat_lora.models.backbone.Backbone` of the model is made before. Parameters
    keep their names; a copy of the model (``share_parameters``) is not compiled. What is recomputed
    in the backward pass stays so, and is not to be changed afterwards. Blocks that are given a
    cache of keys and values run as they are: decoding has other shapes at every token. Attention
    is left out of the graph: the lengths of samples are data.

    Raises:
        ValueError: if transformers marks no blocks in this architecture.
    """
    blocks = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError(
            f"--compile compiles transformer blocks, but {type(model).__name__} declares none in "
            "transformers; drop the option"
        )
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _MOST_VARIANTS)
    # Or as many tokens as the model is wide, once, would be taken for a rule.
    torch.fx.experimental._config.use_duck_shape = False
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
        _dispatch(block, recompute=bool(block.gradient_checkpointing))


def _dispatch(block: GradientCheckpointingLayer, *, recompute: bool) -> None:
    """Let calls without a cache go to what is compiled."""
    compiled = block._compiled_call_impl
    # Checkpointing around what is compiled: torch gives up on what it finds within.
    block.gradient_checkpointing = False

    def call(*args: object, **kwargs: object) -> object:
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return block._call_impl(*args, **kwargs)
        if recompute and block.training:
            return block._gradient_checkpointing_func(partial(compiled, **kwargs), *args)
        return compiled(*args, **kwargs)

    block._compiled_call_impl = call
