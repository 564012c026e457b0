"""What a GLUE run leaves: measures, predictions, and what was trained, of the best and the last."""

import json
from collections.abc import Mapping
from pathlib import Path

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.data import TaskSplit
from dschat_lora.addons.glue.model import lora_settings, trained_tensors
from dschat_lora.addons.glue.trainer import GlueTrainer, predictions, tokenize
from dschat_lora.addons.glue.validation import LAST
from dschat_lora.addons.loralib.extract import empty_classifier, write_trained
from dschat_lora.addons.loralib.lora_only import LoraOnly
from dschat_lora.checkpoint.tensors import save_weights, writing
from dschat_lora.config.staging import staged_file, write_whole
from dschat_lora.report.directory import read_object
from dschat_lora.report.log import jsonable
from dschat_lora.runtime.run import OpenRun


def write_evaluation(trainer: GlueTrainer, run: OpenRun[GlueConfig]) -> None:
    """Measures of the weights that the run ends with, which may have been taken already."""
    state, config = trainer.state, run.config
    if config.do_train and config.load_best_model_at_end and state.best_global_step:
        metrics = trainer.watch.evaluations.get(state.best_global_step, {})
        best = {
            "step": state.best_global_step,
            "epoch": state.best_global_step * state.epoch / state.global_step,
            "metric": config.best_metric,
            "value": state.best_metric,
            "checkpoint": Path(state.best_model_checkpoint).name,
            "last": trainer.watch.evaluations.get(state.global_step),
        }
        run.record.update({"best": best})
        run.log.say(
            f"best: {best['metric']} {best['value']:.4f} after step {best['step']}, epoch "
            f"{best['epoch']:.2f}; the last step's weights are in {LAST}/"
        )
    else:
        if trainer.watch.step != state.global_step:
            trainer.evaluate()
        metrics = trainer.watch.metrics
    write_results(trainer, "eval", metrics)
    run.record.update({"results": metrics})


def write_results(trainer: GlueTrainer, split: str, metrics: Mapping[str, float]) -> None:
    """Write ``SPLIT_results.json`` and add to ``all_results.json``, as the Trainer does.

    Its own way leaves half a file where it is killed, and a resumed run stops at that.
    """
    if not trainer.is_world_process_zero():
        return
    directory = trainer.directory
    together = directory / "all_results.json"
    both = {
        directory / f"{split}_results.json": metrics,
        together: {**read_object(together), **metrics},
    }
    for path, values in both.items():
        write_whole(path, json.dumps(jsonable(values), indent=4, sort_keys=True) + "\n")


def keep_last(trainer: GlueTrainer, config: GlueConfig) -> None:
    """Write what the last step left, before the best takes its place; call on every rank."""
    if config.do_eval and trainer.watch.step != trainer.state.global_step:
        trainer.evaluate()
    if not trainer.is_world_process_zero():
        return
    last = trainer.directory / LAST
    last.mkdir(exist_ok=True)
    if config.do_eval:
        text = json.dumps(jsonable(trainer.watch.metrics), indent=4) + "\n"
        write_whole(last / "eval_results.json", text)
    if config.apply_lora or config.apply_adapter:
        _write_trained(trainer, config, last)


def write_predictions(
    trainer: GlueTrainer, config: GlueConfig, splits: Mapping[str, TaskSplit]
) -> None:
    """Write the label found for each test row."""
    labels = config.task.labels
    for name, task in (("test", config.task_name), ("test_mismatched", "mnli-mm")):
        if name not in splits:
            continue
        rows = tokenize(splits[name].examples, trainer.processing_class, config)
        labels_of_rows = predictions(config.task, trainer.predict(rows).predictions)
        words = [labels[int(each)] if labels else f"{each:.3f}" for each in labels_of_rows]
        lines = ["index\tprediction", *(f"{number}\t{word}" for number, word in enumerate(words))]
        if trainer.is_world_process_zero():
            path = trainer.directory / f"predict_results_{task}.txt"
            write_whole(path, "\n".join(lines) + "\n")


def save_trained(trainer: GlueTrainer, run: OpenRun[GlueConfig]) -> None:
    """The adapter with its head, or after full fine-tuning the model."""
    if not (run.config.apply_lora or run.config.apply_adapter):
        path = trainer.directory / "model"
        with writing(path):
            trainer.save_model(str(path))
        run.log.say(f"model: {path}")
    elif trainer.is_world_process_zero():
        run.log.say(f"adapter: {_write_trained(trainer, run.config, trainer.directory)}")


def _write_trained(trainer: GlueTrainer, config: GlueConfig, directory: Path) -> Path:
    """Write what was trained: for stock PEFT, or, of bottleneck adapters, as one file."""
    model = trainer.model
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
            write_more=trainer.processing_class.save_pretrained,
        )
    return path
