"""A base in 4 bits against the same values in whole, and against bitsandbytes under stock PEFT."""

import json
import sys
import warnings
from dataclasses import replace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dschat_lora.checkpoint.export import probe_logits
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.generate import decode
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora import nf4
from dschat_lora.lora.layers import is_quantized, state_of, stored_bytes, values_of
from dschat_lora.lora.merge import merge_deviation, merged_state_dict
from dschat_lora.lora.model import adapter_parameters, adapters_disabled, apply_lora
from dschat_lora.models import stored_weights
from dschat_lora.models.build import base_warning
from dschat_lora.models.fingerprint import base_fingerprint, weights_fingerprint
from dschat_lora.models.loading import load_causal_lm, load_config, share_parameters
from dschat_lora.models.reward_model import load_reward_model
from dschat_lora.models.source import find_model
from helpers.addons import of_addon
from helpers.process_memory import forget_peak, peak_memory, save_wide_model
from helpers.quantised import mend_bitsandbytes
from helpers.spread import ALL
from helpers.tiny import VOCAB, write_trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FOUR = ModelConfig(base_bits=4)
DISTANCE = of_addon("bases.distance")
LORA = LoraConfig(lora_dim=4, lora_alpha=8)
STEPS = 20 if ALL else 4
KINDS = ("opt", "gpt2", "neox", "llama", "qwen2") if ALL else ("opt", "gpt2", "llama")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(autouse=True)
def _mended(monkeypatch):
    mend_bitsandbytes(monkeypatch)


def load(path, config=FOUR, *, dtype=torch.float32, **more):
    options = {"meta": False} | more
    return load_causal_lm(path, load_config(path, config), config, dtype=dtype, **options)


def stock(path, **options):
    """bitsandbytes' model by transformers. In training mode: in evaluation on some CPUs its layers
    round, and rewrite their weights."""
    quantization = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **{**NF4, **options})
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=quantization
    ).train()


def whole_twin(path):
    """A plain model of the values of the 4-bit one."""
    held, plain = load(path), load(path, ModelConfig())
    with torch.no_grad():
        for name, parameter in held.named_parameters():
            plain.get_parameter(name).copy_(values_of(parameter))
    return plain


