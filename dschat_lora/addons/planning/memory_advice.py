"""Advice on a GPU out of memory: what fills it by estimate, and options that take less."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from dschat_lora.commands.stages import STAGES
from dschat_lora.config.groups import is_on
from dschat_lora.config.options import command_line, flatten, with_values
from dschat_lora.config.stages import StageConfig, SupervisedConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size, world_size
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.option_checks import check_divides, check_training
from dschat_lora.perf.cards import USABLE
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.errors import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.runtime.graphs import takes_graphs
from dschat_lora.runtime.memory import GIB, MemoryPlan, peak_here
from dschat_lora.runtime.micro_batches import smaller_micro_batches
from dschat_lora.runtime.roles import OneRole, trained_models

Options = Mapping[str, object]
Added = Options | Callable[[Any], Options]  # to a config, or by it
Remedy = tuple[str, Added]  # in words, and its options, none where nothing is left of it

_RANK = 16  # of the adapter advised instead of training every weight
_ROWS_MATTER = 0.05  # share of the memory from which on that of rows is worth a change
_PARTS = {
    "optimizer": "of optimizer state",
    "loss": "for the loss",
    "update": "for the optimizer's step",
    "gathered": "for gathered weights",
    "unpacked": "for a weight unpacked from 4 bits",
}


def advise_supervised(
    error: torch.OutOfMemoryError,
    device_bytes: int | None,
    adapted: AdaptedModel,
    config: SupervisedConfig,
    settings: EngineSettings,
) -> str:
    """What fills the device in a supervised stage, and what to change, the least costly first.

    Args:
        error: what was raised.
        device_bytes: memory of the device; None: unknown.
        adapted: the model that trains.
        config: the options of the run.
        settings: how its engine is built.
    """
    trained = [each for each in adapted.model.parameters() if each.requires_grad]
    stage = settings.stage_in_use(settings.native_dtype(trained))
    (one,) = trained_models(config, OneRole(adapted)).values()
    now = replace(one, settings=replace(settings, zero_stage=stage))
    parts: dict[str, int] = {}
    with suppress(ValueError):  # an architecture that is not understood
        parts = asdict(now.estimated())
    sizes = {_PARTS.get(name, f"of {name}"): size for name, size in parts.items()}
    remedies = _supervised_remedies(adapted, config, settings, parts)
    advice = f"out of GPU memory: {_in_words(sizes, remedies, device_bytes, config)}"
    if parts and takes_graphs(now, config.model, peak=peak_here(settings.torch_dtype)):
        kept = parts["activations"] / GIB
        advice += f". --training_graphs off takes {kept:.3g} GiB less, where graphs were recorded"
    if tokens := config.batch.tokens_per_device:
        advice += f". Fewer than --tokens_per_device {tokens} take less memory, but change the run"
    return advice


def _supervised_remedies(
    adapted: AdaptedModel,
    config: SupervisedConfig,
    settings: EngineSettings,
    parts: Mapping[str, int],
) -> list[Remedy]:
    """Changes of rows and of weights, those first that take the most; of no part: rows first."""
    batch, lora, length = config.batch, adapted.lora, config.data.max_seq_len
    rows = 0 if batch.tokens_per_device else batch.per_device_train_batch_size
    count = rows * batch.gradient_accumulation_steps * data_world_size()
    same = f", the same batch of {count} rows a step, so the run can be resumed" if rows else ""
    total = sum(parts.values())
    by_rows = sum(parts.get(name, 0) for name in ("activations", "loss", "temporaries"))
    trains_base = lora.lora_dim == 0 or not lora.only_optimize_lora
    states = parts.get("gradients", 0) + parts.get("optimizer", 0)
    # ZeRO divides optimizer state and gradients, then weights; adapters need the last alone.
    most = parts.get("weights", 0) > states or settings.zero_stage == 2
    shared = 3 if most or not trains_base else 2
    # Optimizer state goes to the host, then weights, which only stage 3 moves.
    hosted = 1 if trains_base and not settings.offload else 3
    adapter = {"only_optimize_lora": True} if lora.lora_dim else {"lora_dim": _RANK}
    fewer: Added = partial(_smaller_micro_batches, longest=length) if rows else {}
    of_rows: list[Remedy] = [(f"compute fewer rows at once{same}", fewer), *_RECOMPUTING]
    of_weights: list[Remedy] = [
        ("compute in 16 bits", {"dtype": "auto"} if settings.dtype == "fp32" else {}),
        ("shard over the processes", partial(_shared, stage=shared)),
        (f"divide the model{same}", partial(_divided, adapted)),
        _IN_4_BITS,
        ("offload to host memory", partial(_offloaded, stage=hosted)),
        ("train only adapters", adapter if trains_base else {}),
    ]
    if by_rows < _ROWS_MATTER * total:
        return of_weights
    ordered = of_weights + of_rows if 2 * by_rows < total else of_rows + of_weights
    return [*ordered, ("shorten the rows", {"max_seq_len": length // 2} if rows == 1 else {})]


def _divided(adapted: AdaptedModel, config: SupervisedConfig) -> Options:
    """The next ``--tensor_parallel_size`` that processes and model allow, in the same batch."""
    size, count = config.parallel.tensor_parallel_size, world_size()
    if config.parallel.context_parallel_size > 1 or config.model.base_bits == 4:
        return {}  # which go with none
    for larger in (n for n in range(2 * size, count + 1, size) if count % n == 0):
        with suppress(ValueError):
            check_divides(adapted.model.config.to_dict(), larger)
            check_training(config.model, adapted.lora, larger)
            times = config.batch.gradient_accumulation_steps * larger // size
            return {"gradient_accumulation_steps": times, "tensor_parallel_size": larger}
    return {}


def advise_rl(
    error: torch.OutOfMemoryError,
    device_bytes: int | None,
    config: RlhfConfig,
    plan: MemoryPlan | None,
) -> str:
    """What fills the device in step 3, and what to change, the least costly first.

    Args:
        error: what was raised; its type says what was done.
        device_bytes: memory of the device; None: unknown.
        config: the options of the run.
        plan: its memory; None for architectures that are not understood.
    """
    decodes = isinstance(error, FullWhileDecodingError)
    freed = decodes or isinstance(error, FullAfterReleaseError)
    keeps = plan is not None and plan.keeps_cache and not freed
    sizes: dict[str, int] = {}
    if plan is not None:
        sizes = {"of weights": plan.weights, "of gradients and optimizer state": plan.training}
        sizes |= {"of CUDA graphs": plan.graphs} if plan.graphs else {}
        sizes |= {} if decodes else {"for a micro-batch": plan.update}
        sizes |= {"for decoding": plan.cache} if decodes or keeps else {}
    records = plan is not None and plan.graphs > 0
    remedies = _rl_remedies(config, decodes=decodes, keeps_cache=keeps, records=records)
    doing = "responses are decoded" if decodes else "training"
    return f"out of GPU memory while {doing}: {_in_words(sizes, remedies, device_bytes, config)}"


def _rl_remedies(
    config: RlhfConfig, *, decodes: bool, keeps_cache: bool, records: bool
) -> list[Remedy]:
    """Changes of step 3; all but of the bits leave results alone."""
    batch, longest = config.batch, config.data.max_seq_len
    half = batch.rows_decoded // 2 // batch.num_generations * batch.num_generations
    fewer = {"max_num_seqs": half} if half and (decodes or keeps_cache) else {}
    stage = 2 if batch.engine.needs_whole_weights else 3
    smaller: Added = {} if decodes else partial(_smaller_micro_batches, longest=longest)
    return [
        ("free the KV cache", {"release_inference_cache": True} if keeps_cache else {}),
        ("train without CUDA graphs", {"training_graphs": "off"} if records else {}),
        ("compute fewer rows at once", smaller),
        ("decode fewer responses at once", fewer),
        *([] if decodes else _RECOMPUTING),
        _IN_4_BITS,
        ("shard over the processes", partial(_shared, stage=stage)),
        ("offload to host memory", partial(_offloaded, stage=stage)),
    ]


def _smaller_micro_batches(config: StageConfig, *, longest: int) -> Options:
    """Options of micro-batches of half the size at most, in the same step; empty without any."""
    for sizes in smaller_micro_batches(config, longest=longest):
        name, size = next(iter(sizes.items()))
        if 2 * size <= getattr(config.batch, name):
            return sizes
    return {}


def _recomputed(config: StageConfig) -> Options:
    names = [f"{role.prefix}gradient_checkpointing" for role in config.trained.values()]
    return {name: True for name in names if not is_on(flatten(config)[name])}


def _moved(config: StageConfig) -> Options:
    return {} if config.parallel.offload_activations else {"offload_activations": True}


def _in_4_bits(config: StageConfig) -> Options:
    adapters = [role.lora for role in config.trained.values()]
    frozen = all(lora.lora_dim > 0 and lora.only_optimize_lora for lora in adapters)
    whole = config.load.base_bits != 4 and config.parallel.tensor_parallel_size == 1
    return {"base_bits": 4} if frozen and whole else {}


_RECOMPUTING: tuple[Remedy, ...] = (
    ("recompute activations", _recomputed),
    ("offload activations to host memory", _moved),
)
_IN_4_BITS: Remedy = ("hold the base in 4 bits by dschat_lora[qlora]", _in_4_bits)


def _zero_stages(config: StageConfig, least: int) -> dict[str, object]:
    """Options of a ZeRO stage, of the roles below it; weights that are gathered are not compiled.

    Roles whose own stages were typed have options of theirs.
    """
    own = [f"{role.prefix}zero_stage" for role in config.trained.values()]
    names = dict.fromkeys(name if name in config.given else "zero_stage" for name in own)
    low = [name for name in names if (flatten(config)[name] or 0) < least]
    whole = ["compile"] if low and least == 3 and config.load.compile else []
    return {**dict.fromkeys(low, least), **dict.fromkeys(whole, False)}


def _shared(config: StageConfig, *, stage: int) -> Options:
    return _zero_stages(config, stage) if data_world_size() > 1 else {}


def _offloaded(config: StageConfig, *, stage: int) -> Options:
    return _zero_stages(config, stage) | ({} if config.parallel.offload else {"offload": True})


def _in_words(
    sizes: Mapping[str, int],
    remedies: Iterable[Remedy],
    device_bytes: int | None,
    config: StageConfig,
) -> str:
    """The parts in use, where they are known, and each remedy in words and as options."""
    stage, left = config.stage, []
    for words, remedy in remedies:
        if options := remedy(config) if callable(remedy) else remedy:
            config = with_values(config, options)
            left.append(f"{words} ({' '.join(command_line(options))})")
    used = f"by estimate {_parts_in_use(sizes, device_bytes)}; " if sizes else ""
    if not left:
        return f"{used}no further option saves memory: use a larger device or a smaller model"
    each = "try in this order, keeping the earlier ones: " if len(left) > 1 else "try to "
    advice = f"{used}{each}{', then '.join(left)}"
    if device_bytes is None or _fits(sizes, device_bytes) or stage not in STAGES:
        return advice
    asked = f"--num_gpus {world_size()} " if world_size() > 1 else ""
    asked += f"--for {device_bytes / GIB:.3g}GiB"
    advice += f"; dschat-lora plan {stage} with the options of the run and {asked}"
    return f"{advice} shows what is enough"


def _fits(sizes: Mapping[str, int], device_bytes: int) -> bool:
    return sum(sizes.values()) <= USABLE * device_bytes


def _parts_in_use(sizes: Mapping[str, int], device_bytes: int | None) -> str:
    """The parts that fill the device, the largest first, without negligible ones."""

    def gib(count: int) -> str:
        return f"{float(f'{count / GIB:.3g}'):g} GiB"

    total = sum(sizes.values())
    largest = sorted(sizes.items(), key=lambda part: -part[1])
    parts = [f"{gib(count)} {words}" for words, count in largest if count >= 0.005 * total]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    if device_bytes is None:
        return listed
    on = f"{listed}, on a device of {gib(device_bytes)}"
    if not _fits(sizes, device_bytes):
        return on
    return f"{on}, where it should fit: the estimate is too low, or another program uses the device"
