"""Everything that can be found wrong in a stage's options before anything heavy is imported."""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.checkpoint.adapter_config import WEIGHTS_FILE, verify_adapter
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.checkpoint.manifest import safetensors_header
from dschat_lora.config.groups import DataConfig, LoadConfig, LoraConfig, ParallelConfig, RunConfig
from dschat_lora.config.stages import DpoStageConfig, ScoreConfig, StageConfig, SupervisedConfig
from dschat_lora.data.rows import DataKind, check_sources
from dschat_lora.engine.ds_config import reconcile
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.models.tensor_parallel_checks import (
    check_divides,
    check_files,
    check_processes,
    check_training,
)
from dschat_lora.report.directory import check_idle, is_unfinished, leftovers
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.resume import goes_on_in_place, launched_processes, settle

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)

# Rows of the bundled data are short; longer packed rows would leave few optimizer steps.
BUNDLED_SEQ_LEN = 128
_LORA_ONLY = (
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "train_bias",
    "enable_lora",
    "only_optimize_lora",
    "lora_learning_rate",
    "lora_lr_multiplier",
    "loraplus_lr_ratio",
    "merge_adapter",
)


@dataclass(frozen=True)
class StageRules:
    """What a stage asks of its options.

    Attributes:
        name: as in its default output directory.
        kind: what it makes of rows of data.
        tasks: kinds of model whose adapters it continues.
        unused: options of other stages that it accepts and ignores.
        complete: the config with what it has by default for this model.
    """

    name: str
    kind: DataKind = "samples"
    tasks: tuple[str, ...] = ("CAUSAL_LM",)
    unused: tuple[str, ...] = ()
    complete: Callable[[Any, ModelSource], Any] = lambda config, source: config


SFT = StageRules("sft")
REWARD = StageRules(
    "reward",
    "pairs",
    ("CAUSAL_LM", "SEQ_CLS"),
    ("train_on_prompt", "sft_only_data_path", "sample_generations"),
)
DPO = StageRules("dpo", "pairs", unused=("train_on_prompt", "sft_only_data_path"))


def check_supervised(config: ConfigT, *, rules: StageRules = SFT) -> ConfigT:
    """The config of step 1, 2 or DPO with paths, bundled defaults and the DeepSpeed JSON applied.

    Where a run is to be resumed, the first rank settles from what, and the others wait for its
    word (:func:`dschat_lora.runtime.run.open_run`): their config comes back as it is.

    Args:
        config: as parsed.
        rules: of the stage.

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """
    if config.checkpoint is None:
        if config.run.resume_from_checkpoint and not is_first_rank():
            return config
        config = settle(config, stage=rules.name)
    given = config.given
    source = find_model(config.model.model_name_or_path)
    config = rules.complete(config, source)
    if source.adapter is not None and is_first_rank():
        verify_adapter(source.adapter)
    check_task(source, rules.tasks)
    data = with_bundled_data(config.data, given, ignored=rules.unused)
    lora = continued_lora(config.lora, source, given)
    _check_lora(lora, given)
    check_processes(config.parallel.tensor_parallel_size, launched_processes())
    check_training(config.model, lora, config.parallel.tensor_parallel_size)
    check_divided(source, config.parallel)
    _check_reference(config, lora)
    data = replace(data, max_seq_len=_fitting_length(data.max_seq_len, source, given))
    _check_budget(replace(config, data=data))
    check_sources(data, rules.kind)
    model, batch, optim, parallel = reconcile(
        config.model,
        config.batch,
        config.optim,
        config.parallel,
        given=given,
        world_size=launched_processes(),
    )
    check_compile(config.model, parallel.zero_stage)
    run = with_tensorboard(config.run)
    check_output_dir(config)
    check_nothing_read_is_deleted(run, source)
    announce(source, data, config.data)
    for note in without_effect(replace(config, lora=lora), unused=rules.unused):
        log_once(f"  note         {note}")
    return replace(
        config,
        model=model,
        lora=lora,
        data=data,
        batch=batch,
        optim=optim,
        parallel=parallel,
        run=run,
    )


