"""The recipes of GLUE are what was published, and can be given to the command."""

from pathlib import Path

import pytest

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.config.options import parse_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes" / "glue").glob("*.yaml"))
MODELS = {
    "roberta-base": "roberta-base",
    "roberta-large": "roberta-large",
    "deberta-v2-xxlarge": "microsoft/deberta-v2-xxlarge",
}


def read(path):
    return parse_config(GlueConfig, ["--config", str(path)])


@pytest.mark.smoke
def test_a_recipe_is_taken_by_its_name():
    config = parse_config(GlueConfig, ["--config", "roberta-base_cola", "--seed", "7"])
    assert (config.task_name, config.seed) == ("cola", 7)


def test_there_is_one_for_each_model_and_published_task():
    tasks = "mnli sst2 mrpc cola qnli qqp rte stsb".split()
    wanted = {f"{model}_{task}" for model in MODELS for task in tasks}
    assert {path.stem for path in RECIPES} == wanted


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_taken_and_says_what_it_is(path):
    config, text = read(path), path.read_text(encoding="utf-8")
    model, task = path.stem.rsplit("_", 1)
    assert (config.model_name_or_path, config.task_name) == (MODELS[model], task)
    assert config.output_dir == f"output/glue/{path.stem}"
    starts = f"output/glue/{model}_mnli" if task in ("mrpc", "rte", "stsb") else None
    assert config.lora_path == starts
    assert config.seed == 0
    gpus = 2 if path.stem == "roberta-base_cola" else 8
    rows = config.per_device_train_batch_size
    assert f"# {gpus} GPUs x {rows} rows = {gpus * rows} rows a step." in text
    launch = f"torchrun --nproc_per_node {gpus} training/nlu_glue/main.py --config "
    assert f"#   {launch}configs/recipes/glue/{path.name}\n" in text


# Of microsoft/LoRA's scripts: r, alpha, length, rows, rate, epochs, warm-up, decay, score.
PUBLISHED = {
    "roberta-base_cola": (8, 16, 512, 2 * 32, 4e-4, 80, 0.06, 0.1, "63.4 +- 1.2"),
    "roberta-base_qnli": (8, 16, 512, 8 * 32, 4e-4, 25, 0.06, 0.1, "93.3 +- 0.3"),
    "roberta-large_mnli": (8, 16, 128, 8 * 4, 3e-4, 10, 0.06, 0.1, "90.6 +- 0.2"),
    "roberta-large_rte": (8, 16, 512, 8 * 8, 4e-4, 20, 0.06, 0.1, "87.4 +- 2.5"),
    "deberta-v2-xxlarge_qnli": (16, 32, 512, 8 * 6, 1e-4, 8, 500, 0.01, "96.0 +- 0.1"),
    "deberta-v2-xxlarge_mrpc": (16, 32, 128, 8 * 32, 2e-4, 30, 0.1, 0.01, "92.6 +- 0.6"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_the_published_ones(name):
    path = ROOT / "configs" / "recipes" / "glue" / f"{name}.yaml"
    config, text = read(path), path.read_text(encoding="utf-8")
    r, alpha, length, rows, rate, epochs, warmup, decay, score = PUBLISHED[name]
    assert f"= {rows} rows a step." in text
    assert f"published {score} " in text
    assert (config.lora_r, config.lora_alpha, config.max_seq_length) == (r, alpha, length)
    assert (config.learning_rate, config.num_train_epochs) == (rate, epochs)
    assert (config.warmup_steps or config.warmup_ratio, config.weight_decay) == (warmup, decay)
