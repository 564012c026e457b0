"""The recipes of GPT-2 on data and texts can be typed as they stand, and are the published ones."""

from pathlib import Path

import pytest

from dschat_lora.addons.nlg.config import NlgConfig
from dschat_lora.config.options import parse_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes" / "nlg").glob("*.yaml"))


def test_there_is_one_for_each_model_and_data_set():
    names = [f"gpt2-{size}_{task}" for size in ("large", "medium") for task in TASKS]
    assert [path.stem for path in RECIPES] == names


# arXiv:2106.09685, table 11: weight decay, adapter dropout, label smoothing; and the length penalty
TASKS = {
    "dart": (0.0, 0.0, 0.0, 0.8),
    "e2e": (0.01, 0.1, 0.1, 0.9),
    "webnlg": (0.01, 0.1, 0.1, 0.8),
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_has_the_published_hyper_parameters(path):
    config = parse_config(NlgConfig, ["--config", str(path)])
    optim, lora, batch = config.optim, config.lora, config.batch
    decay, dropout, smoothing, penalty = TASKS[path.stem.partition("_")[2]]
    assert (lora.lora_dim, lora.lora_alpha, lora.enable_lora) == (4, 32, ("q", "v"))
    assert (optim.learning_rate, optim.num_warmup_steps, optim.num_train_epochs) == (2e-4, 500, 5)
    assert (optim.lr_scheduler_type, optim.adam_beta2, optim.max_grad_norm) == ("linear", 0.999, 0)
    assert (batch.per_device_train_batch_size, batch.gradient_accumulation_steps) == (8, 1)
    assert (optim.weight_decay, lora.lora_dropout, config.label_smooth) == (
        decay,
        dropout,
        smoothing,
    )
    text = path.read_text(encoding="utf-8")
    assert f"--length_penalty {penalty} " in text
    assert "Published" in text
    assert config.run.output_dir == f"output/{path.stem}"
