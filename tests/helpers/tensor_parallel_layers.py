"""Layers and heads that ranks hold parts of, against the formula on whole tensors."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.lora.parallel import (
    ColumnParallel,
    ParallelEmbedding,
    ParallelLinear,
    RowParallel,
    shard_of,
)
from dschat_lora.models.causal_lm import CausalLMLoss, LinearHead, LogprobHead, PolicyHead
from dschat_lora.models.tensor_parallel import divide
from helpers.tensor_parallel import divided
from helpers.tiny import KINDS, VOCAB, ragged_samples, tiny_model

ROWS, TOKENS, RANK, SCALING, SEED, WIDTH = 2, 8, 3, 0.7, 5, 12
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter broadcast gather"
    " reduce_scatter_tensor reduce scatter all_to_all all_to_all_single barrier"
).split()


@dataclass(frozen=True)
class Case:
    """A linear layer, and how it is divided."""

    split: str
    blocks: tuple[int, ...]
    transposed: bool = False
    bias: str = "frozen"  # or "none", "trained"
    reads: str = "dealt"
    gathers: bool = False
    adapter: str = "on"  # or "off", "none"
    dropout: float = 0.0

    @property
    def sizes(self):
        """(in, out) of the whole layer."""
        size = sum(self.blocks)
        return (WIDTH, size) if self.split == "column" else (size, WIDTH)


CASES = {
    "column": Case("column", (24,)),
    "column, no bias": Case("column", (24,), bias="none"),
    "column, trained bias": Case("column", (24,), bias="trained"),
    "column, gathered": Case("column", (24,), gathers=True),
    "column, gathered, uneven": Case("column", (10,), gathers=True, bias="trained"),
    "column, same input": Case("column", (24,), reads="same", gathers=True, bias="none"),
    "column, entered before": Case("column", (24,), reads="entered"),
    "column, packed": Case("column", (16, 4, 4), gathers=True, bias="trained"),
    "column, dropout": Case("column", (24,), dropout=0.4),
    "column, adapter off": Case("column", (24,), bias="trained", adapter="off"),
    "column, no adapter": Case("column", (24,), adapter="none"),
    "row": Case("row", (24,)),
    "row, no bias": Case("row", (24,), bias="none"),
    "row, trained bias": Case("row", (24,), bias="trained"),
    "row, uneven": Case("row", (10,)),
    "row, dropout": Case("row", (24,), dropout=0.4),
    "row, uneven, dropout": Case("row", (10,), dropout=0.4),
    "row, adapter off": Case("row", (24,), bias="trained", adapter="off"),
    "row, no adapter": Case("row", (24,), adapter="none"),
    "Conv1D column": Case("column", (24,), transposed=True),
    "Conv1D column, packed": Case("column", (8, 8, 8), transposed=True, bias="trained"),
    "Conv1D column, dropout": Case("column", (8, 8, 8), transposed=True, dropout=0.4),
    "Conv1D column, adapter off": Case("column", (8, 8, 8), transposed=True, adapter="off"),
    "Conv1D column, no adapter": Case("column", (8, 8, 8), transposed=True, adapter="none"),
    "Conv1D row": Case("row", (24,), transposed=True),
    "Conv1D row, trained bias": Case("row", (24,), transposed=True, bias="trained"),
    "Conv1D row, adapter off": Case("row", (24,), transposed=True, adapter="off"),
    "Conv1D row, no adapter": Case("row", (24,), transposed=True, adapter="none"),
}
# Places of the padding among the ids: none, of the first rank, of a later one.
EMBEDDINGS = {"embedding": None, "embedding, padding 0": 0, "embedding, padding 40": 40}
LLAMA_LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
HEADS = ("plain", "plain, bias", "adapted")
HEAD_KINDS = ("loss", "logprobs", "policy", "policy whose entropy trains")


def places(blocks, size, rank):
    """Of the numbers along the blocks those that are dealt to a rank, in turn from each block."""
    numbers, begin = [], 0
    for block in blocks:
        each = math.ceil(block / size)
        numbers += [begin + i for i in range(block) if i // each == rank]
        begin += block
    return torch.tensor(numbers, dtype=torch.long)


def report(size):
    """All that is compared on ``size`` ranks: errors, collectives, states of random numbers."""
    with divided(size) as group:
        return {
            "layers": layer_errors(group),
            "embeddings": embedding_errors(group),
            "heads": head_errors(group),
            "models": models(group),
            "narrow": narrow_traffic(group),
            "scattered": scattered_sum(group),
            "tokens": token_errors(group),
        }


@contextmanager
def sequences(group, parallel):
    """Within, tokens are dealt out to the ranks, or not."""
    group.sequence_parallel = parallel
    try:
        yield
    finally:
        group.sequence_parallel = False


def relative(found, expected):
    """Largest error as a share of the largest value."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if found.shape != expected.shape:
        return math.inf
    return float((found.double() - expected).abs().max() / expected.abs().max())


