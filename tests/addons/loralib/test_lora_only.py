"""Files of LoRA tensors alone: names, sizes, what they are loaded into and what they are not."""

import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from dschat_lora.addons.loralib.lora_only import (
    LoraSettings,
    load_lora_only,
    lora_config_of_file,
    match_names,
    read_lora_only,
    write_lora_only,
)
from dschat_lora.config.groups import OWN_SETTINGS, LoraConfig
from dschat_lora.lora.model import adapter_parameters, apply_lora
from helpers.tiny import random_ids, randomise, tiny_model

PACKED = LoraConfig(lora_dim=2, lora_alpha=5.5, target_modules=("c_attn",), enable_lora=("q", "v"))


def adapted(config=PACKED, kind="gpt2", seed=0):
    model = tiny_model(kind)
    apply_lora(model, config, seed=seed)
    return model


def trained(config=PACKED, kind="gpt2"):
    model = adapted(config, kind)
    randomise(adapter_parameters(model).values())
    return model


def write(path, model, config=PACKED):
    write_lora_only(path, adapter_parameters(model), config, base="some/base")
    return path


CONTENTS = {
    "packed": ("gpt2", PACKED),
    "plain, rslora": ("llama", LoraConfig(lora_dim=3, use_rslora=True)),
    "embedding": ("gpt2", LoraConfig(lora_dim=3, target_modules=("wte", "c_proj"))),
    "biases": (
        "gpt2",
        LoraConfig(
            lora_dim=2, target_modules=("c_attn",), enable_lora=("k",), train_bias="lora_only"
        ),
    ),
    "all biases": (
        "projected_opt",
        LoraConfig(lora_dim=2, target_modules=("q_proj",), train_bias="all"),
    ),
    "head": ("reward", LoraConfig(lora_dim=2, modules_to_save=("score",))),
}


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
@pytest.mark.parametrize(("kind", "config"), CONTENTS.values(), ids=CONTENTS)
def test_base_and_file_give_the_trained_model(kind, config, ending, tmp_path):
    model, ids = trained(config, kind), random_ids()
    path = write(tmp_path / f"new/lora{ending}", model, config)
    assert [each.name for each in path.parent.iterdir()] == [f"lora{ending}"]
    size = 4 * sum(p.numel() for p in adapter_parameters(model).values())
    assert size < path.stat().st_size < size + 16384  # its tensors, and little more
    file = read_lora_only(path)
    again = tiny_model(kind)
    apply_lora(again, lora_config_of_file(file), seed=9)
    assert set(load_lora_only(again, file)) == adapter_parameters(model).keys()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (tiny_model(kind)(ids).logits - model(ids).logits).abs().max() > 0.01
    with pytest.raises(ValueError, match=f"one alpha, and the adapter has {OWN_SETTINGS}"):
        write(path, model, replace(config, alphas=(("q_proj", 2.0),)))


def test_names_and_settings_of_a_packed_file(tmp_path):
    model = trained()
    file, pickled = (write(tmp_path / name, model) for name in ("lora.safetensors", "lora.pt"))
    shapes = {name: tuple(t.shape) for name, t in load_file(file).items()}
    assert shapes == {
        f"transformer.h.{i}.attn.c_attn.lora_{factor}": shape
        for i in (0, 1)
        for factor, shape in (("A", (4, 32)), ("B", (64, 2)))
    }
    with safe_open(file, "pt") as opened:
        assert opened.metadata().keys() == {"format", "lora"}
    stored = torch.load(pickled, weights_only=True)  # as microsoft/LoRA has it
    assert stored["model_state_dict"].keys() == shapes.keys()
    back = read_lora_only(file)
    assert back.r == 2
    assert back.settings == LoraSettings(5.5, False, ("q", "v"), "some/base")
    assert back.targets == ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn")
    bare = tiny_model("gpt2").transformer  # takes the names of the whole
    apply_lora(bare, PACKED, seed=0)
    assert set(match_names(bare, back).values()) == adapter_parameters(bare).keys()
    # One that does not say its parts asks for them.
    torch.save(dict(adapter_parameters(model)), tmp_path / "x.pt")
    silent = read_lora_only(tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"for 2 part\(s\) of each layer; give as many in --enabl"):
        lora_config_of_file(silent, lora_alpha=4)
    config = lora_config_of_file(silent, lora_alpha=4, enable_lora=("q", "v"))
    load_lora_only(adapted(config), silent)


