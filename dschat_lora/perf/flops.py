"""FLOPs of one training step: counted from the model's shape, and by the classic formula."""

from dataclasses import dataclass


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

    @property
    def base(self) -> float:
        """FLOPs of ``x W^T``, and of each of the two products of its backward pass."""
        return 2 * self.uses * self.in_features * self.out_features

    @property
    def low_rank(self) -> float:
        """FLOPs of a product of the update for each feature of its input or output."""
        return 2 * self.uses * self.rank

    @property
    def forward(self) -> float:
        return self.base + self.low_rank * (self.in_features + self.out_features)

    @property
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

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return (*self.attention, *self.mlp)

    @property
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

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
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
    *,
    batch_size: float,
    sequence_length: float,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
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
    ``sequence_length`` their positions, padding included. ``vocab_size`` is counted even where
    there is no such head; ``lora_dim`` is 0 without LoRA.
    """
    factor = 4.0 if gradient_checkpointing else 3.0
    if lora_dim > 0:
        factor -= 1 - 2 * lora_dim / hidden_size
    linear = 24 * factor * batch_size * sequence_length * num_layers * hidden_size**2
    attention = sequence_length / (6 * hidden_size)
    head = vocab_size / (16 * num_layers * hidden_size)
    return linear * (1 + attention + head)
