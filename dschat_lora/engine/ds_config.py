"""The DeepSpeed JSON: validation, agreement with the command line, configuration of an engine.

Imports nothing heavy, so that a contradiction is reported at once.
"""

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dschat_lora.config.bundled import find_deepspeed_json
from dschat_lora.config.files import parse_json, read_json
from dschat_lora.config.groups import LoadConfig, ParallelConfig, ScheduleConfig

AUTO = "auto"
# JSON field -> the option that sets the same thing.
_SHARED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "zero_optimization.stage": "zero_stage",
}
# DeepSpeed's own ways to divide a model, which ignore adapters.
_FOREIGN = ("tensor_parallel", "autotp_size", "sequence_parallel_size")
# Fields of ZeRO whose groups are made of neighbouring processes, and what turns them off.
_CROSSING = {"zero_hpz_partition_size": 1, "zero_quantized_gradients": False}
# Fields by which DeepSpeed writes files of its own.
_WRITING = (
    *("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler.output_file"),
    *("zero_optimization.offload_param.nvme_path", "aio"),
    "zero_optimization.offload_optimizer.nvme_path",
)
_SECTIONS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler")
_WHOLE = ("a whole number >= 1", lambda value: type(value) is int and value >= 1)
_SWITCH = ("true or false", lambda value: isinstance(value, bool))
# Values of a field that an option sets too, besides "auto".
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "train_batch_size": _WHOLE,
    "train_micro_batch_size_per_gpu": _WHOLE,
    "gradient_accumulation_steps": _WHOLE,
    "gradient_clipping": (
        "a number >= 0",
        lambda x: type(x) in (int, float) and 0 <= x <= sys.float_info.max,
    ),
    "zero_optimization.stage": ("0, 1, 2 or 3", lambda x: type(x) is int and x in range(4)),
    "bf16.enabled": _SWITCH,
    "fp16.enabled": _SWITCH,
}
_LOSS_SCALING = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


def read_deepspeed_json(path: str | None) -> dict[str, Any]:
    """The JSON object in the file ``path``, or the package's of that name; empty without one.

    ``path`` may be the text of the object itself.

    Raises:
        ValueError: if the file cannot be read or is not a JSON object.
    """
    if path is None:
        return {}
    file = None if path.lstrip().startswith("{") else find_deepspeed_json(path)
    try:
        content = parse_json(path) if file is None else read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--deepspeed_config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--deepspeed_config {path} must hold a JSON object of DeepSpeed's options"
        )
    _check_fields(path, content)
    return content


def fields_that_write(path: str) -> list[str]:
    """Fields of the file in ``path`` by which DeepSpeed writes files of its own."""
    content = read_deepspeed_json(path)
    return [field for field in _WRITING if _lookup(content, field) is not None]


def _check_fields(path: str, content: Mapping[str, Any]) -> None:
    """Refuse misspelt names and unusable values of the fields read here, not of DeepSpeed's own."""
    ours = [*_SECTIONS, *(field for field in _ALLOWED if "." not in field)]
    for name in content.keys() - set(ours):
        if close := difflib.get_close_matches(name, ours, 1, cutoff=0.9):
            raise ValueError(f"--deepspeed_config {path}: {name} is unknown; write {close[0]}")
    for section in _SECTIONS:
        if not isinstance(content.get(section, {}), dict):
            raise ValueError(f"--deepspeed_config {path} must hold a JSON object under {section}")
        if not isinstance(content.get(section, {}).get("params", {}), dict):
            raise ValueError(f"--deepspeed_config {path}: {section}.params must be an object")
    for field, (allowed, fits) in _ALLOWED.items():
        stated = _lookup(content, field)
        if stated not in (None, AUTO) and not fits(stated):
            raise ValueError(
                f'--deepspeed_config {path}: {field} must be {allowed} or "{AUTO}", got {stated!r}'
            )
    if _lookup(content, "bf16.enabled") is True and _lookup(content, "fp16.enabled") is True:
        raise ValueError(f"--deepspeed_config {path} enables both bf16 and fp16; choose one")


