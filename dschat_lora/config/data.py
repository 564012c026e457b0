"""Options of data: where rows come from, how they are read, and what becomes of them."""

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dschat_lora.config.files import parse_json
from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.held import is_held
from dschat_lora.config.options import hidden, option

# What a stage makes of rows: texts to learn, two answers to compare, answers that are good or bad,
# or prompts to answer.
DataKind = Literal["samples", "pairs", "unpaired", "prompts"]
UnpairedRows = Literal["refuse", "good_only", "all"]
# Columns that rows are read from, under these names or others given by --columns.
COLUMNS = (
    *("prompt", "completion", "messages", "chosen", "rejected", "text", "margin", "label", "tools"),
    *("conversations", "instruction", "input", "output", "system", "history"),
    *("question", "answer", "images"),
)
MAX_WEIGHT = 10_000  # times that rows are used in an epoch
NameT = TypeVar("NameT")
Overlong = Literal["split", "drop", "truncate", "error"]


@dataclass(frozen=True)
class SourceConfig:
    """Sources of rows, and how they are read."""

    section = "data"

    data_path: tuple[str, ...] = option(
        (),
        help="files (.jsonl, .csv, .parquet, ...), directories or hub data sets; default: the "
        "bundled data\nfiles may be .jsonl .json .csv .parquet .arrow .txt .tar, or patterns "
        "such as 'data/*.jsonl'; hub data sets are org/name[[:config]:split]; each may end in "
        "its fraction of a mixture, as in a.jsonl:0.6 b/:0.4",
    )
    data_split_name: tuple[str, ...] = option(
        (),
        help="split of each --data_path that is a hub data set or a directory with splits, or one "
        "for all; default: train",
    )
    columns: tuple[str, ...] = option(
        (),
        help="names of your columns, as in prompt=question completion=answer\nhere the prompt is "
        "read from the column question, in all data",
    )
    data_weights: tuple[float, ...] = option(
        (), help="how often each --data_path is used per epoch, in the same order; default: 1 each"
    )
    max_source_rows: tuple[int, ...] = option(
        (),
        help="use only the first N rows of each --data_path; one number for each, or one for all; "
        "0: all",
    )
    max_repeats: tuple[int, ...] = option(
        (),
        help="maximum number of times a row of each --data_path is used in the whole run; one "
        "number for each, or one for all; 0: no limit",
    )
    eval_data_path: tuple[str, ...] = option((), help="evaluation data, never trained on")
    eval_ratio: float = option(
        0.05,
        help="fraction of the rows held out for evaluation if there is no --eval_data_path, in [0, "
        "1)",
    )
    data_split: str | None = option(
        None,
        help="proportions of the rows for steps 1, 2 and 3, such as 2,4,4; default: every step "
        "uses all rows",
    )
    data_output_path: str | None = option(
        None, help="cache directory for tokenized data; default: ~/.cache/dschat_lora", runs="file"
    )
    overlong: Overlong = option(
        "split",
        help="what to do with samples longer than --max_seq_len: split cuts rows of `text` into "
        "pieces and drops other rows; drop drops all",
    )
    bad_rows: Literal["stop", "skip"] = option("stop", help="what to do at an unusable row")
    unpaired_rows: UnpairedRows = option(
        "refuse",
        help="what to do with answers that have a `label` (KTO rows): refuse to run, train only on "
        "those with label true, or train on all",
    )
    preprocessing_num_workers: int = option(
        0, help="number of processes that read and tokenize rows; 0: one per core, at most 16"
    )
    chat_template_kwargs: str | None = option(
        None,
        help='JSON object of variables for the chat template, such as \'{"enable_thinking": '
        "false}'; a column of this name in a row takes precedence",
    )
    # what reads training sources on behind their first rows, which alone are prepared:
    # see :class:`dschat_lora.data.loader.Tail`
    tail: Any = hidden(None)

    def __post_init__(self) -> None:
        require_numbers(self, "in [0, 1)", "eval_ratio")
        require_numbers(self, ">= 0", "preprocessing_num_workers")
        weights, count = self.data_weights, len(self.data_path)
        fits = not weights or (len(weights) == count and all(0 < w <= MAX_WEIGHT for w in weights))
        allowed = f"one positive number for each of the {count} --data_path, {MAX_WEIGHT} at most"
        require(fits, "data_weights", weights, allowed)
        splits = self.data_split_name
        allowed = f"one name, or one for each of the {count} --data_path"
        require(len(splits) in (0, 1, count), "data_split_name", " ".join(splits), allowed)
        self._require_bounds("max_source_rows")
        self._require_bounds("max_repeats")
        shares = [weight for _, weight in map(split_weight, self.data_path) if weight is not None]
        usable = len(shares) == count and all(0 < w < math.inf for w in shares)
        if shares and not (usable and min(shares) / max(shares)):
            raise ValueError(
                f"--data_path {' '.join(self.data_path)}: give every entry a share > 0, as in "
                "a.jsonl:0.6 b/:0.4, or none"
            )
        if self.data_weights and self.is_mixture:
            raise ValueError(
                "--data_weights counts uses per epoch, but --data_path has fractions of a "
                "mixture; give only one"
            )
        parse_columns(self.columns)
        if self.data_split is not None:
            parse_data_split(self.data_split)
        parse_variables(self.chat_template_kwargs)

    def _require_bounds(self, name: str) -> None:
        bounds, count = getattr(self, name), len(self.data_path)
        allowed = f"one number >= 0, or one for each of the {count} --data_path"
        fits = len(bounds) in (0, 1, count) and all(bound >= 0 for bound in bounds)
        require(fits, name, " ".join(map(str, bounds)), allowed)

    @property
    def is_mixture(self) -> bool:
        """Whether each ``--data_path`` has a share of what is trained on."""
        return any(weight is not None for _, weight in map(split_weight, self.data_path))


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Rows as sequences to train on."""

    sft_only_data_path: tuple[str, ...] = option(
        (), help="further data, used in full in step 1 only"
    )
    max_seq_len: int = option(
        512, help="maximum number of tokens per row, prompt and completion together"
    )
    train_on_prompt: bool = option(
        False,
        help="compute the loss on the prompt too, also in evaluation (as DeepSpeed-Chat does, and "
        "microsoft/LoRA with --obj jlm)",
    )
    train_empty_think: bool = option(
        False,
        help="train on the empty thought that a chat template adds to answers without one, such as "
        "Qwen3's <think></think>, which teaches the model not to think",
    )
    packing: bool = option(
        True,
        help="pack several samples into rows of --max_seq_len\nattention does not cross samples",
    )
    eos_after_prompt: bool = hidden(False)  # the sign between the two of GPT-2 on tables of data

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_seq_len >= 2, "max_seq_len", self.max_seq_len, ">= 2 tokens")
        if self.is_mixture and self.sft_only_data_path:
            raise ValueError(
                "--sft_only_data_path cannot have a fraction of a mixture; give it in --data_path"
            )


# Arguments of ``apply_chat_template`` that are no variables of a template.
_NO_VARIABLES = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    }
)


def parse_variables(text: object, name: str = "--chat_template_kwargs") -> dict[str, Any]:
    """Variables of a chat template, from a JSON object or its text; none where it is None.

    Raises:
        ValueError: naming ``name``, unless it is one, and of nothing that is set by the package.
    """
    variables: object = {} if text is None else text
    reason = ""
    if isinstance(text, str):
        try:
            variables = parse_json(text)
        except ValueError as error:
            reason = f" ({error})"
    if not isinstance(variables, dict):
        example = '{"enable_thinking": false}'
        raise ValueError(
            f"{name} must be a JSON object such as {example}, got {text!s:.200}{reason}"
        )
    if taken := sorted(_NO_VARIABLES & variables.keys()):
        raise ValueError(f"{name} has {taken[0]!r}, which is not a variable of chat templates")
    return variables


_WEIGHT = re.compile(r"(?P<entry>.+):(?P<weight>\d+(\.\d*)?|\.\d+)", re.DOTALL)


def split_weight(entry: str) -> tuple[str, float | None]:
    """An entry of ``--data_path`` and its weight, None where it has none.

    The weight is what follows the last colon, if that is a number and nothing has the whole name.
    """
    match = _WEIGHT.fullmatch(entry)
    if match is None or is_held(entry) or os.path.exists(os.path.expanduser(entry)):
        return entry, None
    return match["entry"], float(match["weight"])


def mixture_shares(weights: Mapping[NameT, float]) -> dict[NameT, float]:
    """Shares that sum to 1, in proportion to ``weights``."""
    largest = max(weights.values(), default=1.0)  # by which their sum is finite
    parts = {name: weight / largest for name, weight in weights.items()}
    return {name: part / sum(parts.values()) for name, part in parts.items()}


def parse_columns(items: Sequence[str]) -> dict[str, str]:
    """``{"prompt": "question"}`` from ``["prompt=question"]``.

    Raises:
        ValueError: at the first that is not of this form, names no column of ``COLUMNS``, or
            names one a second time.
    """
    columns: dict[str, str] = {}
    for item in items:
        name, equals, column = item.partition("=")
        if not (name and equals and column):
            raise ValueError(f"--columns must be NAME=COLUMN, as in prompt=question, got {item!r}")
        if name not in COLUMNS:
            close = difflib.get_close_matches(name, COLUMNS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--columns {item}: {name!r} is not one of {', '.join(COLUMNS)}{hint}")
        if name in columns:
            raise ValueError(f"--columns names {name} twice: {columns[name]} and {column}")
        columns[name] = column
    return columns


def parse_data_split(text: str) -> tuple[float, float, float]:
    """Shares of steps 1, 2 and 3, summing to 1, from ``"2,4,4"``.

    Raises:
        ValueError: unless the text is three numbers >= 0, not all 0.
    """
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    usable = all(number >= 0 and math.isfinite(number) for number in numbers)
    valid = len(numbers) == 3 and usable and sum(numbers) > 0
    require(valid, "data_split", text, "three numbers >= 0 such as 2,4,4")
    first, second, third = (number / sum(numbers) for number in numbers)
    return first, second, third
