"""Data sets of the hub that are so large that they are read while training."""

from typing import Any

from dschat_lora.data.rows import config_sources
from dschat_lora.data.sources import DataSource
from dschat_lora.engine.distributed import broadcast_string, on_rank_zero
from dschat_lora.report.terminal import say_once
from dschat_lora.runtime.resume import with_options

MOST_HUB_ROWS = 1_000_000  # that are prepared, unless --no-streaming asks for more


def with_large_hub_data_streamed(config: Any) -> Any:
    """With ``--streaming`` where data sets of the hub are large; call on every rank.

    Not where it was typed, nor where a run goes on, or needs to know all rows before.
    """
    data = config.data
    sources = config_sources(getattr(data, "data", data))  # prompts are data to prepare
    hub = [s for s in sources if s.hub_name is not None and s.option != "eval_data_path"]
    if config.checkpoint or "streaming" in config.given or not hub:
        return config
    try:
        asked = with_options(config, {"streaming": True})
        streamed = asked.addons.streaming.before_data(asked)
    except ValueError:
        return config
    counted = on_rank_zero(lambda: sum(map(known_rows, hub)))
    rows = int(broadcast_string(str(counted)))
    if rows <= MOST_HUB_ROWS:
        return config
    say_once(
        f"  note         {', '.join(each.entry for each in hub)}: {rows:,} rows exceed "
        f"{MOST_HUB_ROWS:,}, so they are read during training, as with --streaming; "
        "--no-streaming prepares them first"
    )
    return streamed


def known_rows(source: DataSource) -> int:
    """Rows of a hub data set by its card, or by what was made of it before; 0 where neither tells.

    Nothing but the description is fetched.
    """
    from datasets import load_dataset_builder

    name, config, split = source.hub_parts
    try:
        splits = load_dataset_builder(name, config).info.splits or {}
    except (OSError, ValueError, RuntimeError):  # that it cannot be read is said by who reads it
        return 0
    rows = int(splits[split].num_examples) if split in splits else 0
    return min(rows, source.most or rows)
