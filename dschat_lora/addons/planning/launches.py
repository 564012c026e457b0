"""Advice where launching kernels takes longer than their work."""

from dschat_lora.config.groups import LoadConfig
from dschat_lora.engine.distributed import device
from dschat_lora.perf.throughput import device_peak
from dschat_lora.runtime.memory import TrainedModel


def launch_advice(launching: float, work: float, *, compiled: bool) -> str | None:
    """What helps where launching a pass's kernels takes more seconds than their work does."""
    if launching <= work:
        return None
    more = "" if compiled else ", and --compile launches fewer"
    return (
        f"launching kernels takes about {launching * 1e3:.0f} ms and their work {work * 1e3:.0f} "
        f"ms by estimate: larger micro-batches use the GPU better{more}"
    )


def micro_batch_advice(trained: TrainedModel, load: LoadConfig) -> str | None:
    """:func:`launch_advice` of training on a full micro-batch; None where nothing is known."""
    peak = device_peak(device(), trained.settings.torch_dtype)
    if peak is None:
        return None
    try:
        seconds = trained.seconds(peak, fused=load.fused_kernels != "off")
    except ValueError:
        return None
    return launch_advice(seconds.launching, seconds.work, compiled=load.compile)
