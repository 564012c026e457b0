"""Rows read while training: shards of sources, places in them, mixtures, and blocks of samples."""

import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.readers import (
    START,
    Line,
    Place,
    RawRow,
    RowError,
    hub_rows,
    iter_unread,
    iter_unread_file,
    load_hub,
)
from dschat_lora.data.record_files import BYTES_PER_FILE, RowCounts, RowReader
from dschat_lora.data.records import TextRecord, answers_of, row_digest, text_digest
from dschat_lora.data.row_arrays import Indices
from dschat_lora.data.samples import (
    COLUMNS,
    AnySample,
    Column,
    write_table,
)
from dschat_lora.data.sources import DataSource, StreamError, data_suffix, kind_of_file
from dschat_lora.data.token_files import mismatched
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.data.workers import ordered_map

if TYPE_CHECKING:
    from datasets import IterableDataset

ROWS_PER_CHUNK = 256  # that a worker tokenises at a time
WAITS = (1.0, 2.0, 4.0)  # seconds before a shard that cannot be read is tried again
MAX_EXAMPLES = 5  # bad rows of a block that are quoted
# Why rows are not used, besides what is wrong with bad ones.
NOT_LEARNT, HELD_OUT, TOO_LONG = "not learnt", "held out", "too long"
ONE_PROMPT = "of one prompt alone"
FATES = NOT_LEARNT, HELD_OUT, TOO_LONG, ONE_PROMPT

Placed = tuple[RawRow | Line, Place]  # a row, and the place after it


class Position(NamedTuple):
    """How far a pool has been read."""

    epoch: int = 0  # passes that are done
    shard: int = 0  # place in the order of this pass
    row: int = 0  # of that shard; see :class:`Place`
    byte: int = 0
    rows: int = 0  # that were read in this pass


@dataclass(frozen=True)
class DataShard:
    """A file, a shard of a hub data set, or rows of a Python program."""

    name: str
    source: int  # its number
    number: int  # among all shards of its pool
    rows_from: Callable[[Place], Iterable[Placed]]
    find_end: Callable[[], Place]  # 0 for what only reading tells

    def share_before(self, place: Place) -> float:
        """The share of it that is before a place; 0 where its size is not known."""
        sizes = self.find_end() if place.row else START
        return max(min(1.0, at / n) if n else 0.0 for at, n in zip(place, sizes, strict=True))

    def read(self, start: Place) -> Iterator[Placed]:
        """Its rows from ``start`` on, each with the place after it.

        A failure to read is met by reading on from there, a few times.

        Raises:
            StreamError: if it cannot be read for all that, or a row is too large.
        """
        from huggingface_hub.utils import httpx  # whichever of its versions it is built on

        # What reading a damaged file, or one of a server, raises.
        errors = OSError, ValueError, RuntimeError, EOFError, httpx.HTTPError
        failures = 0
        while True:
            try:
                for row, place in self.rows_from(start):
                    start, failures = place, 0
                    yield row, place
                return
            except RowError as error:
                raise StreamError(str(error)) from error
            except errors as error:
                if failures == len(WAITS):
                    reason = str(error).strip().split("\n")[0]
                    raise StreamError(
                        f"{self.name} could not be read on after row {start.row:,}, tried "
                        f"{failures + 1} times: {reason}"
                    ) from error
            time.sleep(WAITS[failures])
            failures += 1


def find_shards(sources: Sequence[DataSource], numbers: Sequence[int]) -> list[DataShard]:
    """The shards of these of the sources, in order."""
    parts = [(number, part) for number in numbers for part in _parts_of(sources[number])]
    return [
        DataShard(name, source, number, rows_from, cache(find_end))
        for number, (source, (name, rows_from, find_end)) in enumerate(parts)
    ]


def _parts_of(
    source: DataSource,
) -> Iterator[tuple[str, Callable[[Place], Iterable[Placed]], Callable[[], Place]]]:
    """Name, reader and end of each shard of a source."""
    if source.most is not None or source.rows is not None:

        def whole_source(start: Place) -> Iterator[Placed]:
            return _counted(islice(iter_unread(source), start.row, None), start)

        yield source.name, whole_source, partial(_end_of_source, source)
        return
    for file in source.files:
        yield str(file), partial(_file, file), partial(_end_of_file, file)
    if source.hub_name is not None:
        whole = cast("IterableDataset", load_hub(source, streaming=True))
        for index in range(whole.num_shards):
            name = f"{source.hub_name}, shard {index + 1}"
            yield name, partial(_hub_shard, name, whole, index), lambda: START


