"""Validation of a GLUE run: its checks in their order, before torch is imported."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.data import find_files, read_split
from dschat_lora.addons.loralib.seeds import check_starts_runs
from dschat_lora.checkpoint.adapter_config import (
    is_adapter_directory,
    read_adapter_config,
    verify_adapter,
)
from dschat_lora.config.bundled import find_deepspeed_json
from dschat_lora.config.files import read_json
from dschat_lora.config.options import flatten
from dschat_lora.config.when import without_effect
from dschat_lora.data.rows import SMALL_FILE
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.terminal import log_once, say_once
from dschat_lora.runtime.checks import Check, apply_checks, require_packages, resolve_stage
from dschat_lora.runtime.directory import check_output_dir, check_source_is_kept
from dschat_lora.runtime.resume import with_options

#: where a run that ends with its best weights keeps the last ones
LAST = "last"


def check_glue(config: GlueConfig) -> GlueConfig:
    """The config with its paths and the checkpoint to resume from.

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """

    def check(config: GlueConfig) -> GlueConfig:
        adapter = None if config.lora_path is None else Path(config.lora_path)
        source = ModelSource(config.model_name_or_path, adapter)
        return apply_checks(config, source, GLUE_CHECKS)

    return resolve_stage(with_start(config), check, stage=config.stage)


def fix_environment() -> None:
    """Set environment variables that hashing and CUDA read at their start; may restart Python.

    ``PYTHONHASHSEED`` counts only from the start of the interpreter; 0 as in the original's
    scripts. What is set already stays.
    """
    # The workspace that makes cuBLAS repeatable; read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def with_start(config: GlueConfig) -> GlueConfig:
    """With the base model, and the adapter that training starts from."""
    source = find_model(config.model_name_or_path)
    if source.adapter is not None and config.lora_path is not None:
        raise ValueError(
            f"--model_name_or_path names the adapter {source.adapter}, and --lora_path another"
        )
    places = {"model_name_or_path": source.base}
    if (start := config.lora_path or source.adapter) is not None:
        places["lora_path"] = str(_adapter_or_file(str(start)).resolve())
    return with_options(config, places)


def _adapter_or_file(name: str) -> Path:
    """The adapter directory or the file of weights behind ``--lora_path``.

    Raises:
        ValueError: if there is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    for candidate in (path, path / "adapter"):
        if is_adapter_directory(candidate):
            verify_adapter(candidate)
            return candidate
    reason = "holds no adapter" if path.is_dir() else "does not exist"
    raise ValueError(
        f"--lora_path {name} {reason}; give an adapter directory, the output directory of a run, "
        "or a file of LoRA weights"
    )


def check_packages(config: GlueConfig, source: ModelSource) -> None:
    """Refuse to run without the packages of GLUE."""
    require_packages("GLUE", "accelerate", "scipy", "sklearn", extra="glue")


def check_options_agree(config: GlueConfig, source: ModelSource) -> None:
    """Refuse options that contradict each other, or change nothing."""
    masking, regression = config.masking_prob, config.task.is_regression
    adapter = config.adapter_path
    for is_wrong, message in (
        (config.fp16 and config.bf16, "--fp16 and --bf16 contradict each other; give one"),
        (
            not (config.do_train or config.do_eval or config.do_predict),
            "--no-do_train and --no-do_eval together leave nothing to do; add --do_predict",
        ),
        (
            not config.do_train and config.resume_from_checkpoint,
            "--resume_from_checkpoint resumes training, but --no-do_train is given",
        ),
        (
            config.warmup_steps and config.warmup_ratio,
            f"--warmup_steps {config.warmup_steps} and --warmup_ratio {config.warmup_ratio:g} "
            "contradict each other; give one",
        ),
        *((True, message) for message in without_effect(config)[:1]),
        (
            config.apply_lora and config.apply_adapter,
            "--apply_lora and --apply_adapter cannot be combined; give one",
        ),
        (
            adapter is not None and not Path(adapter).expanduser().is_file(),
            f"--adapter_path {adapter} is not a file",
        ),
        (
            masking and not config.reg_loss_wgt,
            f"--masking_prob {masking:g} masks the second pass of --reg_loss_wgt; give that too, "
            "above 0",
        ),
        (
            config.reg_loss_wgt and regression,
            f"--reg_loss_wgt compares classes; {config.task_name} has none",
        ),
    ):
        if is_wrong:
            raise ValueError(message)


