"""Records to token ids and labels; the one path for training, evaluation and rollouts."""

import math
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.data.chat import Span
from dschat_lora.data.records import TextRecord, shared_length
from dschat_lora.data.rows import DataKind

Tokens = NDArray[np.int32]

PROBES = ("a", "1", "\u4e2d")  # a vocabulary may lack some scripts


class Tokenizer(Protocol):
    """What encoding needs of a tokenizer; those of ``transformers`` have it."""

    bos_token_id: int | None

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]: ...


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenised record. The first label is ignored: nothing precedes it."""

    input_ids: Tokens  # (n,)
    labels: Tokens  # (n,), IGNORE_INDEX where no loss is taken

    @property
    def prompt(self) -> Tokens:
        """Tokens before the first supervised one."""
        return self.input_ids[: int((self.labels != IGNORE_INDEX).argmax())]

    @property
    def num_supervised(self) -> int:
        """Supervised tokens."""
        return int((self.labels != IGNORE_INDEX).sum())

    def ends_in(self, token: int) -> bool:
        """Whether the last supervised token is ``token``."""
        return bool(self.labels[self.labels != IGNORE_INDEX][-1] == token)


@dataclass(frozen=True, eq=False)
class PairSample:
    """Two answers to one prompt, as a tree: what both begin with, then how each goes on.

    ``input_ids`` is the shared beginning (prompt included), the rest of the chosen and the
    rest of the rejected sequence, one after another.
    """

    input_ids: Tokens  # (n,)
    prompt_length: int
    shared_length: int  # >= prompt_length: answers may begin alike too
    chosen_length: int  # of the rest of the chosen sequence
    margin: float = 0.0  # by how much the chosen answer is better
    # log-probabilities of the chosen and the rejected answer under a reference, in nats
    reference: tuple[float, float] = (math.nan, math.nan)

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids[: self.prompt_length]

    @property
    def chosen(self) -> Tokens:
        """(n,) the whole chosen sequence."""
        return self.input_ids[: self.shared_length + self.chosen_length]

    @property
    def rejected(self) -> Tokens:
        """(n,) the whole rejected sequence."""
        start = self.shared_length + self.chosen_length
        return np.concatenate([self.input_ids[: self.shared_length], self.input_ids[start:]])

    @property
    def num_supervised(self) -> int:
        """Tokens of both answers, those that they share once."""
        return len(self.input_ids) - self.prompt_length

    def ends_in(self, token: int) -> bool:
        """Whether ``token`` ends both answers."""
        return bool(self.chosen[-1] == token and self.rejected[-1] == token)


@dataclass(frozen=True, eq=False)
class PromptSample:
    """A prompt to be answered, and the row that it comes from."""

    input_ids: Tokens  # (n,)
    columns: bytes  # the row as JSON, UTF-8

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids

    @property
    def num_supervised(self) -> int:
        """Nothing is learnt by heart."""
        return 0

    def ends_in(self, token: int) -> bool:
        """Answers are not given."""
        return False


AnySample = Sample | PairSample | PromptSample


@dataclass(frozen=True)
class TokenRule:
    """Options that decide how a record becomes a sample."""

    eos_id: int
    max_seq_len: int
    overlong: Literal["drop", "truncate", "error"]
    train_on_prompt: bool
    kind: DataKind = "samples"
    eos_after_prompt: bool = False


@dataclass(frozen=True)
class Tokenized:
    """What became of a record, for the audit."""

    sample: AnySample | None  # None: dropped, too long or with nothing to learn
    length: int  # tokens before anything was cut; of a pair's longer sequence
    truncated: bool = False
    doubled_bos: bool = False  # its text brought a second beginning-of-sequence
    identical: bool = False  # a pair that was dropped because nothing tells its answers apart


@dataclass(frozen=True)
class Encoder:
    """A tokenizer that begins a text once and never ends it.

    ``bos`` is what the tokenizer puts before a text by default (or would), ``suffix`` the
    number of tokens it puts behind.
    """

    tokenizer: Tokenizer
    bos: tuple[int, ...]
    suffix: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts that begin a sequence, beginning-of-sequence at most once."""
        return [self.begin_once(ids) for ids in self.encode_raw(texts)]

    def encode_raw(self, texts: Sequence[str]) -> list[list[int]]:
        """As :meth:`encode`, but a text that brings its own beginning has it twice."""
        encoded = call(self.tokenizer, texts, add_special_tokens=True)
        return [ids[: len(ids) - self.suffix] for ids in encoded]

    def encode_alone(self, text: str) -> list[int]:
        """Tokens of a text that continues a sequence."""
        return call(self.tokenizer, [text], add_special_tokens=False)[0]

    def begins_twice(self, ids: Sequence[int]) -> bool:
        """True if the sequence begins with a doubled beginning-of-sequence."""
        size = len(self.bos)
        return size > 0 and tuple(ids[: 2 * size]) == self.bos * 2

    def begin_once(self, ids: list[int]) -> list[int]:
        """``ids`` without a second beginning-of-sequence."""
        while self.begins_twice(ids):
            ids = ids[len(self.bos) :]
        return ids


