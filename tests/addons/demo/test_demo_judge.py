"""How answers to the bundled test prompts are judged."""

import json
import math

import pytest
import torch

from dschat_lora.api import demo_judge as judging
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.assets.toy_world import judge
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model


class Words:
    """A tokenizer of whole texts: each prompt and each answer is one id."""

    eos_token_id = 0
    pad_token_id = 0

    def __init__(self):
        self.texts = ["<eos>"]

    def __call__(self, texts):
        return {"input_ids": [[self.add(text)] for text in texts]}

    def add(self, text):
        self.texts.append(text)
        return len(self.texts) - 1

    def decode(self, ids, skip_special_tokens):
        return "".join(self.texts[i] for i in ids if i or not skip_special_tokens)


@pytest.fixture
def rows():
    lines = BUNDLED_DATA["test"].read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def says(tokenizer, answers, seen=None):
    """A decode() that gives ``answers[prompt]``, the last draw of each cut off before its end."""

    def decode(model, prompts, sampling, *, seeds, eos_ids, pad_id, device):
        if seen is not None:
            seen.extend(seed for own in seeds for seed in own)
        drawn = []
        for ids, own in zip(prompts, seeds, strict=True):
            answer = tokenizer.add(answers[tokenizer.texts[ids[0]]])
            drawn.append([[answer, 0] for _ in own[1:]] + [[answer]])
        return drawn

    return decode


@pytest.mark.parametrize("draws", [1, 4])
def test_scores_are_means_over_draws_then_over_prompts(monkeypatch, rows, draws):
    tokenizer = Words()
    answers = {row["prompt"]: row["chosen"] for row in rows}
    seeds = []
    monkeypatch.setattr(judging, "decode", says(tokenizer, answers, seeds))
    shares = judging.rule_scores(None, tokenizer, Sampling(48), draws=draws)
    for name in ("score", "correct", "polite", "ends"):
        values = []
        for row in rows:
            verdicts = [judge(row["prompt"], row["chosen"], n < draws - 1) for n in range(draws)]
            values.append(sum(float(getattr(v, name)) for v in verdicts) / draws)
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        assert shares[name].mean == pytest.approx(mean)
        assert shares[name].error == pytest.approx(math.sqrt(variance / len(values)))
    assert shares["correct"].mean == 1.0
    assert len(set(seeds)) == draws * len(rows), "every draw has random numbers of its own"


@pytest.mark.thorough
def test_perplexity_is_that_of_a_plain_loop_over_the_chosen_answers(rows):
    source = find_model(None)
    tokenizer = load_tokenizer(source.tokenizer, ModelConfig())
    model = build_causal_lm(
        source, tokenizer, ModelConfig(), LoraConfig(), dtype=torch.float32, seed=0, meta=False
    ).model.eval()
    total = count = 0
    with torch.no_grad():
        for row in rows:
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = [*tokenizer(row["prompt"] + row["chosen"])["input_ids"], tokenizer.eos_token_id]
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for place in range(len(prompt), len(ids)):
                total -= float(logits[place - 1, ids[place]])
                count += 1
    assert judging.perplexity(model, tokenizer) == pytest.approx(math.exp(total / count), rel=1e-5)


def test_base_sft_and_policy_are_judged_with_their_own_adapters(monkeypatch, tmp_path):
    for name, value in (("sft", 1.0), ("policy", 2.0)):
        write(tmp_path / name / "adapter", value)
    seen = []

    def judge_model(model, tokenizer):
        layer = next(m for m in model.modules() if hasattr(m, "lora_B"))
        seen.append((layer.enabled, float(layer.lora_B.detach()[0, 0])))
        return seen[-1]

    monkeypatch.setattr(judging, "judge_model", judge_model)
    judged = judging.evaluate_by_rule(tmp_path / "sft", tmp_path / "policy")
    assert judged == {"base": (False, 1.0), "SFT": (True, 1.0), "PPO": (True, 2.0)}


def write(directory, value):
    source, config = find_model(None), LoraConfig(lora_dim=2)
    tokenizer = load_tokenizer(source.base, ModelConfig())
    model = build_causal_lm(
        source, tokenizer, ModelConfig(), config, dtype=torch.float32, seed=0, meta=False
    ).model
    write_adapter(
        directory,
        {name: torch.full_like(p, value) for name, p in adapter_parameters(model).items()},
        config,
        layout=adapter_layout(model),
        base_model_name_or_path=str(BUNDLED_MODEL),
    )


def test_accuracy_is_told_for_each_flaw(monkeypatch, tmp_path, rows):
    """By a reward model that takes the longer answer for the better one, but for those of Leo."""

    class Lengths:
        tokenizer = load_tokenizer(find_model(None).tokenizer, ModelConfig())

        def __init__(self, config, *, batch_size):
            assert config.model_name_or_path == str(tmp_path)

        def scores(self, records):
            return [score(each.prompt, each.spans[-1].text) for each in records]

    def score(prompt, answer):
        return float(len(answer)) * (-1 if "Leo" in prompt else 1)

    monkeypatch.setattr(judging, "LoadedRewardModel", Lengths)
    right = {}
    for row in rows:
        chosen, rejected = (score(row["prompt"], row[name]) for name in ("chosen", "rejected"))
        right.setdefault(row["flaw"], []).append(chosen > rejected)
    expected = {flaw: sum(each) / len(each) for flaw, each in right.items()}
    assert judging.accuracy_by_flaw(tmp_path) == expected
    assert len(expected) > 1
    assert any(0 < share < 1 for share in expected.values())
