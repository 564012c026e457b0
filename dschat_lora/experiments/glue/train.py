"""One GLUE task from its options to its results, by transformers' Trainer."""

import hashlib
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)

from dschat_lora.config.recipes import find_deepspeed_json
from dschat_lora.engine import peers
from dschat_lora.engine.collectives import check_same, raise_together
from dschat_lora.engine.distributed import init_distributed
from dschat_lora.experiments.glue.callback import MetricsCallback, lines_until
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.data import TaskSplit, find_files, read_split
from dschat_lora.experiments.glue.features import collator, tokenize
from dschat_lora.experiments.glue.metrics import task_metrics
from dschat_lora.experiments.glue.model import build_model, max_positions
from dschat_lora.experiments.glue.regularize import with_second_pass
from dschat_lora.experiments.glue.results import (
    keep_last,
    save_trained,
    write_evaluation,
    write_predictions,
)
from dschat_lora.experiments.glue.trainer import GlueTrainer, mean_loss
from dschat_lora.experiments.glue.validation import earlier_run
from dschat_lora.report.log import jsonable
from dschat_lora.runtime.directory import RunDirectory, check_links
from dschat_lora.runtime.run import Run, claim_together, ended_in_words, open_files


def run_glue(config: GlueConfig) -> None:
    """Train, evaluate, predict and save, from a checked config; call on every rank."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with ended_in_words() as ending:
        peers.set_timeout(config.distributed_timeout)
        settings = training_arguments(config)
        directory = claim_together(ending, lambda: _claimed(config))
        settings.output_dir = str(directory)
        earlier = config.resume_from_checkpoint is not None
        with open_files(config, directory, ending, name="glue", earlier=earlier) as run:
            _train_and_measure(run, settings, directory)


def _claimed(config: GlueConfig) -> RunDirectory:
    """The directory of a new run, or the one that a resumed run goes on in."""
    if config.resume_from_checkpoint is None:
        name = f"glue-{config.task_name}"
        return RunDirectory.claim(config.output_dir, name=name, results=earlier_run)
    path = Path(config.output_dir or Path(config.resume_from_checkpoint).parent)
    path.mkdir(parents=True, exist_ok=True)
    check_links(path)
    return RunDirectory(path, results=earlier_run)


def _train_and_measure(run: Run[GlueConfig], settings: TrainingArguments, directory: Path) -> None:
    """The whole run; what it makes, the Trainer above all, is gone when it returns."""
    config = run.config
    trainer, splits, tokenizer = build_trainer(run, settings)
    if config.do_train:
        trainer.before_best = lambda: keep_last(trainer, tokenizer, run, directory)
        _train(trainer, run)
        save_trained(trainer, tokenizer, run, directory)
    if config.do_eval:
        write_evaluation(trainer, run, directory)
    if config.do_predict:
        write_predictions(trainer, config, splits, tokenizer, directory)


def training_arguments(config: GlueConfig) -> TrainingArguments:
    """The options in the Trainer's words; joins the process group of a launcher.

    Raises:
        ValueError: on fp16 without a GPU, where the Trainer would compute in fp32.
    """
    if config.fp16 and not torch.accelerator.is_available():
        raise ValueError("--fp16 needs a GPU; --bf16 computes on the CPU too")
    if config.deepspeed is not None:
        init_distributed()  # also where no launcher has set anything
    same = (
        *("do_train", "do_eval", "do_predict", "learning_rate", "lr_scheduler_type", "seed"),
        *("num_train_epochs", "max_steps", "per_device_train_batch_size", "weight_decay"),
        *("per_device_eval_batch_size", "gradient_accumulation_steps", "adam_beta1"),
        *("adam_beta2", "adam_epsilon", "max_grad_norm", "eval_strategy", "eval_steps"),
        *("save_strategy", "save_steps", "save_total_limit", "logging_steps", "fp16", "bf16"),
        *("dataloader_num_workers", "load_best_model_at_end"),
    )
    settings = TrainingArguments(
        output_dir=config.output_dir or "output",
        **{name: getattr(config, name) for name in same},
        metric_for_best_model=config.best_metric if config.load_best_model_at_end else None,
        # Below 1 it is a share of the steps, rounded up.
        warmup_steps=config.warmup_steps or config.warmup_ratio,
        optim="adamw_torch",
        # Every trainable parameter takes part in every step.
        ddp_find_unused_parameters=False,
        deepspeed=None if config.deepspeed is None else deepspeed_settings(config.deepspeed),
        # Without this word the Trainer leaves out the processes of a launcher.
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    if settings.n_gpu > 1:
        settings._n_gpu = 1  # processes share work out, not threads of one process
    return settings


def deepspeed_settings(path: str) -> dict[str, Any]:
    """A DeepSpeed JSON for the Trainer, which fills its ``"auto"`` fields.

    Those of the loss scale it does not know; without them DeepSpeed takes its own defaults.
    """
    file = find_deepspeed_json(path, option="deepspeed")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    scale = content.get("fp16", {})
    content["fp16"] = {n: v for n, v in scale.items() if v != "auto" or n == "enabled"}
    return content


def build_trainer(
    run: Run[GlueConfig], settings: TrainingArguments
) -> tuple[GlueTrainer, dict[str, TaskSplit], PreTrainedTokenizerBase]:
    """The Trainer with model, rows and measures, and what it was made from."""
    config, say = run.config, run.log.say
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(config.use_deterministic_algorithms)
    set_seed(config.seed)
    splits = raise_together(lambda: _read(config))
    check_same(
        lambda: {f"the {name} rows": _digest(split) for name, split in splits.items()},
        remedy="give all hosts the same files",
    )
    tokenizer = AutoTokenizer.from_pretrained(
        config.model_name_or_path, trust_remote_code=config.trust_remote_code
    )
    model = build_model(config, say=say)
    most = tokenizer.model_max_length = min(tokenizer.model_max_length, max_positions(model.config))
    if config.max_seq_length > most:
        say(f"note: inputs are cut after {most} tokens, all that {config.model_name_or_path} takes")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = {name: tokenize(split.examples, tokenizer, config) for name, split in splits.items()}
    trainer = GlueTrainer(
        model=model,
        args=settings,
        train_dataset=rows.get("train"),
        eval_dataset=rows.get("validation"),
        data_collator=collator(tokenizer, config),
        processing_class=tokenizer,
        compute_loss_func=partial(mean_loss, config.task, weight=config.reg_loss_wgt),
        compute_metrics=lambda found: task_metrics(config.task, found.predictions, found.label_ids),
    )
    trainer.watch = MetricsCallback(
        run.log, config, begin=lambda: _begin(run), rows=lambda: int(trainer.rows)
    )
    trainer.add_callback(trainer.watch)
    if config.reg_loss_wgt > 0:
        special = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        trainer.doubled = partial(
            with_second_pass,
            masking_prob=config.masking_prob,
            unknown=int(tokenizer.unk_token_id),
            kept=[token for token in special if token is not None],
        )
    trainer.mismatched = rows.get("validation_mismatched")
    trainer.remove_callback(PrinterCallback)
    _describe(model, splits, run)
    return trainer, splits, tokenizer


def _read(config: GlueConfig) -> dict[str, TaskSplit]:
    splits = {}
    for name, path in find_files(config).items():
        limits = {"train": config.max_train_samples, "validation": config.max_eval_samples}
        most = limits.get(name.removesuffix("_mismatched"))
        splits[name] = read_split(path, config, name, first=most)
    return splits


def _digest(split: TaskSplit) -> str:
    return hashlib.blake2b(repr(split.examples).encode(), digest_size=16).hexdigest()


def _describe(model: PreTrainedModel, splits: dict[str, TaskSplit], run: Run[GlueConfig]) -> None:
    """Say and record what is trained, and on what."""
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    factors = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    data = {
        name: {"source": each.source, "rows": len(each.examples), "skipped": len(each.skipped)}
        for name, each in splits.items()
    }
    parameters = {"total": total, "trainable": trainable, "lora": factors}
    run.record.update({"data": data, "parameters": parameters})
    adapter = f": LoRA {factors:,}, head {trainable - factors:,}" if run.config.apply_lora else ""
    run.log.say(f"trained: {trainable:,} of {total:,} parameters{adapter}")
    for name, each in splits.items():
        skipped = f", {len(each.skipped):,} skipped ({each.skipped[0]})" if each.skipped else ""
        run.log.say(f"{name}: {len(each.examples):,} rows of {each.source}{skipped}")


# What DeepSpeed puts into its checkpoints besides tensors.
_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def check_pickles(checkpoint: Path) -> None:
    """Refuse a checkpoint of DeepSpeed's that runs code when it is read; it is not read here.

    The Trainer's own files are read without the right to run any.

    Raises:
        ValueError: naming the file and what it calls.
    """
    for path in sorted(checkpoint.glob("global_step*/*.pt")):
        try:
            found = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged, or no file of torch's: {error}") from None
        if strange := sorted(found - _OF_DEEPSPEED):
            raise ValueError(
                f"{path} would call {', '.join(strange)} when it is read, which no checkpoint of a "
                "run holds"
            )


def _train(trainer: GlueTrainer, run: Run[GlueConfig]) -> None:
    if run.config.resume_from_checkpoint is not None:
        check_pickles(Path(run.config.resume_from_checkpoint))
    done = trainer.train(resume_from_checkpoint=run.config.resume_from_checkpoint)
    if trainer.watch.first_step == trainer.state.global_step:
        run.log.say("trained: the run was at its end already")
        return
    run.log.write("event", trainer.state.global_step, {"name": "trained"})
    trainer.save_metrics("train", jsonable(done.metrics))
    trainer.save_state()


def _begin(run: Run[GlueConfig]) -> None:
    """Where a run goes on: take back what was logged after the checkpoint, which is loaded."""
    config, log, directory = run.config, run.log, run.directory
    if config.resume_from_checkpoint is None or directory is None:
        return
    checkpoint = Path(config.resume_from_checkpoint)
    for reason in config.rejected:
        log.say(f"note: checkpoint rejected: {reason}")
    step = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))["global_step"]
    story = checkpoint.parent / "metrics.jsonl"
    num_lines, seconds = lines_until(story, step)
    elsewhere = story.parent.resolve() != directory.resolve()
    log.rewind(num_lines=num_lines, seconds=seconds, step=step, source=story if elsewhere else None)
    run.record.release()
    log.say(f"resumed after step {step} from {checkpoint}")
