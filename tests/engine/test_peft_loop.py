"""Our training against a plain loop: stock PEFT, torch's AdamW, one sample at a time."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig
from helpers import plain
from helpers.runs import LORA, RATE, load_model, loader, rate_factors
from helpers.spread import ALL, pairwise
from helpers.tiny import ragged_samples

pytestmark = pytest.mark.stage
# The last step of the epoch holds half as many samples.
STEPS, SAMPLES = 6, 44
# Gradients on both sides of 1, so that a clipping at 1 that nobody asked for shows.
STRONG_LORA = {"lora_dim": 4, "lora_alpha": 32.0}


def sample_windows(samples, **shape):
    """The samples of each optimizer step, read off the loader's batches token by token."""
    known = {tuple(sample.input_ids.tolist()): sample for sample in samples}
    source = loader(samples, **shape)
    for epoch in range(10**6):
        for window in source.epoch(epoch):
            yield [known[ids] for batch in window for ids in _sequences(batch)]


def _sequences(batch):
    for ids, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            yield tuple(ids[segments == segment].tolist())


def plain_run(
    path, *, max_grad_norm, steps=STEPS, packing=False, shape=(4, 2), lora=LORA, **options
):
    theirs = plain.peft_copy_of(
        load_model(path, lora), AutoModelForCausalLM.from_pretrained(path), LoraConfig(**lora)
    )
    micro, accumulation = shape
    source = sample_windows(
        ragged_samples(SAMPLES), micro=micro, accumulation=accumulation, packing=packing
    )
    windows = [next(source) for _ in range(steps)]
    rates = [RATE * factor for factor in rate_factors(steps)]
    losses, norms = plain.train(
        theirs, windows, rates=rates, max_grad_norm=max_grad_norm, **options
    )
    return losses, norms, dict(theirs.named_parameters())


def our_run(ranks, path, **changes):
    run = {"path": path, "steps": STEPS, "samples": SAMPLES, "micro": 4, "accumulation": 2}
    return ranks.run("helpers.runs:train", **(run | changes))[0]


def assert_same_run(ours, losses, norms, parameters):
    assert ours["losses"] == pytest.approx(losses, abs=1e-5)
    assert ours["norms"] == pytest.approx(norms, rel=1e-4)
    for name, value in ours["trained"].items():
        expected = parameters[f"base_model.model.{name}.default.weight"].detach()
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"] if ALL else ["opt"])
def test_losses_norms_and_adapters_equal_a_plain_peft_loop(ranks, model_directory, kind):
    path = model_directory(kind)
    assert_same_run(our_run(ranks(1), path, max_grad_norm=0.0), *plain_run(path, max_grad_norm=0.0))


NORMS = {"never": 0.0, "default": 1.0, "always": 0.05}
CLIPPED = pairwise({"norm": tuple(NORMS), "size": (1, 2), "stage": (0, 1, 2, 3)})


@pytest.mark.parametrize("norm", NORMS if ALL else ["always"])
@pytest.mark.parametrize("size", [1, 2] if ALL else [2])
def test_clipping_is_torchs_at_every_stage(ranks, model_directory, size, norm):
    path = model_directory("neox")
    expected = plain_run(path, max_grad_norm=NORMS[norm], lora=STRONG_LORA)
    assert min(expected[1]) > 0.05
    assert max(expected[1]) > 1.0
    run = {"path": path, "steps": STEPS, "samples": SAMPLES, "max_grad_norm": NORMS[norm]}
    run |= {"micro": 4 // size, "accumulation": 2, "lora": STRONG_LORA}
    stages = [row["stage"] for row in CLIPPED if (row["norm"], row["size"]) == (norm, size)]
    runs = [run | {"stage": stage} for stage in stages]
    for ours in ranks(size).run("helpers.runs:train_many", runs=runs)[0]:
        assert_same_run(ours, *expected)


PLACES = [(size, stage) for size in (1, 2) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(("size", "stage"), PLACES if ALL else [(1, 0), (2, 2)])
def test_b_at_a_rate_of_its_own_equals_a_plain_loop(ranks, model_directory, size, stage):
    path = model_directory("opt")
    ours = our_run(
        ranks(size),
        path,
        max_grad_norm=1.0,
        micro=4 // size,
        stage=stage,
        optim={"loraplus_lr_ratio": 4.0},
    )
    expected = plain_run(
        path, max_grad_norm=1.0, scale=lambda name: 4.0 if ".lora_B." in name else 1.0
    )
    assert_same_run(ours, *expected)
    assert ours["rates"][0] == pytest.approx(RATE * rate_factors(1)[0] * 4)


@pytest.mark.parametrize("size", [1, 2] if ALL else [2])
def test_packed_training_equals_the_plain_loop_on_the_same_samples(ranks, model_directory, size):
    path, shape = model_directory("opt"), (4 // size, 1)
    expected = plain_run(path, max_grad_norm=1.0, packing=True, shape=(4, 1))
    ours = our_run(ranks(size), path, packing=True, micro=shape[0], accumulation=1)
    assert_same_run(ours, *expected)
