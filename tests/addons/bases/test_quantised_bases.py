"""Bases whose files are quantised: values by the formats' definitions and by transformers."""

import json

import peft
import pytest
import torch
from gguf_files import save_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Mxfp4Config

from dschat_lora.checkpoint.quantization import stored_kind
from dschat_lora.config import addons
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.lora.layers import values_of
from dschat_lora.lora.model import apply_lora
from dschat_lora.lora.nf4 import quantize
from dschat_lora.models.build import bits_of, build_causal_lm
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.models.reward_model import load_reward_model
from dschat_lora.models.source import find_model
from helpers.quantised import AWQ, FP8, GPTQ, MXFP4_VALUES, awq, fp8, gptq, rewrite, save_gpt_oss
from helpers.roles import Words
from helpers.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FORMATS = {"fp8": (fp8, FP8), "gptq": (gptq, GPTQ), "awq": (awq, AWQ)}
EXPERTS = "model.layers.1.mlp.experts"


def load(path, bits=None, *, dtype=torch.float32, load=load_causal_lm, **more):
    config = ModelConfig(base_bits=bits, attn_implementation="eager")
    fields = load_config(str(path), config)
    return load(str(path), fields, config, dtype=dtype, meta=False, **more)


def assert_values(model, values):
    for name, expected in values.items():
        ours = model.get_parameter(name)
        # transformers leaves what is not quantised in the type of the files.
        assert torch.equal(ours, expected.to(ours.dtype)), name


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Qwen3-MoE, which is stored expert by expert and held in fused parameters."""
    directory = tmp_path_factory.mktemp("moe")
    tiny_model("qwen3_moe", num_experts=12).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_that_the_format_defines(kind, model_directory, tmp_path):
    quantise, field = FORMATS[kind]
    values = rewrite(model_directory("llama"), tmp_path, quantise, field)
    model = load(tmp_path)
    assert_values(model, values)
    # DeepSpeed broadcasts the bytes of each.
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert not hasattr(model.config, "quantization_config")  # of a merged model, say
    assert bits_of(model) == 16


@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_quantised_experts_are_fused_in_their_order(kind, moe, tmp_path):
    values = rewrite(moe, tmp_path, *FORMATS[kind])
    model = load(tmp_path)
    each = [
        torch.cat([values[f"{EXPERTS}.{e}.{part}_proj.weight"] for part in ("gate", "up")])
        for e in range(12)
    ]
    assert torch.equal(model.get_parameter(f"{EXPERTS}.gate_up_proj"), torch.stack(each))
    down = [values[f"{EXPERTS}.{e}.down_proj.weight"] for e in range(12)]
    assert torch.equal(model.get_parameter(f"{EXPERTS}.down_proj"), torch.stack(down))


def test_mxfp4_experts_of_gpt_oss_are_their_values(tmp_path):
    values = save_gpt_oss(tmp_path)
    assert_values(load(tmp_path), values)
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert_values(load(tmp_path, dtype=torch.bfloat16), dict(stock.named_parameters()))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_int8_of_bitsandbytes_is_unpacked(kind, model_directory, tmp_path):
    original = load(model_directory(kind))
    config = BitsAndBytesConfig(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(
        model_directory(kind), quantization_config=config
    ).save_pretrained(tmp_path)
    model = load(tmp_path)
    codes = load_file(tmp_path / "model.safetensors")
    layers = [key.removesuffix(".SCB") for key in codes if key.endswith(".SCB")]
    assert layers
    for name in layers:
        rows = codes[f"{name}.weight"].float() * codes[f"{name}.SCB"][:, None] / 127
        ours = model.get_parameter(f"{name}.weight")
        torch.testing.assert_close(ours, rows.t() if kind == "gpt2" else rows)
        whole = original.get_parameter(f"{name}.weight")
        assert (ours - whole).abs().max() < whole.abs().max() / 200


def test_values_that_are_packed_into_nf4_are_not_rounded_on_the_way(model_directory, tmp_path):
    values = rewrite(model_directory("llama"), tmp_path, fp8, FP8)
    model = load(tmp_path, 4, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = values_of(quantize(values[name], dtype=torch.bfloat16))
    assert torch.equal(values_of(model.get_parameter(name)), expected)


def test_four_bits_take_experts_that_files_hold_one_by_one(moe):
    whole, model = load(moe), load(moe, 4)
    assert bits_of(model) == 4
    stored = load_file(moe / "model.safetensors")
    assert f"{EXPERTS}.0.gate_proj.weight" in stored
    for name, parameter in whole.named_parameters():
        if "proj" not in name:
            assert torch.equal(model.get_parameter(name), parameter)


def test_a_reward_model_is_on_the_same_values(model_directory, tmp_path):
    values = rewrite(model_directory("llama"), tmp_path, gptq, GPTQ)
    model = load(tmp_path, load=load_reward_model, seed=3)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(name), values[name])


def test_codes_without_known_scales_are_refused(model_directory, tmp_path):
    rewrite(model_directory("llama"), tmp_path, fp8, FP8)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {key.replace("weight_scale_inv", "another"): t for key, t in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="holds torch.float8_e4m3fn codes without scales"):
        load(tmp_path, 4)


@pytest.mark.parametrize("kind", ["lfm2", "llama"])
def test_a_gguf_file_is_a_base_and_peft_has_the_same_one(kind, tmp_path):
    values = save_gguf(kind, tmp_path / "tiny.gguf")
    source = find_model(str(tmp_path / "tiny.gguf"))
    model = load(source.base)
    assert_values(model, values)
    built = build_causal_lm(
        *(source, Words(), ModelConfig(), LoraConfig()),
        **{"dtype": torch.float32, "seed": 0, "meta": True},
    )
    assert list(built.facts()) == ["base         gguf files, whose values are unpacked to float32"]
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits)
    apply_lora(model, LoraConfig(lora_dim=2), seed=0)
    theirs = peft.get_peft_model(stock, peft.LoraConfig(r=2, target_modules="all-linear"))
    ours = sum(p.requires_grad for p in model.parameters())
    assert ours == sum(p.requires_grad for p in theirs.parameters())


def test_a_gguf_file_without_its_package_is_refused_with_what_to_install(tmp_path, monkeypatch):
    save_gguf("lfm2", tmp_path / "tiny.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need a package: pip install 'dschat_lora\[gguf\]'"):
        load_config(str(tmp_path / "tiny.gguf"), ModelConfig())


def test_a_gguf_file_may_be_held_in_four_bits_and_has_a_fingerprint(tmp_path):
    values = save_gguf("lfm2", tmp_path / "tiny.gguf")
    path = str(tmp_path / "tiny.gguf")
    model = load(path, 4)
    assert bits_of(model) == 4
    name = "model.layers.0.conv.in_proj.weight"
    expected = values_of(quantize(values[name], dtype=torch.float32))
    assert torch.equal(values_of(model.get_parameter(name)), expected)
    before = weights_fingerprint(path)
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    data[-100] ^= 1
    (tmp_path / "tiny.gguf").write_bytes(data)
    assert weights_fingerprint(path) != before


@pytest.mark.smoke
def test_a_gguf_file_of_the_hub_is_named_with_its_repository():
    name = "someone/Model-GGUF:model-Q4_K_M.gguf"
    assert find_model(name).base == name


def test_nibbles_of_mxfp4_are_those_of_the_standard():
    """OCP Microscaling Formats 1.0, table 4: E2M1 has a bias of 1 and a subnormal of 0.5."""
    by_hand = [
        (-1) ** sign * (mantissa / 2 if e == 0 else 2 ** (e - 1) * (1 + mantissa / 2))
        for sign in (0, 1)
        for e in range(4)
        for mantissa in (0, 1)
    ]
    assert list(MXFP4_VALUES) == by_hand


OTHERS = {
    "gptq of an odd width": ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits, gptq"),
    "gptq for a kernel": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "gptq of 4 bits, marlin",
    ),
    "awq for vectors": (
        {"quant_method": "awq", "bits": 4, "version": "GEMV"},
        "awq of 4 bits, gemv",
    ),
    "compressed": ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "hqq": ({"quant_method": "hqq"}, "hqq"),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes fp4"),
}


@pytest.mark.parametrize(("fields", "kind"), OTHERS.values(), ids=OTHERS)
def test_other_quantisations_are_refused_in_one_line(fields, kind, model_directory, tmp_path):
    config = json.loads((load_config(model_directory("opt"), ModelConfig())).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    with pytest.raises(
        ValueError,
        match=rf"is quantised \({kind}\), which is not supported for training: bitsandbytes' nf4",
    ) as told:
        load_config(str(tmp_path), ModelConfig())
    assert "\n" not in str(told.value)


def test_a_form_of_an_add_on_that_is_not_installed_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(addons, "installed", dict)
    addons.provided.cache_clear()
    for name, fields, form in (
        ("some/model", {"quantization_config": GPTQ}, "gptq"),
        ("some/model.gguf", {}, "gguf"),
    ):
        words = (
            f"--model_name_or_path {name}: {form} is of the add-on bases, which is not installed"
        )
        with pytest.raises(ValueError, match=f"^{words}$"):
            stored_kind(fields, name)
    addons.provided.cache_clear()
