"""Pairs of answers, and the losses over them in the plainest way: one sequence at a time."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from dschat_lora.data.samples import PairSample
from helpers.tiny import VOCAB


@dataclass(frozen=True)
class Answers:
    """A prompt and two answers as plain lists of tokens."""

    prompt: list
    chosen: list
    rejected: list
    margin: float = 0.0
    reference: tuple = (math.nan, math.nan)

    @property
    def sequences(self):
        return self.prompt + self.chosen, self.prompt + self.rejected

    def sample(self):
        """The pair as the package holds it, its beginning found token by token."""
        chosen, rejected = self.sequences
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        return PairSample(
            np.array(chosen + rejected[shared:], dtype=np.int32),
            prompt_length=len(self.prompt),
            shared_length=shared,
            chosen_length=len(chosen) - shared,
            margin=self.margin,
            reference=self.reference,
        )


def ragged_pairs(count, *, longest=7, seed=0, vocab=VOCAB):
    """Pairs of unlike lengths; answers begin alike in some, one ends early in others."""
    generator = np.random.default_rng(seed)

    def tokens(low):
        return generator.integers(3, vocab, int(generator.integers(low, longest + 1))).tolist()

    pairs = []
    for _ in range(count):
        alike = tokens(0)[:2]
        chosen, rejected = tokens(1), tokens(1)
        rejected[0] = chosen[0] - 1 if chosen[0] > 3 else 4
        values = generator.normal(size=3)
        reference = (-3.0 * len(alike + chosen) + values[1], -3.0 * len(alike + rejected))
        pairs.append(
            Answers(tokens(1), alike + chosen, alike + rejected, float(values[0]), reference)
        )
    return pairs


def with_a_prefix(seed=0):
    """Pairs of which one answer is the beginning of the other, both ways."""
    whole, short = [5, 6, 7, 8], [5, 6]
    return [
        Answers([9, 10, 11], whole, short, 0.5, (-11.0, -6.5)),
        Answers([12, 13], short, whole, -0.25, (-5.5, -12.0)),
    ]


def plain_hidden(model, sequence):
    """(n, H) last hidden states of one sequence, by the model's own masks and positions."""
    return model.base_model(input_ids=torch.tensor([sequence]), use_cache=False)[0][0]


def plain_scores(model, sequence):
    """(n,) score at each token of one sequence."""
    return model.score(plain_hidden(model, sequence))[:, 0]


def plain_logprobs(model, sequence, begin):
    """Log-probabilities of the tokens from ``begin`` on, each picked by hand."""
    logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
    table = logits.log_softmax(-1)
    return torch.stack([table[t - 1, sequence[t]] for t in range(begin, len(sequence))])


def plain_bradley_terry(model, pairs, center=0.0):
    """Sum over pairs, each from two forward passes of one sequence."""
    total = 0.0
    for pair in pairs:
        chosen, rejected = (plain_scores(model, each)[-1] for each in pair.sequences)
        # the odds of the worse answer, moved by the margin, against the better one's
        total = total + torch.log1p(torch.exp(rejected + pair.margin - chosen))
        total = total + center * (chosen + rejected).square()
    return total


def plain_per_token(model, pairs):
    """DeepSpeed-Chat's loss without its padding, summed over pairs."""
    total = 0.0
    for pair in pairs:
        left, right = pair.sequences
        chosen, rejected = plain_scores(model, left), plain_scores(model, right)
        terms, differ = [], False
        for t in range(min(len(left), len(right))):
            differ = differ or left[t] != right[t]
            if differ:
                terms.append(torch.log1p(torch.exp(rejected[t] - chosen[t])))
        total = total + (sum(terms) / len(terms) if terms else 0.0)
    return total


def plain_dpo(model, pairs, config):
    """DPO's loss summed over pairs, from the probabilities that its paper speaks of."""
    total = 0.0
    for pair in pairs:
        answers = [
            plain_logprobs(model, sequence, len(pair.prompt)).double()
            for sequence in pair.sequences
        ]
        ratios = [a.sum() - r for a, r in zip(answers, pair.reference, strict=True)]
        if config.length_normalization or config.loss_type == "ipo":
            ratios = [ratio / len(a) for ratio, a in zip(ratios, answers, strict=True)]
        better, worse = ratios
        if config.loss_type == "ipo":
            # eq. 17: (h - 1/(2 tau))^2
            loss = (better - worse - 0.5 / config.beta).square()
        elif config.loss_type == "hinge":
            loss = torch.clamp(1 - config.beta * (better - worse), min=0)
        else:
            wins = 1 / (1 + torch.exp(config.beta * (worse - better)))
            e = config.label_smoothing
            loss = -(1 - e) * torch.log(wins) - e * torch.log(1 - wins)
        total = total + loss - config.rpo_alpha * answers[0].mean()
    return total.float()


def classic_per_token(chosen_scores, rejected_scores, chosen, rejected, *, pad, leading=0):
    """DeepSpeed-Chat's loss of one padded pair, padding terms and all.

    The score at padding is compared as any other: from the first difference to where the longer
    answer ends.

    Args:
        chosen_scores, rejected_scores: (T,) at every position of the padded sequences.
        chosen, rejected: lists of T tokens.
        pad: its id.
        leading: pads that every sequence begins with (``num_padding_at_beginning``).
    """
    length = len(chosen)

    def end_of(sequence):
        pads = [t for t in range(length) if sequence[t] == pad]
        return pads[leading] if len(pads) > leading else length

    if chosen == rejected:
        start, end = length - 1, length
    else:
        start = next(t for t in range(length) if chosen[t] != rejected[t])
        end = max(end_of(chosen), end_of(rejected))
    assert start > 0
    differences = [chosen_scores[t] - rejected_scores[t] for t in range(start, end)]
    return -sum(torch.log(torch.sigmoid(d)) for d in differences) / (end - start)
