"""Runs of step 3 in which a GPU's memory runs out at a given pass, by errors raised by hand."""

from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from io import StringIO
from unittest import mock

import torch

from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import rank
from dschat_lora.rl.loop import memory
from dschat_lora.runtime.stage_main import exits
from helpers.rlhf_course import train_rlhf
from helpers.runs import release

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Passes:
    """Counts passes, and lets those fail that are named: "forward 3", "backward 0"."""

    def __init__(self, failing):
        self.failing, self.counts, self.engines = set(failing), {}, []

    def fails(self, kind):
        number = self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{kind} {number}" in self.failing

    def forward(self, plain):
        def call(engine, *inputs):
            found = plain(engine, *inputs)
            if self.fails("forward" if torch.is_grad_enabled() else "scoring"):
                raise torch.OutOfMemoryError(FULL)
            return found

        return call

    def backward(self, plain):
        def call(engine, loss, *, last):
            self.engines.append(engine)
            if not self.fails("backward"):
                return plain(engine, loss, last=last)

            def refuse(gradient):
                raise torch.OutOfMemoryError(FULL)

            # Gradients of all layers but the first, which comes last, are there by then.
            hook = engine._parameters[0].register_hook(refuse)
            try:
                return plain(engine, loss, last=last)
            finally:
                hook.remove()

        return call


def keeping(plan, *_, **__):
    return replace(plan, keeps_cache=True)


def train_full(argv, *, failing=(), on_rank=0, keeps=True):
    """:func:`train_rlhf` where these passes of a rank fail, and the number of its last one by kind.

    ``keeps`` has decoding keep its memory, as on a GPU. Of a run that fails the report is what it
    wrote on stderr, and its exit code.
    """
    passes = Passes(failing if rank() == on_rank else ())
    with ExitStack() as stack:
        for name, around in (("__call__", passes.forward), ("backward", passes.backward)):
            plain = getattr(TrainEngine, name)
            stack.enter_context(mock.patch.object(TrainEngine, name, around(plain)))
        if keeps:
            stack.enter_context(mock.patch.object(memory, "keeping_cache", keeping))
        said = stack.enter_context(redirect_stderr(StringIO()))
        try:
            return {**exits(train_rlhf)(argv), "passes": passes.counts}
        except SystemExit as end:
            for engine in set(passes.engines):
                release(engine)
            return {"said": said.getvalue(), "code": end.code, "passes": passes.counts}
