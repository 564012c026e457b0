"""ZeRO 3 gathers every weight that is read, and gives it back after the forward pass."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv

from dschat_lora.lora import layers
from dschat_lora.lora.layers import LoraLinear, lora_linear, lora_linear_reference

pytestmark = pytest.mark.stage
WIDE, DEEP = 64, 4
STATES = torch.linspace(-1, 1, 5 * 16).view(1, 5, 16)
KEEP_NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def weights_held(formula):
    """(read, still in memory after the forward pass) frozen weights, and the first gradient."""
    from dschat_lora.engine.build import TrainEngine
    from dschat_lora.engine.zero import shard_from_rank_zero
    from helpers.runs import engine_settings, release

    settings = engine_settings(stage=3, deepspeed_json={"zero_optimization": KEEP_NOTHING})
    torch.manual_seed(0)
    model = nn.Sequential(
        *(LoraLinear(nn.Linear(WIDE, WIDE).requires_grad_(False), r=2, scaling=1.0) for _ in "abcd")
    )
    for layer in model:
        nn.init.normal_(layer.lora_A)
        nn.init.normal_(layer.lora_B)
    shard_from_rank_zero(model, settings.deepspeed(3, None))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = TrainEngine(model, [{"params": trained, "lr": 0.1, "weight_decay": 0.0}], settings)
    read = []

    def note(tensor):
        if tensor.numel() == WIDE * WIDE:
            read.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    layers.lora_linear = written_out if formula else lora_linear
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run = engine(torch.ones(8, WIDE))
        held = sum(not ref.expired() for ref in read)
        engine.backward(run.square().sum(), last=True)
        norm = engine.step().grad_norm
    finally:
        layers.lora_linear = lora_linear
    release(engine)
    return len(read), held, norm


def written_out(x, weight, bias, a, b, scaling, keep=None, **_):
    return lora_linear_reference(x, weight, bias, a, b, scaling, keep)


def test_no_gathered_weight_outlives_the_forward_pass(ranks):
    ours, plain = (
        ranks(2).run("engine.test_zero3_weights:weights_held", formula=formula)[0]
        for formula in (False, True)
    )
    # The formula's graph holds a view of every weight but the first, whose input has no gradient.
    assert plain[1] == plain[0] == DEEP - 1
    assert ours[0] == DEEP
    assert ours[1] <= 1
    assert ours[2] == pytest.approx(plain[2], rel=1e-5)


def short_convolution():
    """A layer that reads the weight of a convolution which it never calls; that is frozen."""
    torch.manual_seed(0)
    layer = Lfm2ShortConv(Lfm2Config(hidden_size=16), 0)
    layer.conv.requires_grad_(False)
    return nn.Sequential(layer)


def states_and_norm():
    """Sum of the states that the layer alone returns, and norm of the gradient of a step."""
    from dschat_lora.engine.build import TrainEngine
    from helpers.runs import engine_settings, release

    settings = engine_settings(stage=3, deepspeed_json={"zero_optimization": KEEP_NOTHING})
    model = short_convolution()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = TrainEngine(model, [{"params": trained, "lr": 0.1, "weight_decay": 0.0}], settings)
    with torch.no_grad():  # a part of the model, as probes and evaluation call it
        states = float(engine.module[0](STATES).sum())
    engine.backward(engine(STATES).square().sum(), last=True)
    norm = engine.step().grad_norm
    release(engine)
    return states, norm


def test_a_convolution_whose_weight_another_module_reads(ranks):
    model = short_convolution()
    states = model(STATES)
    states.square().sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.requires_grad]).norm()
    for sums in ranks(2).run("engine.test_zero3_weights:states_and_norm"):
        # Both ranks bring the same rows.
        assert sums == pytest.approx((states.sum().item(), 2 * norm.item()), rel=1e-5)
