"""Throughput of a training run: real tokens, samples, TFLOP/s, memory; and a device's peak."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, astuple, dataclass, field

import torch

from dschat_lora.perf.cards import tabled_peak
from dschat_lora.perf.flops import Flops, ModelShape, deepspeed_chat_flops, step_flops

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class StepCounts:
    """What an optimizer step processed, summed over its micro-batches and all processes."""

    num_samples: int = 0
    num_tokens: int = 0  # without padding
    num_targets: int = 0  # supervised predictions
    num_attended: int = 0  # sum over samples of n (n + 1) / 2
    num_positions: int = 0  # B T of each micro-batch
    num_scored_pairs: int = 0  # B T^2 of each micro-batch: what a dense mask makes attention do
    num_chosen_targets: int = 0  # predictions of chosen answers, of pairs

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class _Total:
    """Sums over steps, from which every rate is one division."""

    steps: int = 0
    seconds: float = 0.0
    counts: StepCounts = field(default_factory=StepCounts)
    extra: Flops = field(default_factory=Flops)

    def add(self, other: "_Total") -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.counts += other.counts
        self.extra += other.extra


@dataclass(eq=False)
class Meter:
    """Times optimizer steps and turns their counts into rates.

    A step lasts from the end of the one before, so loading data counts. Call :meth:`start`
    before the first step, and again after anything that is not training (evaluation, saving).
    The device is waited for at these two points only.
    """

    shape: ModelShape | None  # None reports no FLOPs
    _: KW_ONLY
    gradient_checkpointing: bool
    world_size: int  # processes that the counts are summed over
    device: torch.device  # this process's
    peak_tflops: float | None = None  # best of one device, for ``mfu``; None where unknown
    skips_padding: bool = False  # padding and pairs of tokens under the mask are not computed
    clock: Callable[[], float] = time.perf_counter
    _mark: float | None = field(default=None, init=False)
    _first: _Total | None = field(default=None, init=False)
    _window: _Total = field(default_factory=_Total, init=False)
    _run: _Total = field(default_factory=_Total, init=False)

    def start(self) -> None:
        """Let the next step begin here."""
        synchronize(self.device)
        self._mark = self.clock()

    def step(self, counts: StepCounts, *, extra: Flops | None = None) -> Metrics:
        """Rates of the step that ends here, by counts summed over all processes.

        ``extra`` FLOPs are those besides one forward and backward pass of the counts, such as a
        reference model's, summed alike.

        Raises:
            RuntimeError: if :meth:`start` was never called.
        """
        if self._mark is None:
            raise RuntimeError("Meter.step() needs a Meter.start() before it")
        synchronize(self.device)
        mark, self._mark = self._mark, self.clock()
        one = _Total(1, self._mark - mark, counts, extra or Flops())
        self._window.add(one)
        if self._first is None:
            self._first = one
        else:
            self._run.add(one)
        return self._rates(one)

    def window(self) -> Metrics:
        """Mean rates of the steps since the last call; ``steps`` says how many. Empties it."""
        total, self._window = self._window, _Total()
        return {"steps": total.steps, **self._rates(total)}

    def summary(self) -> Metrics:
        """Mean rates over the run without its first step, which warms up.

        ``steps`` is how many steps were averaged, ``warmup_steps`` how many left out: 1, or 0
        if there is no other step.
        """
        warmup = int(self._run.steps > 0)
        total = self._run if warmup else self._first or _Total()
        return {"steps": total.steps, "warmup_steps": warmup, **self._rates(total)}

    def _rates(self, total: _Total) -> Metrics:
        """Metrics by their name in metrics.jsonl; rates are None over no time at all."""
        metrics: Metrics = {
            "step_seconds": total.seconds / total.steps if total.steps else None,
            "tokens_per_second": None,
            "samples_per_second": None,
            "tflops_per_device": None,
            "hardware_tflops_per_device": None,
            "tflops_deepspeed_chat": None,
            "mfu": None,
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        if total.seconds <= 0:
            return metrics
        counts = total.counts
        metrics["tokens_per_second"] = counts.num_tokens / total.seconds
        metrics["samples_per_second"] = counts.num_samples / total.seconds
        if self.shape is None:
            return metrics
        flops = total.extra + step_flops(
            self.shape,
            num_tokens=counts.num_tokens,
            num_attended=counts.num_attended,
            num_targets=counts.num_targets,
            gradient_checkpointing=self.gradient_checkpointing,
            num_positions=None if self.skips_padding else counts.num_positions,
            num_scored_pairs=None if self.skips_padding else counts.num_scored_pairs,
        )
        device_tera_seconds = total.seconds * self.world_size * 1e12
        tflops = flops.model / device_tera_seconds
        metrics["tflops_per_device"] = tflops
        metrics["hardware_tflops_per_device"] = flops.hardware / device_tera_seconds
        metrics["tflops_deepspeed_chat"] = self._deepspeed_chat(self.shape, total)
        metrics["mfu"] = None if self.peak_tflops is None else tflops / self.peak_tflops
        return metrics

    def _deepspeed_chat(self, shape: ModelShape, total: _Total) -> float:
        """TFLOP/s per device by the classic formula, which knows rows of one length only.

        It is linear in B S and B S^2, so rows of several lengths are equal to B S / S' rows of
        length ``S' = (sum B S^2) / (sum B S)``.
        """
        counts = total.counts
        if not counts.num_positions:
            return 0.0
        length = counts.num_scored_pairs / counts.num_positions
        flops = deepspeed_chat_flops(
            batch_size=counts.num_positions / length / self.world_size,
            sequence_length=length,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            lora_dim=shape.lora_dim,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        return flops / total.seconds / 1e12


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: tensors on a GPU, else the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """:func:`tabled_peak` of a device; None on anything but a GPU."""
    if device.type != "cuda":
        return None
    return tabled_peak(torch.cuda.get_device_name(device), dtype)


def measured_peak(
    device: torch.device, dtype: torch.dtype, *, size: int = 8192, rounds: int = 20
) -> float:
    """TFLOP/s of the fastest of ``rounds`` products of two random square matrices.

    Random, because zeros draw less power and run faster than any real data. One more product is
    made first, untimed. A CPU is done sooner with ``size`` 1024.
    """
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:]) / 1e12


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
