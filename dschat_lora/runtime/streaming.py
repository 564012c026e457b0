"""Rows that are read while training: when, and by one process for all."""

from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from dschat_lora.config.data import DataConfig
from dschat_lora.config.stages import StageConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.readers import known_rows
from dschat_lora.data.rows import DataKind, config_sources
from dschat_lora.data.stream import StreamError
from dschat_lora.data.stream_loader import Stream
from dschat_lora.engine.distributed import (
    broadcast_bytes,
    broadcast_string,
    on_rank_zero,
    rank,
    world_size,
)
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.terminal import say_once
from dschat_lora.runtime.resume import with_options
from dschat_lora.runtime.validation import check_streaming

StageT = TypeVar("StageT", bound=StageConfig)
MOST_HUB_ROWS = 1_000_000  # that are prepared, unless --no-streaming asks for more


def with_large_hub_data_streamed(config: StageT) -> StageT:
    """With ``--streaming`` where data sets of the hub are large; call on every rank.

    Not where it was typed, nor where a run goes on, or needs to know all rows before.
    """
    data: Any = getattr(config, "data", None)
    sources = config_sources(getattr(data, "data", data))  # prompts are data to prepare
    hub = [s for s in sources if s.hub_name is not None and s.option != "eval_data_path"]
    if config.checkpoint or "streaming" in config.given or not hub:
        return config
    try:
        streamed = with_options(config, {"streaming": True})
        check_streaming(streamed)
    except ValueError:
        return config
    found = on_rank_zero(lambda: sum(map(known_rows, hub)))
    rows = int(broadcast_string(str(found)))
    if rows <= MOST_HUB_ROWS:
        return config
    say_once(
        f"  note         {', '.join(each.entry for each in hub)}: {rows:,} rows are more than "
        f"{MOST_HUB_ROWS:,}, so they are read while training, as by --streaming; --no-streaming "
        "prepares them before"
    )
    return streamed


class SharedStream:
    """Blocks of the training data that rank 0 reads; call methods on every rank."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        head: Prepared,
        *,
        phase: int,
        kind: DataKind,
        seed: int,
        closing: ExitStack,
    ) -> None:
        """Prepare to read all but what is held out of the ``head``, the first rows.

        ``closing`` ends the reading.
        """
        self._own: Stream | None = None
        self._closing = closing
        self._open = partial(
            Stream,
            data,
            tokenizer,
            phase=phase,
            seed=seed,
            eos_id=int(tokenizer.eos_token_id),
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
        found, error = b"", ""
        if self._own is not None:
            try:
                found = self._own.next()
            except (ValueError, OSError) as problem:
                error = str(problem)
        if error := broadcast_string(error):
            raise StreamError(error)
        return broadcast_bytes(found, 0) if world_size() > 1 else found
