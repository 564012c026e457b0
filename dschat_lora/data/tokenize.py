"""Tokenization of records: token ids and labels for training, evaluation and rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.config.data import Overlong
from dschat_lora.data.chat import Span
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.media import FIRST_ID, MediaRun, has_media, with_runs
from dschat_lora.data.records import TextRecord
from dschat_lora.data.rows import DataKind, shared_length
from dschat_lora.data.samples import (
    AnySample,
    PairSample,
    PromptSample,
    SequenceSample,
    UnpairedSample,
)


@dataclass(frozen=True)
class TokenRule:
    """Options that decide how a record becomes a sample."""

    eos_id: int
    max_seq_len: int
    overlong: Overlong
    train_on_prompt: bool
    kind: DataKind = "samples"
    eos_after_prompt: bool = False
    train_empty_think: bool = False


class Tokenized(NamedTuple):
    """The sample of a record, with what the audit counts."""

    sample: AnySample | None  # None: dropped, too long or with nothing to learn
    length: int  # tokens before anything was cut; of a pair's longer sequence
    prompt_length: int  # of these, tokens before the last answer
    truncated: bool = False
    doubled_bos: bool = False  # its text brought a second beginning-of-sequence
    identical: bool = False  # a pair that was dropped because nothing tells its answers apart
    ended: bool = False  # by a token of the chat template's own
    is_text: bool = False  # plain text, which answers nothing
    empty_thoughts: int = 0  # that the chat template added, and that are not learnt
    rest: tuple[SequenceSample, ...] = ()  # further pieces of a text longer than a row

    @property
    def samples(self) -> tuple[AnySample, ...]:
        """All samples of the record."""
        return () if self.sample is None else (self.sample, *self.rest)


def tokenize(records: Sequence[TextRecord], encoder: Encoder, rule: TokenRule) -> list[Tokenized]:
    """Samples of records, or pairs if ``rule.kind`` says so, in order.

    A sequence is ``tokenizer(prompt)``, the completion's tokens and end-of-sequence. The
    completion's tokens are the rest of ``tokenizer(prompt + completion)`` where that begins
    with ``tokenizer(prompt)``, so that SentencePiece adds no false space, else those of the
    completion alone. Conversations go on in the same way, turn by turn.

    Raises:
        ValueError: at a record longer than ``max_seq_len`` if ``rule.overlong`` is ``error``.
    """
    tokenize_one = {
        "samples": _tokenize_sample,
        "pairs": _tokenize_pair,
        "unpaired": _tokenize_unpaired,
        "prompts": _tokenize_prompt,
    }[rule.kind]
    texts: list[list[str]] = []  # of a record: up to each span's end, and to that of another answer
    for record in records:
        spans = record.context if rule.kind == "prompts" else record.spans
        texts.append(list(accumulate(span.text for span in spans)))
        if rule.kind in ("pairs", "unpaired"):
            texts[-1].append(record.prompt + _other_answer(record, rule))
    encoded = iter(encoder.encode_raw([text for each in texts for text in each]))
    return [
        tokenize_one(record, [next(encoded) for _ in own], encoder, rule)
        for record, own in zip(records, texts, strict=True)
    ]


def _other_answer(record: TextRecord, rule: TokenRule) -> str:
    other = record.rejected if rule.kind == "pairs" else record.mismatched
    assert other is not None, "rows without two answers were refused, or given a mismatched one"
    return other


def _tokenize_sample(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-1])
    prefixes = [encoder.begin_once(ids) for ids in encoded]
    pieces = _pieces(record.spans, prefixes, encoder, record.media)
    for number, span in enumerate(record.spans[:-1]):
        if rule.eos_after_prompt and not span.target:
            pieces[number] = ended(pieces[number], rule.eos_id)
    if record.spans[-1].target and record.end == "eos":
        pieces[-1] = ended(pieces[-1], rule.eos_id)
    length, is_text = sum(map(len, pieces)), record.kind == "text"
    before = length - len(pieces[-1]) * record.spans[-1].target
    beyond = [*chain.from_iterable(pieces)][rule.max_seq_len :]
    dropped = Tokenized(None, length, before, doubled_bos=doubled)
    if rule.overlong == "truncate" and has_media(beyond):
        return dropped
    if length > rule.max_seq_len and is_text and rule.overlong == "split" and not record.media:
        tokens, size = np.array([*chain.from_iterable(pieces)], dtype=np.int32), rule.max_seq_len
        # Each piece after the first begins with the last token of the one before it, as context.
        cuts = [tokens[start : start + size] for start in range(0, length - 1, size - 1)]
        first, *rest = (SequenceSample(ids, (1, len(ids) - 1)) for ids in cuts)
        return dropped._replace(sample=first, is_text=True, rest=tuple(rest))
    if length > rule.max_seq_len and rule.overlong != "truncate":
        _refuse_overlong(record, length, rule)
        return dropped
    thoughts = [
        [] if rule.train_on_prompt else _thought_places(span, piece, encoder, rule)
        for span, piece in zip(record.spans, pieces, strict=True)
    ]
    sample = _to_sample(record, pieces, thoughts, rule)
    learns, truncated = sample.num_supervised > 0, length > rule.max_seq_len
    return dropped._replace(
        sample=sample if learns else None,
        truncated=truncated and learns,
        ended=record.end == "template" and not truncated,
        is_text=is_text,
        empty_thoughts=sum(map(len, thoughts)) if learns else 0,
    )


def _tokenize_pair(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-1])
    prompt, chosen, rejected = _two_answers(record, encoded, encoder, rule)
    sequences = [[*prompt, *ids] for ids in (chosen, rejected)]
    length = max(map(len, sequences))
    dropped = Tokenized(None, length, len(prompt), doubled_bos=doubled)
    if length > rule.max_seq_len and rule.overlong != "truncate":
        _refuse_overlong(record, length, rule)
        return dropped
    # A prompt that fills the row leaves nothing of either answer.
    chosen, rejected = (ids[: rule.max_seq_len] for ids in sequences)
    if has_media(prompt[rule.max_seq_len :]):
        return dropped
    if chosen == rejected:
        return dropped._replace(identical=True)
    shared = shared_length(chosen, rejected)
    sample = PairSample(
        np.array([*chosen, *rejected[shared:]], dtype=np.int32),
        prompt_length=len(prompt),
        shared_length=shared,
        chosen_length=len(chosen) - shared,
        margin=record.margin or 0.0,
    )
    truncated = length > rule.max_seq_len
    is_ended = record.end == "template" and not truncated
    return dropped._replace(sample=sample, truncated=truncated, ended=is_ended)


def _tokenize_unpaired(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-2])
    prompt, answer, mismatched = _two_answers(record, encoded, encoder, rule)
    ids = [*prompt, *answer]
    dropped = Tokenized(None, len(ids), len(prompt), doubled_bos=doubled)
    if len(ids) > rule.max_seq_len and rule.overlong != "truncate":
        _refuse_overlong(record, len(ids), rule)
        return dropped
    room = rule.max_seq_len - len(prompt)
    if room <= 0:
        return dropped
    sample = UnpairedSample(
        np.array(ids[: rule.max_seq_len], dtype=np.int32),
        np.array(mismatched[:room], dtype=np.int32),
        prompt_length=len(prompt),
        label=int(bool(record.label)),
    )
    truncated = len(ids) > rule.max_seq_len
    is_ended = record.end == "template" and not truncated
    return dropped._replace(sample=sample, truncated=truncated, ended=is_ended)


def _tokenize_prompt(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-1])
    prefixes = [encoder.begin_once(ids) for ids in encoded]
    ids = [*chain.from_iterable(_pieces(record.context, prefixes, encoder, record.media))]
    cuts_media = has_media(ids[: max(0, len(ids) - rule.max_seq_len)])
    if not ids or (len(ids) > rule.max_seq_len and (cuts_media or rule.overlong != "truncate")):
        _refuse_overlong(record, len(ids), rule, option="max_prompt_seq_len")
        return Tokenized(None, len(ids), len(ids), doubled_bos=doubled)
    # The answer follows the prompt's end, so its beginning is cut.
    kept = np.array(ids[-rule.max_seq_len :], dtype=np.int32)
    sample = PromptSample(kept, record.columns.encode())
    return Tokenized(
        sample, len(ids), len(ids), truncated=len(ids) > len(kept), doubled_bos=doubled
    )


def _two_answers(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> tuple[list[int], list[int], list[int]]:
    """Tokens of the prompt, of its answer and of the other one, both with their end.

    An empty thought that the chat template puts before both belongs to the prompt.
    """
    *prefixes, with_other = (encoder.begin_once(ids) for ids in encoded)
    *context, own = _pieces(record.spans, prefixes, encoder, record.media)
    spans = (*record.spans[:-1], Span(_other_answer(record, rule), target=True))
    *_, another = _pieces(spans, [*prefixes[:-1], with_other], encoder, record.media)
    if record.end == "eos":
        own, another = ended(own, rule.eos_id), ended(another, rule.eos_id)
    ((_, size),) = _thought_places(record.spans[-1], own, encoder, rule) or [(0, 0)]
    size = size if own[:size] == another[:size] else 0
    return [*chain.from_iterable(context), *own[:size]], own[size:], another[size:]


def ended(ids: list[int], eos_id: int) -> list[int]:
    """``ids`` and an end-of-sequence, unless a template has put one there."""
    return ids if ids[-1:] == [eos_id] else [*ids, eos_id]


def _pieces(
    spans: Sequence[Span], prefixes: Sequence[list[int]], encoder: Encoder, runs: Sequence[MediaRun]
) -> list[list[int]]:
    """Tokens of each span, from the tokens of the text up to the end of each span."""
    pieces = [prefixes[0]]
    for span, before, after in zip(spans[1:], prefixes[:-1], prefixes[1:], strict=True):
        continues = after[: len(before)] == before
        pieces.append(after[len(before) :] if continues else encoder.encode_alone(span.text))
    return with_runs(pieces, runs) if runs else pieces


def _refuse_overlong(
    record: TextRecord, length: int, rule: TokenRule, option: str = "max_seq_len"
) -> None:
    if rule.overlong == "error":
        raise ValueError(
            f"{record.location}: {length} tokens are more than --{option} "
            f"{rule.max_seq_len}; raise it, or choose --overlong split, drop or truncate"
        )


def _thought_places(
    span: Span, piece: list[int], encoder: Encoder, rule: TokenRule
) -> list[tuple[int, int]]:
    """Start and end, among the tokens of a span, of each empty thought that is not learnt.

    A token that holds some of what precedes or follows it is none of its.
    """
    if rule.train_empty_think:
        return []

    def tokens(end: int) -> int:
        # Alone, and behind other text, where SentencePiece puts no space before it.
        texts = span.text[:end], "\n", "\n" + span.text[:end]
        alone, line, behind = map(encoder.encode_alone, texts)
        return max(shared_length(piece, ids) for ids in (alone, behind[len(line) :]))

    return [(tokens(start), tokens(end)) for start, end in span.empty_thoughts]


def _to_sample(
    record: TextRecord,
    pieces: Sequence[list[int]],
    thoughts: Sequence[list[tuple[int, int]]],
    rule: TokenRule,
) -> SequenceSample:
    """The first tokens of the pieces, without end-of-sequence if any were cut."""
    # What several samples of a row begin with is learnt in the first.
    on_prompt = rule.train_on_prompt and not record.goes_on
    runs, room = [0], rule.max_seq_len
    for span, piece, unlearnt in zip(record.spans, pieces, thoughts, strict=True):
        # Learnt and not in turn.
        ends = [*chain.from_iterable(unlearnt), len(piece)]
        for number, (start, end) in enumerate(pairwise([0, *ends])):
            size = min(end - start, room)
            learnt = (span.target or on_prompt) and number % 2 == 0
            room -= size
            if learnt and size and not runs[0]:  # nothing precedes the first token
                runs[0], size = 1, size - 1
            if learnt == (len(runs) % 2 == 0):
                runs[-1] += size
            elif size:
                runs.append(size)
    ids = np.fromiter(chain.from_iterable(pieces), np.int32)[: rule.max_seq_len]
    sample = SequenceSample(ids, tuple(runs))
    if not record.media:
        return sample
    # Nothing predicts what is no token of the vocabulary.
    return SequenceSample.of(ids, np.where(ids < FIRST_ID, sample.labels, IGNORE_INDEX))
