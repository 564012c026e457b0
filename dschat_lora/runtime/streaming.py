"""A stream of rows that one process reads for all."""

from typing import Any

from dschat_lora.config.data import DataConfig
from dschat_lora.config.stages import StageConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.data.stream import StreamError
from dschat_lora.data.stream_loader import Stream
from dschat_lora.engine.distributed import broadcast_bytes, broadcast_string, rank, world_size
from dschat_lora.models.loading import Tokenizer
from dschat_lora.runtime.run import OpenRun


class SharedStream:
    """Blocks of the training data that rank 0 reads; call methods on every rank."""

    def __init__(
        self,
        run: OpenRun[StageConfig],
        data: DataConfig,
        tokenizer: Tokenizer,
        head: Prepared,
        *,
        phase: int,
        kind: DataKind,
    ) -> None:
        """Prepare to read all but what is held out of the ``head``, the first rows."""
        self._own: Stream | None = None
        if rank() == 0:
            self._own = Stream(
                data,
                tokenizer,
                phase=phase,
                seed=run.config.run.seed,
                eos_id=int(tokenizer.eos_token_id),
                kind=kind,
                left_out=head.left_out,
            )
            run.closing.callback(self._own.close)

    def begin(self, start: dict[str, Any] | None) -> None:
        """Read ahead from the block that begins there, or from the first."""
        if self._own is not None:
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
