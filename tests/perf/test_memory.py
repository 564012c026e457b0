import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from dschat_lora.algos.logprobs import MAX_CHUNK_LOGITS_CPU
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.samples import SequenceSample
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.perf.memory import activation_bytes, estimate_memory, offloaded_bytes
from dschat_lora.perf.shape import describe
from helpers.perf_models import (
    FAMILIES,
    QUERY_VALUE,
    VOCAB,
    add_lora,
    checkpoint,
    llama,
    opt,
    project_lora,
)
from helpers.spread import pairwise

ROWS, LENGTH = 4, 48
NAMES = {"full": None, "LoRA everywhere": None, "LoRA on q and v": QUERY_VALUE}


def build(family, variant, dtype, **changes):
    model = FAMILIES[family](**changes).to(dtype)
    if variant == "LoRA everywhere":
        add_lora(model, layer=project_lora)
    if variant == "LoRA on q and v":
        add_lora(model, layer=project_lora, names=QUERY_VALUE)
    return model


def kept_bytes(model):
    """Bytes of distinct storages that autograd keeps for the backward pass, without weights."""
    model.train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive, sizes = [], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            alive.append(tensor)
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(
            input_ids=ids,
            attention_mask=torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=model.dtype),
            position_ids=torch.arange(LENGTH).expand(ROWS, LENGTH),
            use_cache=False,
        )
    return sum(sizes.values())


