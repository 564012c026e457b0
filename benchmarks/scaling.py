"""The tables of docs/scaling.md: bytes that processes exchange, and step times expected by them.

``python -m benchmarks.scaling`` prints them; ``python -m benchmarks.scaling docs/scaling.md`` puts
them in their places there, behind lines ``<!-- NAME -->``. Nothing is measured: the formulas are
those of ``dschat_lora.perf`` and :mod:`benchmarks.common.exchanges`, the rates those of data
sheets.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.common.exchanges import (
    Cluster,
    Exchange,
    ModelSize,
    data_exchanges,
    experience_bytes,
    experience_exchanges,
    tensor_exchanges,
)
from benchmarks.common.report import with_tables
from benchmarks.common.shapes import SHAPES, Shape, meta_base
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import apply_lora
from dschat_lora.perf.cards import USABLE
from dschat_lora.perf.memory import MemoryEstimate, cached_token_bytes, estimate_memory
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import ModelShape, forward_flops, step_flops

# Peaks, memory rates and links: data sheets of NVIDIA DGX H100 (eight 400 Gb/s adapters) and of
# A100 80GB SXM (here with one 100 Gb/s Ethernet adapter a host). Shares of the peak: 38 to 43 % in
# arXiv:2407.21783, table 4, and 44 to 52 % in arXiv:2104.04473, table 1.
CLUSTERS = (
    Cluster("H100, InfiniBand", 989.4, 0.40, 3.35e12, 0.6, 8, 450e9, 400e9),
    Cluster("A100, Ethernet", 312.0, 0.45, 2.04e12, 0.6, 8, 300e9, 12.5e9),
)
MODELS = {"OPT-1.3B": "opt-1.3b", "Llama-2-7B": "llama-2-7b", "Llama-2-13B": "llama-2-13b"}
RANKS = (1, 2, 4, 8, 16, 64, 512)
LORA_DIM, ROWS, LENGTH = 16, 16, 512  # of each GPU; half of a row is supervised, or a response
NEW_TOKENS = LENGTH // 2
DEVICE_BYTES = 80e9
# Of the host, for the rows and responses of all ranks, on one slow core.
ROW_SECONDS, RESPONSE_SECONDS = 5e-6, 2e-4
TOKEN_BYTES, LOGPROB_BYTES = 36, 32  # Python's numbers, with the references to them


@dataclass(frozen=True)
class Model:
    """A model of the tables, on rows of its GPU."""

    size: ModelSize
    shape: ModelShape
    memory: MemoryEstimate  # of a step of SFT that recomputes nothing
    cached_token: int  # bytes of its keys and values


@cache
def model_of(name: str) -> Model:
    """The model of that name, with its adapter; no weight is made."""
    options = replace(SHAPES[MODELS[name]], lora_dim=LORA_DIM)
    model = adapted(options)
    memory = estimate_memory(
        model,
        rows=ROWS,
        length=LENGTH,
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=False,
        zero_stage=0,
        world_size=1,
    )
    return Model(size_of(model, options), describe(model), memory, cached_token_bytes(model))


def adapted(options: Shape) -> PreTrainedModel:
    """The model on the meta device, with its adapter."""
    model = meta_base(options, dtype=torch.bfloat16)
    apply_lora(model, LoraConfig(lora_dim=options.lora_dim), seed=0)
    return model


def size_of(model: PreTrainedModel, options: Shape) -> ModelSize:
    """What processes exchange of a model of :func:`adapted`."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings().weight
    tied = any(each.weight is head for each in embeddings)
    return ModelSize(
        frozen=sum(p.numel() for p in model.parameters()) - trained,
        trained=trained,
        embedding=sum(each.weight.numel() for each in embeddings),
        head=0 if tied else head.numel(),
        layers=options.num_layers,
        hidden=options.hidden_size,
        linears=len(layers) // options.num_layers,
        last=layers[-1].weight.numel(),
        rank=options.lora_dim,
    )


def cut(
    model: Model, stage: str, *, ranks: int = 1, zero_stage: int = 0, tensor: int = 1
) -> tuple[int, bool]:
    """(micro-batches of a step, whether blocks recompute) that a GPU has the memory for.

    Several micro-batches come first: they repeat nothing.
    """
    memory = model.memory
    graphs = 2 if stage == "PPO" else 1  # of actor and critic
    weights = memory.weights / (ranks if zero_stage == 3 else tensor)
    needed = weights + memory.gradients + memory.optimizer + memory.loss
    room = USABLE * DEVICE_BYTES - needed
    count = next(
        (n for n in (1, 2, 4, 8, 16) if graphs * memory.activations / (tensor * n) <= room), None
    )
    return count or 1, count is None


