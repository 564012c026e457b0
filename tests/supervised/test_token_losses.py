"""Losses of the tokens of held-out rows, against cross-entropy one token at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.data.samples import PairSample, SequenceSample
from dschat_lora.supervised.evaluation import first_sequences, token_losses
from helpers.tiny import tiny_model


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def test_sequences_say_which_of_their_tokens_are_trained_on():
    ignored = IGNORE_INDEX
    row = SequenceSample.of(ids(5, 6, 7, 8), ids(ignored, ignored, 7, 8))
    (found,) = first_sequences([row, row], 1)
    assert (found.ids, found.supervised) == ([5, 6, 7, 8], [False, False, True, True])
    pair = PairSample(ids(5, 6, 7, 8, 9), prompt_length=2, shared_length=2, chosen_length=1)
    chosen, rejected = first_sequences([pair], 3)
    assert (chosen.name, chosen.ids) == ("chosen", [5, 6, 7])
    assert (rejected.name, rejected.ids) == ("rejected", [5, 6, 8, 9])
    assert rejected.supervised == [False, False, True, True]


def test_losses_are_cross_entropies_of_each_token_after_those_before_it():
    model = tiny_model("llama", "sdpa").eval()
    row = SequenceSample.of(ids(5, 6, 7, 8, 3), ids(IGNORE_INDEX, 6, 7, 8, 3))
    engine = SimpleNamespace(module=SimpleNamespace(model=model), device=torch.device("cpu"))
    ((first, *rest),) = token_losses(engine, first_sequences([row], 1))
    assert first is None
    for n, loss in enumerate(rest, start=1):
        logits = model(torch.tensor([row.input_ids[:n].tolist()])).logits[0, -1]
        assert loss == pytest.approx(-logits.log_softmax(-1)[row.input_ids[n]].item(), abs=1e-5)
