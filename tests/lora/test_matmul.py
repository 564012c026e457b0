"""The one LoRA product against the formula as it reads, and what it keeps and allocates."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dschat_lora.lora.layers import LoraLinear, draw_keep, lora_linear, lora_linear_reference

NAMES = ("x", "bias", "lora_A", "lora_B")


def operands(dtype=torch.float64, *, factors=None, dropout=0.0, tokens=6, wide=7, out=5, r=2):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    x = draw(2, tokens // 2, wide, dtype=dtype)
    return {
        "x": x.requires_grad_(),
        "weight": draw(out, wide, dtype=dtype),
        "bias": draw(out, dtype=dtype).requires_grad_(),
        "lora_A": draw(r, wide, dtype=factors or dtype).requires_grad_(),
        "lora_B": draw(out, r, dtype=factors or dtype).requires_grad_(),
        "scaling": 0.7,
        "keep": draw_keep(x, dropout) if dropout else None,
    }


def results(function, values, weights=None, **options):
    """Output, and the gradients of some weighted sum of it, of what trains."""
    leaves = [x for x in values.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    output = function(**values, **options)
    if weights is None:
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    return [output, *torch.autograd.grad(output, leaves, weights.to(output.dtype))]


def drawn(layer):
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    return layer


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_finite_differences(dropout, transposed):
    torch.manual_seed(1)
    values = operands(dropout=dropout)
    leaves = [values[name] for name in NAMES]

    def function(*leaves):
        given = {**values, **dict(zip(NAMES, leaves, strict=True))}
        if transposed:
            given["weight"] = given["weight"].T.contiguous()
        return lora_linear(**given, transposed=transposed)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize(
    ("dtype", "dropout", "bias"),
    [
        *((torch.float32, dropout, bias) for dropout in (0.0, 0.4) for bias in (True, False)),
        *((torch.bfloat16, 0.0, True), (torch.float16, 0.0, True)),
    ],
)
def test_it_is_the_formula_and_in_16_bits_as_near_to_the_truth(dtype, dropout, bias):
    torch.manual_seed(1)
    sizes = {"tokens": 64, "wide": 32, "out": 48, "r": 4}
    values = operands(dtype, factors=torch.float32, dropout=dropout, **sizes)
    values["bias"] = values["bias"] if bias else None
    exact = {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in values.items()
    }
    truth = results(lora_linear_reference, exact)
    ours, plain = results(lora_linear, values), results(lora_linear_reference, values)
    for one, other, wanted in zip(ours, plain, truth, strict=True):
        assert one.dtype == other.dtype
        if dtype == torch.float32:
            assert (one - other).norm() <= 1e-6 * other.norm()
            continue
        error, allowed = ((each.double() - wanted).norm() for each in (one, other))
        assert error <= 1.2 * allowed


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_trains_gets_its_gradient_and_a_model_may_write_into_the_output(transposed):
    values = operands()
    values["weight"].requires_grad_()

    def clamped(**values):
        # In place, of the whole output and none that is a view.
        return lora_linear(**values, transposed=transposed).clamp_(-1.0, 1.0)

    def expected(**values):
        return lora_linear_reference(**values).clamp(-1.0, 1.0)

    wanted = results(expected, values)
    if transposed:
        values["weight"] = values["weight"].detach().T.clone().requires_grad_()
        wanted[2] = wanted[2].T
    torch.testing.assert_close(results(clamped, values), wanted)


def test_an_input_without_gradient_costs_none():
    values = operands()
    values["x"] = values["x"].detach()
    values["bias"] = values["bias"].detach()
    with Outputs(values["x"].numel()) as seen:
        lora_linear(**values).sum().backward()
    assert values["lora_A"].grad.abs().sum() > 0
    # Neither the output nor its gradient is as large as the input here.
    assert seen.large == 0


class Outputs(TorchDispatchMode):
    """Counts fresh tensors of at least so many elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.large = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for each in result if isinstance(result, tuple | list) else [result]:
            fresh = isinstance(each, torch.Tensor) and each.data_ptr() not in old
            self.large += fresh and each.numel() >= self.size
        return result


def test_one_tensor_of_full_size_forward_and_one_backward():
    counts = {}
    for function in (lora_linear, lora_linear_reference):
        values = operands(torch.float32, tokens=64, wide=32, out=32, r=2)
        values["bias"] = values["bias"].detach()
        with Outputs(values["x"].numel()) as forward:
            output = function(**values)
        weights = torch.ones_like(output)
        with Outputs(values["x"].numel()) as backward:
            output.backward(weights)
        counts[function] = forward.large, backward.large
    assert counts[lora_linear] == (1, 1)
    # Forward: product, update, scaled update, sum. Backward: the scaled gradient, two parts of
    # the input's gradient and their sum.
    assert counts[lora_linear_reference][0] == 4
    assert counts[lora_linear_reference][1] >= 3


