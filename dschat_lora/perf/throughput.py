"""FLOPs of a step from the shapes of the layers, and the throughput that a run reaches."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, astuple, dataclass, field
from functools import cached_property

import torch

from dschat_lora.perf.cards import tabled_peak


@dataclass(frozen=True)
class LinearShape:
    """One ``x W^T + s (x A^T) B^T``. FLOPs are per position; a multiply-add counts two.

    Of experts, ``uses`` of a position are those it is routed to, as a share of all where each is a
    layer of its own. A low-rank update of an embedding has ``in_features = 0``: looking up a row
    is no matmul.
    """

    name: str
    in_features: int
    out_features: int
    trained: bool  # W receives a gradient
    bias_trained: bool = False
    rank: int = 0  # of the update, of all parts of a packed layer together; 0 without one
    adapter_trained: bool = False
    whole: bool = False  # base and update are one operation, run as a whole or not at all
    input_needs_grad: bool = True
    uses: float = 1  # of a position: how many experts it is sent to
    closes: bool = False  # reads what layers before it made of the input of its half
    routed: bool = False  # an expert's: what it reads is a copy of the tokens sent to it

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass reads x: the gradients of W and of A do."""
        return self.trained or self.adapter_trained

    @property
    def output_needs_grad(self) -> bool:
        return self.input_needs_grad or self.saves_input or self.bias_trained

    @cached_property
    def base(self) -> float:
        """FLOPs of ``x W^T``, and of each of the two products of its backward pass."""
        return 2 * self.uses * self.in_features * self.out_features

    @cached_property
    def low_rank(self) -> float:
        """FLOPs of a product of the update for each feature of its input or output."""
        return 2 * self.uses * self.rank

    @cached_property
    def forward(self) -> float:
        return self.base + self.low_rank * (self.in_features + self.out_features)

    @cached_property
    def backward(self) -> float:
        flops = (self.input_needs_grad + self.trained) * self.base
        if self.adapter_trained:  # gradients of A and B
            flops += self.low_rank * (self.in_features + self.out_features)
        if self.adapter_trained or self.input_needs_grad:  # dY B, the gradient of x A^T
            flops += self.low_rank * self.out_features
        if self.input_needs_grad:  # (dY B) A
            flops += self.low_rank * self.in_features
        return flops


@dataclass(frozen=True)
class BlockShape:
    """One transformer block, which is also the unit of gradient checkpointing."""

    attention: tuple[LinearShape, ...]  # q, k, v in some order, or fused; then the output
    mlp: tuple[LinearShape, ...]  # up, or gate and up; then down; routers and experts alike
    # Query heads x dimension of a value, 0 where no token is scored against others.
    attention_width: int
    score_width: int  # query heads x dimension of a query
    heads: int
    cache_width: int  # numbers of a token that decoding keeps: keys and values
    # How many of dP, dV, dQ, dK autograd forms; below 4 only where q, k, v need none.
    attention_backward: int
    recomputed: float  # FLOPs per position of the linears which checkpointing runs again
    norm_width: int = 0  # numbers that norms read beside the one before each half
    has_state: bool = False  # carried from token to token, as in linear attention
    uncounted: tuple[str, ...] = ()  # weights of products that are not understood

    @cached_property
    def linears(self) -> tuple[LinearShape, ...]:
        return (*self.attention, *self.mlp)

    @cached_property
    def pair(self) -> int:
        """FLOPs of a query with a key: its score, and its share of the values."""
        return 2 * (self.score_width + self.attention_width)


@dataclass(frozen=True)
class ModelShape:
    """A model for FLOP counts; :func:`dschat_lora.perf.shape.describe` reads it from modules."""

    blocks: tuple[BlockShape, ...]
    outside: tuple[LinearShape, ...]  # other linears run on every position: projections, score
    head: LinearShape | None  # the language-model head; None on a reward model
    hidden_size: int
    vocab_size: int
    fused_attention: bool  # the kernel forms the scores again in the backward pass

    @cached_property
    def num_layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def lora_dim(self) -> int:
        """The largest rank in use, 0 without LoRA."""
        linears = (*self.outside, *(x for block in self.blocks for x in block.linears))
        return max((linear.rank for linear in linears), default=0)

    @property
    def uncounted(self) -> str:
        """What counts leave out, for the log; empty where nothing is."""
        count = sum(block.has_state for block in self.blocks)
        names = dict.fromkeys(
            name.rpartition(".")[2] for block in self.blocks for name in block.uncounted
        )
        parts = [f"the recurrence of {count} of {self.num_layers} layers"] * (count > 0)
        parts += [f"products with {', '.join(names)}"] * bool(names)
        return " and ".join(parts)


@dataclass(frozen=True)
class Flops:
    """Floating point operations; a multiply-add counts two."""

    model: float = 0.0  # what training needs: real tokens, causal pairs, no recomputation
    hardware: float = 0.0  # what kernels execute: padding, masked pairs and recomputation too

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.model + other.model, self.hardware + other.hardware)