@pytest.mark.parametrize(
    ("width", "layers", "heads", "count", "ratio"),
    [(768, 12, 12, 147_456, 844), (1024, 24, 16, 393_216, 902), (1280, 36, 20, 737_280, 1050)],
    ids=["small", "medium", "large"],
)
def test_gpt2_files_are_of_the_published_size(width, layers, heads, count, ratio):
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=heads))
    base = sum(p.numel() for p in model.parameters())
    config = LoraConfig(lora_dim=4, target_modules=("c_attn",), enable_lora=("q", "v"))
    apply_lora(model, config, seed=0)
    tensors = adapter_parameters(model).values()
    assert sum(t.numel() for t in tensors) == count
    assert round(base / count) == ratio
    assert {t.shape for t in tensors} == {(8, width), (2 * width, 4)}
    assert sum(t.numel() * t.element_size() for t in tensors) == 4 * count


def roberta(labels=3):
    with torch.device("meta"):
        return RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, num_labels=labels))


def public_names():
    """The tensors of microsoft/LoRA's roberta_base_lora_mnli.bin."""
    shapes = {
        f"roberta.encoder.layer.{i}.attention.self.{part}.lora_{factor}": shape
        for i in range(12)
        for part in ("query", "value")
        for factor, shape in (("A", (8, 768)), ("B", (768, 8)))
    }
    shapes |= {"classifier.dense.weight": (768, 768), "classifier.dense.bias": (768,)}
    shapes |= {"classifier.out_proj.weight": (3, 768), "classifier.out_proj.bias": (3,)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_the_public_roberta_file_fits_with_nothing_unexpected(tmp_path):
    path = tmp_path / "roberta_base_lora_mnli.bin"
    torch.save(public_names(), path)
    file, model, whole, other = read_lora_only(path), roberta(), roberta(), roberta(labels=2)
    assert len(file.tensors) == 52
    assert (file.r, file.settings) == (8, None)
    config = lora_config_of_file(file, lora_alpha=16)
    apply_lora(model, config, seed=0)
    assert match_names(model, file).keys() == file.tensors.keys()
    sizes = {name: p.numel() for name, p in adapter_parameters(model).items()}
    assert sum(n for name, n in sizes.items() if "lora_" in name) == 294_912
    assert sum(n for name, n in sizes.items() if "lora_" not in name) == 592_899
    with pytest.raises(ValueError, match=r"roberta_base_lora_mnli.bin does not record its scaling"):
        lora_config_of_file(file)
    apply_lora(other, config, seed=0)
    with pytest.raises(ValueError, match=r"classifier.out_proj.weight is \(3, 768\), the model ha"):
        match_names(other, file)
    # Whole heads take the names of their parts.
    apply_lora(whole, replace(config, modules_to_save=("classifier",)), seed=0)
    name = match_names(whole, file)["classifier.out_proj.bias"]
    assert name == "classifier.trained.out_proj.bias"


def test_debertas_projections_have_the_same_names(tmp_path):
    config = DebertaV2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    path = "deberta.encoder.layer.0.attention.self"
    tensors = {
        f"{path}.{part}_proj.lora_{factor}": torch.ones(shape)
        for part in ("query", "value")
        for factor, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    head = {"pooler.dense": (8, 8), "classifier": (2, 8)}
    tensors |= {f"{name}.weight": torch.ones(shape) for name, shape in head.items()}
    tensors |= {f"{name}.bias": torch.ones(shape[0]) for name, shape in head.items()}
    torch.save(tensors, tmp_path / "x.bin")
    file, model = read_lora_only(tmp_path / "x.bin"), DebertaV2ForSequenceClassification(config)
    settings = lora_config_of_file(file, lora_alpha=4)
    assert settings.modules_to_save == ("classifier", "pooler.dense")
    apply_lora(model, settings, seed=0)
    load_lora_only(model, file)
    assert all((p == 1).all() for p in adapter_parameters(model).values())


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: name.removeprefix("transformer."),
        lambda name: f"module.{name.removeprefix('transformer.')}",
    ],
    ids=["of ranks", "of the base model", "both"],
)
def test_names_with_and_without_their_prefix_fit(rename, tmp_path):
    model = trained()
    tensors = {rename(name): p.detach() for name, p in adapter_parameters(model).items()}
    torch.save({"model_state_dict": tensors}, tmp_path / "model.20.pt")
    again = adapted()
    load_lora_only(again, read_lora_only(tmp_path / "model.20.pt"))
    assert torch.equal(again(random_ids()).logits, model(random_ids()).logits)


# ---------------------------------------------------------------------- refusals


