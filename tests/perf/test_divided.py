"""A model divided among tensor-parallel ranks: counted as a whole, its memory rank by rank."""

import pytest
import torch
from test_memory import LENGTH, ROWS, estimate, kept_bytes

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.tensor_parallel import divide
from dschat_lora.perf.memory import cached_token_bytes
from dschat_lora.perf.shape import describe
from helpers.perf_models import FAMILIES, MLP_UP, QUERY_VALUE, VOCAB

TARGETS = {"every linear layer": ("all-linear",), "q and v": QUERY_VALUE, "the MLP": MLP_UP}


class AlikeGroup(TensorGroup):
    """Ranks that all have what this one has: nothing is exchanged."""

    def _stacked(self, x):
        return torch.stack([x.detach()] * self.size)

    def _reduce(self, x, operation):
        return x.detach().clone()

    def _sum_tokens(self, x):
        return self._own_tokens(x)


def adapted(family, group=None, *, targets=("all-linear",), dtype=torch.float32, **changes):
    """The model with adapters of rank 4, and what ``group`` leaves of it here."""
    model = FAMILIES[family](**changes).to(dtype)
    if group is not None:
        divide(model, group)
    endings = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if targets != ("all-linear",):
        targets = tuple(ending for ending in endings if ending.endswith(targets))
    apply_lora(model, LoraConfig(lora_dim=4, target_modules=targets), seed=0)
    return model


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_divided_model_is_counted_as_the_whole_one(family, targets):
    with torch.device("meta"):
        whole = adapted(family, targets=TARGETS[targets])
        parts = [
            adapted(family, TensorGroup(None, rank, 2), targets=TARGETS[targets]) for rank in (0, 1)
        ]
    assert [describe(part) for part in parts] == [describe(whole)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
def test_activations_are_what_autograd_keeps_on_a_rank(family, sequence_parallel, dtype):
    group = AlikeGroup(None, 1, 2, sequence_parallel=sequence_parallel)
    # One key head on a rank, of two queries, would be read by both without a copy.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if family == "llama" else {}
    model = adapted(family, group, dtype=dtype, attn="sdpa", **heads)
    assert estimate(model).activations == pytest.approx(kept_bytes(model), rel=0.03)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_unfused_attention_keeps_the_probabilities_of_a_ranks_heads(sequence_parallel):
    group = AlikeGroup(None, 0, 2, sequence_parallel=sequence_parallel)
    model = adapted("opt", group, attn="eager")
    assert estimate(model).activations == pytest.approx(kept_bytes(model), rel=0.05)


def test_checkpointing_keeps_a_ranks_tokens_of_block_inputs():
    """Eight blocks in place of two: six inputs of 32 numbers more a token, or half of each."""
    kept = {}
    for sequence_parallel in (False, True):
        group = TensorGroup(None, 0, 2, sequence_parallel=sequence_parallel)
        with torch.device("meta"):
            two, eight = (adapted("opt", group, num_hidden_layers=n) for n in (2, 8))
        two, eight = (estimate(m, gradient_checkpointing=True).activations for m in (two, eight))
        kept[sequence_parallel] = (eight - two) / (ROWS * LENGTH)
    assert kept == {False: 6 * 32 * 4, True: 6 * 16 * 4}


def test_weights_gradients_and_optimizer_are_those_of_a_ranks_part():
    """As OPT with h = 32, MLP 128, V = 80, 3 blocks; norms, positions and A are on both ranks."""
    with torch.device("meta"):
        model = adapted("opt", TensorGroup(None, 1, 2), targets=QUERY_VALUE, dtype=torch.bfloat16)
    adapters = 3 * 2 * 4 * (32 + 16)
    attention = 3 * (16 * 32 + 16) + 32 * 16 + 32
    mlp = 64 * 32 + 64 + 32 * 64 + 32
    frozen = 3 * (attention + mlp + 4 * 32) + 40 * 32 + (64 + 2) * 32 + 2 * 32
    whole = estimate(model)
    assert whole.weights == 2 * frozen + 4 * adapters
    assert whole.gradients == 4 * adapters
    assert whole.optimizer == 8 * adapters


def test_a_rank_holds_its_share_of_the_logits_unless_the_head_is_adapted():
    positions = ROWS * LENGTH
    with torch.device("meta"):
        model = adapted("llama", TensorGroup(None, 0, 2), vocab_size=81)
        with_head = adapted("llama", TensorGroup(None, 0, 2), targets=("proj", "lm_head"))
    assert estimate(model).loss == positions * 41 * 8 + positions * 64 * 4
    assert estimate(with_head).loss == positions * VOCAB * 8 + positions * 64 * 4


def test_keys_and_values_are_those_of_all_ranks():
    """Three blocks with two key heads of 16 numbers."""
    with torch.device("meta"):
        parts = adapted("llama", TensorGroup(None, 0, 2))
    assert cached_token_bytes(parts) == 2 * 3 * 2 * 16 * 4