def kept_bytes(function, known=()):
    """Bytes that autograd keeps for the backward pass, each storage once."""
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = function()
    for tensor in known:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values()), output


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_that_read_one_input_keep_it_once_and_little_else(dropout):
    torch.manual_seed(0)
    tokens, wide, r = 40, 24, 3
    layers = [
        LoraLinear(nn.Linear(wide, wide).bfloat16(), r=r, scaling=1.0, dropout=dropout)
        for _ in "qkv"
    ]
    x = torch.randn(tokens, wide, dtype=torch.bfloat16, requires_grad=True)
    parameters = [p for layer in layers for p in layer.parameters()]
    kept, _ = kept_bytes(lambda: [layer(x) for layer in layers], known=parameters)
    masks = 3 * tokens * wide if dropout else 0
    assert kept == 2 * tokens * wide + 3 * 2 * tokens * r + masks


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputing_it_draws_the_same_dropout(dropout):
    layer = drawn(LoraLinear(nn.Linear(6, 4), r=2, scaling=0.5, dropout=dropout))
    x = torch.randn(8, 6, requires_grad=True)

    def gradients(run):
        torch.manual_seed(5)
        return torch.autograd.grad(run().square().sum(), (x, layer.lora_A, layer.lora_B))

    plain = gradients(lambda: layer(x))
    again = gradients(lambda: checkpoint(layer, x, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_autocast_computes_in_its_type_and_trains_fp32_factors():
    values = operands(torch.float32, tokens=16, wide=32, out=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = results(lora_linear, values)
        plain = results(lora_linear_reference, values)
    assert ours[0].dtype == plain[0].dtype == torch.bfloat16
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= 0.02 * other.float().norm()


def test_it_compiles_into_one_graph():
    torch._dynamo.reset()
    layer = drawn(LoraLinear(nn.Linear(6, 4), r=2, scaling=0.5))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 6, requires_grad=True)
    leaves = (x, layer.lora_A, layer.lora_B)
    eager, whole = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (layer, compiled))
    torch.testing.assert_close(whole, eager)
    # Not by bernoulli, of which inductor draws another mask for the gradients.
    graph = make_fx(lambda x: draw_keep(x, 0.5))(torch.randn(3, 6)).graph
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    assert called == {torch.ops.aten.rand.default, torch.ops.aten.ge.Scalar}
    keep = draw_keep(torch.zeros(200, 200), 0.3)
    assert keep.dtype == torch.bool
    assert abs(keep.double().mean() - 0.7) < 0.01  # four standard deviations


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_input_and_gradient_may_lie_in_memory_in_any_order(dropout):
    values = operands()
    turned = torch.randn(7, 3, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    values |= {"x": turned, "keep": draw_keep(turned, dropout) if dropout else None}
    weights = torch.randn(5, 3, 2, dtype=torch.float64).permute(2, 1, 0)
    ours, plain = (results(f, values, weights) for f in (lora_linear, lora_linear_reference))
    torch.testing.assert_close(ours, plain)


@pytest.mark.stage
@pytest.mark.thorough
def test_compiled_dropout_is_the_same_forward_and_backward():
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = [drawn(LoraLinear(nn.Linear(16, 8), r=2, scaling=0.5, dropout=0.5)) for _ in "qkv"]
    norm = nn.LayerNorm(16)

    def outputs(x):
        read = norm(x)
        return torch.stack([layer(read) for layer in layers])

    x = torch.randn(32, 16, requires_grad=True)
    compiled = torch.compile(outputs)(x)
    weights = torch.randn(compiled.shape)
    gradients = torch.autograd.grad(compiled, [layer.lora_B for layer in layers], weights)
    for layer in layers:
        layer.enabled = False
    # An update is linear in B, so that the product of B and its gradient is the update again.
    updates = ((compiled - outputs(x)) * weights).sum((1, 2))
    products = [(g * layer.lora_B).sum() for g, layer in zip(gradients, layers, strict=True)]
    torch.testing.assert_close(torch.stack(products), updates, rtol=1e-4, atol=1e-3)
    assert updates.abs().min() > 1
    torch._dynamo.reset()
