"""Options of other trainers, and what does the same here."""

from collections.abc import Collection, Mapping

_WIDTH = "the frozen base is kept in 16 bits: take a smaller model, or spread it by --zero_stage 3"
_LENGTH = "--max_seq_len N is the longest row in tokens"
_EVALUATION = "--eval_interval N is the number of optimizer steps between evaluations"
# Name -> the option that does the same, and the words that say so.
HINTS: Mapping[str, tuple[str, str]] = {
    "bf16": ("dtype", "--dtype bf16 computes in bf16"),
    "fp16": ("dtype", "--dtype fp16 computes in fp16"),
    "torch_dtype": ("dtype", "--dtype bf16, fp16 or fp32 is the compute type"),
    "load_in_4bit": ("zero_stage", f"there is no 4-bit base; {_WIDTH}"),
    "load_in_8bit": ("zero_stage", f"there is no 8-bit base; {_WIDTH}"),
    "use_flash_attention_2": (
        "attn_implementation",
        "the default of --attn_implementation runs flash attention where the GPU has it",
    ),
    "warmup_ratio": (
        "num_warmup_steps",
        "--num_warmup_steps N counts optimizer steps, of which --dry_run says the number",
    ),
    "warmup_steps": ("num_warmup_steps", "--num_warmup_steps N counts optimizer steps"),
    "use_peft": ("lora_dim", "--lora_dim N trains an adapter of rank N"),
    "lora_r": ("lora_dim", "--lora_dim N is the rank"),
    "lora_target_modules": ("target_modules", "--target_modules names the layers to adapt"),
    "dataset_name": ("data_path", "--data_path takes files, directories and hub data sets"),
    "max_length": ("max_seq_len", _LENGTH),
    "max_seq_length": ("max_seq_len", _LENGTH),
    "save_steps": (
        "save_interval",
        "--save_interval N is the number of optimizer steps between checkpoints",
    ),
    "eval_steps": ("eval_interval", _EVALUATION),
    "eval_strategy": ("eval_interval", _EVALUATION),
    "run_name": ("output_dir", "--output_dir names the run"),
}


def hint_for(name: str, known: Collection[str]) -> str | None:
    """What to give instead of another trainer's option; None where that is not ``known`` here."""
    option, words = HINTS.get(name.replace("-", "_"), ("", ""))
    return words if option in known else None
