"""Whether the passes of training run as CUDA graphs, and what keeps them from it."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from dschat_lora.config.groups import LoadConfig
from dschat_lora.engine.distributed import device, device_type, planned_varlen
from dschat_lora.lora.experts import expert_weights
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.backbone import Backbone, BackboneModel, recurrent_layers
from dschat_lora.models.cuda_graphs import cuda_graphs
from dschat_lora.models.training_graphs import TrainingGraphs
from dschat_lora.perf.cards import USABLE
from dschat_lora.runtime.memory import MemoryPlan, TrainedModel, advice, peak_here

# Compute capabilities on which torch multiplies experts' rows without reading how many each has.
_GROUPED = ((9, 0), (10, 0))


def takes_graphs(trained: TrainedModel, load: LoadConfig, *, peak: float | None) -> bool:
    """Whether ``--training_graphs`` has full micro-batches of a model replayed, memory aside.

    Left to ``auto``, that is where it takes less time by estimate on a card of ``peak`` dense
    TFLOP/s (None: not known, so neither is that).
    """
    if load.training_graphs == "off" or obstacle(trained, load) is not None:
        return False
    if load.training_graphs == "on":
        return True
    with suppress(ValueError):  # an architecture that is not understood
        if peak is not None:
            seconds = trained.seconds(peak, fused=load.fused_kernels != "off")
            return seconds.recorded().total < seconds.total
    return False


def with_graphs(
    trained: Iterable[TrainedModel],
    load: LoadConfig,
    *,
    peak: float | None,
    left: Callable[[], float],
) -> list[TrainedModel]:
    """The models whose passes run as CUDA graphs: asked for, or faster and in ``left`` bytes."""
    taken = [each for each in trained if takes_graphs(each, load, peak=peak)]
    if load.training_graphs == "on" or not taken:
        return taken
    fitting, free = [], left()
    for each in taken:
        free -= each.estimated().activations
        if free >= 0:
            fitting.append(each)
    return fitting


def plan_graphs(
    plan: MemoryPlan | None, models: Mapping[str, TrainedModel], load: LoadConfig, *, free: int
) -> tuple[MemoryPlan | None, list[str]]:
    """The plan with what graphs keep, and the names of the models that take them.

    ``auto`` takes them where they fit ``free`` bytes.

    Raises:
        ValueError: if graphs are asked for, and a model cannot have them.
    """
    if load.training_graphs == "on":
        for each in models.values():
            if (reason := obstacle(each, load)) is not None:
                raise ValueError(f"--training_graphs on: {reason}; use auto or off")
    of = list(models.values())
    taken = with_graphs(
        of,
        load,
        peak=peak_here(of[0].settings.torch_dtype),
        left=lambda: math.inf if plan is None else USABLE * free - plan.peak,
    )
    if plan is not None:
        # A pass of a shape that is not recorded has its own activations beside these.
        kept = sum(each.estimated().activations for each in taken)
        plan = replace(plan, graphs=kept)
    return plan, [name for name, each in models.items() if each in taken]


def launches_note(trained: TrainedModel, load: LoadConfig, *, recorded: bool) -> str | None:
    """What the log says of launching kernels on a GPU."""
    if recorded:
        return "forward and backward passes below the head run as CUDA graphs (--training_graphs)"
    return advice("launches", trained, load) if device_type() == "cuda" else None


def record_training(network: nn.Module, model: nn.Module) -> None:
    """Have passes below the head of a model of ``network`` recorded; it is where it computes."""
    for each in network.modules():
        if isinstance(each, BackboneModel) and each.model is model:
            each.backbone.graphs = TrainingGraphs(each.backbone.model.base_model, cuda_graphs())


def obstacle(trained: TrainedModel, load: LoadConfig) -> str | None:
    """What keeps passes of a model from being CUDA graphs, by its option; None where nothing does.

    That a layer waits for the GPU is seen when it is recorded.
    """
    if device_type() != "cuda":
        return "CUDA graphs need a GPU"
    model, settings = trained.model, trained.settings
    stage = settings.stage_in_use(
        settings.native_dtype(p for p in model.parameters() if p.requires_grad)
    )
    reasons = {
        "--compile changes the operations of the blocks": load.compile,
        f"gradients of ZeRO {stage} are managed by DeepSpeed and not accumulated in place": stage
        > 0,
        "--tensor_parallel_size exchanges tensors between processes, which cannot be recorded": (
            group_of(model) is not None
        ),
        "--context_parallel_size splits rows by their lengths": trained.processes > 1,
        "--offload_activations copies to the host, which cannot be recorded": trained.offloads,
    }
    for name in ("neftune_noise_alpha", "router_aux_loss_coef"):
        reasons[f"--{name} is not recorded"] = getattr(load, name, 0) > 0
    return next((reason for reason, holds in reasons.items() if holds), None) or _by_model(model)


def _by_model(model: nn.Module) -> str | None:
    here = device() if planned_varlen() is None else None
    if (drawing := _drawing(model)) is not None:
        return f"{drawing} would draw different random numbers for padded rows"
    if "media" in vars(model):
        return "rows with images cannot be recorded"
    if recurrent_layers(model):
        return "recurrent layers depend on the lengths of sequences"
    if not Backbone(model).skips_padding(here):
        return (
            "this GPU, dtype or architecture uses masked attention, but graphs need "
            "variable-length attention in 16 bits"
        )
    if here is None or not expert_weights(model):
        return None
    if torch.cuda.get_device_capability(here) not in _GROUPED or model.dtype != torch.bfloat16:
        return "with this GPU and dtype the host reads the number of rows of each expert"
    return None


def _drawing(model: nn.Module) -> str | None:
    """The option by which layers draw random numbers in training, if they do."""
    for module in model.modules():
        names = {**vars(module), **({"dropout": module.p} if hasattr(module, "p") else {})}
        for name, value in names.items():
            if "drop" in name and isinstance(value, float) and value > 0:
                adapter = hasattr(module, "lora_A")
                return f"--{'lora_' if adapter else ''}dropout {value:g}"
    return None