def ids(rows=2, length=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def adapted(model, seed=3):
    apply_lora(model, LORA, seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.05, generator=generator)
    return model


def codes_of(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if is_quantized(p)}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_codes_and_the_rest_is_whole(kind, model_directory):
    model = load(model_directory(kind))
    held = {name for name, p in model.named_parameters() if is_quantized(p)}
    wide = {
        n for n, p in load(model_directory(kind), ModelConfig()).named_parameters() if p.dim() > 1
    }
    outside = ("embed", "wte", "wpe", "lm_head")
    assert held == {name for name in wide if not any(part in name for part in outside)}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (kind in ("opt", "gpt2", "qwen2"))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_checkpoints_of_bitsandbytes_are_read_as_they_are(kind, double, model_directory, tmp_path):
    """Some layers of the blocks in 16 bits, as the files are."""
    kept = {"opt": "fc1", "gpt2": "c_fc"}[kind]
    options = {"llm_int8_skip_modules": ["lm_head", kept], "bnb_4bit_use_double_quant": double}
    written = stock(model_directory(kind), **options)
    written.save_pretrained(tmp_path)
    model = load(str(tmp_path), ModelConfig())
    assert {kept in n for n, p in model.named_parameters() if is_quantized(p)} == {False}
    torch.testing.assert_close(model(ids()).logits, written(ids()).logits, rtol=1e-5, atol=1e-5)
    assert not hasattr(model.config, "quantization_config")
    state = state_of(next(p for p in model.parameters() if is_quantized(p)))
    assert (state.offset is not None) == double
    empty = load(str(tmp_path), ModelConfig(), meta=True)
    assert [p.shape for p in empty.parameters()] == [p.shape for p in model.parameters()]


def train(model, steps=STEPS):
    """Losses of a few steps on the same batches."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=5e-3), []
    for step in range(steps):
        batch = ids(seed=step % 2)
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_on_the_values_and_those_of_stock_peft(kind, model_directory):
    path = model_directory(kind)
    model, twin = adapted(load(path)).train(), adapted(whole_twin(path)).train()
    theirs = peft.get_peft_model(
        stock(path), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    own = {n: p.detach().clone() for n, p in adapter_parameters(model).items()}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                short = name.removeprefix("base_model.model.").replace(".default.weight", "")
                parameter.copy_(own[short])
    before = codes_of(model)
    losses = train(model)
    if kind == "gpt2":  # whose twin multiplies by a transposed matrix
        assert losses == pytest.approx(train(twin), abs=1e-5)
    else:
        assert losses == train(twin)
    assert losses == pytest.approx(train(theirs), abs=1e-5)
    assert losses[2] < losses[0]  # of the same batch
    after = codes_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_stock_peft_on_the_4_bit_base(kind, model_directory, tmp_path):
    path = model_directory(kind)
    model = adapted(load(path)).eval()
    write_trained(tmp_path, model, LORA, base_model_name_or_path=path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(stock(path).train(), tmp_path).train()
    merged = load(path, ModelConfig()).eval()
    merged.load_state_dict(merged_state_dict(model), strict=True)
    mask = torch.ones(2, 16, dtype=torch.bool)
    with torch.no_grad():
        report = merge_deviation(theirs(ids()).logits, merged(ids()).logits, mask)
        unmerged = merge_deviation(model(ids()).logits, merged(ids()).logits, mask)
    assert report.kl_nats_per_token < 1e-10
    assert unmerged.kl_nats_per_token < 1e-10


@pytest.mark.parametrize("enabled", [True, False], ids=["adapter", "base"])
@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_decoding_unpacked_once_or_layer_by_layer_is_that_of_the_values(
    kind, enabled, model_directory
):
    path = model_directory(kind)
    model, twin = adapted(load(path)).eval(), adapted(whole_twin(path)).eval()
    before, prompts = base_fingerprint(model), ids(3, 5).tolist()
    expected = None
    with torch.no_grad():
        for network, unpacked in ((twin, None), (model, True), (model, False)):
            disabled = adapters_disabled(network) if not enabled else torch.no_grad()
            with disabled, FastLinears(network, unpacked=unpacked).in_use():
                logits = network(ids()).logits
            if expected is None:
                expected = logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    options = {"seeds": [[0]] * 3, "eos_ids": [2], "pad_id": 0, "device": torch.device("cpu")}
    first, second = (
        decode(network, prompts, Sampling(6, do_sample=False), **options)
        for network in (twin, model)
    )
    assert first == second
    assert base_fingerprint(model) == before


def test_merged_decoding_and_stacks_are_those_of_the_values(model_directory):
    model = adapted(load(model_directory("llama"))).eval()
    with torch.no_grad():
        expected = model(ids()).logits
        for options in ({"merged": True}, {"stacked": True}, {"stacked": True, "merged": True}):
            with FastLinears(model, unpacked=True, **options).in_use():
                ours = model(ids()).logits
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_roles_on_one_base_hold_its_codes_once(model_directory):
    path = model_directory("opt")
    base = load(path).requires_grad_(False)
    first, second = adapted(share_parameters(base)), adapted(share_parameters(base))
    scorer = load_reward_model(
        path, load_config(path, FOUR), FOUR, dtype=torch.float32, seed=1, meta=False, base=base
    )
    together = torch.nn.ModuleList([base, first, second, scorer])
    quantised = [p for p in together.parameters() if is_quantized(p)]
    assert len(quantised) == len(codes_of(base))
    assert sum(map(stored_bytes, quantised)) == sum(
        stored_bytes(p) for p in base.parameters() if is_quantized(p)
    )


def test_a_reward_model_scores_as_on_the_values(model_directory):
    path, options = model_directory("opt"), {"dtype": torch.float32, "seed": 1, "meta": False}
    ours = load_reward_model(path, load_config(path, FOUR), FOUR, **options).eval()
    plain = ModelConfig()
    twin = load_reward_model(
        path, load_config(path, plain), plain, base=whole_twin(path), **options
    ).eval()
    assert torch.equal(probe_logits(ours, ids()), probe_logits(twin, ids()))


def test_pickled_weights_are_packed_too(model_directory, tmp_path):
    path = model_directory("opt")
    plain = load(path, ModelConfig())
    plain.config.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(load(str(tmp_path))(ids()).logits, load(path)(ids()).logits)


def saved_adapter(path, directory, bits):
    model = adapted(load(path, ModelConfig(base_bits=bits))).eval()
    fingerprint = weights_fingerprint(path) if bits == 4 else ""
    more = {"base_model_name_or_path": path, "base_fingerprint": fingerprint}
    write_trained(directory, model, LORA, base_bits=bits, **more)
    return model


@pytest.mark.skipif(not DISTANCE, reason="the add-on is not there")
@pytest.mark.parametrize(("trained", "loaded"), [(4, 16), (16, 4)])
@pytest.mark.parametrize(
    ("kind", "adapted_layers"), [("opt", "all-linear"), ("gpt2", "all-linear"), ("opt", "k_proj")]
)
def test_distance_of_another_base_is_that_of_both_models(
    kind, adapted_layers, trained, loaded, model_directory, tmp_path, monkeypatch
):
    layers = replace(LORA, target_modules=(adapted_layers,))
    monkeypatch.setattr(sys.modules[__name__], "LORA", layers)
    monkeypatch.setattr(*DISTANCE, "probe_ids", lambda *_: ids(1, 24))
    path = model_directory(kind)
    own = saved_adapter(path, tmp_path / "adapter", trained)
    other = adapted(load(path, ModelConfig(base_bits=loaded))).train()
    with torch.no_grad():
        logits = other(ids(1, 24)).logits
        mask = torch.ones(1, 24, dtype=torch.bool)
        report = merge_deviation(own(ids(1, 24)).logits, logits, mask)
    before = base_fingerprint(other)
    source = find_model(str(tmp_path / "adapter"))
    words = base_warning(other, source, None, bits=loaded)
    assert f"was trained on a {trained}-bit base, but this one has {loaded} bits" in words
    assert f": {report.kl_nats_per_token:.2g} nats per token" in words
    assert report.kl_nats_per_token > 1e-4
    assert base_fingerprint(other) == before
    assert other.training
    assert torch.equal(other(ids(1, 24)).logits, logits)
    assert base_warning(own, source, None, bits=trained) is None


def test_other_weight_files_than_in_training_are_told(model_directory, tmp_path):
    path = model_directory("opt")
    own = saved_adapter(path, tmp_path / "adapter", 4)
    changed = load(path, ModelConfig())
    with torch.no_grad():
        changed.get_input_embeddings().weight.add_(0.5)
    changed.save_pretrained(tmp_path / "base")
    config = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    config.write_text(json.dumps(fields))
    words = base_warning(own, find_model(str(tmp_path / "adapter")), None, bits=4)
    assert "was trained on other weight files than" in words


def test_adapters_of_others_say_nothing_of_their_base(model_directory, tmp_path):
    base = load(model_directory("opt"), ModelConfig())
    base.name_or_path = model_directory("opt")
    peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    assert source.base_bits is None
    assert base_warning(base, source, None, bits=16) is None


def test_the_device_that_is_trained_on_quantizes(model_directory, monkeypatch):
    path, plain, workers = model_directory("opt"), nf4.quantize, set()
    # A GPU that is here is none of ours: DS_ACCELERATOR chose the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    expected = codes_of(load(path))

    def noted(weight, worker=None, **options):
        workers.update([] if weight.is_meta else [worker])
        return plain(weight, **options)

    monkeypatch.setattr(nf4, "quantize", noted)
    for module in (stored_weights, *DISTANCE):
        monkeypatch.setattr(module, "device", lambda: torch.device("cuda", 3))
    model = load(path)
    for module in DISTANCE:
        monkeypatch.setattr(module, "quantize", noted)
        module._rounded("", torch.randn(64, 4), False)
    assert workers == {torch.device("cuda", 3)}
    for name, codes in codes_of(model).items():
        assert torch.equal(codes, expected[name])


def memory_of_loading(path, tiny_path):
    """Bytes of a 4-bit model, and by how much this process's peak memory grows as it is loaded."""
    load(tiny_path)  # so that what loading anything costs does not count
    forget_peak()
    before = peak_memory()
    model = load(path)
    return sum(map(stored_bytes, model.parameters())), peak_memory() - before


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_memory_than_what_it_leaves(
    fresh_ranks, model_directory, tmp_path
):
    """Temporaries of packing, between codes that stay, took three times as much."""
    save_wide_model(tmp_path)
    paths = {"path": str(tmp_path), "tiny_path": model_directory("llama")}
    ((size, growth),) = fresh_ranks(1).run("models.test_four_bit_base:memory_of_loading", **paths)
    assert growth < 1.1 * size + 10 * 2**20  # a weight before packing, the layers themselves
