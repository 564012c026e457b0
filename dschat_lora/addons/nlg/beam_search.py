"""Beam search by transformers' own generation, with rules of the text that it writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dschat_lora.generation.batch_state import padded_left
from dschat_lora.models.causal_lm import fp32_logits


@dataclass(frozen=True)
class BeamSearch:
    """Options of beam search."""

    num_beams: int  # hypotheses kept at every step; 1 is greedy search
    max_new_tokens: int  # of a text, with the one that ends it
    eos_ids: tuple[int, ...]  # any of them ends a text
    pad_id: int  # any token, for padding that no result depends on
    length_penalty: float = 1.0  # power of the length that a log-probability is divided by
    no_repeat_ngram_size: int = 0  # no n tokens occur twice in a text; 0: they may
    repetition_penalty: float = 1.0  # multiplies log-probabilities of tokens that the text has
    min_length: int = 0  # tokens before a text may end


class TextRules(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Repetition penalty and n-gram blocking over the generated text, without the prompt.

    transformers' own rules of these names count the prompt too, so that names in the meaning
    representation could not be repeated in the text. Texts begin at column ``start``, behind the
    padded prompts.
    """

    def __init__(self, search: BeamSearch, start: int) -> None:
        self._start = start
        self._ngram = search.no_repeat_ngram_size
        self._penalty = search.repetition_penalty

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(N, V) log-probabilities of the next token, from (N, T) rows so far and (N, V) logits.

        The log-probability of a token that the text has is multiplied by ``repetition_penalty``
        (arXiv:1909.05858); a token that would repeat an n-gram of the text gets -inf.

        Raises:
            ValueError: for logits that have no softmax; a search would go on with any token.
        """
        text = input_ids[:, self._start :]
        scores = scores.log_softmax(dim=-1)
        if scores.isnan().any():
            raise ValueError(
                f"token {text.shape[1] + 1} of a text has no finite probability, because the "
                "model overflows; try --dtype fp32, or an earlier checkpoint"
            )
        if self._penalty != 1.0 and text.shape[1]:
            repeated = scores.gather(1, text)
            scores = scores.scatter(1, text, repeated * self._penalty)
        if self._ngram:
            for row, tokens in enumerate(text.tolist()):
                scores[row, repeated_ngram_ends(tokens, self._ngram)] = -torch.inf
        return scores


def repeated_ngram_ends(tokens: Sequence[int], n: int) -> list[int]:
    """Tokens that would complete an n-gram for the second time."""
    last = list(tokens[len(tokens) - n + 1 :])
    if len(last) < n - 1:
        return []
    starts = range(len(tokens) - n + 1)
    return [tokens[i + n - 1] for i in starts if list(tokens[i : i + n - 1]) == last]


@torch.no_grad()
def beam_search(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    search: BeamSearch,
    *,
    device: torch.device,
    use_cache: bool = True,
) -> list[list[int]]:
    """The best text found for each prompt, without the token that ended it.

    The best has the highest ``log p(text) / |text|^length_penalty``, |text| in tokens with
    the one that ended it, among those that ended and those that reached ``max_new_tokens``. The
    search goes on until no open hypothesis could be better. The model is in evaluation mode, and
    no prompt is empty.
    """
    ids, mask = padded_left(prompts, search.pad_id, device)
    width = ids.shape[1]
    # transformers would fill in options that are not given here from the model's own config.
    model.generation_config = GenerationConfig()
    with fp32_logits(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=search.max_new_tokens,
            min_new_tokens=search.min_length,
            do_sample=False,
            num_beams=search.num_beams,
            length_penalty=search.length_penalty,
            early_stopping="never" if search.num_beams > 1 else False,
            logits_processor=LogitsProcessorList([TextRules(search, width)]),
            renormalize_logits=True,
            no_repeat_ngram_size=0,
            repetition_penalty=1.0,
            eos_token_id=list(search.eos_ids),
            pad_token_id=search.pad_id,
            use_cache=use_cache,
        )
    texts = output[:, width:].tolist()
    ends = [next((i for i, t in enumerate(each) if t in search.eos_ids), None) for each in texts]
    return [each[:end] for each, end in zip(texts, ends, strict=True)]
