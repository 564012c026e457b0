"""Loss of each token of a few held-out rows, before and after training, for the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dschat_lora.algos.logprobs import token_logprobs
from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.data.samples import PairSample, SequenceSample, TokenSet
from dschat_lora.engine.build import TrainEngine
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.models.backbone import BackboneModel

MAX_TOKENS = 256  # of a sequence that is shown


@dataclass(frozen=True)
class ShownSequence:
    """A held-out sequence, cut to ``MAX_TOKENS``."""

    name: str  # "chosen" or "rejected" of a pair
    ids: list[int]
    supervised: list[bool]  # whether the loss is taken on the token


def first_sequences(samples: TokenSet, count: int) -> list[ShownSequence]:
    """The sequences of the first ``count`` samples or pairs."""
    return [each for n in range(min(count, len(samples))) for each in _sequences(samples[n])]


def _sequences(sample: object) -> Iterator[ShownSequence]:
    if isinstance(sample, SequenceSample):
        supervised = (sample.labels != IGNORE_INDEX).tolist()
        yield ShownSequence("", sample.input_ids.tolist()[:MAX_TOKENS], supervised[:MAX_TOKENS])
    elif isinstance(sample, PairSample):
        for name, ids in (("chosen", sample.chosen), ("rejected", sample.rejected)):
            marks = [n >= sample.prompt_length for n in range(len(ids))]
            yield ShownSequence(name, ids.tolist()[:MAX_TOKENS], marks[:MAX_TOKENS])


@torch.no_grad()
def token_losses(
    engine: TrainEngine[BackboneModel], sequences: Sequence[ShownSequence]
) -> list[list[float | None]]:
    """-log p of each token after those before it, in nats; None of the first. On every rank.

    The engine is in evaluation mode.
    """
    model: nn.Module = engine.module.model
    found = []
    with whole_sequences(model):
        for each in sequences:
            ids = torch.tensor([each.ids], device=engine.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses: list[float | None] = (-token_logprobs(logits, ids[0, 1:])).tolist()
            found.append([None, *losses])
    return found
