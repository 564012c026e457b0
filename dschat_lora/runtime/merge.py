"""Merging of an adapter into its base outside of a run, with the deviation that rounding makes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from dschat_lora.checkpoint.export import save_merged
from dschat_lora.checkpoint.history import is_checkpoint
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.verbs import MergeConfig
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import device
from dschat_lora.lora.merge import MergeReport
from dschat_lora.models.build import AdaptedModel, build_causal_lm, build_reward_model
from dschat_lora.models.composite import merged_words
from dschat_lora.models.loading import Tokenizer, load_config, load_tokenizer, stored_dropouts
from dschat_lora.models.source import find_model
from dschat_lora.report.terminal import log_once, note, print_json

PROBE = 256  # tokens on which a merged model is compared


@dataclass(frozen=True)
class Merge:
    """A merged model on the disk, and what is to be said of it."""

    directory: Path
    dtype: torch.dtype  # of its weights
    report: MergeReport
    composite: str | None  # words on a composite model
    base_bits: int  # that the adapter was trained on


def merge_model(config: MergeConfig) -> Merge:
    """Write base and adapter as one model, and measure how far it differs.

    The base is loaded in the type it is stored in, the update is added in fp32, and the sum is
    rounded once to the type that is written, by default the same. Of a 4-bit base, the values are
    what the update is added to.

    Raises:
        ValueError: if there is not an adapter, or the merge moves the model by too much.
    """
    directory, source = merged_directory(config), find_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    stored = getattr(load_config(source.base, config.model), "dtype", None) or torch.float32
    written = stored if stored in DTYPES.values() else torch.bfloat16
    if config.dtype != "auto":
        written = DTYPES[config.dtype]
    assert source.adapter_config is not None
    build: Callable[..., AdaptedModel] = build_causal_lm
    if source.adapter_config.task_type == "SEQ_CLS":
        build = partial(build_reward_model, new_head=False)
    adapted = build(
        source,
        tokenizer,
        config.model,
        LoraConfig(),
        dtype=stored if stored in DTYPES.values() else written,
        seed=0,
        meta=False,
    )
    if adapted.warning is not None:
        note(f"warning: {adapted.warning}")
    model = adapted.model.eval().to(device())
    report = save_merged(
        directory,
        model,
        tokenizer=tokenizer,
        probe_ids=probe_ids(tokenizer, getattr(model.config, "max_position_embeddings", None)),
        max_kl=config.merge_max_kl,
        dropouts=stored_dropouts(source.base, config.model),
        dtype=written,
    )
    assert report is not None, "there is one process"
    return Merge(directory, written, report, merged_words(model), adapted.base_bits)


def show_merge(config: MergeConfig) -> None:
    """Merge, and print what was written."""
    merge = merge_model(config)
    directory, report = merge.directory, merge.report
    if config.json:
        name = next(each for each, dtype in DTYPES.items() if dtype == merge.dtype)
        print_json({"directory": str(directory), "dtype": name, **asdict(report)})
        return
    own = ", in which its base is stored (--dtype)" if config.dtype == "auto" else ""
    log_once(
        f"model written to {directory} in {str(merge.dtype).removeprefix('torch.')}{own}: against "
        f"the adapter on its base, largest logit difference {report.max_abs_logit:.2g}, KL "
        f"{report.kl_nats_per_token:.2g} nats per token"
    )
    if merge.composite:
        log_once(merge.composite)
    if merge.base_bits == 4:
        log_once(
            f"it was trained on a 4-bit base: serve {directory}, which has the dequantised values "
            f"of that base, or {config.model_name_or_path} itself in a quarter of the memory; "
            "quantising the merged model again would change it"
        )


def merged_directory(config: MergeConfig) -> Path:
    """The directory that :func:`merge_model` writes.

    Raises:
        ValueError: if there is nothing to merge, or something is there already.
    """
    source = find_model(config.model_name_or_path)
    if source.adapter is None:
        raise ValueError(
            f"--model_name_or_path {config.model_name_or_path} is a full model without an "
            "adapter: there is nothing to merge"
        )
    if config.output_dir is None and is_checkpoint(source.adapter):
        raise ValueError(f"{source.adapter} is a checkpoint: give --output_dir for the model")
    given = Path(config.output_dir or source.adapter.parent / "model").expanduser()
    taken = given.is_file() or (given.is_dir() and any(given.iterdir()))
    is_model = (given / "config.json").is_file()
    if taken and not (config.overwrite_output_dir and is_model):
        hint = "--overwrite_output_dir overwrites it" if is_model else "it contains no model"
        raise ValueError(f"--output_dir {given} is not empty ({hint}); choose another directory")
    if Path(source.base).resolve() == given.resolve():
        raise ValueError(f"--output_dir {given} is the base of the adapter; choose another")
    return given


def probe_ids(tokenizer: Tokenizer, positions: int | None, most: int = PROBE) -> Tensor:
    """(1, T) token ids of bundled texts, T at most ``most`` and the model's positions."""
    with BUNDLED_DATA["eval"].open(encoding="utf-8") as file:
        ids = [token for line in islice(file, 8) for token in tokenizer(line)["input_ids"]]
    return torch.tensor([ids[: min(most, positions or most)]])
