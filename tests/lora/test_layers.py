import math

import pytest
import torch
from torch import nn
from toy import Conv1D, randomise

from dschat_lora.lora.layers import LoraEmbedding, LoraLinear, conv1d
from dschat_lora.lora.trained import TrainedBias, TrainedModule


def adapted_linear(r=2, scaling=0.5, dropout=0.0, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    base = nn.Linear(5, 3, bias=bias).to(dtype)
    layer = LoraLinear(base, r=r, scaling=scaling, dropout=dropout)
    randomise([layer.lora_A, layer.lora_B])
    return base, layer


def test_linear_is_the_sum_over_rank_one_updates():
    base, layer = adapted_linear(scaling=0.7)
    x = torch.randn(4, 5)
    expected = base(x)
    for k in range(2):
        a, b = layer.lora_A[k], layer.lora_B[:, k]
        expected = expected + 0.7 * (x @ a)[:, None] * b
    torch.testing.assert_close(layer(x), expected)


def test_gradients_are_those_of_the_written_out_formula():
    base, layer = adapted_linear(scaling=0.7)
    layer, base = layer.double(), base.double()
    x, g = torch.randn(4, 5).double(), torch.randn(4, 3).double()
    layer(x).backward(g)
    a, b = layer.lora_A.detach(), layer.lora_B.detach()
    torch.testing.assert_close(layer.lora_B.grad, 0.7 * g.T @ (x @ a.T))
    torch.testing.assert_close(layer.lora_A.grad, 0.7 * (g @ b).T @ x)


def test_conv1d_equals_the_linear_layer_of_the_transposed_weight():
    torch.manual_seed(0)
    base = Conv1D(3, 5)
    layer = LoraLinear(base, r=2, scaling=0.5)
    randomise([layer.lora_A, layer.lora_B])
    weight = base.weight.T + 0.5 * layer.lora_B @ layer.lora_A
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, base.bias))
    assert (layer.in_features, layer.out_features) == (5, 3)


def test_conv1d_function_is_bitwise_that_of_the_pretrained_layer():
    torch.manual_seed(0)
    base, x = Conv1D(3, 5), torch.randn(2, 4, 5)
    assert torch.equal(conv1d(x, base.weight, base.bias), base(x))


def test_embedding_looks_up_the_updated_table():
    torch.manual_seed(0)
    base = nn.Embedding(7, 3, padding_idx=0)
    layer = LoraEmbedding(base, r=2, scaling=0.5)
    randomise([layer.lora_embedding_A, layer.lora_embedding_B])
    table = base.weight + 0.5 * (layer.lora_embedding_B @ layer.lora_embedding_A).T
    ids = torch.tensor([[0, 3], [6, 3]])
    torch.testing.assert_close(layer(ids), table[ids])
    assert (layer.in_features, layer.out_features) == (7, 3)