# Linear layers


def every_setting(group):
    """(what stands behind a name, type) of each type, and whether tokens are dealt within."""
    for dtype in DTYPES:
        for parallel in (False, True):
            with sequences(group, parallel):
                yield f", {dtype}" + ", sequence" * parallel, DTYPES[dtype]


def layer_errors(group):
    """``{name, dtype and whether tokens are dealt: {tensor: error on this rank}}``."""
    return {
        name + setting: linear_error(case, group, dtype)
        for name, case in CASES.items()
        for setting, dtype in every_setting(group)
    }


def linear_error(case, group, dtype):
    values = linear_values(case)
    whole, after = linear_reference(case, values)
    of = {name: cutter(case, group, name) for name in ("x", "y", "A", "B", "b")}
    layer = linear_layer(case, group, values, of).to(dtype)
    x = of["x"](values["x"]).to(dtype).requires_grad_()
    torch.manual_seed(SEED)
    y = layer(group.enter(x) if case.reads == "entered" else x)
    y.backward(of["y"](values["g"]).to(dtype))
    computed = {"y": y.detach(), "x": x.grad}
    if case.adapter != "none":
        computed |= {"A": layer.lora_A.grad, "B": layer.lora_B.grad}
        if case.bias == "trained":
            computed["b"] = layer.trained_bias.grad
    assert layer.weight.grad is None
    errors = {
        name: relative(value, of[name](whole[name]) if name in whole else None)
        for name, value in computed.items()
    }
    # Draws after the layer are those after the whole layer.
    return errors | {"random numbers": relative(torch.rand(1), after)}


def linear_values(case):
    inputs, outputs = case.sizes
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "W": draw(outputs, inputs),
        "b": draw(outputs),
        "A": draw(RANK, inputs),
        "B": draw(outputs, RANK),
        "x": draw(ROWS, TOKENS, inputs),
        "g": draw(ROWS, TOKENS, outputs),
    }


def linear_reference(case, values):
    """Output and gradients of whole tensors in fp64, and what is drawn next."""
    whole = {name: value.double().requires_grad_() for name, value in values.items()}
    torch.manual_seed(SEED)
    y = whole["x"] @ whole["W"].T
    if case.bias != "none":
        y = y + whole["b"]
    if case.adapter == "on":
        x = whole["x"]
        if case.dropout:
            x = x * (torch.rand(x.shape) >= case.dropout) / (1 - case.dropout)
        y = y + SCALING * (x @ whole["A"].T) @ whole["B"].T
    (y * values["g"]).sum().backward()
    names = ["x", *(("A", "B") if case.adapter == "on" else ())]
    if case.bias == "trained" and case.adapter == "on":
        names.append("b")
    gradients = {name: whole[name].grad for name in names}
    return {"y": y.detach()} | gradients, torch.rand(1).double()


def cutter(case, group, name):
    """What of a whole tensor, an output or an input this rank is given, by hand."""
    own = places(case.blocks, group.size, group.rank)
    each = TOKENS // group.size

    def tokens(t):
        return t[:, group.rank * each :][:, :each] if group.sequence_parallel else t

    column = {
        "x": (lambda x: x) if case.reads == "same" else tokens,
        "y": (lambda y: y) if case.gathers else lambda y: y[..., own],
        "A": lambda a: a,
        "B": lambda b: b[own],
        "b": lambda b: b[own],
    }
    row = {
        "x": lambda x: x[..., own],
        "y": tokens,
        "A": lambda a: a[:, own],
        "B": lambda b: b,
        "b": lambda b: b,
    }
    return (column if case.split == "column" else row)[name]


