"""Reward models of decoders that transformers has no classifier of, here and under stock PEFT."""

import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.checkpoint.score_class import register_score_class, score_class_code
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.build import build_reward_model
from dschat_lora.models.loading import load_config
from dschat_lora.models.reward_model import RewardModel, load_reward_model
from dschat_lora.models.source import ModelSource
from dschat_lora.supervised.pair_objectives import score_ends
from fakecuda.captured import tiny
from helpers.pairs import ragged_pairs
from helpers.runs import CARD, NoTokenizer
from helpers.spread import ALL

# Dense; of experts; with convolutions; a type whose classes are those of another.
KINDS = ("granite", "olmoe", "lfm2", "internlm3")
MORE = ("apertus", "cohere2", "ernie4_5", "ernie4_5_moe", "granitemoe", "glm4_moe", "vaultgemma")
OPTIONS = ModelConfig(attn_implementation="eager")


class Tokenizer(NoTokenizer):
    pad_token_id, eos_token_id = 1, 2

    def __len__(self):
        return 1024


@pytest.fixture(scope="module", params=KINDS + MORE if ALL else KINDS)
def base(request, tmp_path_factory):
    """A language model's directory."""
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(request.param)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def forget_classes(monkeypatch):
    """transformers knows its own classes alone."""
    known = AutoModelForSequenceClassification._model_mapping
    monkeypatch.setattr(known, "_extra_content", {})


def build(directory, lora, *, seed, **more):
    source, options = ModelSource(str(directory)), {"dtype": torch.float32, "meta": False}
    return build_reward_model(source, Tokenizer(), OPTIONS, lora, seed=seed, **options, **more)


@pytest.fixture
def trained(base):
    """A reward model with an adapter that changes it, and a head of its own."""
    adapted = build(base, LoraConfig(lora_dim=2, lora_alpha=4), seed=3)
    adapted.model.eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(adapted.model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return adapted


def sequences():
    return [list(s) for pair in ragged_pairs(3) for s in pair.sequences]


@torch.no_grad()
def plain_scores(backbone, head):
    """The score of each sequence, alone: its last hidden state times the head."""
    states = [backbone(torch.tensor([s]), use_cache=False).last_hidden_state for s in sequences()]
    return torch.stack([head.float() @ state[0, -1] for state in states])


@torch.no_grad()
def our_scores(model):
    samples = [pair.sample() for pair in ragged_pairs(3)]
    scores = score_ends(RewardModel(model), PairCollator(0, "alone")([[s] for s in samples]))
    chosen, rejected = scores.chunk(2)
    return torch.stack([chosen, rejected], 1).flatten()


def test_scores_are_the_last_hidden_state_of_the_language_model_times_a_new_head(base):
    language_model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    model = load_reward_model(
        str(base), load_config(str(base), OPTIONS), OPTIONS, dtype=torch.float32, seed=3, meta=False
    ).eval()
    expected = plain_scores(language_model.base_model, model.score.weight[0])
    assert expected.std() > 0.01
    torch.testing.assert_close(our_scores(model), expected)
    with torch.no_grad():
        own = [model(torch.tensor([s])).logits[0, 0] for s in sequences()]
    torch.testing.assert_close(torch.stack(own), expected)


def test_stock_peft_scores_alike_by_the_code_of_the_model_card(base, trained, tmp_path):
    options = {"base": str(base), "tokenizer": Tokenizer(), "card": CARD, "task_type": "SEQ_CLS"}
    save_adapter(tmp_path, trained.model, trained.lora, **options)
    card = (tmp_path / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    code = code.replace(f'"{base.name}"', repr(str(base)))
    code = code.replace('"path/of/this/directory"', repr(str(tmp_path)))
    AutoModelForSequenceClassification._model_mapping._extra_content.clear()
    names = {}
    exec(code, names)
    theirs = names["model"].eval()
    assert isinstance(theirs, PeftModel)
    with torch.no_grad():
        scores = [theirs(torch.tensor([s])).logits[0, 0] for s in sequences()]
    torch.testing.assert_close(our_scores(trained.model), torch.stack(scores), rtol=1e-4, atol=1e-5)


def test_a_merged_reward_model_is_one_again(base, trained, tmp_path):
    probe = torch.tensor([sequences()[0]])
    directory = tmp_path / "merged"
    options = {"tokenizer": Tokenizer(), "max_kl": 1e-4, "dropouts": {}}
    save_merged(directory, trained.model, probe_ids=probe, **options)
    AutoModelForSequenceClassification._model_mapping._extra_content.clear()
    again = build(directory, LoraConfig(), seed=0, new_head=False)
    expected = our_scores(trained.model)
    torch.testing.assert_close(our_scores(again.model.eval()), expected, rtol=1e-4, atol=1e-5)


def test_what_transformers_has_a_class_of_keeps_it():
    for kind in ("llama", "t5"):
        register_score_class(AutoConfig.for_model(kind))
    assert AutoModelForSequenceClassification._model_mapping._extra_content == {}
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(tiny("llama"))
    assert score_class_code(model) == []


@pytest.mark.parametrize("beside", [True, False], ids=["on a loaded base", "from files"])
def test_a_head_of_another_name_is_refused_by_it(beside, tmp_path):
    model = AutoModelForCausalLM.from_config(tiny("ctrl"))
    model.save_pretrained(tmp_path)
    config = load_config(str(tmp_path), OPTIONS)
    more = {"base": model} if beside else {}
    with pytest.raises(ValueError, match="a ctrl model has no 'score' head that can be read"):
        load_reward_model(
            *(str(tmp_path), config, OPTIONS),
            **{"dtype": torch.float32, "seed": 0, "meta": False, **more},
        )
