"""Training by processes that divide the tokens of each row: the losses of one process."""

import pytest
import torch

pytestmark = pytest.mark.stage
# Eight rows of a step in two micro-batches, clipped at most steps.
RUN = {"accumulation": 2, "max_grad_norm": 0.3, "steps": 3, "packing": True, "want_gradient": True}
TWO = [
    {"context_parallel": 2, "stage": stage, "packing": packing, "checkpointing": stage == 2}
    for stage in (0, 2, 3)
    for packing in (True, False)
]
FOUR = [
    {"context_parallel": 4},
    {"context_parallel": 4, "stage": 3, "packing": False},
    {"context_parallel": 2, "stage": 2, "micro": 2},
    {"context_parallel": 2, "stage": 3, "micro": 2, "packing": False},
]
FULL = {"lora": {"lora_dim": 0}}
EVERY = [
    *((kind, 2, layout) for kind in ("opt", "llama", "qwen3", "qwen3_moe") for layout in TWO),
    *((kind, 4, layout) for kind in ("opt", "llama") for layout in FOUR),
    *(("llama", 2, layout | FULL) for layout in (TWO[0], TWO[2], TWO[4])),
]


@pytest.mark.parametrize(
    ("kind", "size", "layout"),
    [
        pytest.param(*each, marks=() if each == ("qwen3", 2, TWO[0]) else pytest.mark.thorough)
        for each in EVERY
    ],
)
def test_losses_gradients_and_weights_are_those_of_whole_rows(
    ranks, model_directory, kind, size, layout
):
    run = {"path": model_directory(kind), "micro": 4} | RUN | layout
    (one,) = ranks(1).run("helpers.runs:train", **run | {"context_parallel": 1, "micro": 4})
    every = ranks(size).run("helpers.runs:train", **run)
    for report in every:
        assert report["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert report["norms"] == pytest.approx(one["norms"], abs=2e-5)
        assert report["targets"] == one["targets"]
        torch.testing.assert_close(report["gradient"], one["gradient"], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(every[0]["trained"], one["trained"], rtol=0.0, atol=3e-5)
    assert min(one["norms"]) > 0
    assert max(one["losses"]) - min(one["losses"]) > 1e-3
