"""Training by processes that divide the tokens of each row: the losses of one process."""

import pytest
import torch

from dschat_lora.config.addons import installed

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


# Eight pairs of a step; the last step of an epoch has three, none for its second micro-batch.
PAIRS = {"accumulation": 2, "steps": 3, "pairs": 19}
OBJECTIVES = {
    "reward": {"task": "reward", "options": {"center_rewards_coefficient": 0.02}},
    "per_token": {"task": "reward", "options": {"reward_loss": "per_token"}},
    "dpo": {"task": "dpo", "options": {"beta": 0.3, "rpo_alpha": 0.1}},
    "dpo on the fly": {"task": "dpo", "options": {"beta": 0.3}, "on_the_fly": True},
    "orpo": {"task": "dpo", "options": {"loss_type": "orpo", "beta": 0.7}},
}
if "kto" in installed():
    OBJECTIVES |= {
        "kto": {"task": "dpo", "options": {"loss_type": "kto", "beta": 1.0}},
        "kto on the fly": {
            "task": "dpo",
            "options": {"loss_type": "kto", "beta": 1.0},
            "on_the_fly": True,
        },
    }
LAYOUTS = [
    {"context_parallel": 2},
    {"context_parallel": 2, "stage": 2, "layout": "separate"},
    {"context_parallel": 2, "stage": 3, "packing": True},
]
EVERY_PAIR = [
    *(("qwen3", name, 2, layout) for name in OBJECTIVES for layout in LAYOUTS),
    *((kind, name, 2, LAYOUTS[0]) for kind in ("opt", "llama") for name in ("reward", "dpo")),
    *(("opt", name, 4, {"context_parallel": 4}) for name in OBJECTIVES),
    *(("opt", name, 4, {"context_parallel": 2, "micro": 2}) for name in OBJECTIVES),
    *(("opt", name, 2, LAYOUTS[0] | FULL) for name in ("reward", "dpo")),
]


@pytest.mark.parametrize(
    ("kind", "objective", "size", "layout"),
    [
        pytest.param(
            *each, marks=() if each == ("qwen3", "dpo", 2, LAYOUTS[0]) else pytest.mark.thorough
        )
        for each in EVERY_PAIR
    ],
)
def test_pairs_are_learnt_from_as_in_whole_rows(
    ranks, model_directory, kind, objective, size, layout
):
    run = {"path": model_directory(kind), "micro": 4} | PAIRS | OBJECTIVES[objective] | layout
    (one,) = ranks(1).run(
        "helpers.pair_runs:train_pairs", **run | {"context_parallel": 1, "micro": 4}
    )
    for report in ranks(size).run("helpers.pair_runs:train_pairs", **run):
        assert report["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert report["norms"] == pytest.approx(one["norms"], abs=1e-5)
        assert report["pairs"] == one["pairs"]
        for ours, expected in zip(report["means"], one["means"], strict=True):
            # Where margins are 0 it is their rounding's.
            both = [{**each, "rewards/accuracies": None} for each in (ours, expected)]
            assert both[0] == pytest.approx(both[1], abs=1e-5)
        torch.testing.assert_close(report["gradient"], one["gradient"], rtol=0.0, atol=1e-5)
    assert min(one["norms"]) > 0
    assert max(one["losses"]) - min(one["losses"]) > 1e-3