def check_score(config: ScoreConfig) -> None:
    """Find what is wrong with a reward model's directory or the files to score, before torch.

    Raises:
        ValueError: naming option, value and remedy.
    """
    source = find_model(config.model_name_or_path)
    if source.adapter is not None:
        verify_adapter(source.adapter)
    check_task(source, ("SEQ_CLS",))
    _fitting_length(config.max_seq_len, source, frozenset({"max_seq_len"}))
    check_sources(DataConfig(data_path=config.data_path))
    if config.output_path is not None:
        check_can_be_made(Path(config.output_path).expanduser().parent, option="output_path")


def check_divided(source: ModelSource, parallel: ParallelConfig) -> None:
    """Refuse a local model that ``--tensor_parallel_size`` does not divide.

    One of the hub is looked at once its configuration is here.

    Raises:
        ValueError: naming the model, and the numbers that do not fit.
    """
    size = parallel.tensor_parallel_size
    try:
        check_divides(model_fields(source), size)
        check_files(Path(source.base), size)
    except ValueError as error:
        name = "the bundled tiny model" if source.bundled else f"--model_name_or_path {source.base}"
        raise ValueError(f"{name}: {error}") from error


def check_compile(load: LoadConfig, *zero_stages: int | None) -> None:
    """Refuse to compile what gathers its weights as it runs.

    Raises:
        ValueError: naming both options.
    """
    if load.compile and 3 in zero_stages:
        raise ValueError(
            "--compile does not go with --zero_stage 3, which gathers the weights of each layer as "
            "it runs; use --zero_stage 2, or drop --compile"
        )


def announce(source: ModelSource, data: DataConfig, asked: DataConfig) -> None:
    """Say on the first line what is trained on what; the first rank alone."""
    model = "the bundled tiny model" if source.bundled else source.base
    adapter = f" with the adapter {source.adapter}" if source.adapter else ""
    paths = "the bundled data" if data.data_path != asked.data_path else " ".join(data.data_path)
    more = " ".join(data.sft_only_data_path)
    log_once(f"model: {model}{adapter}; data: {paths} {more}".rstrip())


def with_bundled_data(
    data: DataConfig, given: frozenset[str], *, ignored: tuple[str, ...] = ()
) -> DataConfig:
    """The bundled rows where the user names none that the stage uses."""
    if "sft_only_data_path" in ignored:
        data = replace(data, sft_only_data_path=())
    if data.data_path or data.sft_only_data_path:
        return data
    return replace(
        data,
        data_path=(str(BUNDLED_DATA["train"]),),
        eval_data_path=data.eval_data_path or (str(BUNDLED_DATA["eval"]),),
        max_seq_len=data.max_seq_len if "max_seq_len" in given else BUNDLED_SEQ_LEN,
    )


def check_task(source: ModelSource, tasks: tuple[str, ...]) -> None:
    """Refuse a language model where a reward model is wanted and the other way round.

    Raises:
        ValueError: naming the directory and what it holds.
    """
    found, adapter = None, source.adapter_config
    if adapter is not None:
        found = adapter.task_type
    elif any(name.endswith("ForSequenceClassification") for name in _architectures(source)):
        found = "SEQ_CLS"
    elif tasks == ("SEQ_CLS",) and Path(source.base).is_dir():
        found = "CAUSAL_LM"
    name = source.adapter or source.base
    if found is not None and found not in tasks:
        kinds = " or ".join(tasks)
        raise ValueError(
            f"--model_name_or_path {name} is of kind {found}, and this takes {kinds} "
            "(SEQ_CLS is a reward model, CAUSAL_LM a language model)"
        )
    if found == "SEQ_CLS" and source.adapter is not None:
        tensors = safetensors_header(source.adapter / WEIGHTS_FILE)
        if not any(".score." in name for name in tensors):
            raise ValueError(
                f"--model_name_or_path {name} is the adapter of a reward model, but its score head "
                "is missing; save it again with modules_to_save=['score']"
            )


