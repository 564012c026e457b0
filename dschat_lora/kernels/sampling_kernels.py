"""Triton's side of :mod:`dschat_lora.kernels.sampling`."""

import triton
import triton.language as tl


@triton.jit
def block_of(logits, row, step, block, vocabulary, temperature, BLOCK: tl.constexpr):
    """Logits of one block of a row over the temperature, and their numbers."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * step + columns
    scaled = tl.load(place, mask=columns < vocabulary, other=float("-inf"))
    return scaled.to(tl.float32) / temperature, columns


@triton.jit
def finite(maximum):
    """A largest logit, 0 for minus infinity, of which differences would be no number."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def sums_kernel(logits, maxima, sums, step, vocabulary, temperature, BLOCK: tl.constexpr) -> None:
    """The largest logit of a block, and the sum of its weights."""
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    scaled, _ = block_of(logits, row, step, block, vocabulary, temperature, BLOCK)
    largest = tl.max(scaled, 0)
    weights = tl.exp(scaled - finite(largest)).to(tl.float64)
    tl.store(maxima + row * blocks + block, largest)
    tl.store(sums + row * blocks + block, tl.sum(weights, 0))


@triton.jit
def draw_kernel(
    logits,
    maxima,
    sums,
    uniforms,
    sequences,
    numbers,
    tokens,
    logprobs,
    chosen,
    step,
    table_step,
    sequence_step,
    number_step,
    vocabulary,
    blocks,
    temperature,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOGPROBS: tl.constexpr,
) -> None:
    """The block in which weights reach their share of all, and the token there."""
    row = tl.program_id(0)
    place = tl.load(sequences + row * sequence_step) * table_step
    place += tl.load(numbers + row * number_step)
    uniform = tl.load(uniforms + place)
    number = tl.arange(0, BLOCKS)
    inside = number < blocks
    own = tl.load(maxima + row * blocks + number, mask=inside, other=float("-inf"))
    largest = finite(tl.max(own, 0))
    factors = tl.exp(own - largest).to(tl.float64)
    masses = factors * tl.load(sums + row * blocks + number, mask=inside, other=0.0)
    running = tl.cumsum(masses, 0)
    total = tl.sum(tl.where(number == BLOCKS - 1, running, 0.0), 0)
    wanted = uniform * total
    block = tl.minimum(tl.sum((running < wanted).to(tl.int32), 0), blocks - 1)
    before = tl.sum(tl.where(number == block - 1, running, 0.0), 0)
    factor = tl.sum(tl.where(number == block, factors, 0.0), 0)
    scaled, columns = block_of(logits, row, step, block, vocabulary, temperature, BLOCK)
    maximum = tl.max(tl.where(number == block, own, float("-inf")), 0)
    weights = tl.exp(scaled - finite(maximum)).to(tl.float64)
    reached = before + factor * tl.cumsum(weights, 0)
    first = block * BLOCK + tl.sum((reached < wanted).to(tl.int32), 0)
    # Where rounding leaves the sum of the block below its share, the last token with a weight.
    first = tl.minimum(first, tl.max(tl.where(weights > 0, columns, 0), 0))
    drawn = total > 0  # not of NaN
    token = tl.where(drawn, first, 0)
    tl.store(tokens + place, tl.where(drawn, first, -1).to(tl.int64))
    tl.store(chosen + row, token.to(tl.int64))
    if LOGPROBS:
        logit = tl.load(logits + row.to(tl.int64) * step + token).to(tl.float32) / temperature
        tl.store(logprobs + place, logit - largest - tl.log(total.to(tl.float32)))
