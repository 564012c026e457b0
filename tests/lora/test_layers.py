"""Layers with a trained part beside a frozen base, each against its formula."""

import pytest
import torch
from torch import nn
from toy import Conv1D, randomise

from dschat_lora.lora.layers import LoraEmbedding, LoraLinear, conv1d
from dschat_lora.lora.trained import TrainedBias, TrainedModule

IDS = torch.tensor([[0, 3], [6, 3]])


def adapted(base, *, r=2, scaling=0.5, **options):
    kind = LoraEmbedding if isinstance(base, nn.Embedding) else LoraLinear
    layer = kind(base, r=r, scaling=scaling, **options)
    randomise([p for name, p in layer.named_parameters() if "lora_" in name])
    return layer


def shifted(layer):
    randomise([p for name, p in layer.named_parameters() if "trained" in name])
    return layer


def seeded(make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options)


def test_linear_is_the_sum_over_rank_one_updates():
    base, x = seeded(nn.Linear, 5, 3), torch.randn(4, 5)
    layer, expected = adapted(base, scaling=0.7), base(x)
    for k in range(2):
        a, b = layer.lora_A[k], layer.lora_B[:, k]
        expected = expected + 0.7 * (x @ a)[:, None] * b
    torch.testing.assert_close(layer(x), expected)
    assert list(layer.state_dict()) == ["weight", "bias", "lora_A", "lora_B"]


def test_conv1d_equals_the_linear_layer_of_the_transposed_weight():
    base, x = seeded(Conv1D, 3, 5), torch.randn(2, 4, 5)
    assert torch.equal(conv1d(x, base.weight, base.bias), base(x))
    layer = adapted(base)
    weight = base.weight.T + 0.5 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, base.bias))
    assert (layer.in_features, layer.out_features) == (5, 3)


def test_embedding_looks_up_the_updated_table():
    base = seeded(nn.Embedding, 7, 3, padding_idx=0)
    layer = adapted(base)
    table = base.weight + 0.5 * (layer.lora_embedding_B @ layer.lora_embedding_A).T
    torch.testing.assert_close(layer(IDS), table[IDS])
    assert (layer.in_features, layer.out_features) == (7, 3)
    with pytest.raises(ValueError, match="max_norm"):
        LoraEmbedding(nn.Embedding(7, 3, max_norm=1.0), r=2, scaling=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 3), lambda: nn.Embedding(7, 3)])
def test_factors_stay_fp32_under_16_bit_compute_and_receive_fp32_gradients(make, dtype):
    base = seeded(make).to(dtype)
    layer = adapted(base)
    y = layer(IDS if isinstance(base, nn.Embedding) else torch.randn(4, 5, dtype=dtype))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    for name, factor in layer.named_parameters():
        if "lora_" in name:
            assert factor.dtype == factor.grad.dtype == torch.float32
            assert factor.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("base", "adapt"),
    [
        (nn.Linear(5, 3), adapted),
        (nn.Embedding(7, 3), adapted),
        (nn.Linear(5, 3), lambda base: shifted(TrainedModule(base))),
        *(
            (base, lambda base: shifted(TrainedBias(base)))
            for base in (nn.Linear(5, 3), Conv1D(3, 5), nn.LayerNorm(5))
        ),
    ],
    ids=["linear", "embedding", "module", "bias", "conv1d's bias", "norm's bias"],
)
def test_disabled_layer_is_its_base_bit_for_bit(base, adapt):
    layer = adapt(base)
    x = IDS if isinstance(base, nn.Embedding) else torch.randn(4, 5)
    assert not torch.equal(layer(x), base(x))
    if isinstance(layer, TrainedBias):
        torch.testing.assert_close(layer(x), base(x) + layer.trained_bias - base.bias)
    layer.enabled = False
    assert torch.equal(layer(x), base(x))


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 3), lambda: Conv1D(3, 5)])
def test_dropout_acts_on_the_adapter_input_alone_and_only_in_training(make):
    base, x = seeded(make), torch.randn(4, 5)
    layer = adapted(base, dropout=0.5).eval()
    still = layer(x)
    assert torch.equal(layer(x), still)
    layer.train()
    noisy = seeded(layer, x)
    torch.manual_seed(0)
    dropped = 2 * x * (torch.rand(4, 5) >= 0.5)
    expected = base(x) + 0.5 * dropped @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(noisy, expected)
    assert not torch.equal(noisy, still)


def test_a_layer_has_its_bases_mode_and_device_and_states_its_settings():
    base = nn.Linear(5, 3, device="meta", dtype=torch.bfloat16).eval()
    layer = LoraLinear(base, r=2, scaling=0.5, dropout=0.25)
    assert not layer.training
    for factor in (layer.lora_A, layer.lora_B):
        assert factor.is_meta
        assert factor.dtype == torch.float32
    expected = "LoraLinear(in_features=5, out_features=3, r=2, scaling=0.5, dropout=0.25)"
    assert repr(layer) == expected


def test_trained_bias_of_another_layer_is_refused_by_name():
    with pytest.raises(ValueError, match="--train_bias all cannot train the bias of a Conv2d"):
        TrainedBias(nn.Conv2d(2, 2, 1))


def test_trained_module_computes_in_fp32_and_answers_in_the_base_dtype():
    base = seeded(nn.Linear, 5, 3).bfloat16()
    layer, x = TrainedModule(base), torch.randn(4, 5).bfloat16()
    exact = x.double() @ base.weight.double().T + base.bias.double()
    assert torch.equal(layer(x), exact.bfloat16())
    layer(x).float().sum().backward()
    assert layer.trained.weight.grad.dtype == torch.float32
    assert base.weight.grad is None
    layer.trained.bfloat16()  # as DeepSpeed does where it keeps the fp32 masters of all that trains
    expected = nn.functional.linear(x, layer.trained.weight, layer.trained.bias)
    assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x), expected)