def _architectures(source: ModelSource) -> list[str]:
    fields = model_fields(source)
    return [str(name) for name in fields.get("architectures") or []]


def continued_lora(lora: LoraConfig, source: ModelSource, given: frozenset[str]) -> LoraConfig:
    """The settings of the adapter that ``--model_name_or_path`` continues, else as given.

    Raises:
        ValueError: where an option contradicts the adapter.
    """
    adapter = source.adapter_config
    if adapter is None:
        return lora
    if "lora_dropout" not in given:
        lora = replace(lora, lora_dropout=adapter.lora_dropout)
    stored: dict[str, Any] = {
        "lora_dim": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "use_rslora": adapter.use_rslora,
        "train_bias": adapter.bias,
        "enable_lora": adapter.enable_lora,
    }
    for name, value in stored.items():
        mine = getattr(lora, name)
        if name in given and mine != value:
            if name == "enable_lora":
                mine, value = (" ".join(parts) or "nothing" for parts in (mine, value))
            raise ValueError(
                f"--{name} is {mine!r}, but the adapter {source.adapter} has "
                f"{value!r}; drop the option to continue it, or merge it first (--merge_adapter) "
                "to train another on top"
            )
    for name in sorted({"lora_module_name", "target_modules", "modules_to_save"} & given):
        raise ValueError(f"--{name} is settled by the adapter {source.adapter}; drop the option")
    return replace(lora, **stored)


def with_tensorboard(run: RunConfig) -> RunConfig:
    """``--report_to`` with its DeepSpeed-Chat spelling folded in.

    Raises:
        ValueError: if TensorBoard is wanted and not installed.
    """
    if not (run.enable_tensorboard or run.report_to == "tensorboard" or run.tensorboard_path):
        return run
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "--enable_tensorboard needs a package: pip install 'dschat_lora[tensorboard]'"
        )
    return replace(run, report_to="tensorboard", enable_tensorboard=True)


def check_output_dir(config: StageConfig) -> None:
    """Refuse a directory that holds another run; asked by the first rank, which creates it."""
    run = config.run
    if run.output_dir is None or not is_first_rank():
        return
    path = Path(run.output_dir).expanduser()
    check_can_be_made(path)
    check_idle(path)
    earlier = leftovers(path)
    if not earlier or goes_on_in_place(config):
        return
    names = ", ".join(p.name for p in earlier)
    goes_on = run.resume_from_checkpoint == "auto" and is_unfinished(path)
    if not run.overwrite_output_dir and not goes_on:
        go_on = (
            "go on with that run by --resume_from_checkpoint latest, "
            if checkpoints_of(path)
            else "(it has no checkpoint for --resume_from_checkpoint) "
        )
        raise ValueError(
            f"--output_dir {path} holds an earlier run ({names}); choose another directory, "
            f"{go_on}or delete it with --overwrite_output_dir"
        )
    if not (path / "run.json").is_file():
        raise ValueError(
            f"--output_dir {path} holds {names} but no run.json: no run wrote that, and "
            "--overwrite_output_dir deletes runs only; choose another directory"
        )


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def check_can_be_made(path: Path, option: str = "output_dir") -> None:
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"--{option} {path} cannot be made: {nearest} is no directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"--{option} {path} cannot be made: {nearest} is not writable")


def without_effect(config: SupervisedConfig, *, unused: tuple[str, ...] = ()) -> list[str]:
    """A line for each option that was given and changes nothing."""
    lora, given = config.lora, config.given
    notes = [f"--{name} has no effect in this stage" for name in unused if name in given]
    if lora.lora_dim == 0:
        notes += [
            f"--{name} has no effect without --lora_dim" for name in _LORA_ONLY if name in given
        ]
    elif lora.only_optimize_lora and not _follows_base_rate(config) and "learning_rate" in given:
        notes.append("--learning_rate has no effect: adapters alone train, at --lora_learning_rate")
    notes += parallel_without_effect(config.parallel)
    if "eot_token" in given and not config.model.add_eot_token:
        notes.append("--eot_token has no effect without --add_eot_token")
    return notes


