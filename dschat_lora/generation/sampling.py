"""Sampling of tokens from logits, with random numbers of each sequence's own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from dschat_lora.algos.logprobs import token_logprobs
from dschat_lora.algos.segments import to_device
from dschat_lora.kernels.sampling import draw_tokens
from dschat_lora.kernels.support import runs_kernels
from dschat_lora.lora.collectives import TensorGroup

NO_TOKEN = -1  # in the place of a token that cannot be drawn
# Logits of up to 1e32 divided by it are finite in fp32.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """Options of sampling."""

    max_new_tokens: int  # bound on a response, its end-of-sequence token included
    do_sample: bool = True  # False takes the most probable token, and the rest has no effect
    temperature: float = 1.0  # divides the logits, at least MIN_TEMPERATURE
    top_p: float = 1.0  # draw from the most probable tokens up to this sum, in (0, 1]
    top_k: int = 0  # draw from so many of the most probable tokens; 0 means all
    policy_temperature: float | None = None  # of kept log-probabilities; None: temperature

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}")
        for name in ("temperature", "policy_temperature"):
            value = getattr(self, name)
            if value is not None and not value >= MIN_TEMPERATURE:
                raise ValueError(
                    f"{name} must be at least {MIN_TEMPERATURE:g}, found {value}; do_sample False "
                    "is greedy"
                )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], found {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, found {self.top_k}")

    @property
    def draws_from_policy(self) -> bool:
        """Whether tokens are drawn from the distribution that log-probabilities are kept of."""
        same = self.policy_temperature in (None, self.temperature)
        return self.do_sample and same and self.top_p == 1 and self.top_k == 0


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """(len(seeds), count) float64 in (0, 1]: row i is a function of ``seeds[i]`` alone."""
    # Not torch's generator, which takes but 32 bits of a seed.
    rows = [[1.0 - draw() for _ in range(count)] for draw in (Random(s).random for s in seeds)]
    return torch.tensor(rows, dtype=torch.float64).view(len(seeds), count)


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """(B,) int64 token of each row; NO_TOKEN where its largest logit is not finite, or one is NaN.

    The drawn token is the first one, in vocabulary order, up to which the kept probabilities
    sum to at least ``uniform`` times their total. ``logits`` are (B, V) of any floating dtype,
    ``uniform`` (B,) float64 in (0, 1], so that a token of probability 0 is never drawn.
    """
    if not sampling.do_sample:
        largest, drawn = logits.max(-1)
        undrawn = largest - largest != 0  # NaN, of infinities too
    else:
        if sampling.temperature != 1:
            logits = logits.float() / sampling.temperature
        if sampling.top_k or sampling.top_p < 1:
            logits = keep_top(logits, sampling)
        sums = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
        total = sums[:, -1]
        drawn = torch.searchsorted(sums, (uniform * total)[:, None])[:, 0]
        undrawn = total != total  # NaN where a logit is NaN or infinity, or all are -infinity
    return drawn.masked_fill(undrawn, NO_TOKEN)


def sample_each(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> list[int]:
    """The next token of each row, by options of its own; see :func:`sample_tokens`.

    ``logits`` are (B, V); ``uniforms`` numbers in (0, 1], of which greedy rows take none.
    """
    rows: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows.setdefault(sampling, []).append(row)
    chosen = [0] * len(samplings)
    for sampling, own in rows.items():
        uniform = torch.tensor([uniforms[row] for row in own], dtype=torch.float64)
        part = logits
        if len(own) < len(chosen):
            part = logits[to_device(torch.tensor(own), logits.device)]
        tokens = sample_tokens(part, to_device(uniform, logits.device), sampling).tolist()
        for row, token in zip(own, tokens, strict=True):
            chosen[row] = token
    return chosen


def keep_top(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits, -inf where top-k, and then top-p, leave a token out; ties stay together.

    Top-p (arXiv:1904.09751, section 3.1) is over what top-k leaves.

    Args:
        logits: (B, V), divided by the temperature.
        sampling: the options.
    """
    vocabulary = logits.shape[-1]
    kept = min(sampling.top_k or vocabulary, vocabulary)
    if kept == vocabulary and sampling.top_p == 1:
        return logits
    best = logits.topk(kept, sorted=True).values.float()
    cutoff = best[:, -1:]
    if sampling.top_p < 1:
        # Of tokens tied with the last of the top k, those beyond k count for top-p as nothing.
        reached = best.softmax(-1).cumsum(-1)
        needed = 1 + (reached[:, :-1] < sampling.top_p).sum(-1, keepdim=True)
        cutoff = best.gather(-1, needed - 1)
    return logits.masked_fill(logits < cutoff, -torch.inf)