def stated_values(
    load: LoadConfig,
    sizes: Mapping[str, int],
    optim: ScheduleConfig,
    parallel: ParallelConfig,
    *,
    given: frozenset[str],
    world_size: int,
    tokens_per_device: int = 0,
) -> dict[str, Any]:
    """Values of options, by name, once ``--deepspeed_config`` fills in those that are not given.

    ``sizes`` are by their options the rows of a micro-batch, which ``tokens_per_device`` stand for
    if there are any, and the micro-batches of a step; ``world_size`` counts processes, for
    ``train_batch_size``.

    Raises:
        ValueError: where the file and an option disagree; the message names both.
    """
    path, (micro, times) = parallel.deepspeed_config, sizes
    content = read_deepspeed_json(path)
    values: dict[str, Any] = {
        **sizes,
        "max_grad_norm": optim.max_grad_norm,
        "zero_stage": parallel.zero_stage,
        "dtype": load.dtype,
        "offload": parallel.offload,
    }
    if tokens_per_device:
        for field in ("train_micro_batch_size_per_gpu", "train_batch_size"):
            if (stated := content.get(field, AUTO)) != AUTO:
                raise ValueError(
                    f"--deepspeed_config {path} sets {field} to {stated}, a number of rows, but "
                    f"--tokens_per_device {tokens_per_device} counts tokens; write "
                    f'"{AUTO}" in the file'
                )
        values[micro] = 1  # as DeepSpeed wants some number of rows
    for field, name, stated in _stated_options(content):
        name = micro if name == "per_device_train_batch_size" else name
        if name in given and values[name] != stated:
            raise ValueError(
                f"--deepspeed_config {path} sets {field} to {stated!r}, but --{name} is "
                f'{values[name]!r}; remove one of them, or write "{AUTO}" in the file'
            )
        values[name] = stated
    _refuse_foreign(path, content, parallel)
    rows, steps = values[micro], values[times]
    total = rows * steps * parallel.shares(world_size)
    if (stated := content.get("train_batch_size", AUTO)) not in (AUTO, total):
        raise ValueError(
            f"--deepspeed_config {path} sets train_batch_size to {stated}, but --{micro} {rows} x "
            f"--{times} {steps} x {parallel.share_words(world_size)} is {total}"
        )
    if values["offload"] and not values["zero_stage"]:
        raise ValueError("--offload needs --zero_stage 1, 2 or 3: ZeRO 0 shards nothing to offload")
    return values | {"zero_stage": values["zero_stage"] or 0}


