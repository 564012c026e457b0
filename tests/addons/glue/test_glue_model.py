"""What a GLUE model trains, from which values it starts, and that PEFT agrees."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.deberta_v2 import DebertaV2Config
from transformers.models.roberta import RobertaConfig

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.model import (
    adapt,
    build_model,
    lora_settings,
    max_positions,
    start_from,
    trained_tensors,
)
from dschat_lora.addons.loralib.extract import empty_classifier
from dschat_lora.config.options import parse_config

IDS = torch.tensor([[0, 7, 9, 11, 2], [0, 8, 10, 2, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def config_of(model, task, *options):
    argv = ["--model_name_or_path", model, "--task_name", task, *options]
    return parse_config(GlueConfig, [str(each) for each in argv])


def silent(text):
    pass


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=MASK).logits


ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
XXL = {
    **{"vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 48},
    **{"num_attention_heads": 24, "intermediate_size": 6144, "max_position_embeddings": 512},
    **{"type_vocab_size": 0, "relative_attention": True, "position_buckets": 256},
    **{"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"]},
    **{"conv_kernel_size": 3, "conv_act": "gelu", "position_biased_input": False},
}


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
LARGE["intermediate_size"] = 4096


# Published by microsoft/LoRA: the factors and, for MNLI's three labels, the head.
@pytest.mark.parametrize(
    ("settings", "r", "factors", "head"),
    [
        (RobertaConfig(num_labels=3, **ROBERTA), 8, 294_912, 592_899),
        (RobertaConfig(num_labels=3, **LARGE, **ROBERTA), 8, 786_432, 1_052_675),
        (DebertaV2Config(num_labels=3, **XXL), 16, 4_718_592, 2_365_443),
    ],
    ids=["roberta-base", "roberta-large", "deberta-v2-xxlarge"],
)
def test_as_many_parameters_train_as_in_the_original(settings, r, factors, head):
    model = empty_classifier(settings)
    adapt(model, config_of("m", "mnli", "--apply_lora", "--lora_r", r))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for name, p in trained.items() if "lora_" in name) == factors
    assert sum(p.numel() for name, p in trained.items() if "lora_" not in name) == head
    assert trained.keys() == trained_tensors(model).keys()
    adapted = {name.split(".")[-2] for name in trained if "lora_" in name}
    roberta = settings.model_type == "roberta"
    assert adapted == ({"query", "value"} if roberta else {"query_proj", "value_proj"})


def test_names_are_those_of_the_original(encoder):
    model = build_model(config_of(encoder("roberta"), "mnli", "--apply_lora"), say=silent)
    layers = [f"roberta.encoder.layer.{n}.attention.self." for n in range(2)]
    factors = {f"{layer}{m}.lora_{f}" for layer in layers for m in ("query", "value") for f in "AB"}
    parts = (f"classifier.{part}.{k}" for part in ("dense", "out_proj") for k in ("weight", "bias"))
    assert set(trained_tensors(model)) == factors | set(parts)


def test_every_weight_trains_without_lora(encoder):
    model = build_model(config_of(encoder("roberta"), "rte"), say=silent)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kind", ["roberta", "deberta-v2"])
def test_dropout_of_the_head_can_be_chosen(encoder, kind):
    model = build_model(config_of(encoder(kind), "rte", "--classifier_dropout", "0.3"), say=silent)
    dropout = model.classifier.dropout if kind == "roberta" else model.dropout
    assert dropout.p == 0.3


def test_factors_start_as_chosen(encoder):
    stds = {}
    for init in ("uniform", "normal"):
        config = config_of(encoder("deberta-v2"), "rte", "--apply_lora", "--lora_init", init)
        tensors = trained_tensors(build_model(config, say=silent))
        values = torch.cat([t.flatten() for name, t in tensors.items() if name.endswith("lora_A")])
        stds[init] = values.std().item()
        assert all(not t.any() for name, t in tensors.items() if name.endswith("lora_B"))
    # U(-b, b) with b = 1 / sqrt(32) has a standard deviation of b / sqrt(3).
    assert stds["uniform"] == pytest.approx(32**-0.5 / 3**0.5, rel=0.05)
    assert stds["normal"] == pytest.approx(0.02, rel=0.05)


def test_a_layer_of_the_head_is_not_adapted():
    model = empty_classifier(RobertaConfig(**ROBERTA))
    config = config_of("m", "rte", "--apply_lora", "--target_modules", "query", "dense")
    with pytest.raises(ValueError, match="query dense matches classifier.dense of the head"):
        adapt(model, config)


def test_positions_of_a_model_are_counted():
    assert max_positions(RobertaConfig(**ROBERTA)) == 512  # 514, less the two up to the padding's
    assert max_positions(DebertaV2Config(**XXL)) > 10**6  # relative alone
    assert max_positions(DebertaV2Config(**XXL | {"position_biased_input": True})) == 512


def test_a_head_with_its_labels_in_another_order_is_put_in_the_tasks(encoder, tmp_path):
    labels = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    settings = AutoConfig.from_pretrained(
        encoder("roberta"), id2label=labels, label2id={name: n for n, name in labels.items()}
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(encoder("roberta"), config=settings)
    theirs.classifier.out_proj.bias.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    theirs.save_pretrained(tmp_path)
    told = []
    ours = build_model(config_of(tmp_path, "mnli"), say=told.append)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs)[:, [2, 1, 0]])
    assert "contradiction, neutral, entailment) were put in the task's order" in told[0]


def test_a_file_of_another_run_is_taken_or_refused_by_what_it_holds(encoder, tmp_path):
    config = config_of(encoder("roberta"), "mnli", "--apply_lora")
    model, path, told = build_model(config, say=silent), tmp_path / "other.bin", []
    own = trained_tensors(model)
    theirs = {
        name.removeprefix("roberta."): torch.randn_like(tensor)
        for name, tensor in own.items()
        if "out_proj" not in name
    }

    def start():
        torch.save(theirs, path)
        start_from(model, path, lora_settings(model, config), say=told.append)

    start()
    for name, tensor in own.items():
        if "lora_" in name:
            torch.testing.assert_close(tensor.detach(), theirs[name.removeprefix("roberta.")])
    assert told[0].endswith("starts anew; dropped classifier, which has other parts there")
    theirs["encoder.layer.0.attention.self.query.bias"] = torch.zeros(32)
    with pytest.raises(ValueError, match="query.bias, which the model does not have"):
        start()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["roberta", "deberta-v2"])
def test_peft_loads_the_adapter_with_equal_logits(glue_run, encoder, kind, tmp_path):
    options = ["--apply_lora", "--learning_rate", "1e-2", "--max_steps", "3", "--save_steps", "3"]
    out = glue_run(tmp_path / "out", "mnli", *options, kind=kind)
    config = config_of(encoder(kind), "mnli", "--apply_lora", "--lora_path", out / "adapter")
    ours = build_model(config, say=silent)
    settings = AutoConfig.from_pretrained(encoder(kind), num_labels=3)
    base = AutoModelForSequenceClassification.from_pretrained(encoder(kind), config=settings)
    theirs = PeftModel.from_pretrained(base, str(out / "adapter"))
    torch.testing.assert_close(logits_of(theirs), logits_of(ours), atol=1e-5, rtol=0)
    assert all(t.any() for name, t in trained_tensors(ours).items() if name.endswith("lora_B"))
    if kind == "deberta-v2":
        assert {"pooler", "classifier"} <= set(theirs.peft_config["default"].modules_to_save)
