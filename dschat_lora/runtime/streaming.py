"""Whether rows are read while training where nobody says it."""

from typing import Any, TypeVar

from dschat_lora.config.stages import StageConfig
from dschat_lora.data.readers import known_rows
from dschat_lora.data.rows import config_sources
from dschat_lora.engine.distributed import broadcast_string, on_rank_zero
from dschat_lora.report.terminal import say_once
from dschat_lora.runtime.checks import check_streaming
from dschat_lora.runtime.resume import with_options

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