def step_flops(
    shape: ModelShape,
    *,
    num_tokens: float,
    num_attended: float,
    num_targets: float,
    gradient_checkpointing: bool,
    num_positions: float | None = None,
    num_scored_pairs: float | None = None,
) -> Flops:
    """FLOPs of one forward and backward pass; matmuls only, no norms, no optimizer.

    ``num_tokens`` are without padding, ``num_attended`` causal pairs, the sum over samples of
    n (n + 1) / 2, and ``num_targets`` supervised positions.

    Per token, a linear layer costs ``2 d_in d_out`` for the output, as much for the gradient
    of its input and of its weight, each only where autograd forms it; a low-rank update
    costs ``2 r (d_in + d_out)`` each time. Per (query, key) pair and layer, attention costs
    ``4 heads head_dim`` forward and twice that backward. The head runs on supervised positions
    only, and is never recomputed: its gradient is formed together with the logits.

    The hardware count differs in three ways: if given, it takes ``num_positions``, with padding
    (B T for each micro-batch), and ``num_scored_pairs``, all that the attention kernel scores
    (B T^2 for each micro-batch with a dense mask); a fused attention kernel forms the scores again
    (5 products backward, not 4); and gradient checkpointing repeats each block up to the last
    tensor that its backward pass reads. Checkpointing is taken to be non-reentrant, one block a
    unit.
    """
    positions = num_tokens if num_positions is None else num_positions
    scored = num_attended if num_scored_pairs is None else num_scored_pairs
    model, hardware = _forward(shape, num_tokens, num_attended), _forward(shape, positions, scored)
    linear = sum(x.backward for block in shape.blocks for x in block.linears)
    linear += sum(x.backward for x in shape.outside)
    model += linear * num_tokens
    hardware += linear * positions
    for block in shape.blocks:
        # dP and dV cost what a forward product with the values does, dQ and dK one of scores.
        needed = block.attention_backward * block.pair / 2
        again = 2 * block.score_width if shape.fused_attention and needed else 0
        executed = 2 * block.pair if again else needed
        model += needed * num_attended
        hardware += (executed + again) * scored
        if gradient_checkpointing and block.recomputed:
            hardware += block.recomputed * positions + block.pair * scored
    head = 0 if shape.head is None else shape.head.forward + shape.head.backward
    return Flops(model + head * num_targets, hardware + head * num_targets)


def forward_flops(
    shape: ModelShape,
    *,
    num_tokens: float,
    num_attended: float,
    num_targets: float,
    num_positions: float | None = None,
    num_scored_pairs: float | None = None,
) -> Flops:
    """FLOPs of a forward pass alone (scoring, evaluation); arguments as :func:`step_flops`."""
    positions = num_tokens if num_positions is None else num_positions
    scored = num_attended if num_scored_pairs is None else num_scored_pairs
    head = 0 if shape.head is None else shape.head.forward * num_targets
    return Flops(
        _forward(shape, num_tokens, num_attended) + head, _forward(shape, positions, scored) + head
    )


def _forward(shape: ModelShape, positions: float, pairs: float) -> float:
    """Forward FLOPs without the head."""
    linear = sum(x.forward for block in shape.blocks for x in block.linears)
    linear += sum(x.forward for x in shape.outside)
    return linear * positions + sum(block.pair for block in shape.blocks) * pairs


def deepspeed_chat_flops(
    shape: ModelShape,
    *,
    batch_size: float,
    sequence_length: float,
    lora_dim: int,
    gradient_checkpointing: bool,
) -> float:
    """FLOPs of one step as DeepSpeed-Chat (utils/perf.py) counts them, for comparison with logs.

    ``24 f B S L h^2 (1 + S / (6 h) + V / (16 L h))`` with ``f = 3``, or 4 when checkpointing,
    and ``f - 1 + k``, ``k = 2 lora_dim / hidden_size``, with LoRA. Wrong in it: ``k`` counts the
    update in one pass of three or four, ``f`` shrinks attention too, and the head is off by 3/4 at
    ``f = 3``; MHA, an ungated 4h MLP, full rows and all-pairs attention are taken for granted.

    ``batch_size`` is the rows that one device processes in the step (DeepSpeed-Chat divides this
    per-device figure by the number of processes once more; that is not done here),
    ``sequence_length`` their positions, padding included. The vocabulary is counted even where
    there is no such head; ``lora_dim`` is 0 without LoRA.
    """
    factor, hidden_size = 4.0 if gradient_checkpointing else 3.0, shape.hidden_size
    if lora_dim > 0:
        factor -= 1 - 2 * lora_dim / hidden_size
    linear = 24 * factor * batch_size * sequence_length * shape.num_layers * hidden_size**2
    attention = sequence_length / (6 * hidden_size)
    head = shape.vocab_size / (16 * shape.num_layers * hidden_size)
    return linear * (1 + attention + head)


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

    def sizes(self, *, skips_padding: bool) -> dict[str, float]:
        """Arguments of :func:`step_flops`; without padding where that is not computed."""
        names = ["num_tokens", "num_attended", "num_targets"]
        names += [] if skips_padding else ["num_positions", "num_scored_pairs"]
        return {name: getattr(self, name) for name in names}


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
    before the first step, and again after anything that is not training (evaluation, saving);
    there alone the device is waited for. A step ends where its results are read: when the device
    has made it or, where that waits for the host, when the next one is queued. The seconds of
    steps add up to those from a start to the last of them.
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
            gradient_checkpointing=self.gradient_checkpointing,
            **counts.sizes(skips_padding=self.skips_padding),
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
            shape,
            batch_size=counts.num_positions / length / self.world_size,
            sequence_length=length,
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


def memory_of(device: torch.device) -> str:
    """What :func:`peak_memory_bytes` counts, in words where that is more than tensors."""
    return "" if device.type == "cuda" else " (the whole process)"


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
