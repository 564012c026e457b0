"""A second attempt at what runs out of GPU memory, without what decoding keeps there."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from dschat_lora.engine.build import TrainEngine
from dschat_lora.rl.rollout import Generator

ResultT = TypeVar("ResultT")


class Retry:
    """Computes again what ran out of GPU memory, once: bit for bit what the first attempt would.

    That takes memory to free, which decoding keeps between rollouts, and that the first attempt
    has left nothing behind. Forward passes leave nothing, as no role has dropout. Backward passes
    leave gradients, which can be dropped at ZeRO 0 alone. What has met other processes is not
    repeated: they would not meet it again.

    Args:
        engines: all that compute. generator: of responses; None: nothing is tried again.
    """

    def __init__(
        self, engines: Collection[TrainEngine[nn.Module]] = (), generator: Generator | None = None
    ) -> None:
        self._engines, self._generator, self._meeting = engines, generator, False

    def forward(self, compute: Callable[[], ResultT]) -> ResultT:
        """What ``compute`` returns, which makes forward passes."""
        return self._attempt(compute, all(each.repeats_forward for each in self._engines))

    def step(self, compute: Callable[[], ResultT]) -> ResultT:
        """What ``compute`` returns, which makes all passes of an optimizer step."""
        repeats = all(each.repeats_backward for each in self._engines)
        return self._attempt(compute, repeats, forgets=True)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Within, processes meet: what fails there is not tried again."""
        self._meeting = True
        yield
        self._meeting = False

    def _attempt(
        self, compute: Callable[[], ResultT], repeats: bool, *, forgets: bool = False
    ) -> ResultT:
        try:
            return compute()
        except torch.OutOfMemoryError:
            generator = self._generator
            if generator is None or not generator.keeps or not repeats or self._meeting:
                raise
        # The error is gone, and with it the frames that held what the first attempt had made.
        generator.release()
        for engine in self._engines if forgets else ():
            engine.forget_gradients()
        return compute()