def test_embedding_that_rescales_its_weights_is_refused():
    with pytest.raises(ValueError, match="max_norm"):
        LoraEmbedding(nn.Embedding(7, 3, max_norm=1.0), r=2, scaling=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_stay_fp32_under_16_bit_compute_and_receive_fp32_gradients(dtype):
    _, layer = adapted_linear(dtype=dtype)
    y = layer(torch.randn(4, 5, dtype=dtype))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    for factor in (layer.lora_A, layer.lora_B):
        assert factor.dtype == factor.grad.dtype == torch.float32
        assert factor.grad.abs().sum() > 0


def test_16_bit_embedding_returns_its_base_dtype():
    layer = LoraEmbedding(nn.Embedding(7, 3).bfloat16(), r=2, scaling=0.5)
    assert layer(torch.tensor([1])).dtype == torch.bfloat16
    assert layer.lora_embedding_A.dtype == torch.float32


def test_disabled_layer_is_its_base_bit_for_bit():
    base, layer = adapted_linear()
    x = torch.randn(4, 5)
    assert not torch.equal(layer(x), base(x))
    layer.enabled = False
    assert torch.equal(layer(x), base(x))


def test_disabled_embedding_is_its_base_bit_for_bit():
    base, ids = nn.Embedding(7, 3), torch.tensor([[0, 3], [6, 3]])
    layer = LoraEmbedding(base, r=2, scaling=0.5)
    randomise([layer.lora_embedding_A, layer.lora_embedding_B])
    assert not torch.equal(layer(ids), base(ids))
    layer.enabled = False
    assert torch.equal(layer(ids), base(ids))


def test_dropout_acts_on_the_adapter_input_alone_and_only_in_training():
    base, layer = adapted_linear(dropout=0.5)
    x = torch.randn(4, 5)
    layer.eval()
    still = layer(x)
    assert torch.equal(layer(x), still)
    layer.train()
    torch.manual_seed(3)
    noisy = layer(x)
    torch.manual_seed(3)
    dropped = 2 * x * (torch.rand(4, 5) >= 0.5)
    expected = base(x) + 0.5 * dropped @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(noisy, expected)
    assert not torch.equal(noisy, still)


def test_conv1d_drops_its_adapter_input_in_training():
    layer = LoraLinear(Conv1D(3, 5), r=2, scaling=0.5, dropout=0.5)
    randomise([layer.lora_A, layer.lora_B])
    x = torch.randn(4, 5)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_layer_made_from_an_evaluating_base_evaluates():
    assert not LoraLinear(nn.Linear(2, 2).eval(), r=1, scaling=1.0, dropout=0.9).training


def test_layer_of_a_meta_base_is_on_meta():
    with torch.device("meta"):
        base = nn.Linear(5, 3).bfloat16()
    layer = LoraLinear(base, r=2, scaling=1.0)
    assert layer.lora_A.is_meta
    assert layer.lora_B.is_meta
    assert layer.lora_A.dtype == torch.float32


def test_names_of_the_base_are_kept():
    _, layer = adapted_linear()
    assert list(layer.state_dict()) == ["weight", "bias", "lora_A", "lora_B"]


def test_repr_states_rank_and_scaling():
    _, layer = adapted_linear(r=2, scaling=0.5, dropout=0.25)
    assert repr(layer) == (
        "LoraLinear(in_features=5, out_features=3, r=2, scaling=0.5, dropout=0.25)"
    )


@pytest.mark.parametrize(
    "base", [nn.Linear(5, 3), Conv1D(3, 5), nn.LayerNorm(5)], ids=["linear", "conv1d", "norm"]
)
def test_trained_bias_shifts_the_output_and_disabled_gives_the_base(base):
    layer = TrainedBias(base)
    x = torch.randn(4, 5)
    assert torch.equal(layer(x), base(x))
    with torch.no_grad():
        layer.trained_bias += 2.0
    torch.testing.assert_close(layer(x), base(x) + 2.0)
    layer.enabled = False
    assert torch.equal(layer(x), base(x))


def test_trained_bias_of_another_layer_is_refused_by_name():
    with pytest.raises(ValueError, match="--train_bias all cannot train the bias of a Conv2d"):
        TrainedBias(nn.Conv2d(2, 2, 1))


def test_trained_module_computes_in_fp32_and_answers_in_the_base_dtype():
    base = nn.Linear(5, 3).bfloat16()
    layer = TrainedModule(base)
    x = torch.randn(4, 5).bfloat16()
    exact = x.double() @ base.weight.double().T + base.bias.double()
    assert torch.equal(layer(x), exact.bfloat16())
    layer(x).float().sum().backward()
    assert layer.trained.weight.grad.dtype == torch.float32
    assert base.weight.grad is None


def test_trained_module_disabled_is_the_original():
    base = nn.Linear(5, 3)
    layer = TrainedModule(base)
    randomise(layer.trained.parameters())
    x = torch.randn(4, 5)
    assert not torch.equal(layer(x), base(x))
    layer.enabled = False
    assert torch.equal(layer(x), base(x))


def test_scaling_is_not_part_of_the_base():
    base, layer = adapted_linear(scaling=math.pi)
    zero = torch.zeros(1, 5)
    torch.testing.assert_close(layer(zero), base(zero))


def test_saved_module_whose_copy_was_cast_to_16_bits_still_computes():
    # as DeepSpeed does where it keeps the fp32 masters of all that trains
    layer = TrainedModule(nn.Linear(4, 2).bfloat16())
    layer.trained.bfloat16()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = layer(x)
    assert found.dtype == torch.bfloat16
    expected = nn.functional.linear(x, layer.trained.weight, layer.trained.bias)
    torch.testing.assert_close(found, expected)
