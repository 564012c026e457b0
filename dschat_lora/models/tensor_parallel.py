"""Which parts of a transformers model a tensor group divides, and how."""

import re
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_lora.lora.collectives import Exchange, TensorGroup
from dschat_lora.lora.layers import is_conv1d
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.parallel import (
    ColumnParallel,
    ParallelEmbedding,
    ParallelLinear,
    RowParallel,
    Shard,
    Split,
)
from dschat_lora.models.option_checks import check_divides
from dschat_lora.models.stored_weights import parameter_names

# Where transformers ships no plan: linear layers below the base model, in its words.
_OPT = {
    **{f"decoder.layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    "decoder.layers.*.self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise",
    "decoder.layers.*.fc2": "rowwise",
}
_GPT2 = {
    "h.*.attn.c_attn": "packed_colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_PLANS = {"opt": _OPT, "gpt2": _GPT2}
# What a layer of attention counts by itself.
_COUNTS = ("num_heads", "split_size")
# What a block is called with, and what it returns.
Positional = tuple[Any, ...]
Named = dict[str, Any]
Output = Tensor | tuple[Any, ...]
_COLUMN = {"colwise", "packed_colwise"}


def divide(model: PreTrainedModel, group: TensorGroup) -> None:
    """Keep this rank's part of ``model`` alone, in place; on the meta device its shape.

    Linear layers of the blocks are divided by the plan that transformers ships for its own
    tensor parallelism, the embedding and the output head by the vocabulary. Names stay. Adapters
    are added afterwards.

    Raises:
        ValueError: if the model cannot be divided so.
    """
    check_divides(model.config.to_dict(), group.size)
    tied = parameter_names(model)
    _divide_blocks(model, group)
    _divide_vocabulary(model, group)
    for names in tied:
        first, *others = names
        for name in others:
            replace_part(model, name, model.get_parameter(first))
    _divide_tokens(model, group)


def _divide_blocks(model: PreTrainedModel, group: TensorGroup) -> None:
    plan = _PLANS.get(model.config.model_type) or dict(model.config.base_model_tp_plan)
    lists = {name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    regions: set[str] = set()
    for name, module in list(model.named_modules()):
        style = _style(plan, name)
        if style is None:
            continue
        transposed = is_conv1d(module)
        inputs, outputs = module.weight.shape if transposed else module.weight.shape[::-1]
        if style == "rowwise":
            split: Split = RowParallel(group, (inputs,))
        else:
            parent = name.rpartition(".")[0]
            # One exchange for all column layers that read what enters their attention or MLP.
            shares = parent.rpartition(".")[0] not in lists
            if shares:
                regions.add(parent)
            parts = 3 if style == "packed_colwise" else 1
            split = ColumnParallel(
                group, (outputs // parts,) * parts, reads="entered" if shares else "dealt"
            )
        replace_part(model, name, ParallelLinear(module, split, transposed=transposed))
    for name in regions:
        region = model.get_submodule(name)
        region.register_forward_pre_hook(partial(_with_hidden, group.enter), with_kwargs=True)
        for count in _COUNTS:
            if isinstance(getattr(region, count, None), int):
                setattr(region, count, getattr(region, count) // group.size)


def _divide_vocabulary(model: PreTrainedModel, group: TensorGroup) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tokens = embedding.weight.shape[0]
    if any(start == stop for start, stop in Shard(group, 0, (tokens,)).ranges(group.size - 1)):
        raise ValueError(
            f"--tensor_parallel_size {group.size} leaves a process without any of the {tokens} "
            "tokens"
        )
    for name, module in list(model.named_modules()):
        if module is embedding:
            replace_part(model, name, ParallelEmbedding(module, group))
        elif module is head:
            split = ColumnParallel(group, (module.weight.shape[0],), reads="same", gathers=True)
            replace_part(model, name, ParallelLinear(module, split))


def _divide_tokens(model: PreTrainedModel, group: TensorGroup) -> None:
    """With sequence parallelism, each rank computes some of the tokens in the blocks."""
    count = model.config.num_hidden_layers
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)

    def scatter(
        block: nn.Module, values: Positional, named: Named
    ) -> tuple[Positional, Named] | None:
        if not group.sequence_parallel:
            return None
        return _with_hidden(group.scatter_tokens, block, values, named)

    def gather(_: nn.Module, values: Positional, output: Output) -> Output:
        if not group.sequence_parallel:
            return output
        if isinstance(output, tuple):
            return group.gather_tokens(output[0]), *output[1:]
        return group.gather_tokens(output)

    blocks[0].register_forward_pre_hook(scatter, with_kwargs=True)
    blocks[-1].register_forward_hook(gather)


def _with_hidden(
    change: Exchange, _: nn.Module, values: Positional, named: Named
) -> tuple[Positional, Named]:
    """What a block or a part of it is called with, its hidden states changed."""
    if values:
        return (change(values[0]), *values[1:]), named
    return values, named | {"hidden_states": change(named["hidden_states"])}


def _style(plan: dict[str, str], name: str) -> str | None:
    """How a linear layer is divided, by patterns of names below the base model."""
    for pattern, style in plan.items():
        words = re.escape(pattern).replace(r"\*", r"\d+")
        if re.fullmatch(rf"(.+\.)?{words}", name) and style in (*_COLUMN, "rowwise"):
            return style
    return None
