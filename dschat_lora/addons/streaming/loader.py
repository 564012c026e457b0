"""Optimizer steps of rows that are read while training."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dschat_lora.addons.streaming.stream import (
    MAX_EXAMPLES,
    ChunkReader,
    Pool,
    find_shards,
    read_blocks,
)
from dschat_lora.algos.seeds import permutation, stream_seed
from dschat_lora.config.data import DataConfig, mixture_shares
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import Tokenizer, make_encoder
from dschat_lora.data.loader import SampleSources, StepLoader, Window
from dschat_lora.data.packing import PackedRow, PackedRows, SampleCounts
from dschat_lora.data.prepare import num_workers, source_names, token_rule
from dschat_lora.data.record_files import RowReader
from dschat_lora.data.row_arrays import Indices
from dschat_lora.data.rows import DataKind, config_sources, row_options
from dschat_lora.data.samples import SourcedSamples, TokenSet, read_table
from dschat_lora.data.sources import StreamError

if TYPE_CHECKING:
    from dschat_lora.runtime.run import OpenRun

POLL = 0.1  # seconds between two looks at whether reading is to end
PATIENCE = 10  # seconds in which it does, unless a read hangs
# The rows of samples with these counts, by a seed: of ``TokenBudget.groups`` or ``make_rows``.
Packer = Callable[[SampleCounts, int], PackedRows]


def describe_sources(config: DataConfig) -> str:
    """32 hex digits of what is streamed, by names of files and by shares."""
    text = json.dumps(
        [
            [source.option, source.weight, source.most, source.hub_name]
            + [file.name for file in source.files]
            for source in config_sources(config, head=False)
        ]
        + [1.0, config.tail.shuffle_buffer_size]  # 1.0: as checkpoints have it
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class StreamBlock:
    """Samples that are shuffled and packed together."""

    samples: TokenSet
    sources: Indices  # (n,) number of each sample's source
    start: dict[str, Any]  # from where it is read again
    passes: dict[str, tuple[float, float]]  # over each pool, before it and after it
    over: list[str]  # pools that give nothing after it
    unused: dict[str, int]  # rows that are not used, by reason
    bad: list[str]  # some of those that cannot be
    ends_epoch: bool
    ends_stream: bool

    @cached_property
    def sourced(self) -> SourcedSamples:
        """The samples with the numbers of their sources."""
        return SourcedSamples(self.samples, self.sources)

    @classmethod
    def decode(cls, content: bytes, kind: DataKind) -> "StreamBlock":
        """The block that :func:`read_blocks` gives as bytes."""
        (columns,), notes = read_table(content)
        sources = columns.pop("source").values.astype(np.int64)
        return cls(TokenSet([columns], kind), sources, **json.loads(notes[b"block"]))


# Rows with their blocks, and the passes over each pool up to the last of them.
Taken = tuple[list[tuple[StreamBlock, PackedRow]], dict[str, float]]


class Stream:
    """Blocks of tokenised rows, read ahead by a thread and its worker processes."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        phase: int,
        seed: int,
        eos_id: int,
        kind: DataKind,
        left_out: frozenset[bytes],
    ) -> None:
        """Find the shards of all training sources.

        ``left_out`` are digests of rows and prompts that are not trained on.

        Raises:
            ValueError: if a source cannot be found.
        """
        sources = config_sources(config, head=False)
        names = source_names(sources)
        options = ("data_path", *(("sft_only_data_path",) if phase == 1 else ()))
        used = [number for number, source in enumerate(sources) if source.option in options]
        self._size, self._workers = config.tail.shuffle_buffer_size, num_workers(config)
        chat = make_chat(tokenizer, config.chat_template_kwargs, eos_id=eos_id)
        reader = RowReader(row_options(config), chat, kind, skips=config.bad_rows == "skip")
        rule = token_rule(config, eos_id, kind)
        self._reader = ChunkReader(reader, make_encoder(tokenizer), rule, left_out)
        groups, shares = [used], {used[0]: 1.0}
        if config.is_mixture:
            weights = {number: sources[number].weight or 0.0 for number in used}
            groups = [[number] for number in used]
            shares = mixture_shares(weights)
        repeats = (config.max_repeats or (0,)) * (len(groups) if len(config.max_repeats) < 2 else 1)
        self.pools = [
            Pool(
                index,
                names[numbers[0]] if len(numbers) == 1 else "the data",
                find_shards(sources, numbers),
                seed,
                shares[numbers[0]],
                repeats[index],
            )
            for index, numbers in enumerate(groups)
        ]
        self._queue: Queue[bytes | Exception] = Queue(maxsize=1)
        self._ends, self._thread = Event(), Thread(target=self._read, daemon=True)
        self._start: dict[str, Any] | None = None

    def begin(self, start: dict[str, Any] | None) -> None:
        """Read ahead from the block that begins there, or from the first."""
        assert not self._thread.is_alive()
        self._start = start
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self) -> bytes:
        """The next block.

        Raises:
            ValueError: if rows cannot be read or used.
        """
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """End the thread and its processes."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _read(self) -> None:
        blocks = read_blocks(
            self.pools, self._reader, self._start, size=self._size, workers=self._workers
        )
        with closing(blocks):
            try:
                for content in blocks:
                    if not self._put(content):
                        return
            except Exception as error:  # noqa: BLE001 (raised where the block is waited for)
                self._put(error)

    def _put(self, item: bytes | Exception) -> bool:
        while not self._ends.is_set():
            try:
                self._queue.put(item, timeout=POLL)
            except Full:
                continue
            return True
        return False


class Blocks(Protocol):
    """A :class:`Stream`, perhaps one that several processes share."""

    def begin(self, start: dict[str, Any] | None) -> None: ...

    def next(self) -> bytes: ...


class StreamedRows:
    """The rows of the blocks of a stream, so many at a time, and how far they were read.

    Blocks are gone through in turn, the rows of each as :meth:`rows_of` orders them; the last ones
    of an epoch are what is left. :meth:`state` says where the block of the next row begins, and
    how many of its rows were used: to resume is to read this one block again.
    """

    counts: SampleCounts | None = None
    num_rows, packs, reads_ahead = 0, False, True

    def __init__(
        self,
        stream: Blocks,
        *,
        taken: int,
        kind: DataKind,
        say: Callable[[str], object],
        sources: str = "",
    ) -> None:
        """Nothing is read yet; ``taken`` are the rows of a time, ``sources`` what is read."""
        self._stream, self._taken, self._kind, self._say = stream, taken, kind, say
        self._sources = sources
        self._state: dict[str, Any] = {
            "start": None,  # of the block of the last row; None: nothing was read
            "used": 0,  # rows of that block
            "unused": Counter(),  # rows of the data, by reason
            "read": Counter(),  # samples and tokens, by the name of their source
        }
        #: whether the rows that were taken last are the last ones that the data gives
        self.has_ended = False

    def rows_of(self, block: StreamBlock) -> Sequence[PackedRow]:
        """The block's rows as samples' numbers, in the order in which they are taken."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        counters = {name: Counter(state[name]) for name in ("unused", "read")}
        self._state = {**state, **counters}

    def identity(self) -> dict[str, Any]:
        """What is read, of which the state is a place."""
        return {"stream": self._sources}

    def record(self, run: "OpenRun[Any]", step: int) -> None:
        """Record what was read in so many steps, and say where the data ended before the run."""
        state = self.state()
        run.record.update({"stream": {name: state[name] for name in ("unused", "read")}})
        has_ended = self.has_ended or state.get("end") is not None
        if has_ended and step < run.config.optim.max_steps:
            run.log.say(f"all data was read --max_repeats times: the run ends after step {step}")

    def take(self) -> Iterator[Taken]:
        """The rows of each time from the state on, until the data ends.

        Raises:
            ValueError: where the data cannot be read on.
        """
        state = self._state
        self._stream.begin(state["start"])
        block: StreamBlock | None = None
        rows: Sequence[PackedRow] = ()
        used, is_known = state["used"], state["start"] is not None
        while not self.has_ended:
            members: list[tuple[StreamBlock, PackedRow]] = []
            before = self._state
            while len(members) < self._taken:
                if block is None or used == len(rows):
                    if block is not None:
                        if block.ends_stream or (block.ends_epoch and members):
                            break
                        used, is_known = 0, False
                    try:
                        block = StreamBlock.decode(self._stream.next(), self._kind)
                    except StreamError:  # the run goes on from before these rows
                        self._state = before
                        raise
                    rows = self.rows_of(block)
                    if not is_known:
                        self._tell(block)
                    continue
                new = rows[used : used + self._taken - len(members)]
                members += [(block, row) for row in new]
                used += len(new)
            if block is None or not members:
                return
            self.has_ended = block.ends_stream and used == len(rows)
            self._state = {**self._state, "start": block.start, "used": used}
            share = used / len(rows) if rows else 1.0
            passes = block.passes.items()
            yield members, {name: old + share * (new - old) for name, (old, new) in passes}

    def _tell(self, block: StreamBlock) -> None:
        """Count and say what is to be known of a block besides its samples."""
        unused = self._state["unused"]
        self._state = {**self._state, "unused": unused + Counter(block.unused)}
        quoted = unused["bad"] if not block.start["epoch"] else MAX_EXAMPLES
        for example in block.bad[: max(0, MAX_EXAMPLES - quoted)]:
            self._say(f"  bad row      {example}")
        for name, (before, after) in block.passes.items():
            passes = int(after)
            # A small source of a mixture may be read very often.
            if passes > int(before) and passes & (passes - 1) == 0 and name not in block.over:
                often = "once" if passes == 1 else f"{passes} times"
                self._say(f"  note         {name} was read {often} and is read again")