def linear_layer(case, group, values, of):
    base = Conv1D(*reversed(case.sizes)) if case.transposed else nn.Linear(*case.sizes)
    base.weight.data = values["W"].T.clone() if case.transposed else values["W"].clone()
    base.bias.data = values["b"].clone()
    if case.bias == "none":
        base.register_parameter("bias", None)
    split = RowParallel(group, case.blocks)
    if case.split == "column":
        split = ColumnParallel(group, case.blocks, reads=case.reads, gathers=case.gathers)
    layer = ParallelLinear(base, split, transposed=case.transposed)
    if case.adapter == "none":
        return layer
    layer = adapted(
        layer,
        lora_dropout=case.dropout,
        train_bias="lora_only" if case.bias == "trained" else "none",
    )
    layer.enabled = case.adapter == "on"
    with torch.no_grad():
        layer.lora_A.copy_(of["A"](values["A"]))
        layer.lora_B.copy_(of["B"](values["B"]))
    return layer


def adapted(layer, **config):
    """The layer with factors, in training."""
    model = nn.ModuleDict({"layer": layer})
    lora = LoraConfig(lora_dim=RANK, lora_alpha=SCALING * RANK, target_modules=("layer",), **config)
    apply_lora(model, lora, seed=0)
    return model["layer"].train()


# Embeddings


def embedding_errors(group):
    return {
        name + setting: embedding_error(padding, group, dtype)
        for name, padding in EMBEDDINGS.items()
        for setting, dtype in every_setting(group)
    }


def embedding_error(padding, group, dtype):
    generator = torch.Generator().manual_seed(1)
    weight, a, b, g = (
        torch.randn(shape, generator=generator)
        for shape in ((VOCAB, WIDTH), (RANK, VOCAB), (WIDTH, RANK), (2, 3, 4, WIDTH))
    )
    ids = torch.randint(0, VOCAB, (2, 3, 4), generator=generator)
    ids[0] = torch.tensor([[0, 15, 16, 30], [31, 32, 40, 48], [60, 59, 40, 0]])
    base = nn.Embedding(VOCAB, WIDTH, padding_idx=padding)
    base.weight.data = weight.clone()
    plain = ParallelEmbedding(base, group).to(dtype)
    layer = adapted(ParallelEmbedding(base, group)).to(dtype)
    own = places((VOCAB,), group.size, group.rank)
    with torch.no_grad():
        layer.lora_embedding_A.copy_(a[:, own])
        layer.lora_embedding_B.copy_(b)
    y = layer(ids)
    y.backward(g.to(dtype))
    layer.enabled = False

    a, b = a.double().requires_grad_(), b.double().requires_grad_()
    rows = a.T[ids]
    if padding is not None:
        rows = torch.where((ids == padding)[..., None], rows.detach(), rows)
    expected = weight.double()[ids] + SCALING * rows @ b.T
    (expected * g).sum().backward()
    base_rows = weight[ids].double()
    return {
        "y": relative(y.detach(), expected.detach()),
        "A": relative(layer.lora_embedding_A.grad, a.grad[:, own]),
        "B": relative(layer.lora_embedding_B.grad, b.grad),
        "off": relative(layer(ids).detach(), base_rows),
        "none": relative(plain(ids), base_rows),
    }


# Heads


def head_errors(group):
    errors = {}
    for name in HEADS:
        for kind in HEAD_KINDS:
            for parallel in (False, True) if kind == "loss" else (False,):
                # So that a few positions' logits alone are formed at a time.
                small = patch("dschat_lora.algos.logprobs.MAX_CHUNK_LOGITS_CPU", 100)
                with sequences(group, parallel), small:
                    errors[f"{name}, {kind}" + ", sequence" * parallel] = head_error(
                        name, kind, group
                    )
    return errors