def test_lora_tensors_are_nothing_without_their_base(tmp_path):
    file = read_lora_only(write(tmp_path / "lora.safetensors", trained()))
    with pytest.raises(ValueError, match="LoRA tensors: load its base and call apply_lora"):
        load_lora_only(tiny_model("gpt2"), file)
    with torch.device("meta"):
        empty = GPT2LMHeadModel(tiny_model("gpt2").config)
    apply_lora(empty, PACKED, seed=0)
    message = "and transformer.wte.weight of the model has no value: load the base first"
    with pytest.raises(ValueError, match=message):
        load_lora_only(empty, file)


C_ATTN = "transformer.h.0.attn.c_attn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1)}),
            "contains transformer.h.0.attn.bias, which the model does not have",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith("transformer.h.1")],
            "lacks transformer.h.1.attn.c_attn.lora_A, which the model has",
        ),
        (
            lambda t: t.update({f"{C_ATTN}.lora_A": torch.ones(4, 31)}),
            f"x.pt: {C_ATTN}.lora_A is (4, 31), the model has (4, 32)",
        ),
        (lambda t: t.pop(f"{C_ATTN}.lora_B"), f"{C_ATTN}.lora_A lacks its counterpart"),
        (
            lambda t: t.update({f"{C_ATTN}.lora_A": torch.ones(3, 32)}),
            f"the factors of {C_ATTN} are (3, 32) and (64, 2); they must be (r, in) and (out, r)",
        ),
        (
            lambda t: t.update({f"{C_ATTN}.lora_B": torch.ones(64, 4)}),
            f"holds factors of several ranks: 4 ({C_ATTN}) and 2 (transformer.h.1.attn.c_attn)",
        ),
        (
            lambda t: t[f"{C_ATTN}.lora_B"].fill_(float("nan")),
            f"{C_ATTN}.lora_B holds values that are not finite",
        ),
        (lambda t: t.clear(), "x.pt holds no LoRA factor"),
        (lambda t: t.update(step=4), "x.pt is not a state dict: 'step' is not a tensor"),
    ],
    ids=["surplus", "missing", "shape", "alone", "ranks", "several", "nan", "empty", "number"],
)
def test_a_file_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    tensors = {name: p.detach().clone() for name, p in adapter_parameters(adapted()).items()}
    change(tensors)
    torch.save({"model_state_dict": tensors}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt") as caught:
        load_lora_only(adapted(), read_lora_only(tmp_path / "x.pt"))
    assert message in str(caught.value)


class Command:
    def __reduce__(self):
        return print, ("this must not run",)


def test_damaged_files_and_code_in_files_are_one_line(tmp_path, capsys):
    path = write(tmp_path / "lora.pt", trained())
    (tmp_path / "cut.bin").write_bytes(path.read_bytes()[:500])
    (tmp_path / "text.bin").write_text("hello")
    (tmp_path / "empty.bin").touch()
    (tmp_path / "code.bin").write_bytes(pickle.dumps(Command(), protocol=2))
    torch.save({"x": Command()}, tmp_path / "more.bin")
    (tmp_path / "text.safetensors").write_text("hello, hello")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    for name, message in {
        **dict.fromkeys(
            ("cut.bin", "text.bin", "empty.bin", "code.bin", "more.bin"),
            "is damaged, or holds more than tensors",
        ),
        "text.safetensors": "is damaged",
        "tensor.pt": "holds a Tensor, not a state dict",
        "absent.pt": "is not a file; a LoRA-only file is a .safetensors, .pt or .bin",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            read_lora_only(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_other_scaling_and_other_parts_are_refused(tmp_path):
    file = read_lora_only(write(tmp_path / "lora.safetensors", trained()))
    chosen = {"lora_dim": 2, "target_modules": ("c_attn",)}
    other = adapted(LoraConfig(lora_alpha=8, enable_lora=("q", "v"), **chosen))
    with pytest.raises(ValueError, match=r"trained with scaling 2.75 \(lora_alpha 5.5, r 2, use_r"):
        load_lora_only(other, file)
    # Of the same shapes.
    other = adapted(LoraConfig(lora_alpha=5.5, enable_lora=("q", "k"), **chosen))
    with pytest.raises(ValueError, match=r"with --enable_lora q v; transformer\S+ has q k"):
        load_lora_only(other, file)


def test_a_write_that_fails_leaves_the_file_before(tmp_path, monkeypatch):
    path = write(tmp_path / "lora.pt", adapted())
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(path, trained())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"ends in .safetensors or .pt"):
        write(tmp_path / "lora.bin", trained())
    broken = {"x.lora_A": torch.ones(2, 3), "x.lora_B": torch.full((4, 2), float("inf"))}
    with pytest.raises(ValueError, match="x.lora_B holds values that are not finite"):
        write_lora_only(path, broken, PACKED)
