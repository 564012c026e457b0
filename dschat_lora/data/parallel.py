"""Tokenisation over processes."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from dschat_lora.data.records import Record
from dschat_lora.data.tokenize import Encoder, Tokenized, TokenRule, tokenize

RECORDS_PER_CHUNK = 512


def tokenize_all(
    records: Sequence[Record], encoder: Encoder, rule: TokenRule, *, workers: int
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


def _tokenize_chunk(records: Sequence[Record]) -> list[Tokenized]:
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
