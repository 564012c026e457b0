"""Reward models and KTO on rows with pictures, against stock transformers and PEFT."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from addons.images.training import EXACT, PICTURES, Seeing, pair_row, train_steps
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.config.stages import RewardConfig, RewardStageConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.build import build_reward_model
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.supervised.pair_objectives import reward_objective, score_ends

NAMES = list(PICTURES)
BATCHES = (("one", "several", "none"), ("another", "none"), ("like", "one", "several"))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
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
    found = read_adapter(tmp_path / "theirs").tensors
    torch.testing.assert_close(own, found, rtol=0, atol=EXACT)


def test_reward_model_of_a_type_without_a_classifier_takes_no_pictures(tmp_path):
    seeing = Seeing("llava_next", tmp_path)
    seeing.data([pair_row("one")], "pairs", config_class=RewardStageConfig)
    with pytest.raises(ValueError, match="transformers has no sequence classifier of llava_next"):
        seeing.ours(build=build_reward_model)