def with_evaluation_alone(config: GlueConfig, source: ModelSource) -> GlueConfig:
    """The original's ``--do_eval`` without ``--do_train`` evaluates and trains nothing."""
    given = config.given
    if "do_eval" not in given or "do_train" in given or not config.do_eval:
        return config
    if config.resume_from_checkpoint is not None:
        return config
    say_once("  note         --do_eval without --do_train only evaluates")
    return replace(config, do_train=False)


def check_best(config: GlueConfig, source: ModelSource) -> None:
    """Refuse to look for the best evaluation where none, or another, is kept."""
    if not config.load_best_model_at_end:
        return
    name = config.metric_for_best_model
    known = ["loss", *config.task.measures]
    known += ["combined_score"] if len(config.task.measures) > 1 else []
    if config.best_metric.removeprefix("eval_") not in known:
        raise ValueError(f"--metric_for_best_model {name} must be one of {', '.join(known)}")
    when, kept = config.eval_strategy, config.save_strategy
    if when == "no" or when != kept:
        raise ValueError(
            f"--load_best_model_at_end keeps what it evaluates: --eval_strategy {when} and "
            f"--save_strategy {kept} must both be epoch, or both steps"
        )
    every = config.eval_steps or config.logging_steps
    if when == "steps" and config.save_steps % every:
        raise ValueError(
            f"--load_best_model_at_end: --save_steps {config.save_steps} must be a multiple of "
            f"--eval_steps {every}"
        )


def check_seeds(config: GlueConfig, source: ModelSource) -> None:
    """Refuse several runs in the processes of one."""
    if config.seeds == 1:
        return
    check_starts_runs(config.seeds, "glue")
    if config.resume_from_checkpoint is not None or not (config.do_train and config.do_eval):
        raise ValueError(
            f"--seeds {config.seeds} starts new runs; resume one of its runs with that run's "
            "--output_dir"
        )


def with_adapter_settings(config: GlueConfig, source: ModelSource) -> GlueConfig:
    """With the rank and alpha of the adapter it starts from, where none are typed."""
    if config.lora_path is None or config.checkpoint:
        return config
    if not config.apply_lora:
        raise ValueError(f"the adapter {config.lora_path} needs --apply_lora")
    if not Path(config.lora_path).is_dir():
        return config
    adapter = read_adapter_config(config.lora_path)
    if adapter.rank_pattern or adapter.alpha_pattern:
        raise ValueError(
            f"--lora_path {config.lora_path} has a rank_pattern or alpha_pattern, but here all "
            "layers share one rank and alpha"
        )
    settings = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha}
    return with_options(config, {n: v for n, v in settings.items() if n not in config.given})


def check_data(config: GlueConfig, source: ModelSource) -> None:
    """Refuse files whose rows cannot be read: all rows of small ones, else the first 100."""
    for split, path in find_files(config).items():
        if path is not None:
            small = path.stat().st_size <= SMALL_FILE
            read_split(path, config, split, first=None if small else 100)


def check_deepspeed(config: GlueConfig, source: ModelSource) -> None:
    """Refuse a DeepSpeed JSON that cannot be read or is of ZeRO 3."""
    path = config.deepspeed
    if path is None:
        return
    file = find_deepspeed_json(path, option="deepspeed")
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--deepspeed {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--deepspeed {path} must hold a JSON object")
    zero = content.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        raise ValueError(
            f"--deepspeed {path} requests ZeRO stage 3, which this command does not support; use "
            "stage 2 or lower"
        )
    if not config.do_train:
        raise ValueError("--deepspeed is for training; remove it with --no-do_train")


# In this order: the first that fails is the one a user reads.
GLUE_CHECKS: tuple[Check[GlueConfig, ModelSource], ...] = (
    check_packages,
    with_evaluation_alone,
    check_options_agree,
    check_best,
    check_seeds,
    with_adapter_settings,
    check_data,
    check_deepspeed,
    check_output_dir,
    check_source_is_kept,
)


def describe_plan(config: GlueConfig) -> None:
    """Show the resolved options, for a dry run."""
    for name, value in flatten(config).items():
        if value is not None:
            log_once(f"{name}: {value}")
