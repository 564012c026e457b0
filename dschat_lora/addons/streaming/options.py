"""Options of rows that are read while training, which are what reads them: a ``Tail`` of data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option

if TYPE_CHECKING:
    from dschat_lora.addons.streaming.loader import StreamLoader
    from dschat_lora.addons.streaming.prompts import PromptStream
    from dschat_lora.data.sources import DataSource
    from dschat_lora.supervised.batching import BatchLayout
    from dschat_lora.supervised.setup import SupervisedSetup


@dataclass(frozen=True)
class StreamingOptions:
    """Whether rows are read while training, and how many are shuffled at a time."""

    fixed: ClassVar = ("streaming", "shuffle_buffer_size")

    streaming: bool = option(
        False,
        help="read, tokenize and pack rows during training, in bounded memory, instead of "
        "preparing all of them first; needs --max_steps",
    )
    shuffle_buffer_size: int = option(
        10_000,
        help="number of rows that --streaming shuffles and packs at a time; the order of shards is "
        "shuffled too",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "shuffle_buffer_size")

    def before_data(self, config: Any) -> Any:
        """The config whose training data is read on while training, where that is asked for.

        Raises:
            ValueError: for what needs all of the data before, naming the option to give.
        """
        if not self.streaming:
            return config
        data = config.data
        for name in ("data_weights", "data_split"):
            if getattr(data, name):
                raise ValueError(
                    f"--{name} needs the number of rows, which is unknown with --streaming; give "
                    "--data_path shares, as in a.jsonl:0.6 b/:0.4, or files of its own"
                )
        if len(set(data.max_repeats)) > 1 and not data.is_mixture:
            raise ValueError(
                f"--max_repeats {' '.join(map(str, data.max_repeats))}: --streaming treats "
                "sources without shares as one; give one number"
            )
        optim, dpo = (getattr(config, name, None) for name in ("optim", "dpo"))
        if optim is not None and optim.num_train_epochs and not optim.max_steps:
            raise ValueError("--streaming needs --max_steps, as the length of the data is unknown")
        if dpo is not None and dpo.has_reference and dpo.precompute_ref_log_probs:
            raise ValueError(
                "--streaming reads rows during training: also give --no-precompute_ref_log_probs, "
                "which computes the reference's log-probabilities during training"
            )
        return replace(config, data=replace(data, tail=self))

    def on_all_ranks(self, config: Any) -> Any:
        """The config that streams if its data sets of the hub are large."""
        from dschat_lora.addons.streaming.hub import with_large_hub_data_streamed

        return with_large_hub_data_streamed(config)

    def hub_rows(self, source: "DataSource") -> Iterable[Mapping[str, Any]]:
        from dschat_lora.data.readers import load_hub

        return load_hub(source, streaming=True)

    def loader(self, setup: "SupervisedSetup", layout: "BatchLayout") -> "StreamLoader":
        from dschat_lora.addons.streaming.runs import make_loader

        return make_loader(setup, layout)

    def text_loader(self, *args: Any, **how: Any) -> "StreamLoader":
        from dschat_lora.addons.streaming.runs import make_text_loader

        return make_text_loader(*args, **how)

    def source(self, *args: Any, **how: Any) -> "PromptStream":
        from dschat_lora.addons.streaming.runs import make_source

        return make_source(*args, **how)