def head_error(name, kind, group):
    generator = torch.Generator().manual_seed(1)
    weight, a, b, hidden, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((VOCAB, WIDTH), (RANK, WIDTH), (VOCAB, RANK), (11, WIDTH), (VOCAB,))
    )
    tokens = torch.randint(0, VOCAB, (11,), generator=generator)
    weights = torch.linspace(-2, 3, 11)
    own = places((VOCAB,), group.size, group.rank)
    base = nn.Linear(WIDTH, VOCAB, bias="bias" in name)
    base.weight.data = weight.clone()
    if base.bias is not None:
        base.bias.data = bias.clone()
    layer = ParallelLinear(base, ColumnParallel(group, (VOCAB,), reads="same", gathers=True))
    if name == "adapted":
        layer = adapted(layer)
        with torch.no_grad():
            layer.lora_A.copy_(a)
            layer.lora_B.copy_(b[own])
    x = hidden.clone().requires_grad_()
    value, extra = _through_head(kind, layer, x, tokens)
    (value * weights + (extra * weights.flip(0) if kind.endswith("trains") else 0)).sum().backward()

    whole = {"x": hidden, "A": a, "B": b}
    whole = {name: value.double().requires_grad_() for name, value in whole.items()}
    logits = whole["x"] @ weight.double().T
    if base.bias is not None:
        logits = logits + bias
    if name == "adapted":
        logits = logits + SCALING * (whole["x"] @ whole["A"].T) @ whole["B"].T
    table = torch.log_softmax(logits / (0.8 if kind.startswith("policy") else 1), -1)
    picked = table[torch.arange(11), tokens]
    entropy = -(table.exp() * table).sum(-1)
    expected = -picked.sum() if kind == "loss" else picked
    loss = (expected * weights).sum()
    if kind.endswith("trains"):
        loss = loss + (entropy * weights.flip(0)).sum()
    loss.backward()
    errors = {
        "value": relative(value.detach(), expected.detach()),
        "x": relative(x.grad, whole["x"].grad),
    }
    if kind.startswith("policy"):
        errors["entropy"] = relative(extra.detach(), entropy.detach())
    if name == "adapted":
        errors["A"] = relative(layer.lora_A.grad, whole["A"].grad)
        errors["B"] = relative(layer.lora_B.grad, whole["B"].grad[own])
    return errors


def _through_head(kind, layer, hidden, tokens):
    if kind.startswith("policy"):
        head: LinearHead = PolicyHead(layer, VOCAB, entropy_trains=kind.endswith("trains"))
        head.rows = 4
        return head(hidden, tokens, 0.8)
    head = LinearHead(layer, VOCAB) if kind == "loss" else LogprobHead(layer, VOCAB)
    head.rows = 4
    return head(hidden, tokens), None


# Whole models


def tiny(kind, group, targets):
    """The loss of an adapted model, divided among the ranks of a group."""
    model = tiny_model(kind)
    if group is not None:
        divide(model, group)
    config = LoraConfig(lora_dim=4, target_modules=targets, lora_dropout=0.3)
    apply_lora(model, config, seed=0)
    for name, parameter in adapter_parameters(model).items():
        noise = torch.randn(whole_shape(parameter), generator=_generator(name))
        with torch.no_grad():
            parameter.add_(0.1 * part_of(parameter, noise))
    return CausalLMLoss(model.train().double())


def _generator(name):
    return torch.Generator().manual_seed(sum(map(ord, name)))


def whole_shape(parameter):
    shape, shard = list(parameter.shape), shard_of(parameter)
    if shard is not None:
        shape[shard.dim] = sum(shard.blocks)
    return shape


def part_of(parameter, whole):
    """What this rank should hold of ``whole`` as ``parameter``, by hand."""
    shard = shard_of(parameter)
    if shard is None:
        return whole
    return whole.index_select(shard.dim, places(shard.blocks, shard.group.size, shard.group.rank))


def loss_of(network):
    """Of a row of two samples, of 16 tokens, of which seven are predicted."""
    lengths = {len(sample.input_ids): sample for sample in ragged_samples(200, seed=1)}
    data = SampleCollator(0)([[lengths[9], lengths[7]]])
    return network(
        data.input_ids, data.position_ids, data.segment_ids, data.logit_positions, data.target_ids
    )


@contextmanager
def recorded():
    """The list of what is exchanged within: name, operation, shape and type."""
    calls: list[tuple[str, str, list[int], str]] = []

    def recording(name):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            moved = next((a for a in reversed(args[:2]) if isinstance(a, Tensor)), torch.empty(0))
            operation = str(kwargs.get("op", "")).rpartition(".")[2]
            calls.append((name, operation, list(moved.shape), str(moved.dtype)))
            return function(*args, **kwargs)

        return patch.object(dist, name, call)

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(recording(name))
        yield calls