def compute_seconds(model: Model, stage: str, cluster: Cluster, *, recomputes: bool) -> float:
    """Time of one GPU's work in a step of SFT, of reward model or DPO, or an iteration of PPO."""
    counts = {"num_tokens": ROWS * LENGTH, "num_attended": ROWS * LENGTH * (LENGTH + 1) // 2}

    def step(targets: int) -> float:
        return step_flops(
            model.shape, gradient_checkpointing=recomputes, num_targets=targets, **counts
        ).hardware

    def forward(targets: int) -> float:
        return forward_flops(model.shape, num_targets=targets, **counts).hardware

    head = ROWS * NEW_TOKENS
    if stage != "PPO":
        return cluster.compute_seconds(step(head if stage == "SFT" else 0))
    # Reference and reward model, actor and critic before the update, then the update.
    work = 2 * forward(head) + 2 * forward(0) + step(head) + step(0)
    prompts = forward(0) / 2
    cached = ROWS * (LENGTH - NEW_TOKENS // 2) * model.cached_token
    read = NEW_TOKENS * (model.size.bytes + cached)
    decoding = read / (cluster.memory_rate * cluster.memory_share)
    return cluster.compute_seconds(work + prompts) + decoding


def step_seconds(
    model: Model, stage: str, ranks: int, cluster: Cluster, *, zero_stage: int = 0
) -> float:
    """Compute, then exchanges, then the host's own work: nothing overlaps."""
    micro_batches, again = cut(model, stage, ranks=ranks, zero_stage=zero_stage)
    exchanges = data_exchanges(
        model.size,
        zero_stage=zero_stage,
        ranks=ranks,
        micro_batches=micro_batches,
        recomputes=again,
    )
    host = ROW_SECONDS
    if stage == "PPO":
        host = RESPONSE_SECONDS
        exchanges += exchanges + _experience(ranks)
    return (
        compute_seconds(model, stage, cluster, recomputes=again)
        + sum(map(cluster.exchange_seconds, exchanges))
        + host * ROWS * ranks
    )


def tensor_seconds(model: Model, tensor: int, ranks: int, cluster: Cluster) -> float:
    """A step of SFT on as many rows a GPU, of which ``tensor`` hold a model between them.

    ZeRO 0 between the models, and sequence parallelism. They run their rows in turn.
    """
    _, again = cut(model, "SFT", tensor=tensor)
    exchanges = _tensor_exchanges(model, tensor, recomputes=again)
    part = replace(model.size, trained=model.size.trained_on(tensor))
    columns = data_exchanges(part, zero_stage=0, ranks=ranks // tensor)
    return (
        compute_seconds(model, "SFT", cluster, recomputes=again)
        + tensor * sum(map(cluster.exchange_seconds, exchanges))
        + sum(cluster.exchange_seconds(each, apart=tensor) for each in columns)
        + ROW_SECONDS * ROWS * ranks
    )


def exchanged() -> list[list[str]]:
    """Settings of Llama-2-7B, collectives of a step, and what each GPU sends."""
    model = model_of("Llama-2-7B")
    rows = [["setting", "collectives, whole tensors", *(f"sent, {n} GPUs" for n in (8, 64, 512))]]
    for stage in (0, 2, 3):
        of_ranks = [data_exchanges(model.size, zero_stage=stage, ranks=n) for n in (8, 64, 512)]
        name = "ZeRO 1, 2" if stage == 2 else f"ZeRO {stage}"
        rows.append([name, _words(of_ranks[0]), *map(_sent, of_ranks)])
    for tensor in (2, 4, 8):
        one = _tensor_exchanges(model, tensor)
        rows.append([f"a model on {tensor}", _words(one), *[_sent(one)] * 3])
    return rows


def held() -> list[list[str]]:
    """What each GPU holds, by model and setting."""
    rows = [["model", "setting", "weights", "gradients, AdamW", "activations and loss"]]
    for name in MODELS:
        model = model_of(name)
        size, memory = model.size, model.memory
        activations = memory.activations + memory.loss
        for setting, weights, state in (
            ("ZeRO 0, any number", size.bytes, 12 * size.trained),
            ("ZeRO 3, 8 GPUs", size.bytes / 8, 16 * size.trained / 8),
            ("ZeRO 3, 64 GPUs", size.bytes / 64, 16 * size.trained / 64),
        ):
            rows.append([name, setting, *map(_bytes, (weights, state, activations))])
    return rows


def expected(cluster: Cluster) -> list[list[str]]:
    """Step times and efficiency at ZeRO 0, by number of GPUs."""
    rows = [["", *(f"{ranks}" for ranks in RANKS)]]
    for stage in ("SFT", "PPO"):
        for name in MODELS:
            times = [step_seconds(model_of(name), stage, ranks, cluster) for ranks in RANKS]
            cells = [f"{_seconds(time)}, {times[0] / time:.0%}" for time in times[1:]]
            rows.append([f"{stage}, {name}", _seconds(times[0]), *cells])
    return rows


def compared() -> list[list[str]]:
    """Settings against each other, on a step of SFT."""
    ranks = (8, 64, 512)
    rows = [["", *(f"{cluster.name}: {n}" for cluster in CLUSTERS for n in ranks)]]
    for name in ("Llama-2-7B", "Llama-2-13B"):
        model = model_of(name)
        for stage in (0, 3):
            times = [
                step_seconds(model, "SFT", n, cluster, zero_stage=stage)
                for cluster in CLUSTERS
                for n in ranks
            ]
            rows.append([f"{name}, ZeRO {stage}", *map(_seconds, times)])
        for tensor in (2, 8):
            times = [
                tensor_seconds(model, tensor, n, cluster) for cluster in CLUSTERS for n in ranks
            ]
            rows.append([f"{name}, a model on {tensor}", *map(_seconds, times)])
    return rows


def experience() -> list[list[str]]:
    """What each process moves and holds of an iteration of PPO's responses."""
    rows = [["GPUs", "responses", "all_gather", "on the device", "on the host", "host's time"]]
    for ranks in (8, 64, 512):
        count = ROWS * ranks
        on_device = experience_bytes(count, longest=NEW_TOKENS)
        on_host = count * (LENGTH * TOKEN_BYTES + NEW_TOKENS * LOGPROB_BYTES)
        gathered = sum(each.bytes for each in _experience(ranks))
        cells = [*map(_bytes, (gathered, on_device, on_host)), _seconds(RESPONSE_SECONDS * count)]
        rows.append([f"{ranks}", f"{count:,}", *cells])
    return rows


def tables() -> dict[str, str]:
    """Markdown tables by their name in the documentation."""
    found = {"exchanged": exchanged(), "held": held(), "experience": experience()}
    for cluster in CLUSTERS:
        found[f"expected on {cluster.name}"] = expected(cluster)
    return {name: _markdown(rows) for name, rows in (found | {"compared": compared()}).items()}


def _tensor_exchanges(model: Model, tensor: int, *, recomputes: bool = False) -> list[Exchange]:
    return tensor_exchanges(
        model.size,
        ranks=tensor,
        positions=ROWS * LENGTH,
        targets=ROWS * NEW_TOKENS,
        recomputes=recomputes,
    )


def _experience(ranks: int) -> list[Exchange]:
    return experience_exchanges(
        ROWS * ranks, new_tokens=NEW_TOKENS, longest=NEW_TOKENS, ranks=ranks
    )


def _words(exchanges: Iterable[Exchange]) -> str:
    return ", ".join(f"{x.kind} {_bytes(x.bytes)}" for x in exchanges)


def _sent(exchanges: Iterable[Exchange]) -> str:
    return _bytes(sum(x.sent for x in exchanges))


def _bytes(count: float) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{float(f'{count / unit:.3g}'):g} {name}"


def _seconds(count: float) -> str:
    return f"{float(f'{count:.2g}'):g} s"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "".join(f"{line}\n" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or put them into the documents named."""
    for path in map(Path, arguments):
        text = path.read_text(encoding="utf-8")
        path.write_text(with_tables(text, tables()), encoding="utf-8")
    if not arguments:
        for name, table in tables().items():
            print(f"{name}\n\n{table}")


if __name__ == "__main__":
    main(sys.argv[1:])
