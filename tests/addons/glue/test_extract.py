"""What was trained, out of full checkpoints of ours and of others."""

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dschat_lora import __main__ as command
from dschat_lora.addons.loralib.extract import extract
from helpers.glue_toys import save_encoder

SCALING = 16 / 8


def weights(directory):
    return load_file(directory / "adapter_model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture
def full(trained):
    """The tensors of the run's last checkpoint."""
    return load_file(trained / "checkpoint-6" / "model.safetensors")


def test_our_checkpoint_gives_what_the_run_left(trained, encoder, tmp_path, monkeypatch, capsys):
    checkpoint = tmp_path / "checkpoint-6"
    shutil.copytree(trained / "checkpoint-6", checkpoint)
    argv = ["dschat-lora", "extract", str(checkpoint), "--base", str(encoder("roberta"))]
    monkeypatch.setattr("sys.argv", [*argv, "--lora_alpha", "16"])
    command.main()
    assert_same(weights(checkpoint / "adapter"), weights(trained / "adapter"))
    for name in ("adapter_config.json", "tokenizer.json"):
        ours, theirs = (d / "adapter" / name for d in (checkpoint, trained))
        assert ours.read_text("utf-8") == theirs.read_text("utf-8")
    said = capsys.readouterr().out
    assert "12 tensors, 3,203 parameters, rank 8" in said
    assert "note" not in said
    command.main()  # again, over what it wrote itself


def merge_in(tensors):
    """Add each update to its weight, as microsoft/LoRA's Trainer left RoBERTa's evaluated."""
    for name in [name for name in tensors if name.endswith(".lora_A")]:
        stem = name.removesuffix("lora_A")
        tensors[f"{stem}weight"] += SCALING * tensors[f"{stem}lora_B"] @ tensors[name]


@pytest.fixture
def extracted(full, encoder, tmp_path):
    """``extracted(dtype, lora_alpha=16)``: the adapter of ``full`` and the last line about it."""

    def call(dtype=torch.float32, lora_alpha=16):
        said = []
        tensors = {name: tensor.to(dtype) for name, tensor in full.items()}
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        torch.save(tensors, tmp_path / "checkpoint" / "pytorch_model.bin")
        base = str(encoder("roberta"))
        checkpoint = tmp_path / "checkpoint"
        out = extract(checkpoint, base=base, lora_alpha=lora_alpha, say=said.append)
        return out, [each for each in said if each.startswith("note")]

    return call


def test_a_checkpoint_saved_while_merged_is_not_counted_twice(full, trained, extracted):
    merge_in(full)
    out, (note,) = extracted()
    assert_same(weights(out), weights(trained / "adapter"))
    assert "was saved while merged: 4 weights already contain the update" in note
    assert "or saved while merged with another --lora_alpha" in extracted(lora_alpha=8)[1][-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_16_bits_is_no_difference(full, extracted, dtype):
    assert extracted(dtype)[1] == []
    merge_in(full)
    assert "was saved while merged: 4 weights" in extracted(dtype)[1][-1]
    full["roberta.embeddings.word_embeddings.weight"] *= 1.02
    assert "1 weights of the base differ" in extracted(dtype)[1][-1]


def test_another_base_is_told(trained, tmp_path):
    said, other = [], save_encoder("roberta", tmp_path / "other", initializer_range=0.2)
    options = {"lora_alpha": 16, "output_dir": tmp_path / "out", "say": said.append}
    extract(trained / "checkpoint-6", base=str(other), **options)
    assert any("of the base differ between" in each for each in said)


def test_a_file_of_loralib_is_taken(full, trained, encoder, tmp_path):
    """Named as roberta_base_lora_mnli.bin is: factors, and the head of one MNLI run."""
    body = {n: t for n, t in full.items() if "lora_" in n or not n.startswith("roberta.")}
    file = tmp_path / "mnli.bin"
    torch.save(body, file)
    out = extract(file, base=str(encoder("roberta")), lora_alpha=16, say=lambda text: None)
    assert out == tmp_path / "mnli.adapter"
    assert_same(weights(out), weights(trained / "adapter"))


def test_packed_factors_of_gpt2_are_put_where_they_belong(model_directory, tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = model_directory("gpt2")
    merged = AutoModelForCausalLM.from_pretrained(base).eval()
    state = {}
    for number, block in enumerate(merged.transformer.h):
        a, b = (torch.randn(n, m, generator=generator) for n, m in ((2 * 4, 32), (2 * 32, 4)))
        name = f"module.transformer.h.{number}.attn.c_attn"
        state |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
        with torch.no_grad():  # query: columns 0 to 31 of 96; value: the last 32
            block.attn.c_attn.weight[:, :32] += 8 / 4 * (b[:32] @ a[:4]).T
            block.attn.c_attn.weight[:, 64:] += 8 / 4 * (b[32:] @ a[4:]).T
    torch.save({"model_state_dict": state}, tmp_path / "e2e.pt")
    options = {"lora_alpha": 8, "enable_lora": ("q", "v"), "say": lambda text: None}
    out = extract(tmp_path / "e2e.pt", base=base, **options)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out)).eval()
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-5)


def test_what_cannot_be_extracted_is_refused(trained, encoder, tmp_path):
    base = str(encoder("roberta"))
    checkpoint = trained / "checkpoint-6"
    for path, more, message in (
        (encoder("roberta"), {}, "holds no LoRA factor"),
        (tmp_path, {}, "holds no model.safetensors"),
        (tmp_path / "none.bin", {}, "is not a file"),
        (checkpoint, {"lora_alpha": None}, "give --lora_alpha"),
        (checkpoint, {"output_dir": trained}, "is not empty"),
        (checkpoint, {"output_dir": trained / "adapter"}, "only an adapter in .*checkpoint-6/adap"),
        (checkpoint, {"base": "./nothere"}, "--base ./nothere is not a model"),
        (checkpoint, {"base": str(trained)}, "is not a model: give a hub name or a directory"),
        (checkpoint, {"base": str(encoder("deberta-v2"))}, "is a deberta-v2 model without the l"),
    ):
        options = {"base": base, "lora_alpha": 16, "say": lambda text: None} | more
        with pytest.raises(ValueError, match=message):
            extract(path, **options)