def undrawn_reason(broken_weights: Sequence[str]) -> str:
    """Why no token could be drawn, given the names of weights that are not finite."""
    reason = "no token can be sampled: the model's logits are not finite"
    if not broken_weights:
        return reason
    more = f" and {len(broken_weights) - 1} more" if broken_weights[1:] else ""
    return f"{reason}, as its weight {broken_weights[0]}{more} holds NaN or infinity"


class Responses:
    """Tokens of up to ``capacity`` sequences, on the device until they are read.

    Their tensors stay where they are, so that a captured step can be replayed for other sequences.
    Rows that hold no sequence write to the last entry.

    Attributes:
        capacity: most sequences.
        end_ids: tokens that end a sequence, with that of none.
        limits: most tokens of each sequence that :meth:`start` has announced.
        size: sequences that :meth:`start` has announced.
    """

    def __init__(
        self,
        capacity: int,
        sampling: Sampling,
        *,
        eos_ids: Collection[int],
        device: torch.device,
        keep_logprobs: bool = False,
        ragged: bool = False,
    ) -> None:
        """Make room; ``ragged`` sequences have limits of their own."""
        self.capacity, self.size, self.ragged = capacity, 0, ragged
        self.limits: list[int] = []
        self._sampling, self.end_ids = sampling, frozenset((NO_TOKEN, *eos_ids))
        self._ends = to_device(torch.tensor(sorted(self.end_ids), dtype=torch.int64), device)
        shape = (capacity + 1, sampling.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._uniforms = torch.ones(shape, dtype=torch.float64, device=device)
        self._logprobs = torch.zeros(shape, device=device) if keep_logprobs else None
        keeps_both = keep_logprobs and sampling.do_sample and not sampling.draws_from_policy
        self._drawn = torch.zeros(shape, device=device) if keeps_both else self._logprobs

    def start(self, seeds: Sequence[int], limits: Sequence[int] | None = None) -> None:
        """Begin a sequence for each of the seeds of random numbers.

        ``limits`` bound their tokens further than the options of sampling do.
        """
        self.size, most = len(seeds), self._sampling.max_new_tokens
        self.limits = [most] * self.size if limits is None else [min(most, n) for n in limits]
        if self._sampling.do_sample:
            drawn = uniforms(seeds, most)
            self._uniforms[: self.size].copy_(to_device(drawn, self._uniforms.device))

    def advance(
        self,
        logits: Tensor,
        sequences: Tensor,
        number: Tensor,
        group: TensorGroup | None = None,
    ) -> Tensor:
        """(B,) next token of each row; those after the end of a sequence are ignored.

        ``logits`` are (B, V), after each row's last token; ``sequences`` says which sequence a row
        holds, (B,) int64, and ``number`` how many tokens each has, (1,) or (B,) int64. The ranks
        of ``group``, among which the model is divided, take the first one's tokens: their logits
        may round to different ones on a GPU. A sequence whose token cannot be drawn ends, with
        any token in its place; see :meth:`undrawn`.
        """
        place, sampling = (sequences, number.expand_as(sequences)), self._sampling
        by_kernels = group is None and sampling.do_sample and runs_kernels(logits.device)
        if by_kernels:
            chosen = self._draw(logits, *place)
        else:
            chosen = sample_tokens(logits, self._uniforms[place], sampling)
            if group is not None:
                chosen = group.first(chosen)
            self._tokens.index_put_(place, chosen)
            chosen = chosen.clamp(min=0)
        keeps_both = self._drawn is not self._logprobs
        if self._logprobs is not None and (keeps_both or not by_kernels):
            scaled = logits.float() / (sampling.policy_temperature or sampling.temperature)
            self._logprobs.index_put_(place, token_logprobs(scaled, chosen))
        if self._drawn is not None and keeps_both and not by_kernels:
            kept = keep_top(logits.float() / sampling.temperature, sampling)
            self._drawn.index_put_(place, token_logprobs(kept, chosen))
        return chosen

    def _draw(self, logits: Tensor, sequences: Tensor, numbers: Tensor) -> Tensor:
        """The next token of each row, with its log-probability where that is kept, by kernels."""
        temperature = self._sampling.temperature
        if self._sampling.top_k or self._sampling.top_p < 1:
            logits, temperature = keep_top(logits.float() / temperature, self._sampling), 1.0
        tables = self._tokens, self._drawn
        return draw_tokens(logits, temperature, self._uniforms, sequences, numbers, *tables)

    def finished(self, chosen: int) -> list[bool]:
        """Whether each sequence has ended, after ``chosen`` tokens; waits for the device."""
        ends = torch.isin(self._tokens[: self.size, :chosen], self._ends)
        ended: list[bool] = ends.any(-1).tolist()
        return [end or chosen >= n for end, n in zip(ended, self.limits, strict=True)]

    def drawn(
        self, sequences: Sequence[int], numbers: Sequence[int], count: int
    ) -> list[list[int]]:
        """``count`` tokens of some sequences, from the one of a number on; waits for the device."""
        places = torch.tensor([sequences, numbers])[..., None] + torch.tensor([[[0]], [[1]]]) * (
            torch.arange(count)
        )
        own, at = to_device(places, self._tokens.device)
        rows: list[list[int]] = self._tokens[own, at].tolist()
        return rows

    def tokens_at(self, sequences: Tensor, number: Tensor) -> Tensor:
        """(B,) tokens of (B,) sequences that have more than so many, as a model reads them."""
        return self._tokens[sequences, number].clamp_(min=0)

    def length(self, tokens: Sequence[int]) -> int:
        """How many of the tokens belong to a sequence: those up to and including its end."""
        ends = (count for count, token in enumerate(tokens, 1) if token in self.end_ids)
        return next(ends, len(tokens))

    def tokens(self) -> list[list[int]]:
        """Every sequence's tokens, up to and including its end."""
        return [[max(0, token) for token in row] for row in self._until_ends()]

    def undrawn(self) -> list[bool]:
        """Whether each sequence ended because no token could be drawn; its last one is none."""
        return [row[-1] == NO_TOKEN for row in self._until_ends()]

    def logprobs(self) -> list[list[float]]:
        """Log-probability of every sequence's tokens, in nats, at the policy's temperature.

        It is that before top-k and top-p.
        """
        return self._for_tokens(self._logprobs)

    def sampler_logprobs(self) -> list[list[float]]:
        """Likewise in the distribution that they were drawn from, after top-k and top-p.

        Where that is the policy's, or tokens are not drawn, the same as :meth:`logprobs`.
        """
        return self._for_tokens(self._drawn)

    def _for_tokens(self, table: Tensor | None) -> list[list[float]]:
        assert table is not None, "they were not kept"
        rows = table[: self.size].tolist()
        return [row[: len(own)] for row, own in zip(rows, self._until_ends(), strict=True)]

    def _until_ends(self) -> list[list[int]]:
        rows = []
        for row, limit in zip(self._tokens[: self.size].tolist(), self.limits, strict=True):
            rows.append(row[: self.length(row[:limit])])
        return rows
