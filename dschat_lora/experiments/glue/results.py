"""What a GLUE run leaves: measures, predictions, and what was trained, of the best and the last."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat_lora.checkpoint.extract import empty_classifier, write_trained
from dschat_lora.checkpoint.lora_only import LoraOnly
from dschat_lora.checkpoint.staging import staged_file, write_whole
from dschat_lora.checkpoint.tensors import save_weights, writing
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.data import TaskSplit
from dschat_lora.experiments.glue.features import tokenize
from dschat_lora.experiments.glue.metrics import predictions
from dschat_lora.experiments.glue.model import lora_settings, trained_tensors
from dschat_lora.experiments.glue.trainer import GlueTrainer
from dschat_lora.experiments.glue.validation import LAST
from dschat_lora.report.directory import read_object
from dschat_lora.report.log import jsonable
from dschat_lora.runtime.run import OpenRun


def write_evaluation(trainer: GlueTrainer, run: OpenRun[GlueConfig], directory: Path) -> None:
    """Measures of the weights that the run ends with, which may have been taken already."""
    best = trainer.state.best_global_step if run.config.load_best_model_at_end else None
    if run.config.do_train and best:
        metrics = trainer.watch.evaluations.get(best, {})
        _record_best(trainer, run)
    else:
        if trainer.watch.step != trainer.state.global_step:
            trainer.evaluate()
        metrics = trainer.watch.metrics
    write_results(trainer, directory, "eval", metrics)
    run.record.update({"results": metrics})


def write_results(
    trainer: GlueTrainer, directory: Path, split: str, metrics: Mapping[str, float]
) -> None:
    """Write ``SPLIT_results.json`` and add to ``all_results.json``, as the Trainer does.

    Its own way leaves half a file where it is killed, and a resumed run stops at that.
    """
    if not trainer.is_world_process_zero():
        return
    together = directory / "all_results.json"
    both = {
        directory / f"{split}_results.json": metrics,
        together: {**read_object(together), **metrics},
    }
    for path, values in both.items():
        write_whole(path, json.dumps(jsonable(values), indent=4, sort_keys=True) + "\n")


def _record_best(trainer: GlueTrainer, run: OpenRun[GlueConfig]) -> None:
    """Say and record which evaluation was the best."""
    state, name = trainer.state, run.config.best_metric
    best = {
        "step": state.best_global_step,
        "epoch": state.best_global_step * state.epoch / state.global_step,
        "metric": name,
        "value": state.best_metric,
        "checkpoint": Path(state.best_model_checkpoint).name,
        "last": trainer.watch.evaluations.get(state.global_step),
    }
    run.record.update({"best": best})
    run.log.say(
        f"best: {name} {best['value']:.4f} after step {best['step']}, epoch {best['epoch']:.2f}; "
        f"the last step's weights are in {LAST}/"
    )


def keep_last(
    trainer: GlueTrainer,
    tokenizer: PreTrainedTokenizerBase,
    run: OpenRun[GlueConfig],
    directory: Path,
) -> None:
    """Write what the last step left, before the best takes its place; call on every rank."""
    if run.config.do_eval and trainer.watch.step != trainer.state.global_step:
        trainer.evaluate()
    if not trainer.is_world_process_zero():
        return
    last = directory / LAST
    last.mkdir(exist_ok=True)
    if run.config.do_eval:
        text = json.dumps(jsonable(trainer.watch.metrics), indent=4) + "\n"
        write_whole(last / "eval_results.json", text)
    if run.config.apply_lora or run.config.apply_adapter:
        _write_trained(trainer, tokenizer, run, last)


def write_predictions(
    trainer: GlueTrainer,
    config: GlueConfig,
    splits: dict[str, TaskSplit],
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> None:
    """Write the label found for each test row."""
    labels = config.task.labels
    for name, task in (("test", config.task_name), ("test_mismatched", "mnli-mm")):
        if name not in splits:
            continue
        rows = tokenize(splits[name].examples, tokenizer, config)
        found = predictions(config.task, trainer.predict(rows).predictions)
        words = [labels[int(each)] if labels else f"{each:.3f}" for each in found]
        lines = ["index\tprediction", *(f"{number}\t{word}" for number, word in enumerate(words))]
        if trainer.is_world_process_zero():
            write_whole(directory / f"predict_results_{task}.txt", "\n".join(lines) + "\n")


def save_trained(
    trainer: GlueTrainer,
    tokenizer: PreTrainedTokenizerBase,
    run: OpenRun[GlueConfig],
    directory: Path,
) -> None:
    """The adapter with its head, or after full fine-tuning the model."""
    config = run.config
    if not (config.apply_lora or config.apply_adapter):
        with writing(directory / "model"):
            trainer.save_model(str(directory / "model"))
        run.log.say(f"model: {directory / 'model'}")
        return
    if trainer.is_world_process_zero():
        run.log.say(f"adapter: {_write_trained(trainer, tokenizer, run, directory)}")


def _write_trained(
    trainer: GlueTrainer,
    tokenizer: PreTrainedTokenizerBase,
    run: OpenRun[GlueConfig],
    directory: Path,
) -> Path:
    """Write what was trained: for stock PEFT, or, of bottleneck adapters, as one file."""
    config, model = run.config, trainer.model
    tensors = {name: p.detach().float().cpu() for name, p in trained_tensors(model).items()}
    if config.apply_adapter:
        path = directory / "bottleneck_adapter.safetensors"
        with staged_file(path) as staging:
            save_weights(staging, tensors, {"format": "pt"})
        return path
    path = directory / "adapter"
    with writing(path):
        write_trained(
            path,
            LoraOnly(path, config.lora_r, tensors, None),
            lora_settings(model, config),
            empty_classifier(model.config),
            base_model_name_or_path=config.model_name_or_path,
            write_more=tokenizer.save_pretrained,
        )
    return path