def block_seed(block: StreamBlock, seed: int) -> int:
    """That of a block: a block that is a whole epoch is what the files give, once prepared."""
    number = block.start["block"]
    return stream_seed("block", seed, number) if number else seed


class StreamLoader(StreamedRows):
    """``steps()`` yields this rank's micro-batches of every optimizer step, as a ``StepLoader``.

    Each block is packed and permuted by a seed of its own. So a step depends on the data, the seed
    and the product of micro batch, accumulation and ranks alone.
    """

    def __init__(
        self,
        stream: Blocks,
        *,
        pack: Packer,
        steps: int,
        taken: int,
        names: Sequence[str],
        kind: DataKind,
        seed: int,
        say: Callable[[str], object],
        sources: str = "",
        **options: Any,
    ) -> None:
        """Prepare the steps; nothing is read yet.

        ``pack`` makes rows of samples by their counts and a seed; ``steps`` are those of the run;
        ``taken`` are the rows, or groups of a budget, of a step; ``names`` those of the training
        sources; ``options`` are a ``StepLoader``'s.
        """
        super().__init__(stream, taken=taken, kind=kind, say=say, sources=sources)
        self._pack, self._names, self._seed = pack, names, seed
        self._options = {**options, "seed": seed}
        self.steps_per_epoch = steps  # as the length of a pass is not known

    def rows_of(self, block: StreamBlock) -> Sequence[PackedRow]:
        seed = block_seed(block, self._seed)
        rows = self._pack(self._options["collate"].counts(block.samples), seed)
        order = permutation(len(rows), "epoch", seed, block.start["epoch"])
        return [rows[place] for place in order]

    def steps(self, start: int) -> Iterator[Window]:
        """Steps from the state on, which is that before step ``start``, until the data ends.

        Raises:
            ValueError: where the data cannot be read on.
        """
        for members, passes in self.take():
            yield self._window(members, passes)

    def _window(
        self, members: Sequence[tuple[StreamBlock, PackedRow]], passes: Mapping[str, float]
    ) -> Window:
        """This rank's micro-batches of these rows."""
        blocks = list(dict.fromkeys(block for block, _ in members))
        chosen = [[(blocks.index(block), index) for index in row] for block, row in members]
        # In the order of the whole data, as samples of equal length are sorted by their numbers.
        places = sorted(chain.from_iterable(chosen))
        numbers = {place: number for number, place in enumerate(places)}
        rows = [tuple(numbers[place] for place in row) for row in chosen]
        samples = [blocks[block].samples[index] for block, index in places]
        numbers_of = np.array([blocks[block].sources[index] for block, index in places])
        sources = SampleSources(self._names, numbers_of) if len(self._names) > 1 else None
        loader = StepLoader(samples, rows=rows, sources=sources, **self._options)
        window = loader.window(rows)
        metrics = {**window.metrics, "epoch": min(passes.values())}
        self._state = {**self._state, "read": self._state["read"] + Counter(window.metrics)}
        if len(passes) > 1:
            metrics |= {f"epochs/{name}": value for name, value in passes.items()}
        return replace(window, metrics=metrics)
