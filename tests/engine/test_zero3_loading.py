"""A model that only rank 0 holds becomes ZeRO 3's shards on every rank."""

import sys

import pytest
import torch

from helpers.process_memory import forget_peak, peak_memory, save_wide_model
from helpers.spread import ALL

pytestmark = pytest.mark.stage
MEGABYTE = 2**20


def shards(path):
    """Whole parameters and buffers as this rank sees them after sharding, and its own share."""
    import deepspeed

    from dschat_lora.engine.distributed import rank
    from dschat_lora.engine.zero import shard_from_rank_zero
    from helpers.runs import LORA, engine_settings, load_model

    model = load_model(path, LORA, meta=rank() > 0)
    was_meta = all(p.is_meta for p in model.parameters())
    shard_from_rank_zero(model, engine_settings(stage=3).deepspeed(3, None))
    whole = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            whole[name] = parameter.detach().clone()
    heads = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return {
        "was_meta": was_meta,
        "whole": whole,
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "own": sum(p.ds_tensor.numel() for p in model.parameters()),
        "tied": heads[0] is heads[1],
    }


def peak_rss(path, tiny_path):
    """(bytes of the model, growth of this process's peak memory) of loading and sharding it."""
    from dschat_lora.engine.distributed import rank
    from dschat_lora.engine.zero import shard_from_rank_zero
    from helpers.runs import LORA, engine_settings, load_model

    shards(tiny_path)  # so that what loading anything costs does not count
    forget_peak()
    before = peak_memory()
    model = load_model(path, LORA, meta=rank() > 0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    shard_from_rank_zero(model, engine_settings(stage=3).deepspeed(3, None))
    return {"model": size, "growth": peak_memory() - before}


@pytest.mark.parametrize(
    "kind", ["opt", "llama", "gpt2", "qwen2", "neox"] if ALL else ["opt", "llama"]
)
def test_every_rank_gathers_what_rank_0_loaded(ranks, model_directory, kind):
    from helpers.runs import LORA, load_model

    path = model_directory(kind)
    original = load_model(path, LORA)
    parameters = dict(original.named_parameters(remove_duplicate=False))
    buffers = dict(original.named_buffers())
    reports = ranks(2).run("engine.test_zero3_loading:shards", path=path)
    assert [report["was_meta"] for report in reports] == [False, True]
    assert bool(buffers) == (kind in ("llama", "qwen2", "neox"))
    for report in reports:
        assert report["whole"].keys() == parameters.keys()
        assert all(torch.equal(report["whole"][n], p.detach()) for n, p in parameters.items())
        assert report["buffers"].keys() == buffers.keys()
        assert all(torch.equal(report["buffers"][n], b) for n, b in buffers.items())
        assert report["trained"] == [n for n, p in original.named_parameters() if p.requires_grad]
        assert report["tied"] == (kind in ("opt", "gpt2", "qwen2"))
        total = sum(p.numel() for p in original.parameters())
        assert report["own"] <= 0.51 * total + len(parameters)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_rank_0_ever_needs_memory_for_the_whole_model(fresh_ranks, model_directory, tmp_path):
    save_wide_model(tmp_path)
    paths = {"path": str(tmp_path), "tiny_path": model_directory("llama")}
    zero, one = fresh_ranks(2).run("engine.test_zero3_loading:peak_rss", **paths)
    assert zero["model"] > 150 * MEGABYTE
    assert zero["growth"] > 0.9 * zero["model"]
    # Its half of the shards, and a module at a time.
    assert one["growth"] < 0.9 * zero["model"]
    assert zero["growth"] - one["growth"] > 0.5 * zero["model"]