def _counted(rows: Iterable[RawRow | Line], start: Place) -> Iterator[Placed]:
    return ((row, Place(number)) for number, row in enumerate(rows, start.row + 1))


def _end_of_source(source: DataSource) -> Place:
    """Its bound or its number of rows; where it has fewer than its bound, what it may end at."""
    sizes = (source.most, len(source.rows) if isinstance(source.rows, Sized) else None)
    return Place(row=min(filter(None, sizes), default=0))


def _file(path: Path, start: Place) -> Iterator[Placed]:
    rows = iter_unread_file(path, start)
    if kind_of_file(path) == ".jsonl":
        return ((line, line.end) for line in rows if isinstance(line, Line))
    return _counted(rows, start)


def _end_of_file(path: Path) -> Place:
    if kind_of_file(path) == ".parquet":
        import pyarrow.parquet

        return Place(row=pyarrow.parquet.read_metadata(path).num_rows)
    return Place(byte=path.stat().st_size if data_suffix(path) == ".jsonl" else 0)


def _hub_shard(name: str, whole: "IterableDataset", index: int, start: Place) -> Iterator[Placed]:
    shard = whole.shard(whole.num_shards, index)
    return _counted(hub_rows(name, shard.skip(start.row) if start.row else shard, start), start)


class StreamedRow(NamedTuple):
    """A row as samples, or the end of a pass over its pool."""

    key: tuple[int, ...]  # of files: pass, shard and row, by which rows are in order
    source: int
    # none where the row is not used; of unpaired answers records, until they are in a block
    samples: Sequence[AnySample | TextRecord]
    after: Position
    fate: str = ""  # why it is not used, where it is not
    ends_pass: bool = False


@dataclass(frozen=True)
class Chunk:
    """Rows of one shard, not tokenised yet; none at the end of a pass."""

    source: int
    shard: int
    rows: Sequence[RawRow | Line]
    after: Sequence[Position]  # each of them, or the pass


@dataclass(frozen=True)
class ChunkReader:
    """Makes samples of rows; called in worker processes."""

    reader: RowReader
    encoder: Encoder
    rule: TokenRule
    left_out: frozenset[bytes]  # digests of rows, and of prompts, that are held out

    def __call__(self, chunk: Chunk | list[TextRecord]) -> list[Any]:
        """A :class:`StreamedRow` for each row of a chunk, or for the end of a pass.

        Of records, the samples of each. Answers of KTO are tokenised so: with one to another
        prompt of their block.

        Raises:
            ValueError: for a row that cannot be used, unless such rows are skipped.
        """
        if isinstance(chunk, list):
            return [each.samples for each in tokenize(chunk, self.encoder, self.rule)]
        if not chunk.rows:
            return [StreamedRow((), chunk.source, (), chunk.after[0], ends_pass=True)]
        kept, fates = [], []
        for row in chunk.rows:
            counts = RowCounts()
            records, prompt = self.reader.records(row.read(), counts)
            fate = counts.examples[0] if counts.examples else NOT_LEARNT
            if records and self.left_out & {row_digest(records, self.reader.kind), prompt}:
                records, fate = (), HELD_OUT
            kept.append(records)
            fates.append(fate)
        samples: list[Sequence[AnySample | TextRecord]]
        if self.reader.kind == "unpaired":
            samples = [answers_of(*records) for records in kept]
        else:
            results = iter(tokenize([*chain.from_iterable(kept)], self.encoder, self.rule))
            samples = [[s for _ in records for s in next(results).samples] for records in kept]
            fates = [TOO_LONG if own else fate for own, fate in zip(kept, fates, strict=True)]
        return [
            StreamedRow((after.epoch, chunk.shard, after.row), chunk.source, own, after, fate)
            for own, after, fate in zip(samples, chunk.after, fates, strict=True)
        ]


