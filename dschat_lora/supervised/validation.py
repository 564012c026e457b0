"""Validation of the supervised stages: the checks of steps 1, 2 and DPO, in their order."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from dschat_lora.config.addons import through_addons
from dschat_lora.config.held import rows_in_words
from dschat_lora.config.roles import MODEL
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.media import media_reader
from dschat_lora.data.rows import check_some_prompt_fits, check_sources
from dschat_lora.data.templates import read_chat_template
from dschat_lora.report.terminal import say_once
from dschat_lora.runtime.checks import (
    Check,
    check_bundled_data_fits,
    model_name,
    note_without_effect,
    with_bundled,
)
from dschat_lora.runtime.directory import check_output_dir
from dschat_lora.runtime.validation import (
    MODEL_CHECKS,
    Inputs,
    check_sources_are_kept,
    check_stage,
    find_model_of,
    with_deepspeed_json,
    with_fitting_lengths,
    with_recomputation,
)

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)

# Rows of the bundled data are short; longer packed rows would leave few optimizer steps.
BUNDLED_SEQ_LEN = 128


def check_supervised(config: ConfigT, *, first: Iterable[Check[ConfigT, Inputs]] = ()) -> ConfigT:
    """The config of step 1, 2 or DPO with paths, bundled defaults and the DeepSpeed JSON applied.

    ``first`` are a stage's own checks, before the others. Where a run is resumed, see
    :func:`dschat_lora.runtime.checks.resolve_stage`.

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """
    checks = (*first, *SUPERVISED_CHECKS)
    return check_stage(config, checks, find_model_of)


def with_bundled_data(config: ConfigT, inputs: Inputs) -> ConfigT:
    """With the bundled rows where the user names none that the stage uses."""
    data = config.data
    if "sft_only_data_path" in config.when:
        data = replace(data, sft_only_data_path=())
    if not (data.data_path or data.sft_only_data_path):
        data = with_bundled(data, config.given, max_seq_len=BUNDLED_SEQ_LEN)
    return replace(config, data=data)


def check_budget(config: SupervisedConfig, inputs: Inputs) -> None:
    """Refuse micro-batches of so many tokens that are of so many rows too, or hold no row."""
    tokens, rows = config.batch.tokens_per_device, config.batch.per_device_train_batch_size
    if tokens and "per_device_train_batch_size" in config.given:
        raise ValueError(
            f"--tokens_per_device {tokens} and --per_device_train_batch_size {rows} both set the "
            "size of a micro-batch; give one"
        )
    longest, length = config.max_row_tokens, config.data.max_seq_len
    if tokens and tokens < longest:
        both = ", twice that for a pair" if longest > length else ""
        raise ValueError(
            f"--tokens_per_device {tokens} is less than the maximum length of a row with "
            f"--max_seq_len {length}{both}; give at least {longest}, or lower --max_seq_len"
        )


def check_bundled_data(config: SupervisedConfig, inputs: Inputs) -> None:
    """Refuse the bundled data for another model than the bundled one and what was made of it."""
    if config.data.data_path != inputs.asked:
        check_bundled_data_fits(inputs.sources.of(MODEL), stage=config.stage)


def check_data(config: SupervisedConfig, inputs: Inputs) -> None:
    """Refuse data that cannot be read as the stage reads it, or a chat template that is none."""
    source = inputs.sources.of(MODEL)
    if config.model.chat_template is not None:
        read_chat_template(config.model.chat_template)
    check_sources(config.data, config.kind, media_reader(config, None, source.base))
    if config.optim.num_train_epochs > 0:
        check_some_prompt_fits(config.data, source.tokenizer)


def announce(config: SupervisedConfig, inputs: Inputs) -> None:
    """Log model and data in the first line, and a note on each option that changes nothing."""
    bundled = config.data.data_path != inputs.asked
    paths = "the bundled data" if bundled else " ".join(map(rows_in_words, config.data.data_path))
    more = " ".join(map(rows_in_words, config.data.sft_only_data_path))
    say_once(f"model: {model_name(inputs.sources.of(MODEL))}; data: {paths} {more}".rstrip())
    note_without_effect(config)


# In this order: the first that fails is the one a user reads.
SUPERVISED_CHECKS: tuple[Check[Any, Inputs], ...] = (
    with_bundled_data,
    *MODEL_CHECKS,
    lambda config, _: config.settled(),
    with_fitting_lengths,
    check_budget,
    check_bundled_data,
    lambda config, _: through_addons(config, "before_data"),
    check_data,
    with_deepspeed_json,
    with_recomputation,
    lambda config, _: through_addons(config, "check"),
    check_output_dir,
    check_sources_are_kept,
    announce,
)