def estimate(model, **changes):
    settings = {
        "rows": ROWS,
        "length": LENGTH,
        "compute_dtype": model.dtype,
        "gradient_checkpointing": False,
        "zero_stage": 0,
        "world_size": 1,
        "mask_bytes": model.dtype.itemsize,
    }
    return estimate_memory(model, **(settings | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
def test_activations_are_what_autograd_keeps(family, variant, dtype):
    model = build(family, variant, dtype, attn="sdpa")
    assert estimate(model).activations == pytest.approx(kept_bytes(model), rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_unfused_attention_keeps_its_probabilities(family, variant, dtype):
    model = build(family, variant, dtype, attn="eager")
    assert estimate(model).activations == pytest.approx(kept_bytes(model), rel=0.05)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_checkpointing_keeps_block_inputs_and_the_inside_of_one_block(family):
    layers = "num_hidden_layers"
    one, two, eight = (
        build(family, "full", torch.float32, attn="sdpa", **{layers: n}) for n in (1, 2, 8)
    )
    inside_of_one = kept_bytes(two) - kept_bytes(one)
    measured = kept_bytes(checkpoint(eight)) + inside_of_one
    estimated = estimate(eight, gradient_checkpointing=True).activations
    assert estimated == pytest.approx(measured, rel=0.1)


class LiveTensors(TorchDispatchMode):
    """The most bytes of storages that are there at a time, of those made meanwhile."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.freed, storage._cdata)
        self.most = max(self.most, self.now)
        return made

    def freed(self, storage):
        self.now -= self.sizes.pop(storage, 0)


def peak_of_step(model, length, *, by_spans=True):
    """The most bytes at a time of a forward and a backward pass over one row."""
    network = CausalLMLoss(model).train()
    network.backbone.by_spans = by_spans
    ids = np.random.default_rng(0).integers(3, VOCAB, length).astype(np.int32)
    batch = SampleCollator(0)([[SequenceSample.of(ids, ids)]])
    fields = ("input_ids", "position_ids", "segment_ids", "logit_positions", "target_ids", "spans")
    with LiveTensors() as live:
        network(**{name: getattr(batch, name) for name in fields}).backward()
    return live.most


WIDE = pairwise(
    {
        "family": ("llama", "opt"),
        "variant": ("LoRA everywhere", "LoRA on q and v"),
        "recomputes": (False, True),
    }
)


@pytest.mark.parametrize(("family", "variant", "recomputes"), [tuple(row.values()) for row in WIDE])
def test_the_backward_pass_of_a_wide_mlp_is_the_peak_of_a_step(family, variant, recomputes):
    wide = {"llama": {"intermediate_size": 2048}, "opt": {"ffn_dim": 2048}}[family]
    length = 2048
    wide["max_position_embeddings"] = length
    model = build(family, variant, torch.float32, attn="sdpa", **wide)
    if recomputes:
        checkpoint(model)
    most = peak_of_step(model, length)
    needed = estimate(
        model,
        rows=1,
        length=length,
        gradient_checkpointing=recomputes,
        chunk_logits=MAX_CHUNK_LOGITS_CPU,
        mask_bytes=0,
    )
    assert needed.temporaries > 0.05 * needed.activations
    # Gradients of parameters come as activations go.
    assert needed.activations + needed.loss + needed.temporaries == pytest.approx(most, rel=0.08)


def test_inputs_on_the_host_leave_two_on_the_device():
    """8 blocks of 32 fp32 numbers a position; pinned memory comes in powers of two."""
    eight = build("opt", "full", torch.float32, attn="sdpa", num_hidden_layers=8)
    kept, moved = (
        estimate(eight, gradient_checkpointing=True, offload_activations=on).activations
        for on in (False, True)
    )
    positions = ROWS * LENGTH
    assert kept - moved == 6 * positions * 32 * 4
    host = [offloaded_bytes(eight, positions=n, compute_dtype=torch.float32) for n in (8, 9, 16)]
    assert host == [8 * 1024, 8 * 2048, 8 * 2048]
    plain = (estimate(eight, offload_activations=on) for on in (False, True))
    assert next(plain) == next(plain)


def test_fused_qkv_that_is_rotated_is_at_most_15_percent_low():
    model = build("neox", "LoRA everywhere", torch.float32, attn="sdpa")
    assert 0.85 * kept_bytes(model) < estimate(model).activations <= kept_bytes(model)


def test_activations_grow_with_positions_alone_when_attention_is_fused():
    shape = describe(llama(attn="sdpa"))
    settings = {"compute_dtype": torch.bfloat16, "gradient_checkpointing": False}
    short, long = (
        activation_bytes(llama(attn="sdpa"), shape, length=n, **settings) for n in (100, 200)
    )
    assert long == short


def windowed(kinds, dtype):
    """A model of a width of 16 with a window of 64 in the layers of that kind."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=len(kinds),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=64,
        layer_types=[f"{kind}_attention" for kind in kinds],
        attn_implementation="sdpa",
    )
    return Gemma3ForCausalLM(config).to(dtype)


@pytest.mark.parametrize(
    ("kinds", "dtype", "by_spans", "recomputes", "length", "expected"),
    [
        (["full"] * 2, torch.float32, True, False, 1024, 0),
        (["full"] * 2, torch.float32, False, False, 1024, 4),  # one for all layers
        (["sliding", "full"], torch.bfloat16, False, True, 1024, 2 * 2),  # one for each kind
        (["sliding", "full", "sliding"], torch.float32, True, False, 1024, 2 * 4),  # one a layer
        (["sliding"] * 3, torch.bfloat16, True, True, 2048, 2 + 1),
    ],
)
def test_masks_take_what_is_counted_for_each_pair_of_positions(
    kinds, dtype, by_spans, recomputes, length, expected
):
    def built():
        model = windowed(kinds, dtype)
        return checkpoint(model) if recomputes else model

    short, long = (peak_of_step(built(), n, by_spans=by_spans) for n in (length // 2, length))
    backbone = Backbone(built())
    backbone.by_spans = by_spans
    counted = backbone.mask_bytes(torch.device("cpu"), length=length, recomputes=recomputes)
    assert counted == expected
    assert (long - 2 * short) / (length**2 - 2 * (length // 2) ** 2) == pytest.approx(
        expected, abs=0.1
    )


def test_processes_that_divide_rows_keep_a_share_of_the_positions():
    model = build("llama", "LoRA everywhere", torch.float32, attn="sdpa")
    whole, part = (estimate(model, context_parallel_size=n, mask_bytes=0) for n in (1, 4))
    assert part.activations == whole.activations // 4
    assert (part.weights, part.optimizer) == (whole.weights, whole.optimizer)
    row = {"rows": 1, "length": 5, "mask_bytes": 0}
    assert estimate(model, **row, context_parallel_size=4).activations == (
        estimate(model, **row).activations // 5 * 2
    )


def test_parameters_gradients_and_optimizer_are_counted_and_divided_as_zero_does():
    """OPT with h = 32, MLP 128, V = 80, 3 blocks: LoRA r = 4 on q and v trains 6 x 256 numbers."""
    model = build("opt", "LoRA on q and v", torch.bfloat16)
    adapters = 3 * 2 * 4 * (32 + 32)
    blocks = 3 * (4 * (32 * 32 + 32) + 2 * 32 * 128 + 128 + 32 + 4 * 32)
    frozen = blocks + 80 * 32 + (64 + 2) * 32 + 2 * 32
    plain = estimate(model)
    assert plain.weights == 2 * frozen + 4 * adapters
    assert plain.gradients == 4 * adapters
    assert plain.optimizer == 8 * adapters
    stages = [estimate(model, zero_stage=n, world_size=4) for n in (1, 2, 3)]
    assert [e.optimizer for e in stages] == [12 * adapters // 4] * 3
    assert [e.gradients for e in stages] == [4 * adapters, adapters, adapters]
    assert [e.weights for e in stages] == [plain.weights, plain.weights, plain.weights // 4]


def test_loss_holds_one_chunk_of_logits_and_the_gradient_of_the_hidden_states():
    positions = ROWS * LENGTH
    model = build("opt", "LoRA on q and v", torch.float32)
    assert estimate(model).loss == positions * VOCAB * 8 + positions * 32 * 4
    assert estimate(model, chunk_logits=1000).loss == 1000 * 8 + positions * 32 * 4
    # The sum of chunks' gradients, and the one that is added to it.
    trained_head = estimate(opt(), chunk_logits=1000).loss
    assert trained_head == 1000 * 8 + positions * 32 * 4 + 2 * VOCAB * 32 * 4


def test_total_is_the_sum_of_its_parts():
    e = estimate(opt())
    assert e.total == e.weights + e.gradients + e.optimizer + e.activations + e.loss + e.temporaries


def test_an_estimate_needs_no_weights():
    with torch.device("meta"):
        meta = build("llama", "LoRA everywhere", torch.float32)
    assert estimate(meta) == estimate(build("llama", "LoRA everywhere", torch.float32))


def test_offload_leaves_optimizer_state_to_the_host_and_at_zero_3_weights_too():
    model = build("opt", "full", torch.float32, attn="sdpa")
    for stage in (1, 2, 3):
        kept, offloaded = (estimate(model, zero_stage=stage, offload=on) for on in (False, True))
        weights = 0 if stage == 3 else kept.weights
        assert vars(offloaded) == vars(kept) | {"optimizer": 0, "weights": weights}


def test_the_update_of_16_bit_weights_makes_their_gradients_anew_once_activations_are_gone():
    model = build("opt", "full", torch.bfloat16, attn="sdpa")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    needed = estimate(model, rows=1, length=1, zero_stage=1)
    assert needed.activations + needed.loss + needed.update == trained * (2 + 4)
    assert estimate(model, rows=10**6, zero_stage=1).update == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_a_single_micro_batch_come_as_its_activations_go(stage):
    model = build("opt", "full", torch.bfloat16, attn="sdpa")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shared, here = trained // 4, trained // 4 if stage == 2 else trained
    for rows in (1, 8, 10**6):
        needed = estimate(model, rows=rows, zero_stage=stage, world_size=4, accumulates=False)
        many = estimate(model, rows=rows, zero_stage=stage, world_size=4)
        kept = needed.weights + 12 * shared
        passing = needed.activations + needed.loss + needed.temporaries
        assert needed.total == kept + max(passing, 2 * here + 6 * shared)
        assert many.total == kept + 2 * here + max(passing, 6 * shared)


def test_16_bit_weights_share_their_optimizer_state_at_stage_0_as_at_1():
    model = build("opt", "full", torch.bfloat16, attn="sdpa")
    assert estimate(model, world_size=8) == estimate(model, world_size=8, zero_stage=1)