def _follows_base_rate(config: SupervisedConfig) -> bool:
    """Whether the adapters' rate comes from ``--learning_rate``."""
    optim = config.optim
    if optim.lora_learning_rate is not None:
        return False
    return optim.lora_lr_multiplier is not None or optim.default_lora_learning_rate is None


def parallel_without_effect(parallel: ParallelConfig) -> list[str]:
    """A line where tokens are to be shared by processes that share no model."""
    if parallel.sequence_parallel and parallel.tensor_parallel_size == 1:
        return ["--sequence_parallel has no effect without --tensor_parallel_size above 1"]
    return []


def _check_reference(config: SupervisedConfig, lora: LoraConfig) -> None:
    """Refuse a reference that would have to be a second model."""
    if not isinstance(config, DpoStageConfig) or config.dpo.precompute_ref_log_probs:
        return
    if lora.lora_dim == 0 or not lora.only_optimize_lora:
        raise ValueError(
            "--no-precompute_ref_log_probs looks through the starting adapter on the frozen base; "
            "with base weights that train use --precompute_ref_log_probs"
        )


def _check_budget(config: SupervisedConfig) -> None:
    """Refuse micro-batches of so many tokens that are of so many rows too, or hold no row."""
    tokens, rows = config.batch.tokens_per_device, config.batch.per_device_train_batch_size
    if tokens and "per_device_train_batch_size" in config.given:
        raise ValueError(
            f"--tokens_per_device {tokens} and --per_device_train_batch_size {rows} both say what "
            "a micro-batch holds; give one"
        )
    longest, length = config.max_row_tokens, config.data.max_seq_len
    if tokens and tokens < longest:
        both = ", twice that for a pair" if longest > length else ""
        raise ValueError(
            f"--tokens_per_device {tokens} is less than a row may take with --max_seq_len "
            f"{length}{both}; give {longest} or more, or lower --max_seq_len"
        )


def check_nothing_read_is_deleted(run: RunConfig, source: ModelSource) -> None:
    """Refuse to overwrite the directory that the model comes from."""
    if run.output_dir is None:
        return
    read = [source.adapter, Path(source.base)]
    for old in leftovers(Path(run.output_dir).expanduser()):
        if any(p is not None and p.resolve().is_relative_to(old.resolve()) for p in read):
            raise ValueError(
                f"--overwrite_output_dir would delete {old}, which --model_name_or_path reads; "
                "choose another --output_dir"
            )


def _check_lora(lora: LoraConfig, given: frozenset[str]) -> None:
    if {"lora_module_name", "target_modules"} <= given:
        raise ValueError("--lora_module_name and --target_modules both choose layers; give one")
    needless = sorted(given & {"lora_module_name", "target_modules", "modules_to_save"})
    if lora.lora_dim == 0 and needless:
        raise ValueError(f"--{needless[0]} needs --lora_dim > 0: without it every weight trains")


def _fitting_length(length: int, source: ModelSource, given: frozenset[str]) -> int:
    """``length`` or, unless the user chose it, what a local model's positions allow."""
    path, fields = Path(source.base) / "config.json", model_fields(source)
    limit = fields.get("max_position_embeddings") or fields.get("n_positions") or length
    if not isinstance(limit, int):
        raise ValueError(f"--model_name_or_path: {path} says {limit!r} of its positions")
    if length > limit and "max_seq_len" in given:
        raise ValueError(f"--max_seq_len is {length}, but the model has {limit} positions")
    return min(length, int(limit))


def model_fields(source: ModelSource) -> dict[str, Any]:
    """The configuration of a local base; empty for one of the hub."""
    path = Path(source.base) / "config.json"
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--model_name_or_path: {path} is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--model_name_or_path: {path} must hold a JSON object")
    return fields
