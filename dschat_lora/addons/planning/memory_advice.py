"""Advice on a GPU out of memory: what fills it by estimate, and options that take less."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace

import torch

from dschat_lora.config.groups import is_on
from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.stages import StageConfig, SupervisedConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_world_size, world_size
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.option_checks import check_divides, check_training
from dschat_lora.perf.cards import USABLE
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.errors import FullAfterReleaseError, FullWhileDecodingError
from dschat_lora.runtime.graphs import takes_graphs
from dschat_lora.runtime.memory import GIB, MemoryPlan, TrainedModel, peak_here, trained_model
from dschat_lora.runtime.micro_batches import smaller_micro_batches

Remedy = tuple[bool, str, Mapping[str, object]]  # whether it is left; in words; as options

_RANK = 16  # of the adapter advised instead of training every weight
_PARTS = {"optimizer": "of optimizer state", "loss": "for the loss"}


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
    now = trained_model(adapted, config, replace(settings, zero_stage=stage))
    sizes = _parts(now)
    rows_matter = not sizes or sizes["of weights"] < max(sizes.values())
    remedies = _supervised_remedies(adapted, config, settings, rows_matter=rows_matter)
    advice = f"out of GPU memory: {_in_words(sizes, remedies, device_bytes)}"
    if takes_graphs(now, config.model, peak=peak_here(settings.torch_dtype)):
        kept = now.estimated().activations / GIB
        advice += f". --training_graphs off takes {kept:.3g} GiB less, where graphs were recorded"
    if tokens := config.batch.tokens_per_device:
        advice += f". Fewer than --tokens_per_device {tokens} take less, in another run"
    return advice


def _parts(now: TrainedModel) -> dict[str, int]:
    """Bytes by what they are of or for; empty for architectures that are not understood."""
    try:
        memory = now.estimated()
    except ValueError:
        return {}
    if now.settings.offload and now.settings.zero_stage == 3:
        memory = replace(memory, weights=0)
    return {_PARTS.get(name, f"of {name}"): size for name, size in asdict(memory).items()}


def _supervised_remedies(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings, *, rows_matter: bool
) -> list[Remedy]:
    """Changes that a supervised stage has left, those of rows where they matter."""
    batch, lora, stage = config.batch, adapted.lora, settings.zero_stage
    processes, times = data_world_size(), batch.gradient_accumulation_steps
    size, length = config.parallel.tensor_parallel_size, config.data.max_seq_len
    trains_base = lora.lora_dim == 0 or not lora.only_optimize_lora
    rows = 0 if batch.tokens_per_device else batch.per_device_train_batch_size
    same = ""
    if rows:
        count = rows * times * processes
        same = f", the same batch of {count} rows a step, so the run can be resumed"
    fewer = _smaller_micro_batches(config, longest=length) if rows else {}
    larger = _larger_group(adapted, config)
    divided = {"gradient_accumulation_steps": times * larger // size}
    divided |= {"tensor_parallel_size": larger}
    # ZeRO divides optimizer state and gradients, then weights; adapters need the last alone.
    shared = 2 if trains_base and stage < 2 else 3
    # Optimizer state goes to the host, then weights, which only stage 3 moves.
    offloaded = 3 if settings.offload or not trains_base else max(stage, 1)
    moved = {"zero_stage": offloaded, "offload": True}
    adapter = {"only_optimize_lora": True} if lora.lora_dim else {"lora_dim": _RANK}
    shorter = {"max_seq_len": length // 2}
    return [
        (rows_matter, f"compute fewer rows at once{same}", fewer),
        *_recomputing(["gradient_checkpointing"], config),
        (settings.dtype == "fp32", "compute in 16 bits", {"dtype": "auto"}),
        (processes > 1 and stage < 3, "share over the processes", {"zero_stage": shared}),
        (larger > size, f"divide the model{same}", divided),
        (not (settings.offload and stage == 3), "use host memory", moved),
        (trains_base, "train adapters alone", adapter),
        (rows_matter and rows == 1, "shorten the rows", shorter),
    ]


def _larger_group(adapted: AdaptedModel, config: SupervisedConfig) -> int:
    """The next ``--tensor_parallel_size`` that processes and model allow, or the present one."""
    size, count = config.parallel.tensor_parallel_size, world_size()
    if config.parallel.context_parallel_size > 1:  # which goes with none
        return size
    for larger in (n for n in range(2 * size, count + 1, size) if count % n == 0):
        with suppress(ValueError):
            check_divides(adapted.model.config.to_dict(), larger)
            check_training(config.model, adapted.lora, larger)
            return larger
    return size


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
    return f"out of GPU memory while {doing}: {_in_words(sizes, remedies, device_bytes)}"


def _rl_remedies(
    config: RlhfConfig, *, decodes: bool, keeps_cache: bool, records: bool
) -> list[Remedy]:
    """Changes that step 3 has left; all but of the bits leave results alone."""
    batch, stage = config.batch, config.parallel.zero_stage or 0
    half = batch.rows_decoded // 2 // batch.num_generations * batch.num_generations
    fewer = _smaller_micro_batches(config, longest=config.data.max_seq_len)
    kept = [f"{role}_gradient_checkpointing" for role in config.trained]
    adapted = all(each.lora_dim > 0 for each in config.trained.values())
    frozen = adapted and config.classic.only_optimize_lora
    decoded = {"max_num_seqs": half} if half else {}
    hosted = {"zero_stage": 3, "offload": True}
    return [
        (keeps_cache, "free what decoding keeps", {"release_inference_cache": True}),
        (records, "train without CUDA graphs", {"training_graphs": "off"}),
        (not decodes, "compute fewer rows at once", fewer),
        (decodes or keeps_cache, "decode fewer responses at once", decoded),
        *([] if decodes else _recomputing(kept, config)),
        (frozen and config.load.base_bits != 4, "hold the base in 4 bits", {"base_bits": 4}),
        (data_world_size() > 1 and stage < 3, "share over the processes", {"zero_stage": 3}),
        (not (config.parallel.offload and stage == 3), "use host memory", hosted),
    ]


def _smaller_micro_batches(config: StageConfig, *, longest: int) -> Mapping[str, object]:
    """Options of micro-batches of half the size at most, in the same step; empty without any."""
    for sizes in smaller_micro_batches(config, longest=longest):
        name, size = next(iter(sizes.items()))
        if 2 * size <= getattr(config.batch, name):
            return sizes
    return {}


def _recomputing(names: Iterable[str], config: StageConfig) -> Iterator[Remedy]:
    """Recomputation where options of these names do not ask for it, and inputs in host memory."""
    left = [name for name in names if not is_on(flatten(config)[name])]
    recomputed = dict.fromkeys(left, True)
    yield True, "recompute activations", recomputed
    moved = recomputed | {"offload_activations": True}
    yield not config.parallel.offload_activations, "keep inputs of blocks in host memory", moved


def _in_words(
    sizes: Mapping[str, int], remedies: Iterable[Remedy], device_bytes: int | None
) -> str:
    """The parts in use, where they are known, and each remedy in words and as options."""
    used = f"by estimate {_parts_in_use(sizes, device_bytes)}; " if sizes else ""
    left = [
        f"{words} ({' '.join(command_line(options))})"
        for applies, words, options in remedies
        if applies and options
    ]
    if not left:
        return f"{used}no option is left that saves memory: take a larger device or a smaller model"
    advice = f"{used}try in this order: {', or '.join(left)}"
    if device_bytes is None or not sizes:
        return advice
    asked = f"--for {device_bytes / GIB:.3g}GiB"
    return f"{advice}; dschat-lora plan with the run's options and {asked} says what is enough"


def _parts_in_use(sizes: Mapping[str, int], device_bytes: int | None) -> str:
    """The parts that fill the device, the largest first, without negligible ones.

    ``sizes`` are their bytes by what they are of or for, such as "of weights".
    """

    def gib(count: int) -> str:
        return f"{float(f'{count / 2**30:.3g}'):g} GiB"

    total = sum(sizes.values())
    largest = sorted(sizes.items(), key=lambda part: -part[1])
    parts = [f"{gib(count)} {words}" for words, count in largest if count >= 0.005 * total]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    if device_bytes is None:
        return listed
    on = f"{listed}, on a device of {gib(device_bytes)}"
    if total > USABLE * device_bytes:
        return on
    return f"{on}, where training should fit unless another program uses it"
