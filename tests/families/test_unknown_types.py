"""Model classes that transformers does not know, as code of a repository has them."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import PreTrainedConfig as Config
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from dschat_lora.config.groups import ModelConfig
from dschat_lora.models.architecture_checks import check_architecture, head_error
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.loading import load_config
from families import checks
from families.checks import CPU, Family
from helpers.tiny import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")


class MeansConfig(Config):
    """Of :class:`Means`; ``way`` says how tokens are mixed."""

    model_type = "running_means"

    def __init__(self, way="causal", vocab_size=1024, hidden_size=32, **others):
        self.way, self.vocab_size, self.hidden_size = way, vocab_size, hidden_size
        self.num_hidden_layers = 2
        super().__init__(**others)


class _Means(PreTrainedModel):
    config_class = MeansConfig
    base_model_prefix = "model"
    _no_split_modules = ()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.5)


class MeansBody(_Means):
    """Each layer adds a linear layer of the mean of what came before: no attention, no mask."""

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(2))
        self.kept = 0.0
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, attention_mask=None, **_):
        way, hidden = self.config.way, self.embed(input_ids)
        if way == "fails":
            raise RuntimeError("no kernel\nfor this")
        counts = torch.arange(1, hidden.shape[1] + 1)[:, None]
        for layer in self.layers:
            mean = hidden.cumsum(1) / counts
            if way == "both ways":
                mean = hidden.mean(1, keepdim=True)
            hidden = hidden + layer(mean).tanh()
        if way == "counts padding" and attention_mask is not None:
            hidden = hidden + (attention_mask == 0).sum(-1)[:, None, None]
        if way == "keeps states":
            hidden, self.kept = hidden + self.kept, hidden[:, -1:].mean(0, keepdim=True)
        return BaseModelOutput(last_hidden_state=hidden)


class Means(_Means, GenerationMixin):
    """A causal language model whose mixing of tokens is its own."""

    def __init__(self, config):
        super().__init__(config)
        self.model = MeansBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return None if self.config.way == "no head" else self.lm_head

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids}  # there is no cache

    def forward(self, input_ids=None, attention_mask=None, **others):
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        logits = self.lm_head(hidden)
        return CausalLMOutput(logits=logits[..., :-8] if self.config.way == "padded" else logits)


AutoConfig.register("running_means", MeansConfig)
AutoModelForCausalLM.register(MeansConfig, Means)


def looked_at(way):
    torch.manual_seed(0)
    model = Means(MeansConfig(way)).eval()
    return check_architecture(Backbone(model), vocab_size=VOCAB, device=CPU)


def test_an_unknown_type_trains_unpacked_as_in_peft(tmp_path):
    family = Family("running_means", tmp_path)
    for check in (checks.sft, checks.logprobs, checks.greedy, checks.merge, checks.to_peft):
        check(family)
    assert checks.packed(family).startswith("unpacked")


def test_what_is_found_of_a_right_type():
    report = looked_at("causal")
    assert not report.packing_is_exact  # it has no mask
    assert report.causal_error <= 1e-6
    assert report.row_error <= 1e-6


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            "both ways",
            r"Means is not a causal language model: .* depend on later tokens \(relative error 0",
        ),
        ("counts padding", r"random samples in padded rows differ .* \(relative error \d"),
        ("keeps states", r"relative error"),
        ("fails", r"Means cannot be trained: three short .* failed \(RuntimeError: no kernel\)$"),
    ],
)
def test_a_wrong_type_is_refused_in_one_line(way, words):
    with pytest.raises(ValueError, match=words) as refused:
        looked_at(way)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("way", ["no head", "padded"])
def test_a_model_without_its_head_or_with_padded_rows_of_it_gives_its_own_logits(way):
    model = Means(MeansConfig(way)).eval()
    assert head_error(model, vocab_size=VOCAB, device=CPU) == float("inf")


def test_a_look_leaves_the_mask_of_a_backbone_as_it_was():
    backbone = Backbone(Means(MeansConfig()).eval())
    before = backbone.own_mask
    check_architecture(backbone, vocab_size=VOCAB, device=CPU)
    assert backbone.own_mask == before


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{kind} models are encoder-decoders, but only decoders"):
        load_config(str(tmp_path), ModelConfig())
