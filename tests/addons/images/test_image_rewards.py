"""Reward models and KTO on rows with pictures, against stock transformers and PEFT."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

import dschat_lora
from addons.images.training import EXACT, PICTURES, Seeing, answer, pair_row, train_steps
from addons.images.vlms import spread
from dschat_lora.addons.kto.batch import UnpairedCollator
from dschat_lora.addons.kto.objective import kto_objective
from dschat_lora.addons.kto.options import KtoOptions
from dschat_lora.addons.report.rollouts import read_rollouts
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.config.stages import DpoConfig, DpoStageConfig, RewardConfig, RewardStageConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.build import build_reward_model
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.supervised.pair_objectives import answer_logprobs, reward_objective, score_ends
from helpers.step1 import write_jsonl

NAMES = list(PICTURES)
CLASSIFIED = ("gemma3", "qwen3_5")  # with a published sequence classifier
BATCHES = (("one", "several", "none"), ("another", "none"), ("like", "one", "several"))


@pytest.mark.parametrize("kind", CLASSIFIED)
def test_reward_model_is_that_of_stock_transformers_and_peft(kind, tmp_path):
    seeing = Seeing(kind, tmp_path)
    rows = map(pair_row, NAMES)
    samples = seeing.data(rows, "pairs", config_class=RewardStageConfig)
    pairs = dict(zip(NAMES, samples, strict=True))
    model = seeing.ours(build=build_reward_model)
    adapter = seeing.write(model, task="SEQ_CLS")
    theirs = seeing.stock(adapter, AutoModelForSequenceClassification, num_labels=1)
    network = RewardModel(model)
    batches = [PairCollator(1, "shared")([[pairs[name] for name in names]]) for names in BATCHES]

    def plain_scores(names):
        rows = {name: pair_row(name) for name in names}
        return torch.cat(
            [
                theirs(
                    **seeing.inputs(rows[name]["prompt"] + rows[name][side], PICTURES[name])[0]
                ).logits[0]
                for side in ("chosen", "rejected")
                for name in names
            ]
        )

    with torch.no_grad():
        for batch, names in zip(batches, BATCHES, strict=True):
            torch.testing.assert_close(
                score_ends(network, batch), plain_scores(names), rtol=0, atol=EXACT
            )

    def loss(batch):
        return reward_objective(RewardConfig()).loss(network, batch).total / batch.num_samples

    def plain_loss(names):
        chosen, rejected = plain_scores(names).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    losses = train_steps(network.parameters(), map(partial(partial, loss), batches))
    wanted = train_steps(theirs.parameters(), map(partial(partial, plain_loss), BATCHES))
    torch.testing.assert_close(losses, wanted, rtol=0, atol=EXACT)
    theirs.save_pretrained(tmp_path / "theirs")
    own = {name: p.detach() for name, p in adapter_parameters(model).items()}
    peft_factors = read_adapter(tmp_path / "theirs").tensors
    torch.testing.assert_close(own, peft_factors, rtol=0, atol=EXACT)


def test_reward_model_of_a_type_without_a_classifier_takes_no_pictures(tmp_path):
    seeing = Seeing("llava_next", tmp_path)
    seeing.data([pair_row("one")], "pairs", config_class=RewardStageConfig)
    with pytest.raises(ValueError, match="transformers has no sequence classifier of llava_next"):
        seeing.ours(build=build_reward_model)


def unpaired_row(name, label):
    """The better answer to a question, or the worse one."""
    row = pair_row(name)
    said = row["chosen" if label else "rejected"]
    return {"prompt": row["prompt"], "completion": said, "label": label, "images": row["images"]}


@pytest.mark.parametrize("kind", spread("qwen3_5", of=CLASSIFIED))
def test_kto_is_that_of_stock_transformers_and_peft(kind, tmp_path, one_rank):
    seeing, names = Seeing(kind, tmp_path), ("one", "none", "several", "like")
    labels = (True, False, False, True)
    rows = list(map(unpaired_row, names, labels))
    options = ("--loss_type", "kto")
    samples = seeing.data(rows, "unpaired", *options, config_class=DpoStageConfig)
    model = seeing.ours()
    theirs = seeing.stock(seeing.write(model))
    network = CausalLMLogprobs(model)
    config = DpoConfig(loss_type="kto", beta=0.5)
    said = [row["completion"][0]["content"][0]["text"] for row in rows]
    decoded = [seeing.tokenizer.decode(sample.mismatched_ids[:-1]) for sample in samples]
    # Each prompt with its own pictures is answered with what another one was; some tokenizers
    # lose spaces.
    by_letters = {text.replace(" ", ""): text for text in said}
    texts = [by_letters[text.replace(" ", "")] for text in decoded]
    assert texts != said
    batch = UnpairedCollator(1)([samples[:3], samples[3:]])

    def plain_logprobs(mismatched):
        answers = texts if mismatched else said
        return torch.stack(
            [
                seeing.logprobs(theirs, [*row["prompt"], answer(text)], PICTURES[name]).sum()
                for row, name, text in zip(rows, names, answers, strict=True)
            ]
        )

    with torch.no_grad():
        known = [answer_logprobs(network, each) for each in (batch.answers, batch.mismatched)]
        start = [plain_logprobs(mismatched) for mismatched in (False, True)]
    torch.testing.assert_close(known, start, rtol=1e-6, atol=EXACT)
    engine = FakeEngine(network)

    def loss():
        def reference(each):
            return known[0] if each is batch.answers else known[1]

        objective = kto_objective(config, KtoOptions(desirable_weight=1.5), reference)
        return objective.loss_of(engine, [batch])(network, batch).total / batch.num_samples

    def plain_loss():
        with torch.no_grad():
            kl = (plain_logprobs(True) - start[1]).mean().clamp(min=0)
        signs = torch.tensor([1.0 if label else -1.0 for label in labels])
        weights = torch.tensor([1.5 if label else 1.0 for label in labels])
        lead = signs * (plain_logprobs(False) - start[0] - kl)
        return (weights * (1 - torch.sigmoid(0.5 * lead))).mean()

    losses = train_steps(network.parameters(), [loss] * 3)
    wanted = train_steps(theirs.parameters(), [plain_loss] * 3)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=EXACT)


class FakeEngine:
    """Stands for an engine around a network on the CPU."""

    device = torch.device("cpu")

    def __init__(self, module):
        self.module = module

    def __call__(self, **inputs):
        return self.module(**inputs)

    def eval(self):
        self.module.eval()

    def train(self):
        self.module.train()


def note(completions, completion_ids, name, log_extra, **more):
    """A reward of 0 that has the rollouts' record say what was drawn."""
    log_extra("tokens", completion_ids)
    log_extra("name", name)
    return [0.0 for _ in completions]


