"""Data of step 3: prompts, pretraining text and the data's own answers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from dschat_lora.config.data import DataConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.draw.player import AsksForColumns
from dschat_lora.rl.draw.source import check_others
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import answers_data, text_data
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import read_data, read_training_data


@dataclass(frozen=True)
class RlhfData:
    """What a run reads."""

    prompts: Prepared
    text: Prepared | None  # pretraining text to mix in
    answers: Prepared | None  # of the prompts' rows, to learn from beside those that are drawn


def read_rlhf_data(
    config: RlhfConfig,
    tokenizer: Tokenizer,
    run: OpenRun[RlhfConfig],
    asking: Iterable[AsksForColumns],
) -> RlhfData:
    """The data of the options, of which the prompts have the columns that ``asking`` needs.

    Raises:
        ValueError: if columns are lacking, or there is nothing to learn from.
    """
    prompts = read_training_data(config.data.data, tokenizer, run, phase=3, kind="prompts")
    columns = {*json.loads(prompts.train[0].columns or b"{}")}
    for each in asking:
        each.check_columns(columns)
    check_others(config, len(prompts.train))

    def read(data: DataConfig, name: str, remedy: str) -> Prepared:
        found = read_data(data, tokenizer, run, phase=3, kind="samples", name=name)
        if found.audit.supervised_tokens == 0:
            raise ValueError(remedy)
        return found

    text = answers = None
    if (data := text_data(config)) is not None:
        # Of text nothing is learnt about where answers end: it may be cut.
        text = read(
            data,
            "pretraining text",
            f"--unsupervised_dataset_name {config.pretraining.unsupervised_dataset_name} holds no "
            "text to learn from",
        )
    if config.ppo.rules.distills and config.teacher.on_policy_share < 1:
        answers = read(
            answers_data(config),
            "answers",
            f"--on_policy_share {config.teacher.on_policy_share:g} needs rows with answers, and "
            f"--data_path {' '.join(config.data.data_path)} has none: use --on_policy_share 1",
        )
    return RlhfData(prompts, text, answers)
