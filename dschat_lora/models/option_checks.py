"""What four bits and divided models or rows need and cannot do, by options and a configuration.

Imports nothing heavy, so that what does not fit is reported at once.
"""

import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_lora.config.groups import LoadConfig, LoraConfig, ModelConfig, ParallelConfig

# Architectures in whose blocks column-parallel layers alone read the input of attention and MLP.
KINDS = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")
# Names of embeddings and output heads of these, which are divided by the vocabulary.
_VOCABULARIES = ("embed_in", "embed_out", "embed_tokens", "lm_head", "wte")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


_only_shapes = False


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Inside the block, which computes nothing, 4 bits need no package."""
    global _only_shapes
    before, _only_shapes = _only_shapes, True
    try:
        yield
    finally:
        _only_shapes = before


def check_installed() -> None:
    """Refuse 4 bits without bitsandbytes, unless shapes are all that is asked for.

    Raises:
        ValueError: saying how to install it.
    """
    if not _only_shapes and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "--base_bits 4 needs a package: pip install 'dschat_lora[qlora]'; without it use "
            "--base_bits 16 and a model whose files are not quantised"
        )


def check_four_bits(lora: LoraConfig, *, trains: bool, tensor_parallel_size: int) -> None:
    """Refuse what a base in 4 bits cannot do.

    Args:
        lora: what is to train.
        trains: whether anything trains.
        tensor_parallel_size: processes to a model.

    Raises:
        ValueError: naming the option.
    """
    check_installed()
    if tensor_parallel_size > 1:
        raise ValueError(
            "--base_bits 4 cannot be combined with --tensor_parallel_size "
            f"{tensor_parallel_size}, which would split blocks of 64 weights with a common scale; "
            "use --zero_stage 3 to shard the weights instead, or --base_bits 16"
        )
    if trains and lora.lora_dim == 0:
        raise ValueError(
            "--base_bits 4 needs a frozen base, but --lora_dim 0 trains all weights: give "
            "--lora_dim 16, or use --base_bits 16"
        )
    if trains and not lora.only_optimize_lora:
        raise ValueError(
            "--base_bits 4 needs a frozen base, but --no-only_optimize_lora trains parts of it; "
            "drop one"
        )


def sizes_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that ranks divide, as far as ``config.json`` has them, by their words in a message.

    Raises:
        ValueError: if a size is no whole number above 0.
    """
    heads = _first(fields, "num_attention_heads", "n_head")
    mlp = _first(fields, "intermediate_size", "ffn_dim", "n_inner")
    width = _first(fields, "n_embd")
    sizes = {
        "attention heads": heads,
        "key and value heads": _first(fields, "num_key_value_heads") or heads,
        # GPT-2 alone may leave it out.
        "MLP features": 4 * width if mlp is None and width is not None else mlp,
    }
    return {words: count for words, count in sizes.items() if count is not None}


def check_divides(fields: Mapping[str, Any], size: int) -> None:
    """Refuse a model that ``size`` ranks cannot divide evenly, by its ``config.json``."""
    kind = fields.get("model_type")
    if size == 1 or kind is None:
        return
    if kind not in KINDS:
        raise ValueError(
            f"--tensor_parallel_size {size}: {kind} models are not supported; supported are "
            f"{', '.join(KINDS)}"
        )
    if fields.get("quantization_config"):
        raise ValueError(
            f"--tensor_parallel_size {size} reads weights in parts, which is not supported for "
            "quantised weights; use --tensor_parallel_size 1"
        )
    counts = sizes_of(fields)
    common = math.gcd(*counts.values())
    for words, count in counts.items():
        if count % size:
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ValueError(
                f"--tensor_parallel_size {size} does not divide the model's {count} {words}; "
                f"{', '.join(map(str, fitting))} would"
            )


def check_files(directory: Path, size: int) -> None:
    """Refuse a local model whose weights cannot be read in parts."""
    if size == 1 or any((directory / name).is_file() for name in _SAFETENSORS):
        return
    if others := sorted(path.name for path in directory.glob("*.bin")):
        raise ValueError(
            f"--tensor_parallel_size {size} reads weights in parts, which needs safetensors "
            f"files, but {directory} has {others[0]}; load and save it with transformers once"
        )