@dataclass(frozen=True)
class Pool:
    """Sources that are read as one, pass after pass, their shards in another order each time."""

    number: int
    name: str
    shards: Sequence[DataShard]
    seed: int
    share: float = 1.0
    passes: int = 0  # most of them; 0: no bound

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """Its rows from ``start`` on.

        Raises:
            ValueError: if it has no rows, or they cannot be read.
        """
        position = start
        while not self.passes or position.epoch < self.passes:
            order = self._order(position.epoch)
            for place in range(position.shard, len(order)):
                if place > position.shard:
                    position = Position(position.epoch, place, rows=position.rows)
                for chunk in self._chunks_of(self.shards[order[place]], position):
                    position = chunk.after[-1]
                    yield chunk
            if not position.rows:
                raise StreamError(f"{self.name} has no rows")
            position = Position(position.epoch + 1)
            yield Chunk(self.shards[0].source, 0, [], [position])

    def _chunks_of(self, shard: DataShard, position: Position) -> Iterator[Chunk]:
        unread: list[RawRow | Line] = []
        after: list[Position] = []
        size, failure = 0, None
        try:
            for row, place in shard.read(Place(position.row, position.byte)):
                position = position._replace(row=place.row, byte=place.byte, rows=position.rows + 1)
                unread.append(row)
                after.append(position)
                size += row.size
                if len(unread) == ROWS_PER_CHUNK or size >= BYTES_PER_FILE:
                    yield Chunk(shard.source, shard.number, unread, after)
                    unread, after, size = [], [], 0
        except StreamError as error:
            failure = error
        if unread:
            yield Chunk(shard.source, shard.number, unread, after)
        if failure is not None:
            raise failure

    def _order(self, epoch: int) -> Indices:
        return permutation(len(self.shards), "shards", self.seed, self.number, epoch)

    def passes_at(self, position: Position) -> float:
        """Passes that are done, the last one by its shards and what was read of the present one."""
        shard = self.shards[self._order(position.epoch)[position.shard]]
        done = position.shard + shard.share_before(Place(position.row, position.byte))
        return position.epoch + done / len(self.shards)


class Mixed(NamedTuple):
    """How far pools have been read, and how much was drawn from each."""

    positions: tuple[Position, ...]
    drawn: tuple[int, ...]  # rows since the last pool ended
    ended: tuple[bool, ...]


def next_pool(shares: Sequence[float], drawn: Sequence[int], ended: Sequence[bool]) -> int:
    """The pool that the next row makes the most of its share of rows good (error diffusion)."""
    active = [number for number, is_over in enumerate(ended) if not is_over]
    whole, total = sum(shares[n] for n in active), sum(drawn[n] for n in active) + 1
    return max(active, key=lambda n: (shares[n] / whole * total - drawn[n], -n))


@dataclass
class Mixture:
    """Rows of several pools by their shares, or of one pool pass by pass."""

    pools: Sequence[Pool]
    rows: Sequence[Iterator[StreamedRow]]  # of each pool, from ``at`` on
    at: Mixed  # after the rows that were taken
    _next: tuple[list[StreamedRow], Mixed] | None = None
    _used: Counter[int] = field(default_factory=Counter)  # by pool: usable rows of this pass

    def __post_init__(self) -> None:
        for number, position in enumerate(self.at.positions):
            self._used[number] = position.rows  # unknown, of a pass that is gone on with

    def peek(self) -> StreamedRow | None:
        """The next row to use, or end of a pass of a single pool; None if all have ended."""
        if self._next is None:
            self._next = self._find()
        last = self._next[0][-1:]
        return last[0] if last and (last[0].samples or last[0].ends_pass) else None

    def take(self) -> list[StreamedRow]:
        """Rows up to the next one, which is the last of them; the others are not used."""
        self.peek()
        assert self._next is not None
        (rows, self.at), self._next = self._next, None
        return rows

    def _find(self) -> tuple[list[StreamedRow], Mixed]:
        seen, at = [], self.at
        while not all(at.ended):
            number = next_pool([pool.share for pool in self.pools], at.drawn, at.ended)
            row = next(self.rows[number], None)
            if row is None:
                ended = (*at.ended[:number], True, *at.ended[number + 1 :])
                at = Mixed(at.positions, (0,) * len(ended), ended)
                continue
            positions = (*at.positions[:number], row.after, *at.positions[number + 1 :])
            at = at._replace(positions=positions)
            if row.ends_pass:
                if not self._used.pop(number, 0):
                    raise StreamError(f"none of the rows of {self.pools[number].name} can be used")
                if len(self.pools) > 1:
                    continue
            seen.append(row)
            if row.samples:
                self._used[number] += 1
                drawn = (*at.drawn[:number], at.drawn[number] + 1, *at.drawn[number + 1 :])
                at = at._replace(drawn=drawn)
            if row.samples or row.ends_pass:
                break
        return seen, at


def take_block(mixture: Mixture, size: int) -> tuple[list[StreamedRow], list[StreamedRow], bool]:
    """Up to ``size`` rows, those that are not used, and whether a pass of a single pool ends."""
    taken: list[StreamedRow] = []
    others: list[StreamedRow] = []
    while (row := mixture.peek()) is not None and (row.ends_pass or len(taken) < size):
        *unused, row = mixture.take()
        others += unused
        if row.ends_pass:
            break
        taken.append(row)
    assert taken, "a pass without a row is refused"
    ends_epoch = row is not None and row.ends_pass and len(mixture.pools) == 1
    if mixture.peek() is None:
        others += mixture.take()  # what is behind the last row
    return taken, others, ends_epoch


