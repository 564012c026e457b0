"""What keeps a step from being captured as a CUDA graph, as it runs."""

import threading
import warnings

import pytest
import torch

from dschat_lora.models.cuda_graphs import run_watching


def wait():
    """Warn as torch does of a wait for a GPU."""
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        wait()
        return grad


def differentiate():
    Waits.apply(torch.ones(1, requires_grad=True)).backward()


@pytest.mark.parametrize(("does", "counts"), [(differentiate, True), (wait, False)])
def test_a_wait_in_another_thread_counts_if_it_is_of_a_backward_pass(does, counts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def step():
        thread = threading.Thread(target=does)
        thread.start()
        thread.join()

    place = run_watching(step)
    assert (place is not None) == counts
    assert place is None or place.startswith("test_cuda_graphs.py:")