def check_processes(parallel: ParallelConfig, processes: int) -> None:
    """Refuse groups that the launched processes do not fill."""
    tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
    if min(tensor, context) > 1:
        raise ValueError(
            f"--tensor_parallel_size {tensor} and --context_parallel_size {context} cannot be "
            "combined; give one of them"
        )
    size = parallel.processes_per_share
    option = "context_parallel_size" if context > 1 else "tensor_parallel_size"
    if processes % size == 0:
        return
    wanted = -(-processes // size) * size
    fitting = [n for n in range(1, processes + 1) if processes % n == 0]
    raise ValueError(
        f"--{option} {size} does not divide the number of launched processes, "
        f"{processes} ({', '.join(map(str, fitting))} would); to start {wanted}, put "
        f"`deepspeed --num_gpus {wanted}` or `torchrun --nproc_per_node {wanted}` before the script"
    )


def check_divided_rows(model: ModelConfig, fields: Mapping[str, Any], size: int) -> None:
    """Refuse rows that ``size`` ranks cannot divide, by options and the model's ``config.json``."""
    if size == 1:
        return
    typed = f"--context_parallel_size {size}"
    if model.attn_implementation not in ("auto", "sdpa"):
        raise ValueError(
            f"{typed} needs sdpa, but --attn_implementation is {model.attn_implementation}; drop "
            "one"
        )
    for name in ("router_aux_loss_coef", "neftune_noise_alpha"):
        if value := getattr(model, name):
            raise ValueError(
                f"--{name} {value:g} needs whole rows, but with {typed} each process has a part "
                "of a row; drop one"
            )
    rope = _rope_of(fields)
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := part.get("rope_type", part.get("type"))) in ("dynamic", "longrope"):
            raise ValueError(
                f"{typed}: the model's rotary embeddings of type {kind} depend on the longest "
                "row, of which each process has only a part; drop the option"
            )
    heads = sizes_of(fields).get("attention heads", size)
    if heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{typed} does not divide the model's {heads} attention heads; "
            f"{', '.join(map(str, fitting))} would"
        )


def check_training(load: LoadConfig, lora: LoraConfig, size: int) -> None:
    """Refuse to train parts of a divided model of which each rank has a share alone."""
    if size == 1:
        return
    reason = f"--tensor_parallel_size {size} only supports adapters on a frozen base"
    if lora.lora_dim == 0:
        raise ValueError(
            f"--lora_dim 0 trains all weights, but {reason}: give --lora_dim 16, or use "
            "--zero_stage 3 to shard all weights instead"
        )
    if not lora.only_optimize_lora:
        raise ValueError(
            f"--no-only_optimize_lora trains parts of the base, but {reason}; drop one"
        )
    if lora.train_bias == "all":
        raise ValueError(
            f"--train_bias all trains biases outside the adapted layers, but {reason}; use none "
            "or lora_only"
        )
    if lora.enable_lora:
        raise ValueError(
            f"--enable_lora {' '.join(lora.enable_lora)} is not supported with "
            f"--tensor_parallel_size {size}; without it the packed layer has one lora_A and lora_B"
        )
    for name in lora.modules_to_save:
        if name.rpartition(".")[2] in _VOCABULARIES:
            raise ValueError(
                f"--modules_to_save {name} is divided among processes by --tensor_parallel_size "
                f"{size}; adapt it by --target_modules instead"
            )
    if isinstance(load, ModelConfig) and load.dropout:
        raise ValueError(
            f"--dropout {load.dropout:g} would differ between the processes of "
            f"--tensor_parallel_size {size}, which compute one model; use --dropout 0, or "
            "--lora_dropout"
        )


def original_positions(fields: Mapping[str, Any]) -> int | None:
    """Positions that a model was trained on, by its ``config.json``; None where it says none."""
    name = "original_max_position_embeddings"
    positions = _rope_of(fields).get(name) or fields.get(name)
    return _first({**fields, name: positions}, name, "max_position_embeddings", "n_positions")


def _rope_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` says of rotary embeddings, by either of its names."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def position_limit(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> int | None:
    """Positions that a model has, with the scaling of its rotary embeddings if there is one.

    ``fields`` are those of its ``config.json``; None where they say none.
    """
    limit = _first(fields, "max_position_embeddings", "n_positions")
    if not scaling or limit is None:
        return limit
    start = scaling.get("original_max_position_embeddings") or original_positions(fields)
    return max(limit, int(scaling["factor"] * start))


def _first(fields: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that has a value."""
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        return None
    count = fields[name]
    if type(count) is not int or count < 1:
        raise ValueError(f"the model's configuration says {count!r} of its {name}")
    return count
