"""Rows that one process reads for all while they train, as the steps and samples of a run."""

from functools import partial
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.streaming.loader import Stream, StreamLoader, describe_sources
from dschat_lora.config.data import DataConfig
from dschat_lora.data.loader import sources_in_metrics
from dschat_lora.data.packing import PackedRows, SampleCounts, make_rows
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.data.sources import StreamError
from dschat_lora.engine.distributed import (
    broadcast_bytes,
    broadcast_string,
    rank,
    world_size,
)
from dschat_lora.supervised.batching import BatchLayout, rows_per_step, step_options
from dschat_lora.supervised.setup import SupervisedSetup

if TYPE_CHECKING:
    from dschat_lora.addons.streaming.prompts import PromptStream
    from dschat_lora.rl.loop.setup import RlhfSetup


class SharedStream:
    """Blocks of the training data that rank 0 reads; call methods on every rank."""

    def __init__(
        self,
        setup: "SupervisedSetup | RlhfSetup",
        data: DataConfig,
        head: Prepared,
        *,
        phase: int,
        kind: DataKind,
    ) -> None:
        """Prepare to read all but what is held out of the ``head``, until the run ends."""
        self._own: Stream | None = None
        self._closing = setup.run.closing
        self._open = partial(
            Stream,
            data,
            setup.tokenizer,
            phase=phase,
            seed=setup.config.run.seed,
            eos_id=int(setup.tokenizer.eos_token_id),
            kind=kind,
            left_out=head.left_out,
        )

    def begin(self, start: dict[str, Any] | None) -> None:
        """Read ahead from the block that begins there, or from the first."""
        if rank() == 0:
            if self._own is None:
                self._own = self._open()
                self._closing.callback(self._own.close)
            self._own.begin(start)

    def next(self) -> bytes:
        """The next block.

        Raises:
            StreamError: on every rank, if rows cannot be read or used.
        """
        content, error = b"", ""
        if self._own is not None:
            try:
                content = self._own.next()
            except (ValueError, OSError) as problem:
                error = str(problem)
        if error := broadcast_string(error):
            raise StreamError(error)
        return broadcast_bytes(content, 0) if world_size() > 1 else content


def make_loader(setup: SupervisedSetup, layout: BatchLayout) -> StreamLoader:
    """This rank's micro-batches of every optimizer step of a supervised stage."""
    config, data, options = setup.config, setup.config.data, step_options(setup, layout)
    budget, step_rows, say = options["budget"], rows_per_step(setup), setup.run.log.say

    def pack(counts: SampleCounts, seed: int) -> PackedRows:
        if budget is not None:
            groups: PackedRows = budget.groups(counts, seed=seed)
            return groups
        size, packing = config.max_row_tokens, layout.packing
        return make_rows(counts.positions, max_seq_len=size, packing=packing, seed=seed)

    say(
        f"  stream       blocks of {data.tail.shuffle_buffer_size:,} rows, each shuffled and "
        f"packed as a whole; steps of up to {step_rows} rows"
    )
    return StreamLoader(
        SharedStream(setup, data, setup.data, phase=setup.config.phase, kind=setup.config.kind),
        pack=pack,
        steps=config.optim.max_steps,
        taken=step_rows if budget is None else budget.groups_per_step,
        names=sources_in_metrics(data, setup.data),
        kind=setup.config.kind,
        say=say,
        sources=describe_sources(data),
        **options,
    )


def make_text_loader(
    setup: "RlhfSetup", data: DataConfig, head: Prepared, *, rows_of: Any, **options: Any
) -> StreamLoader:
    """The same of pretraining text; ``rows_of`` makes rows of samples' lengths and a seed."""
    micro_batches = options["gradient_accumulation_steps"] * options["world_size"]
    return StreamLoader(
        SharedStream(setup, data, head, phase=3, kind="samples"),
        pack=lambda counts, seed: rows_of(counts.positions, seed=seed),
        steps=setup.config.optim.max_steps,
        taken=options["micro_batch_size"] * micro_batches,
        names=(),
        kind="samples",
        say=setup.run.log.say,
        **options,
    )


def make_source(
    setup: "RlhfSetup",
    data: DataConfig,
    head: Prepared,
    *,
    kind: DataKind,
    beside: DataConfig | None,
    **how: Any,
) -> "PromptStream":
    """The samples of each iteration of step 3; ``beside`` is other data that the run streams."""
    from dschat_lora.addons.streaming.prompts import PromptStream  # has what is of step 3 alone

    return PromptStream(
        SharedStream(setup, data, head, phase=3, kind=kind),
        most=max(1, setup.config.optim.max_steps),
        kind=kind,
        seed=setup.config.run.seed,
        say=setup.run.log.say,
        sources=" ".join(map(describe_sources, filter(None, (data, beside)))),
        **how,
    )