def _with_mismatched(
    rows: Sequence[StreamedRow],
    tokenized: Callable[[Iterable[list[TextRecord]]], Iterator[list[Any]]],
    *,
    seed: int,
) -> list[StreamedRow]:
    """Rows of answers as samples, each with an answer to another prompt of the block.

    A row has none if it is too long, or all rows are of one prompt.
    """
    records = [cast("TextRecord", each) for row in rows for each in row.samples]
    prompts = [text_digest(each.prompt) if each.prompt else b"" for each in records]
    others = mismatched(np.array(prompts, "S16"), seed=seed).tolist()
    if min(others) < 0:
        return [row._replace(samples=(), fate=ONE_PROMPT) for row in rows]
    pairs = zip(records, others, strict=True)
    whole = [each._replace(mismatched=records[other].completion) for each, other in pairs]
    starts = range(0, len(whole), ROWS_PER_CHUNK)
    chunks = tokenized(whole[start : start + ROWS_PER_CHUNK] for start in starts)
    own = chain.from_iterable(chunks)
    return [
        row._replace(samples=[each for _ in row.samples for each in next(own)], fate=TOO_LONG)
        for row in rows
    ]


def read_blocks(
    pools: Sequence[Pool],
    reader: ChunkReader,
    start: dict[str, Any] | None,
    *,
    size: int,
    workers: int,
) -> Generator[bytes, None, None]:
    """Blocks of ``size`` rows from ``start`` on, the bytes of a ``StreamBlock``.

    Of a single pool a block ends with a pass too. Within a block rows are in the order of the
    files, so that one that holds a whole pass is what preparing the files gives.

    Raises:
        ValueError: if rows cannot be read or used.
    """
    kind = reader.rule.kind
    count, epoch, number = len(pools), 0, 0
    at = Mixed((Position(),) * count, (0,) * count, (False,) * count)
    if start is not None:
        (positions, drawn, ended), epoch, number = start["at"], start["epoch"], start["block"]
        at = Mixed(tuple(starmap(Position, positions)), tuple(drawn), tuple(ended))
    with ordered_map(reader, workers=workers) as mapped:
        rows = [
            (row for made in mapped(pool.chunks(position)) for row in made)
            for pool, position in zip(pools, at.positions, strict=True)
        ]
        mixture = Mixture(pools, rows, at)
        while mixture.peek() is not None:
            before = mixture.at
            taken, others, ends_epoch = take_block(mixture, size)
            taken.sort(key=lambda row: (row.source, row.key))
            if kind == "unpaired":
                taken = _with_mismatched(taken, mapped, seed=pools[0].seed)
                unused = [row for row in taken if not row.samples]
                others += unused
                if len(unused) == len(taken) and not number:  # rather than pass after pass
                    raise StreamError(
                        f"{pools[0].name}: all {len(taken):,} rows of a block are "
                        f"{unused[0].fate}, and --loss_type kto needs answers to two prompts or "
                        "more: raise --shuffle_buffer_size, or shuffle the rows"
                    )
            bad = [row.fate for row in others if row.fate not in FATES]
            passes = {
                pool.name: [pool.passes_at(at.positions[n]) for at in (before, mixture.at)]
                for n, pool in enumerate(pools)
            }
            notes = {
                "start": {"at": before, "epoch": epoch, "block": number},
                "passes": passes,
                "over": [p.name for p in pools if p.passes and passes[p.name][1] >= p.passes],
                "unused": Counter("bad" if row.fate not in FATES else row.fate for row in others),
                "bad": bad[:MAX_EXAMPLES],
                "ends_epoch": ends_epoch,
                "ends_stream": mixture.peek() is None,
            }
            epoch, number = (epoch + 1, 0) if ends_epoch else (epoch, number + 1)
            samples = [(row.source, each) for row in taken for each in row.samples]
            types = {**COLUMNS[kind], "source": pa.int32()}
            columns = {
                name: Column.of([getattr(each, name) for _, each in samples], types[name])
                for name in COLUMNS[kind]
            }
            columns["source"] = Column.of([source for source, _ in samples], types["source"])
            content = pa.BufferOutputStream()
            write_table(content, [columns], types, {"block": json.dumps(notes).encode()})
            yield content.getvalue().to_pybytes()
