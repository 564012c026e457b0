"""Rows of one batch with different adapters, against the model of each adapter alone."""

import pytest
import torch

from dschat_lora.addons.serving.mixed import AdapterRows, MixedLinear, MixedModule, mix_adapters
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.loading import share_parameters
from helpers.tiny import KINDS, VOCAB, tiny_model

# Ranks and scalings differ, and each kind of trained part is there once.
ADAPTERS = {
    "rank 4": LoraConfig(lora_dim=4, lora_alpha=8.0),
    "rank 3, other layers": LoraConfig(lora_dim=3, lora_alpha=3.0, target_modules=("lm_head",)),
    "biases": LoraConfig(lora_dim=2, train_bias="lora_only"),
}


def adapted(base, config, seed):
    """A model on the parameters of ``base`` whose adapter has no zeros."""
    model = share_parameters(base)
    apply_lora(model, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trained" in name:
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def mixed(base, adapters):
    model, rows = share_parameters(base), AdapterRows(torch.device("cpu"))
    mix_adapters(model, adapters, rows=rows)
    return model.eval(), rows


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
@torch.no_grad()
def test_each_row_has_the_logits_of_its_own_adapter(kind):
    base = tiny_model(kind)
    configs = list(ADAPTERS.values())
    if kind in ("gpt2", "neox"):  # a tied or otherwise named head
        configs[1] = LoraConfig(lora_dim=3, lora_alpha=3.0)
    if kind in ("llama", "qwen3_moe"):  # without biases
        configs[2] = LoraConfig(lora_dim=2, modules_to_save=("embed_tokens", "norm"))
    models = [adapted(base, config, seed) for seed, config in enumerate(configs)]
    model, rows = mixed(base, models)
    numbers = [3, 0, 1, 2, 1, 3]
    ids = torch.randint(3, VOCAB, (len(numbers), 7), generator=torch.Generator().manual_seed(0))
    rows.choose(numbers, 7)
    logits = model(ids).logits
    for row, number in enumerate(numbers):
        alone = [base, *models][number](ids[row : row + 1]).logits[0]
        torch.testing.assert_close(logits[row], alone, atol=1e-5, rtol=1e-5)


def test_a_layer_has_the_weight_and_bias_of_its_base_for_models_that_read_them():
    base = tiny_model("opt")
    model, _ = mixed(base, [adapted(base, LoraConfig(lora_dim=2), 1)])
    (layer, *_) = (each for each in model.modules() if isinstance(each, MixedLinear))
    assert layer.weight is layer.base.weight
    assert layer.bias is layer.base.bias is not None


@torch.no_grad()
def test_factors_of_packed_projections_and_of_embeddings_are_mixed():
    base = tiny_model("gpt2")
    packed = LoraConfig(lora_dim=2, target_modules=("c_attn",), enable_lora=("q", "v"))
    models = [adapted(base, packed, 0), adapted(base, LoraConfig(2, target_modules=("wte",)), 1)]
    model, rows = mixed(base, models)
    ids = torch.randint(3, VOCAB, (3, 5), generator=torch.Generator().manual_seed(0))
    rows.choose([2, 1, 0], 5)
    logits = model(ids).logits
    for row, alone in enumerate([models[1], models[0], base]):
        torch.testing.assert_close(logits[row], alone(ids[row : row + 1]).logits[0])


@torch.no_grad()
def test_a_row_without_adapter_is_the_base_bit_for_bit():
    base = tiny_model("llama")
    model, rows = mixed(base, [adapted(base, ADAPTERS["rank 4"], 0)])
    ids = torch.randint(3, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    rows.choose([0, 0], 5)
    torch.testing.assert_close(model(ids).logits, base(ids).logits, rtol=0, atol=0)


def test_plain_factors_take_two_products_for_all_adapters():
    base = tiny_model("llama")
    models = [adapted(base, ADAPTERS["rank 4"], seed) for seed in range(3)]
    model, _ = mixed(base, models)
    layers = [m for m in model.modules() if isinstance(m, MixedLinear | MixedModule)]
    assert {type(layer) for layer in layers} == {MixedLinear}
    assert {layer.down.shape[0] for layer in layers} == {12}
    own = {p.data_ptr() for p in base.parameters()}
    assert own <= {p.data_ptr() for p in model.parameters()}, "the base is shared, not copied"


def test_rows_that_are_routed_elsewhere_are_refused():
    rows = AdapterRows(torch.device("cpu"))
    rows.choose([1, 0], 3)
    assert rows.of(torch.zeros(2, 3, 4)).tolist() == [1, 0]
    assert rows.of(torch.zeros(6, 4)).tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="reads 5 rows of a batch of 2 rows and 6 tokens"):
        rows.of(torch.zeros(5, 4))


def test_adapters_of_which_one_trains_all_that_another_adapts_are_refused():
    base = tiny_model("llama")
    whole = LoraConfig(2, target_modules=("q_proj",), modules_to_save=("mlp",))
    models = [adapted(base, whole, 0), adapted(base, LoraConfig(2), 1)]
    with pytest.raises(ValueError, match=r"adapts model\.layers\.0\.mlp\.\w+, another one trains"):
        mixed(base, models)