def make_encoder(tokenizer: Tokenizer) -> Encoder:
    """Find out what the tokenizer puts around a text by default.

    Raises:
        ValueError: if it finds no token in any probe, as one without vocabulary does, or
            changes a text's own tokens along with what it puts around them.
    """
    for probe in PROBES:
        bare = call(tokenizer, [probe], add_special_tokens=False)[0]
        if not bare:
            continue
        full = call(tokenizer, [probe], add_special_tokens=True)[0]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return _encoder(tokenizer, tuple(full[:start]), len(full) - len(bare) - start)
        raise ValueError(
            f"the tokenizer reads {probe!r} as {full} with special tokens, as {bare} without"
        )
    raise ValueError(f"the tokenizer finds no token in any of {PROBES}; is its vocabulary empty?")


def _encoder(tokenizer: Tokenizer, bos: tuple[int, ...], suffix: int) -> Encoder:
    if not bos and tokenizer.bos_token_id is not None:
        bos = (tokenizer.bos_token_id,)
    return Encoder(tokenizer, bos, suffix)


def call(tokenizer: Tokenizer, texts: Sequence[str], **options: bool) -> list[list[int]]:
    """Token ids of each text."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no remark on long texts: --overlong deals with them
        **options,
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


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
        "prompts": _tokenize_prompt,
    }[rule.kind]
    texts = [_texts(record, rule.kind) for record in records]
    encoded = iter(encoder.encode_raw([text for each in texts for text in each]))
    return [
        tokenize_one(record, [next(encoded) for _ in own], encoder, rule)
        for record, own in zip(records, texts, strict=True)
    ]


def _texts(record: TextRecord, kind: DataKind) -> list[str]:
    """What has to be encoded: the text up to each span's end, and to the rejected answer's."""
    if kind == "prompts":
        return _prefixes(_context(record))
    texts = _prefixes(record.spans)
    if kind == "pairs":
        assert record.rejected is not None, "rows without two answers were refused"
        texts.append(record.prompt + record.rejected)
    return texts


def _prefixes(spans: Sequence[Span]) -> list[str]:
    """The text up to the end of each span."""
    texts, text = [], ""
    for span in spans:
        text += span.text
        texts.append(text)
    return texts


def _tokenize_sample(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-1])
    pieces = _pieces(record.spans, [encoder.begin_once(ids) for ids in encoded], encoder)
    for number, span in enumerate(record.spans[:-1]):
        if rule.eos_after_prompt and not span.target:
            pieces[number] = ended(pieces[number], rule.eos_id)
    if record.spans[-1].target:
        pieces[-1] = ended(pieces[-1], rule.eos_id)
    length = sum(map(len, pieces))
    if length > rule.max_seq_len and rule.overlong != "truncate":
        _refuse_overlong(record, length, rule)
        return Tokenized(None, length, doubled_bos=doubled)
    sample = _cut(_to_sample(record.spans, pieces, rule), rule.max_seq_len)
    learns = bool((sample.labels != IGNORE_INDEX).any())
    truncated = length > rule.max_seq_len
    return Tokenized(sample if learns else None, length, truncated and learns, doubled)


def _tokenize_pair(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-1])
    *prefixes, with_rejected = (encoder.begin_once(ids) for ids in encoded)
    *context, chosen = _pieces(record.spans, prefixes, encoder)
    prompt = [token for piece in context for token in piece]
    answer = Span(record.rejected or "", target=True)
    *_, rejected = _pieces((*record.spans[:-1], answer), [*prefixes[:-1], with_rejected], encoder)
    sequences = [[*prompt, *ended(ids, rule.eos_id)] for ids in (chosen, rejected)]
    length = max(map(len, sequences))
    if length > rule.max_seq_len and rule.overlong != "truncate":
        _refuse_overlong(record, length, rule)
        return Tokenized(None, length, doubled_bos=doubled)
    # A prompt that fills the row leaves nothing of either answer.
    chosen, rejected = (ids[: rule.max_seq_len] for ids in sequences)
    if chosen == rejected:
        return Tokenized(None, length, doubled_bos=doubled, identical=True)
    return Tokenized(
        _to_pair(chosen, rejected, prompt_length=len(prompt), margin=record.margin or 0.0),
        length,
        truncated=length > rule.max_seq_len,
        doubled_bos=doubled,
    )


def _tokenize_prompt(
    record: TextRecord, encoded: list[list[int]], encoder: Encoder, rule: TokenRule
) -> Tokenized:
    doubled = encoder.begins_twice(encoded[-1])
    prefixes = [encoder.begin_once(ids) for ids in encoded]
    ids = [token for piece in _pieces(_context(record), prefixes, encoder) for token in piece]
    if not ids or (len(ids) > rule.max_seq_len and rule.overlong != "truncate"):
        _refuse_overlong(record, len(ids), rule, option="max_prompt_seq_len")
        return Tokenized(None, len(ids), doubled_bos=doubled)
    # The answer follows the end of the prompt, so its beginning is cut.
    kept = np.array(ids[-rule.max_seq_len :], dtype=np.int32)
    sample = PromptSample(kept, record.columns.encode())
    return Tokenized(sample, len(ids), truncated=len(ids) > len(kept), doubled_bos=doubled)


def _context(record: TextRecord) -> tuple[Span, ...]:
    """All that comes before the last answer."""
    return record.spans[:-1] if record.spans[-1].target else record.spans


def _to_pair(
    chosen: Sequence[int], rejected: Sequence[int], *, prompt_length: int, margin: float
) -> PairSample:
    shared = shared_length(chosen, rejected)
    return PairSample(
        np.array([*chosen, *rejected[shared:]], dtype=np.int32),
        prompt_length=prompt_length,
        shared_length=shared,
        chosen_length=len(chosen) - shared,
        margin=margin,
    )


def ended(ids: list[int], eos_id: int) -> list[int]:
    """``ids`` and an end-of-sequence, unless a template has put one there."""
    return ids if ids[-1:] == [eos_id] else [*ids, eos_id]


def _pieces(
    spans: Sequence[Span], prefixes: Sequence[list[int]], encoder: Encoder
) -> list[list[int]]:
    """Tokens of each span, from the tokens of the text up to the end of each span."""
    pieces = [prefixes[0]]
    for span, before, after in zip(spans[1:], prefixes[:-1], prefixes[1:], strict=True):
        continues = after[: len(before)] == before
        pieces.append(after[len(before) :] if continues else encoder.encode_alone(span.text))
    return pieces


def _refuse_overlong(
    record: TextRecord, length: int, rule: TokenRule, option: str = "max_seq_len"
) -> None:
    if rule.overlong == "error":
        raise ValueError(
            f"{record.location}: {length} tokens are more than --{option} "
            f"{rule.max_seq_len}; raise it, or choose --overlong drop or truncate"
        )


def _to_sample(spans: Sequence[Span], pieces: Sequence[list[int]], rule: TokenRule) -> Sample:
    input_ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
    target = np.repeat(
        [span.target or rule.train_on_prompt for span in spans], [len(p) for p in pieces]
    )
    target[:1] = False
    labels = np.where(target, input_ids, np.int32(IGNORE_INDEX))
    return Sample(input_ids, labels)


def _cut(sample: Sample, size: int) -> Sample:
    """The first ``size`` tokens; what was cut off takes its end-of-sequence along."""
    return Sample(sample.input_ids[:size], sample.labels[:size])


RECORDS_PER_CHUNK = 512


def tokenize_all(
    records: Sequence[TextRecord], encoder: Encoder, rule: TokenRule, *, workers: int
) -> Iterator[Tokenized]:
    """:func:`tokenize` in chunks, over ``workers`` processes, in order."""
    starts = range(0, len(records), RECORDS_PER_CHUNK)
    chunks = [records[start : start + RECORDS_PER_CHUNK] for start in starts]
    workers = min(workers, len(chunks))
    if workers <= 1:
        for chunk in chunks:
            yield from tokenize(chunk, encoder, rule)
        return
    # A forked worker has the tokenizer already and imports nothing.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with (
        _single_threaded_tokenizers(),
        ProcessPoolExecutor(
            workers,
            multiprocessing.get_context(method),
            initializer=_set_worker,
            initargs=(encoder, rule),
        ) as pool,
    ):
        for results in pool.map(_tokenize_chunk, chunks):
            yield from results


_worker: dict[str, Any] = {}  # of a worker process: what does not change between chunks


def _set_worker(encoder: Encoder, rule: TokenRule) -> None:
    _worker.update(encoder=encoder, rule=rule)


def _tokenize_chunk(records: Sequence[TextRecord]) -> list[Tokenized]:
    return tokenize(records, **_worker)


@contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """Threads of a tokenizer do not survive a fork; the library asks to be told beforehand."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
