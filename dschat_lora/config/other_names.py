"""Options of other trainers, and those here that do the same."""

from collections.abc import Collection
from typing import NamedTuple


class OtherName(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the option there.
        sources: whose it is.
        options: those here that do the same; the first that a command has is named.
        words: what that option does; ``{}`` stands for it.
    """

    name: str
    sources: str
    options: tuple[str, ...]
    words: str


_RANK = ("lora_dim", "actor_lora_dim")
_LENGTH = "{} N is the number of tokens of a row"
_EVALUATION = "{} N is the number of optimizer steps between evaluations"
_FOUR = "{} 4 holds the frozen base in 4 bits (NF4)"
_ROWS = (
    OtherName("bf16", "TRL, transformers", ("dtype",), "{} bf16 does the same"),
    OtherName("fp16", "TRL, transformers", ("dtype",), "{} sets the type"),
    OtherName("torch_dtype", "TRL, transformers", ("dtype",), "{} sets the type"),
    OtherName("load_in_4bit", "TRL, axolotl, Unsloth, OpenRLHF", ("base_bits",), _FOUR),
    OtherName(
        "load_in_8bit",
        "TRL, axolotl, Unsloth",
        ("base_bits",),
        f"no base is held in 8 bits, and files of 8 bits are read as values of 16; {_FOUR}",
    ),
    OtherName(
        "use_flash_attention_2",
        "transformers",
        ("attn_implementation",),
        "{} auto, the default, runs flash attention where GPU and model have it",
    ),
    OtherName(
        "warmup_ratio",
        "TRL, transformers",
        ("num_warmup_steps",),
        "{} N counts optimizer steps, of which --dry_run says the number",
    ),
    OtherName(
        "warmup_steps", "TRL, transformers", ("num_warmup_steps",), "{} N counts optimizer steps"
    ),
    OtherName("use_peft", "TRL", _RANK, "{} N trains an adapter of rank N"),
    OtherName("lora_r", "TRL, axolotl", _RANK, "{} N is the rank"),
    OtherName(
        "lora_target_modules",
        "TRL, axolotl",
        ("target_modules", "actor_target_modules"),
        "{} names the layers to adapt",
    ),
    OtherName(
        "dataset_name", "TRL", ("data_path",), "{} takes files, directories and hub data sets"
    ),
    OtherName("max_length", "TRL", ("max_seq_len",), _LENGTH),
    OtherName("max_seq_length", "TRL, Unsloth", ("max_seq_len",), _LENGTH),
    OtherName(
        "save_steps",
        "TRL, transformers",
        ("save_interval",),
        "{} N is the number of optimizer steps between checkpoints",
    ),
    OtherName("eval_steps", "TRL, transformers", ("eval_interval",), _EVALUATION),
    OtherName("eval_strategy", "TRL, transformers", ("eval_interval",), _EVALUATION),
    OtherName("run_name", "TRL, transformers", ("output_dir",), "{} names the run"),
)
OTHER_NAMES = {row.name: row for row in _ROWS}


def same_here(name: str, known: Collection[str]) -> str | None:
    """What of ``known`` does the same as option ``name`` of another trainer; None without it."""
    row = OTHER_NAMES.get(name.replace("-", "_"))
    here = [f"--{option}" for option in row.options if option in known] if row else []
    return row.words.format(here[0]) if row and here else None
