"""How tensors are cut, and that what is drawn does not depend on among how many."""

from contextlib import suppress

import pytest
import torch

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.lora.parallel import Shard, group_of, own_part, shard_of
from dschat_lora.models.tensor_parallel import divide
from helpers.tensor_parallel_layers import in_threads, part_of
from helpers.tiny import VOCAB, tiny_model


def alone(rank, size):
    """A rank that exchanges nothing."""
    return TensorGroup(None, rank, size)


def shard(rank, size, *blocks, dim=0):
    return Shard(alone(rank, size), dim, blocks)


@pytest.mark.parametrize(
    ("blocks", "size", "rank", "rows"),
    [
        ((12,), 2, 1, [6, 7, 8, 9, 10, 11]),
        ((4, 4, 4), 2, 0, [0, 1, 4, 5, 8, 9]),
        ((4, 4, 4), 2, 1, [2, 3, 6, 7, 10, 11]),
        ((8, 4, 4), 4, 2, [4, 5, 10, 14]),
        ((8, 4, 4), 1, 0, list(range(16))),
        ((7,), 3, 0, [0, 1, 2]),
        ((7,), 3, 2, [6]),
        ((9,), 4, 3, []),
    ],
    ids=str,
)
def test_a_rank_holds_its_rows_of_every_block(blocks, size, rank, rows):
    cut = shard(rank, size, *blocks)
    whole = torch.arange(sum(blocks))
    assert cut.own(whole).tolist() == rows
    assert cut.own(whole[:, None].expand(-1, 5)).tolist() == [[row] * 5 for row in rows]
    assert cut.local_shape((sum(blocks), 5)) == (len(rows), 5)
    assert cut.full_shape((len(rows), 5)) == (sum(blocks), 5)


def test_an_uneven_vocabulary_leaves_the_last_rank_less():
    ranges = [shard(rank, 4, VOCAB).ranges() for rank in range(4)]
    assert ranges == [[(0, 16)], [(16, 32)], [(32, 48)], [(48, 61)]]
    assert shard(0, 4, VOCAB).ranges(3) == [(48, 61)]
    assert shard(3, 4, VOCAB).local_shape((VOCAB, 5)) == (13, 5)


def test_joined_parts_of_packed_blocks_are_in_the_order_of_the_whole():
    # What two ranks hold of q, k and v, behind each other, is not it.
    parts = [shard(rank, 2, 4, 4, 4).own(torch.arange(12)) for rank in range(2)]
    order = torch.argsort(torch.cat(parts)).tolist()
    assert order == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]

    def joined(group):
        return Shard(group, 0, (4, 4, 4)).whole(torch.arange(6) + 6 * group.rank)

    assert [whole.tolist() for whole in in_threads(2, joined)] == [order] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("blocks", [(12,), (8, 4, 4), (VOCAB,), (10, 7)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_a_tensors_parts_make_up_the_tensor(dim, blocks, size):
    shape = [2, 3, 5]
    shape[dim] = sum(blocks)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def there_and_back(group):
        cut = Shard(group, dim, blocks)
        own = cut.own(whole)
        assert own.shape == cut.local_shape(whole.shape)
        assert own.is_contiguous()
        assert cut.full_shape(own.shape) == whole.shape
        return cut.whole(own)

    assert all(torch.equal(whole, found) for found in in_threads(size, there_and_back))


TARGETS = {
    "opt": ("q_proj", "out_proj", "fc1", "fc2", "embed_tokens"),
    "gpt2": ("c_attn", "c_proj", "c_fc", "wte"),
    "neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in", "lm_head"),
    "llama": ("k_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head"),
}


@pytest.mark.parametrize(
    ("kind", "size"), [(kind, 2) for kind in TARGETS] + [("opt", 4), ("gpt2", 4), ("neox", 4)]
)
def test_parts_of_drawn_factors_are_slices_of_the_whole_models_to_the_bit(kind, size):
    config = LoraConfig(lora_dim=3, target_modules=TARGETS[kind])
    whole = tiny_model(kind)
    apply_lora(whole, config, seed=7)
    whole = adapter_parameters(whole)
    # The last rank is the one that has less of what does not divide.
    for rank in (0, size - 1):
        model = tiny_model(kind)
        divide(model, alone(rank, size))
        apply_lora(model, config, seed=7)
        parts = adapter_parameters(model)
        assert list(parts) == list(whole)
        for name, part in parts.items():
            assert full_shape(part) == whole[name].shape
            assert torch.equal(part, part_of(part, whole[name])), name
        divided = {name.rpartition(".")[2] for name, part in parts.items() if shard_of(part)}
        assert divided == {"lora_A", "lora_B", "lora_embedding_A"}
        assert any(part.shape != whole[name].shape and part.any() for name, part in parts.items())


def test_a_divided_parameter_is_marked_for_deepspeeds_norm_and_others_are_not():
    model = tiny_model("gpt2")
    assert group_of(model) is None
    group = alone(1, 2)
    divide(model, group)
    apply_lora(model, LoraConfig(lora_dim=3, train_bias="lora_only"), seed=0)
    assert group_of(model) is group
    marked = {
        name.removeprefix("transformer.h.0.")
        for name, p in adapter_parameters(model).items()
        if getattr(p, "tensor_model_parallel", False) and ".h.0." in name
    }
    columns, rows = ("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj")
    assert marked == {
        *(f"{name}.{part}" for name in columns for part in ("lora_B", "trained_bias")),
        *(f"{name}.lora_A" for name in rows),
    }
    value = torch.arange(4.0)
    assert own_part(torch.zeros(4), value) is value  # every rank holds all of it
    c_attn = model.get_submodule("transformer.h.0.attn.c_attn")
    assert shard_of(c_attn.lora_B).blocks == shard_of(c_attn.weight).blocks == (32, 32, 32)


def test_whole_sequences_end_with_the_block_even_if_it_fails():
    group = TensorGroup(None, 0, 2, sequence_parallel=True)
    with suppress(KeyError), group.whole_sequences():
        assert not group.sequence_parallel
        raise KeyError
    assert group.sequence_parallel
    with pytest.raises(ValueError, match="7 tokens cannot be dealt out evenly to 2 ranks"):
        group.scatter_tokens(torch.zeros(1, 7, 3))
