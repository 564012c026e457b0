"""One GLUE task from its options to its results, by transformers' Trainer."""

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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

from dschat_lora.addons.glue.callback import MetricsCallback, check_pickles
from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.data import TaskSplit, read_splits
from dschat_lora.addons.glue.model import build_model, max_positions
from dschat_lora.addons.glue.results import (
    keep_last,
    save_trained,
    write_evaluation,
    write_predictions,
    write_results,
)
from dschat_lora.addons.glue.trainer import (
    GlueTrainer,
    collator,
    mean_loss,
    task_metrics,
    tokenize,
    with_second_pass,
)
from dschat_lora.addons.glue.validation import check_glue
from dschat_lora.config.bundled import find_deepspeed_json
from dschat_lora.config.files import read_json
from dschat_lora.data.digests import BlockHasher, DataIdentity
from dschat_lora.engine import failure_detection, gpu
from dschat_lora.engine.distributed import (
    check_same,
    choose_attention_kernels,
    on_rank_zero,
    raise_together,
    world_size,
)
from dschat_lora.engine.process_group import init_distributed
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.models.loading import hub_errors
from dschat_lora.runtime.resume import check_identity, launched_processes, resumes_in_place
from dschat_lora.runtime.run import (
    OpenRun,
    claim_together,
    open_files,
    recorded_ending,
    resolved_together,
)
from dschat_lora.runtime.setup import tokenizer_digest


def run_glue(config: GlueConfig) -> None:
    """Train, evaluate, predict and save, from a checked config; call on every rank."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with recorded_ending() as ending:
        note = None
        if launched_processes() > 1 or config.deepspeed is not None:
            note = init_distributed()
        config = resolved_together(config, check_glue)
        failure_detection.set_timeout(config.distributed_timeout)
        settings = training_arguments(config)
        directory = claim_together(ending, config, config.stage)
        settings.output_dir = str(directory)
        earlier = resumes_in_place(config)
        with open_files(config, directory, ending, name="glue", earlier=earlier) as run:
            if note is not None:
                run.log.say(f"  note         {note}")
            _train_and_measure(run, settings)


def _train_and_measure(run: OpenRun[GlueConfig], settings: TrainingArguments) -> None:
    """The whole run; what it makes, the Trainer above all, is gone when it returns."""
    config = run.config
    trainer, splits = build_trainer(run, settings)
    if config.do_train:
        trainer.before_best = lambda: keep_last(trainer, config)
        if config.checkpoint:
            checkpoint = Path(config.checkpoint)
            accepts = config.accept_changed_data
            on_rank_zero(
                lambda: check_identity(checkpoint, trainer.identity, accepts_changed_data=accepts)
            )
            check_pickles(checkpoint)
        with run.interrupts.deferred():
            done = trainer.train(resume_from_checkpoint=config.checkpoint or None)
        if trainer.watch.first_step == trainer.state.global_step:
            run.log.say("trained: the run was at its end already")
        else:
            write_results(trainer, "train", done.metrics)
        run.log.write("event", trainer.state.global_step, {"name": "trained"})
        trainer.save_state()
        save_trained(trainer, run)
    if config.do_eval:
        write_evaluation(trainer, run)
    if config.do_predict:
        write_predictions(trainer, config, splits)


def training_arguments(config: GlueConfig) -> TrainingArguments:
    """The options in the Trainer's words.

    Raises:
        ValueError: on fp16 without a GPU, where the Trainer would compute in fp32, and if torch
            cannot use a GPU that is here.
    """
    on_gpu = torch.accelerator.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    gpu.usable(torch.device("cuda" if on_gpu else "cpu"))
    if config.fp16 and not on_gpu:
        raise ValueError("--fp16 needs a GPU; --bf16 computes on the CPU too")
    same = (
        *("do_train", "do_eval", "do_predict", "learning_rate", "lr_scheduler_type", "seed"),
        *("num_train_epochs", "max_steps", "per_device_train_batch_size", "weight_decay"),
        *("per_device_eval_batch_size", "gradient_accumulation_steps", "adam_beta1"),
        *("adam_beta2", "adam_epsilon", "max_grad_norm", "eval_strategy", "eval_steps"),
        *("save_strategy", "save_steps", "logging_steps", "fp16", "bf16"),
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
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        report_to="none",
        logging_nan_inf_filter=False,  # it shows the loss before in place of NaN
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
    content: dict[str, Any] = read_json(file)
    scale = content.get("fp16", {})
    content["fp16"] = {n: v for n, v in scale.items() if v != "auto" or n == "enabled"}
    return content


def build_trainer(
    run: OpenRun[GlueConfig], settings: TrainingArguments
) -> tuple[GlueTrainer, dict[str, TaskSplit]]:
    """The Trainer with model, rows and measures, and the rows of each part."""
    config, say = run.config, run.log.say
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(config.use_deterministic_algorithms)
    choose_attention_kernels()  # the Trainer chooses the device itself
    set_seed(config.seed)
    splits = raise_together(lambda: read_splits(config))
    check_same(
        lambda: {f"the {name} rows": _digest(split) for name, split in splits.items()},
        remedy="give all hosts the same files",
    )
    name = config.model_name_or_path
    with hub_errors("--model_name_or_path", name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
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
    trainer.identity = _identity(config, splits, tokenizer)
    trainer.watch = MetricsCallback(run, trainer.identity, rows=lambda: int(trainer.rows))
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
    return trainer, splits


def _identity(
    config: GlueConfig, splits: dict[str, TaskSplit], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What the state of the run belongs to."""
    if "train" not in splits:
        return {}
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    base = config.model_name_or_path
    return {
        "stage": config.stage,
        "model": weights_fingerprint(base) if Path(base).is_dir() else base,
        "tokenizer": tokenizer_digest(tokenizer),
        "train_data": _data_identity(splits["train"]),
        "rows_per_step": rows * world_size(),
        **({"deepspeed_processes": world_size()} if config.deepspeed is not None else {}),
    }


def _data_identity(split: TaskSplit) -> DataIdentity:
    rows = [repr(example).encode() for example in split.examples]
    hasher = BlockHasher()
    values, offsets = np.frombuffer(b"".join(rows), np.uint8), np.cumsum([0, *map(len, rows)])
    hasher.update({"row": (values, offsets)})
    return DataIdentity(hasher.digest(), partial(_digest, split))


def _digest(split: TaskSplit) -> str:
    return hashlib.blake2b(repr(split.examples).encode(), digest_size=16).hexdigest()


def _describe(
    model: PreTrainedModel, splits: dict[str, TaskSplit], run: OpenRun[GlueConfig]
) -> None:
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