def models(group):
    """Of divided models, with dropout of the adapters, errors against whole ones and exchanges."""
    kinds = KINDS if group.size == 2 else ("opt", "gpt2")
    runs = {kind: (kind, ("all-linear",)) for kind in kinds}
    if group.size == 2:
        runs["llama, vocabulary too"] = ("llama", (*LLAMA_LAYERS, "embed_tokens", "lm_head"))
    by_name = {}
    for name, (kind, targets) in runs.items():
        loss, gradients = whole_model(kind, targets)
        for parallel in (False, True):
            network = tiny(kind, group, targets)
            torch.manual_seed(SEED)
            with sequences(group, parallel):
                with recorded() as forward:
                    own = loss_of(network)
                with recorded() as backward:
                    own.backward()
            parts = adapter_parameters(network.model)
            by_name[name + ", sequence" * parallel] = {
                "loss": relative(own.detach(), loss),
                "gradients": max(
                    relative(p.grad, part_of(p, gradients[n])) for n, p in parts.items()
                ),
                "forward": forward,
                "backward": backward,
            }
    return by_name


def whole_model(kind, targets):
    """The loss and the gradients of a model that one rank holds."""
    network = tiny(kind, None, targets)
    torch.manual_seed(SEED)
    loss = loss_of(network)
    loss.backward()
    gradients = {n: p.grad for n, p in adapter_parameters(network.model).items()}
    return loss.detach().double(), gradients


def narrow_traffic(group):
    """Exchanges of a 16-bit layer's backward pass."""
    by_name = {}
    cases = {"column": CASES["column"], "row": CASES["row"]}
    for name, case in (cases | {"row, dealt tokens": CASES["row, trained bias"]}).items():
        with sequences(group, name not in cases):
            values = linear_values(case)
            of = {part: cutter(case, group, part) for part in ("x", "y", "A", "B")}
            layer = linear_layer(case, group, values, of)
            layer.weight.data, layer.bias.data = layer.weight.bfloat16(), layer.bias.bfloat16()
            y = layer(of["x"](values["x"]).bfloat16())
            with recorded() as by_name[name]:
                y.backward(of["y"](values["g"]).bfloat16())
    return by_name


# Tokens


def token_errors(group):
    """Of the exchanges at both ends of the blocks, forward and backward, and of the plain ones."""
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(ROWS, TOKENS, 3, generator=generator) for _ in range(2))
    each = slice(group.rank * TOKENS // group.size, (group.rank + 1) * TOKENS // group.size)
    whole = x.clone().requires_grad_()
    dealt = group.scatter_tokens(whole)
    dealt.backward(g[:, each])
    part = x[:, each].clone().requires_grad_()
    collected = group.gather_tokens(part)
    collected.backward(g)
    size, numbers = group.size, torch.tensor([1.0, -1.0]) * (group.rank + 1)
    total = size * (size + 1) / 2
    return {
        "max": relative(group.max(numbers), torch.tensor([size, -1.0]).double()),
        "sum": relative(group.sum(numbers), torch.tensor([total, -total]).double()),
        "dealt": relative(dealt.detach(), x[:, each].double()),
        "dealt, gradient": relative(whole.grad, g.double()),
        "collected": relative(collected.detach(), x.double()),
        "collected, gradient": relative(part.grad, g[:, each].double()),
    }


def scattered_sum(group):
    """The sum of tokens as a GPU's library scatters it, which is stood in for, and as gloo."""
    x = torch.randn(ROWS, TOKENS, 3, generator=torch.Generator().manual_seed(group.rank))

    def reduce_scatter(own, parts, group=None):
        total = parts.clone()
        dist.all_reduce(total, group=group)
        # The operation knows ranks by places in memory alone.
        own.copy_(total.view(dist.get_world_size(group), -1)[dist.get_rank(group)].view_as(own))

    with sequences(group, True):
        expected = group.leave(x)
        with (
            patch.object(dist, "get_backend", lambda _: "nccl"),
            patch.object(dist, "reduce_scatter_tensor", reduce_scatter),
        ):
            return relative(group.leave(x), expected.double())


# Threads in the place of processes


class ThreadGroup(TensorGroup):
    """Threads of one process that exchange what ranks would."""

    def __init__(self, rank: int, size: int, desk: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(None, rank, size)
        self._desk, self._barrier = desk, barrier

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every thread's ``x``."""
        self._desk[self.rank] = x.detach()
        self._barrier.wait()
        parts = [each.clone() for each in self._desk]
        self._barrier.wait()
        return parts

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).amax(0)


def in_threads(size: int, function: Callable[[TensorGroup], Any]) -> list[Any]:
    """What ``function`` returns on each of ``size`` threads, given its group."""
    desk: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def on(rank):
        try:
            return function(ThreadGroup(rank, size, desk, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [result.result() for result in [pool.submit(on, rank) for rank in range(size)]]