@pytest.mark.parametrize("kind", spread("gemma3", of=CLASSIFIED))
def test_scores_and_values_of_ppo_are_those_of_stock_transformers_and_peft(kind, tmp_path):
    seeing = Seeing(kind, tmp_path)
    seeing.data(map(pair_row, NAMES), "pairs", config_class=RewardStageConfig)
    adapter = seeing.write(seeing.ours(build=build_reward_model), task="SEQ_CLS")
    rows = [
        {"prompt": row["prompt"], "images": row["images"], "name": name}
        for name in NAMES
        for row in [pair_row(name)]
    ]
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    run = dschat_lora.rlhf(
        str(seeing.base),
        str(path),
        rewards=note,
        critic=str(adapter),
        algorithm="ppo",
        output_dir=tmp_path / "out",
        max_answer_seq_len=5,
        eval_ratio=0.0,
        num_train_epochs=1,
        log_rollouts=10,
        reward_scaling="none",
        clip_reward_value=0,
        preprocessing_num_workers=1,
        dtype="fp32",
        quiet=True,
    )
    theirs = seeing.stock(adapter, AutoModelForSequenceClassification, num_labels=1)
    rollouts = list(read_rollouts(run.path))
    assert len(rollouts) == len(NAMES)
    values = {}
    for row in rollouts:
        name, tokens = row["extra"]["name"], row["extra"]["tokens"]
        prompt = seeing.prompt_inputs([*pair_row(name)["prompt"], answer("")], PICTURES[name])
        scores = []
        for size in range(len(tokens) + 1):
            inputs = dict(prompt)
            inputs["input_ids"] = torch.cat([prompt["input_ids"], torch.tensor([tokens])], 1)
            for key in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
                if key in prompt:
                    fill = int(key == "attention_mask")
                    inputs[key] = F.pad(prompt[key], (0, len(tokens)), value=fill)
                    inputs[key] = inputs[key][:, : prompt[key].shape[1] + size]
            inputs["input_ids"] = inputs["input_ids"][:, : inputs["attention_mask"].shape[1]]
            with torch.no_grad():
                scores.append(theirs(**inputs).logits[0, 0].item())
        assert row["rewards"]["reward_model"] == pytest.approx(scores[-1], abs=EXACT)
        # Of each token the value before it, in four digits; of the first responses alone.
        if "token_value" in row:
            values[name] = row["token_value"]
            assert values[name] == pytest.approx(scores[:-1], rel=1e-3, abs=1e-3)
    assert {"one", "several"} & values.keys()
