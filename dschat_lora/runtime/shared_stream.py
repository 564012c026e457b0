"""Rows that one process reads for all while they train."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from dschat_lora.config.data import DataConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.data.sources import StreamError
from dschat_lora.data.stream_loader import Stream
from dschat_lora.engine.distributed import broadcast_bytes, broadcast_string, rank, world_size
from dschat_lora.models.loading import Tokenizer


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