def _stated_options(content: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(field, option that sets the same, value) of all that the file states."""
    for field, name in _SHARED.items():
        if (value := _lookup(content, field)) not in (None, AUTO):
            yield field, name, value
    for dtype in ("bf16", "fp16"):
        if _lookup(content, f"{dtype}.enabled") is True:
            yield f"{dtype}.enabled", "dtype", dtype
    offload = "zero_optimization.offload_optimizer"
    if _lookup(content, f"{offload}.device") not in (None, AUTO, "none"):
        yield offload, "offload", True


def engine_config(
    content: Mapping[str, Any],
    *,
    zero_stage: int,
    offload: bool,
    micro_batch_size: int,
    accumulation_steps: int,
    max_grad_norm: float,
    native_dtype: str | None,
    shares_weights: bool = False,
) -> dict[str, Any]:
    """The complete DeepSpeed configuration of one engine, with no harmful default of DeepSpeed's.

    Arguments win over ``content``, the JSON of ``--deepspeed_config``. ``native_dtype`` is ``bf16``
    or ``fp16`` where DeepSpeed is to keep the fp32 masters of 16-bit trained weights, None where
    every trained tensor is fp32 already. ``shares_weights`` tells that another engine trains on
    the same base weights.
    """
    zero = zero_options(content, zero_stage, offload=offload)
    if zero_stage == 3 and shares_weights:
        # Weights that one engine prefetches are in flight when the other one gathers them.
        zero["stage3_prefetch_bucket_size"] = 0
    scaling = _LOSS_SCALING | _without_auto(content.get("fp16", {}))
    rest = _without_auto(content)
    for name in ("optimizer", "scheduler", "train_batch_size"):
        rest.pop(name, None)
    return {
        # DeepSpeed's own clock waits for the device at every forward and step.
        "timers": {"throughput": {"enabled": False}},
        **rest,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": max_grad_norm if zero_stage > 0 else 0.0,
        "zero_optimization": zero | {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": native_dtype == "bf16"}
        | ({"check_grad_overflow": True} if native_dtype == "bf16" else {}),
        "fp16": scaling | {"enabled": native_dtype == "fp16"},
        "steps_per_print": 2**31,
    }


def zero_options(content: Mapping[str, Any], stage: int, *, offload: bool) -> dict[str, Any]:
    """The ``zero_optimization`` section: that of the JSON over our defaults."""
    stated = _without_auto(content.get("zero_optimization", {}))
    # A file that states one of the two kinds of offloading states both.
    return default_zero(stage, offload and "offload_optimizer" not in stated) | stated


def loss_scaling(content: Mapping[str, Any]) -> dict[str, int]:
    """Settings of the fp16 loss scale: the JSON's ``fp16`` section over our defaults."""
    section = _without_auto(content.get("fp16", {}))
    return {key: section.get(key, value) for key, value in _LOSS_SCALING.items()}


def default_zero(stage: int, offload: bool) -> dict[str, Any]:
    """The ``zero_optimization`` section used where no JSON is given."""
    section: dict[str, Any] = {"stage": stage}
    if stage >= 1:
        section |= {
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            # DeepSpeed's default of 5e8 sets 2 GB aside in fp32, far more than adapters fill.
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 50_000_000,
        }
    if stage == 3:
        section |= {
            # The other setting replaces torch's linear everywhere, with other 16-bit rounding.
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_max_live_parameters": 30_000_000,
            "stage3_prefetch_bucket_size": 30_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
    if offload and stage >= 1:
        section["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            # Of 30 million elements not one fc1 of OPT-6.7B, 67 million, would be fetched ahead;
            # a block of a 13B or 14B model has up to 330 million.
            section |= {
                "stage3_max_live_parameters": 350_000_000,
                "stage3_prefetch_bucket_size": 350_000_000,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
            }
    return section


def _lookup(content: Mapping[str, object], dotted: str) -> object:
    value: object = content
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refuse_foreign(path: str | None, content: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Refuse what the command line owns, DeepSpeed's own model parallelism, and crossing groups."""
    for section in ("optimizer", "scheduler"):
        parameters = content.get(section, {}).get("params", {})
        fixed = sorted(key for key, value in parameters.items() if value != AUTO)
        if fixed:
            raise ValueError(
                f"--deepspeed_config {path} sets {section}.params {fixed}, which the command line "
                f'owns (--learning_rate, --lr_scheduler_type, ...); remove "{section}" there'
            )
    for name in _FOREIGN:
        if name in content:
            raise ValueError(
                f"--deepspeed_config {path} has {name}, which does not support adapters; remove "
                "it there, and use --tensor_parallel_size (and --sequence_parallel), or "
                "--context_parallel_size"
            )
    stated = _without_auto(content.get("zero_optimization", {}))
    crossing = [name for name, off in _CROSSING.items() if stated.get(name, off) != off]
    if (size := parallel.tensor_parallel_size) > 1 and crossing:
        raise ValueError(
            f"--deepspeed_config {path} sets zero_optimization.{crossing[0]}, whose groups of "
            f"processes cross those of --tensor_parallel_size {size}; drop one"
        )


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != AUTO
    }
