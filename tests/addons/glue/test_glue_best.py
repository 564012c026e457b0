"""The published protocol: the best evaluation of a run, several seeds, R-Drop and adapters."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from dschat_lora.addons.glue.bottleneck import AdaptedOutput, add_adapters, is_adapter
from dschat_lora.addons.glue.callback import best_before
from dschat_lora.addons.glue.config import TASKS, GlueConfig
from dschat_lora.addons.glue.trainer import mean_loss, with_second_pass
from dschat_lora.addons.loralib.seeds import run_seeds
from dschat_lora.config.options import parse_config
from dschat_lora.report.directory import is_unfinished
from helpers.glue_toys import LORA, read_jsonl

EPOCHS = ("--eval_strategy", "epoch", "--save_strategy", "epoch")
PEFT = "base_model.model."


def read(path):
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def best(glue_run, tmp_path_factory):
    """A run whose first evaluation is its best: its rate is too large."""
    return glue_run(
        *(tmp_path_factory.mktemp("best") / "out", "mnli", *LORA, *EPOCHS),
        *("--num_train_epochs", "4", "--load_best_model_at_end", "--save_total_limit", "2"),
        *("--learning_rate", "0.03", "--seed", "1"),
    )


def test_the_best_evaluation_is_that_of_transformers_trainer(best):
    evals = [each for each in read_jsonl(best / "metrics.jsonl") if each["kind"] == "eval"]
    accuracies = {each["step"]: each["accuracy"] for each in evals if "accuracy" in each}
    wanted = max(accuracies, key=accuracies.get)  # the first of equals
    assert wanted < 9, "it was to be older than the two newest"
    of_trainer = read(best / "trainer_state.json")
    record = read(best / "run.json")["best"]
    assert record["step"] == of_trainer["best_global_step"] == wanted
    assert record["value"] == of_trainer["best_metric"] == pytest.approx(accuracies[wanted])
    assert (record["metric"], record["epoch"]) == ("accuracy", wanted / 3)
    assert record["checkpoint"] == f"checkpoint-{wanted}"
    assert record["last"]["eval_accuracy"] == pytest.approx(accuracies[12])


def test_adapter_and_results_are_those_of_the_best_and_the_last_are_beside(best):
    record = read(best / "run.json")["best"]
    kept = {path.name for path in best.glob("checkpoint-*")}
    assert kept == {record["checkpoint"], "checkpoint-12"}
    for home, name in ((best, record["checkpoint"]), (best / "last", "checkpoint-12")):
        own = load_file(home / "adapter" / "adapter_model.safetensors")
        stored = load_file(best / name / "model.safetensors")
        for key, tensor in own.items():
            plain = key.removeprefix(PEFT)
            plain = plain.removesuffix(".weight") if ".lora_" in plain else plain
            torch.testing.assert_close(tensor, stored[plain], rtol=0, atol=0)
    results, last = read(best / "eval_results.json"), read(best / "last" / "eval_results.json")
    assert results["eval_accuracy"] == pytest.approx(record["value"])
    assert results["eval_loss"] != pytest.approx(last["eval_loss"])
    assert results.keys() == last.keys()
    assert read(best / "run.json")["results"] == results
    assert last["eval_loss"] == pytest.approx(record["last"]["eval_loss"])


@pytest.mark.parametrize("resumed", [False, True])
def test_the_best_keeps_its_measures_where_it_is_evaluated_again_or_resumed(
    best, glue_run, tmp_path, resumed
):
    options = ["--resume_from_checkpoint", best / "checkpoint-12"]
    options = options if resumed else [*LORA, "--no-do_train", "--lora_path", best]
    out = glue_run(tmp_path / "out", "mnli", *options)
    assert read(out / "eval_results.json") == pytest.approx(read(best / "eval_results.json"))


def test_the_best_of_a_run_that_was_moved_is_found_and_a_missing_one_is_named(best, tmp_path):
    record = read(best / "run.json")["best"]
    for name in (record["checkpoint"], "checkpoint-12"):
        shutil.copytree(best / name, tmp_path / name)
    newest, kept = tmp_path / "checkpoint-12", tmp_path / record["checkpoint"]
    assert best_before(newest) == str(kept)
    shutil.rmtree(kept)
    assert best_before(newest) == str(best / record["checkpoint"])
    path = newest / "trainer_state.json"
    path.write_text(json.dumps({**read(path), "best_model_checkpoint": "gone"}))
    with pytest.raises(
        ValueError, match=rf"that of {kept.name}, which cannot be used: .* put it next to"
    ):
        best_before(newest)


def test_the_measure_is_the_papers():
    # arXiv:2106.09685, caption of table 2.
    papers = {"cola": "matthews_correlation", "stsb": "pearson"}
    for task in TASKS:
        config = GlueConfig(model_name_or_path="m", task_name=task)
        assert config.best_metric == papers.get(task, "accuracy")


def test_several_seeds_are_runs_of_their_own_with_their_median(tmp_path, capsys):
    values, lines = {3: 0.1, 4: 0.4, 5: 0.2, 6: 0.9, 7: 0.3}, []

    def finished(command):
        lines.append(command)
        home, seed = tmp_path / f"seed-{3 + len(lines) - 1}", 3 + len(lines) - 1
        home.mkdir()
        results = {"eval_accuracy": values[seed], "eval_loss": "nan"}
        (home / "run.json").write_text(json.dumps({"results": results}))
        return 0

    line = "--model_name_or_path m --task_name rte --lora_r 4 --seeds 5 --seed 3 --output_dir"
    config = parse_config(GlueConfig, [*line.split(), str(tmp_path)])
    run_seeds(config, name="glue", prefix=["python", "-m", "x"], run=finished)
    assert [command[:3] for command in lines] == [["python", "-m", "x"]] * 5
    for seed, command in zip(values, lines, strict=True):
        child = parse_config(GlueConfig, command[3:])
        assert (child.seed, child.seeds, child.lora_r) == (seed, 1, 4)
        assert child.output_dir == str(tmp_path / f"seed-{seed}")
    # mean 0.38; squares 0.0784, 0.0004, 0.0324, 0.2704, 0.0064, over 4
    measure = read(tmp_path / "seeds.json")["measures"]
    assert measure.keys() == {"eval_accuracy"}
    assert measure["eval_accuracy"]["median"] == 0.3
    assert measure["eval_accuracy"]["deviation"] == pytest.approx(math.sqrt(0.097))
    assert "0.3000 +- 0.3114" in capsys.readouterr().out


def test_two_passes_are_the_plain_loop_over_rows():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels, weight, total = torch.tensor([1, 3, 0]), 0.7, 0.0
    for row, label in enumerate(labels.tolist()):
        p, q = logits[row].softmax(0), logits[row + 3].softmax(0)
        m = ((logits[row] + logits[row + 3]) / 2).softmax(0)
        total -= float(p[label].log() + q[label].log())
        for other in (p, q):
            terms = [float(m[k] * (m[k] / other[k]).log()) for k in range(4)]
            total += 0.5 * weight * sum(terms) / 4
    outputs = SimpleNamespace(logits=logits)
    loss = mean_loss(TASKS["mnli"], outputs, labels, num_items_in_batch=5, weight=weight)
    assert float(loss) == pytest.approx(total / 5, rel=1e-6)


def test_cutoff_masks_words_alone_and_in_the_second_pass_alone():
    ids = torch.tensor([[0, 7, 8, 9, 2, 1], [0, 5, 6, 2, 1, 1]]).repeat(500, 1)
    batch = {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": torch.zeros(1000)}
    torch.manual_seed(0)
    doubled = with_second_pass(batch, masking_prob=0.2, unknown=3, kept=[0, 2])
    first, second = doubled["input_ids"].chunk(2)
    assert torch.equal(first, ids)
    changed = second != ids
    assert (second[changed] == 3).all()
    assert not changed[(ids == 0) | (ids == 2) | (ids == 1)].any()
    assert float(changed.sum()) / float((ids > 4).sum()) == pytest.approx(0.2, abs=0.03)
    assert torch.equal(doubled["attention_mask"], batch["attention_mask"].repeat(2, 1))
    assert len(doubled["labels"]) == 1000


def test_r_drop_trains_and_is_measured_by_one_pass(glue_run, tmp_path):
    options = ["--max_steps", "2", "--save_strategy", "no", "--learning_rate", "1e-30"]
    plain, twice = (
        glue_run(tmp_path / name, "rte", *LORA, *options, *more)
        for name, more in (("plain", ()), ("twice", ("--reg_loss_wgt", "1.0")))
    )
    losses = [
        [line["loss"] for line in read_jsonl(run / "metrics.jsonl") if line["kind"] == "train"]
        for run in (plain, twice)
    ]
    # Without dropout the passes are the same: two cross-entropies, no divergence.
    assert losses[1] == pytest.approx([2 * loss for loss in losses[0]])
    assert read(plain / "eval_results.json") == pytest.approx(read(twice / "eval_results.json"))


@pytest.mark.parametrize("kind", ["houlsby", "pfeiffer"])
def test_adapters_compute_what_their_papers_say(kind, encoder):
    model = AutoModelForSequenceClassification.from_pretrained(encoder("roberta")).eval()
    torch.manual_seed(0)
    add_adapters(model, kind, 5, std=0.3)
    layer = model.roberta.encoder.layer[1]
    assert isinstance(layer.attention.output, AdaptedOutput) == (kind == "houlsby")
    output = layer.output
    inside, x = torch.randn(2, 3, 48), torch.randn(2, 3, 32)
    h = inside @ output.dense.weight.T + output.dense.bias
    read_from = output.LayerNorm(h + x) if kind == "pfeiffer" else h
    narrow = read_from @ output.adapter.adapter_A.weight.T
    narrow = narrow * narrow.sigmoid() if kind == "houlsby" else narrow.clamp(min=0)
    expected = output.LayerNorm(h + narrow @ output.adapter.adapter_B.weight.T + x)
    torch.testing.assert_close(output(inside, x), expected)
    trained = {name for name, p in model.roberta.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.roberta.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * 4 * (2 if kind == "houlsby" else 1)


def test_a_run_of_adapters_is_kept_and_evaluated_again(glue_run, tmp_path):
    adapters = ["--apply_adapter", "--adapter_type", "houlsby", "--adapter_size", "4"]
    out = glue_run(
        *(tmp_path / "one", "rte", *adapters, "--learning_rate", "1e-2", "--max_steps", "3"),
        *("--save_strategy", "no"),
    )
    path = out / "bottleneck_adapter.safetensors"
    assert not is_unfinished(out), "auto would begin anew, and delete it"
    again = glue_run(*(tmp_path / "two", "rte", *adapters, "--no-do_train", "--adapter_path", path))
    assert read(again / "eval_results.json") == pytest.approx(read(out / "eval_results.json"))
    with pytest.raises(SystemExit):
        glue_run(tmp_path / "three", "rte", *adapters[:-1], "3", "--adapter_path", path)
