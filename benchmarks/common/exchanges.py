"""What processes exchange in an optimizer step, by kind and bytes, and the time that takes.

Formulas of what the engine, DeepSpeed and the layers do; ``tests/fakecuda/test_scaling.py`` counts
the same on real shapes. Bytes are of whole tensors: of what is summed, or of what the ranks' parts
make. Only exchanges that grow with the model or the batch are here; losses, norms and requests are
a few numbers a step, at any number of ranks.
"""

import math
from dataclasses import dataclass
from typing import Literal

from dschat_lora.perf.memory import REUSE_DISTANCE

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
FACTOR = 4  # bytes of an element of an adapter, of its gradient and of each of AdamW's tensors
NUMBER = 8  # bytes of an element in the tables of step 3
BUCKET = 100_000_000  # elements that are summed at once at ZeRO 0
REUSE = REUSE_DISTANCE // 2  # elements that ZeRO 3 keeps from the forward to the backward pass


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in an optimizer step; each rank takes part in all of them.

    Attributes:
        ranks: of the group.
        bytes: of all of them together.
        times: how many, about.
    """

    kind: Kind
    ranks: int
    bytes: int
    times: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, and receives, in rings (arXiv:1802.05799, section 3)."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class ModelSize:
    """A model with adapters on a frozen base, as its processes exchange it.

    Attributes:
        frozen, trained: elements, of the whole model; adapters are in its blocks.
        embedding: elements of all embeddings, frozen. head: of an output head of its own, 0 where
            it is the embedding.
        layers, hidden: of its blocks.
        linears: adapted layers of a block. last: elements of the one that computes last.
        rank: of the adapters.
        width: bytes of a frozen element, and of an activation.
    """

    frozen: int
    trained: int
    embedding: int
    head: int
    layers: int
    hidden: int
    linears: int
    last: int
    rank: int
    width: int = 2

    @property
    def bytes(self) -> int:
        """Of all weights."""
        return self.frozen * self.width + self.trained * FACTOR

    @property
    def whole_factors(self) -> int:
        """Elements of the factors beside the hidden size: tensor parallelism leaves them whole."""
        return self.layers * self.linears * self.rank * self.hidden

    def trained_on(self, tensor_ranks: int) -> int:
        """Elements that one of so many tensor-parallel ranks trains."""
        return self.whole_factors + (self.trained - self.whole_factors) // tensor_ranks


@dataclass(frozen=True)
class Cluster:
    """Machines and what they are assumed to reach; rates are those of their data sheets.

    Attributes:
        name: for the reader.
        tflops: dense 16-bit matmul peak of a GPU. share: of it that training reaches.
        memory_rate: of a GPU, bytes/s. memory_share: of it that decoding reaches.
        gpus: of a host.
        inside: bytes/s that a GPU sends to others of its host.
        between: bytes/s that a host sends to others.
        link_share: of both that collectives reach.
        latency: seconds that a collective takes for each doubling of its ranks.
    """

    name: str
    tflops: float
    share: float
    memory_rate: float
    memory_share: float
    gpus: int
    inside: float
    between: float
    link_share: float = 0.8
    latency: float = 10e-6

    def compute_seconds(self, flops: float) -> float:
        return flops / (self.tflops * 1e12 * self.share)

    def exchange_seconds(self, exchange: Exchange, *, apart: int = 1) -> float:
        """Time of the collectives one after another, with nothing else going on.

        Rings of all GPUs of a host cross to the next host once, so that a host's whole link
        carries what one GPU sends. Ranks that are ``apart`` in number share it with the groups
        between them.
        """
        hosts = exchange.ranks * apart > self.gpus
        rate = min(self.inside, self.between / apart) if hosts else self.inside
        doublings = math.log2(max(2, exchange.ranks))
        return exchange.sent / (rate * self.link_share) + exchange.times * self.latency * doublings


def data_exchanges(
    size: ModelSize,
    *,
    zero_stage: int,
    ranks: int,
    micro_batches: int = 1,
    recomputes: bool = False,
) -> list[Exchange]:
    """Between data-parallel ranks in an optimizer step of a model that each of them trains.

    ZeRO 0 and 1 sum the gradient once a step, ZeRO 2 and 3 after every micro-batch: DeepSpeed
    (0.19) by an all-reduce at ZeRO 1 and 2, of which each rank keeps its part. ZeRO 3 gathers the
    weights for the forward pass, again for the backward pass, and where a block ``recomputes``
    once more in between, but for its last layer, which the backward pass begins with. Without, the
    last blocks before the backward pass begins are kept (``stage3_max_reuse_distance``). Base and
    factors of a layer are two collectives.
    """
    if ranks == 1:
        return []
    gradient = size.trained * FACTOR
    if zero_stage == 0:
        return [Exchange("all_reduce", ranks, gradient, -(-size.trained // BUCKET))]
    if zero_stage < 3:
        times = micro_batches if zero_stage == 2 else 1
        return [
            Exchange("all_reduce", ranks, times * gradient, times),
            Exchange("all_gather", ranks, gradient),
        ]
    gathered, times = _gathered(size, recomputes=recomputes)
    return [
        Exchange("reduce_scatter", ranks, micro_batches * gradient, micro_batches),
        Exchange("all_gather", ranks, micro_batches * gathered, micro_batches * times),
    ]


def _gathered(size: ModelSize, *, recomputes: bool) -> tuple[int, int]:
    """(bytes, collectives) of the weights that ZeRO 3 gathers for a micro-batch.

    Within 2 percent from a billion elements on, from 3 billion where blocks are recomputed. The
    embedding has no backward pass, and the head takes both at once.
    """
    blocks = size.frozen - size.embedding - size.head + size.trained
    block_bytes = size.bytes - (size.embedding + size.head) * size.width
    if recomputes:
        passes = 3 - size.last * size.layers / blocks
    else:
        passes = 2 - min(1.0, (REUSE - (size.head or size.embedding)) / blocks)
    again = size.embedding if not size.head and blocks > 2 * REUSE else size.head
    ends = (size.embedding + again) * size.width
    return round(passes * block_bytes) + ends, round(passes * 2 * size.layers * size.linears)


def tensor_exchanges(
    size: ModelSize,
    *,
    ranks: int,
    positions: int,
    targets: int,
    micro_batches: int = 1,
    recomputes: bool = False,
) -> list[Exchange]:
    """Between the ranks that hold one model, in a step on a frozen base.

    A micro-batch has ``positions``, padding included, and ``targets`` predictions. Each block sums
    its activations twice forward and twice backward, and once more if it ``recomputes``, which
    stops short of its last sum. The first block needs a gradient of its input then alone; the
    embedding sums once. The factor of each adapter that every rank holds gets the sum of its
    gradients. With sequence parallelism a sum of activations is a scattered sum and a gathering,
    which send as much.
    """
    if ranks == 1:
        return []
    activations = positions * size.hidden * size.width
    loss = targets * (size.hidden * size.width + 3 * FACTOR)
    sums = 5 * size.layers + 1 if recomputes else 4 * size.layers
    times = sums + size.layers * size.linears + 4
    total = sums * activations + size.whole_factors * FACTOR + loss
    return [Exchange("all_reduce", ranks, micro_batches * total, micro_batches * times)]


def experience_exchanges(
    responses: int, *, new_tokens: int, longest: int, ranks: int, old_outputs: int = 2
) -> list[Exchange]:
    """Of step 3's iteration, by which every rank gets the experience of all.

    Tokens and log-probabilities of ``responses``, of all ranks, with room for ``new_tokens`` each;
    then their scores, and for the tokens of the ``longest`` log-probabilities of the reference and
    ``old_outputs`` (actor, critic). All in fp64.
    """
    if ranks == 1:
        return []
    drawn = responses * (3 + 2 * new_tokens) * NUMBER
    scored = responses * (2 + (1 + old_outputs) * longest) * NUMBER
    return [Exchange("all_gather", ranks, drawn + scored, 2)]


def experience_bytes(responses: int, *, longest: int) -> int:
    """What every rank keeps on its device of an iteration: a mask, and six tables in fp32.

    Log-probabilities of actor and reference, values, rewards, advantages and returns.
    """
    return responses * longest * (1 + 6 * FACTOR)
