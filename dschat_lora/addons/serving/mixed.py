"""Several adapters on one base in one forward pass: each row of a batch uses its own."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.experts import (
    LoraExperts,
    Routing,
    compute_by,
    expert_linear,
    expert_weights,
    grouped,
)
from dschat_lora.lora.layers import LoraLinear, value_dtype
from dschat_lora.lora.model import AdapterLayer, adapter_layers, replace_part
from dschat_lora.lora.names import is_inside
from dschat_lora.lora.parallel import ParallelLinear


class AdapterRows:
    """Which adapter each row of the next forward pass uses: 0 is the base, 1 the first one."""

    def __init__(self, device: torch.device) -> None:
        self._rows = self._tokens = torch.zeros(0, dtype=torch.int64, device=device)

    def choose(self, numbers: Sequence[int] | Tensor, width: int) -> None:
        """Set the adapter of each row of a batch that is ``width`` tokens wide.

        Of a width of 1, an int64 tensor of the device is read whenever a layer runs.
        """
        self._rows = torch.as_tensor(numbers, device=self._rows.device)
        self._tokens = self._rows if width == 1 else self._rows.repeat_interleave(width)

    def of(self, x: Tensor) -> Tensor:
        """(len(x),) int64 adapters of a layer's input, whose rows are the batch's, or its tokens.

        Raises:
            ValueError: if they are neither, as where tokens are routed to experts.
        """
        return self.of_count(len(x))

    def of_count(self, count: int) -> Tensor:
        """As :meth:`of`, of an input with so many rows."""
        if count == len(self._rows):
            return self._rows
        if count == len(self._tokens):
            return self._tokens
        raise ValueError(
            f"a layer of the model reads {count} rows of a batch of {len(self._rows)} rows and "
            f"{len(self._tokens)} tokens; its adapters cannot answer in one batch"
        )


class MixedLinear(nn.Module):
    """``x -> x W^T + b + scaling_i * x A_i^T B_i^T``, with i the adapter of the row.

    The factors of all adapters lie one behind another, so that two products serve all rows; what
    other adapters than the row's contribute between the two is set to zero.

    Args:
        base: the layer under the adapters.
        layers: the adapted layer, by the adapter's number; their trained biases are not applied.
        count: number of adapters.
        rows: which adapter each row uses.
    """

    gates: Tensor
    down: Tensor
    up: Tensor

    def __init__(
        self, base: nn.Module, layers: Mapping[int, LoraLinear], *, count: int, rows: AdapterRows
    ) -> None:
        super().__init__()
        self.base, self._rows = base, rows
        dtype = value_dtype(layers[next(iter(layers))].weight)
        factors = {number: layer.factors() for number, layer in layers.items()}
        down = torch.cat([a.detach() for a, _ in factors.values()])
        up = torch.cat([layers[n].scaling * b.detach() for n, (_, b) in factors.items()], dim=1)
        gates = torch.zeros(count + 1, len(down), dtype=dtype, device=down.device)
        first = 0
        for number, (a, _) in factors.items():
            gates[number, first : first + len(a)] = 1
            first += len(a)
        self.register_buffer("down", down.to(dtype), persistent=False)
        self.register_buffer("up", up.T.to(dtype).contiguous(), persistent=False)
        self.register_buffer("gates", gates, persistent=False)

    @property
    def weight(self) -> Tensor:
        """That of the base."""
        return self.base.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """That of the base, which Mamba reads beside the weight."""
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., in) -> (B, ..., out); B counts rows or tokens."""
        output: Tensor = self.base(x)
        gates = self.gates[self._rows.of(x)]
        inner = F.linear(x, self.down) * gates.view(len(x), *[1] * (x.dim() - 2), -1)
        flat = output.view(-1, output.shape[-1])
        return flat.addmm_(inner.view(-1, inner.shape[-1]), self.up).view(output.shape)


class MixedExperts(nn.Module):
    """As :class:`MixedLinear`, for the fused weight of experts.

    Args:
        weight: of the base, (E, out, in) or (E, in, out).
        layers: the adapted weight, by the adapter's number.
        count: number of adapters.
        rows: which adapter each row uses.
    """

    gates: Tensor
    down: Tensor
    up: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        layers: Mapping[int, LoraExperts],
        *,
        count: int,
        rows: AdapterRows,
    ) -> None:
        super().__init__()
        self.weight, self._rows = weight, rows
        self.transposed = next(iter(layers.values())).transposed
        dtype = value_dtype(weight)
        down = torch.cat([layer.lora_A.detach() for layer in layers.values()], dim=1)
        ups = [layer.scaling * layer.lora_B.detach() for layer in layers.values()]
        numbers = [number for number, layer in layers.items() for _ in range(layer.r)]
        gates = torch.zeros(count + 1, len(numbers), dtype=dtype, device=down.device)
        gates[numbers, range(len(numbers))] = 1
        self.register_buffer("down", down.to(dtype), persistent=False)
        self.register_buffer("up", torch.cat(ups, dim=2).to(dtype), persistent=False)
        self.register_buffer("gates", gates, persistent=False)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """(S, in) rows sorted by expert -> (S, out)."""
        gates = self.gates[self._rows.of_count(routing.num_tokens)[routing.tokens]]
        inner = grouped(x, self.down.transpose(1, 2), routing.ends) * gates
        output = expert_linear(x, self.weight, routing.ends, transposed=self.transposed)
        return output + grouped(inner, self.up.transpose(1, 2), routing.ends)


class MixedModule(nn.Module):
    """Any other adapted module (embedding, bias, whole module), one adapter after another.

    Args:
        base: the module under the adapters.
        layers: the adapted module, by the adapter's number.
        rows: which adapter each row uses.
    """

    def __init__(
        self, base: nn.Module, layers: Mapping[int, AdapterLayer], *, rows: AdapterRows
    ) -> None:
        super().__init__()
        self.base, self._rows = base, rows
        self._numbers = list(layers)
        self.layers = nn.ModuleList(layers.values())

    @property
    def weight(self) -> Tensor:
        """That of the base."""
        return self.base.get_parameter("weight")

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """What each row's own module returns for it; all inputs have rows first."""
        output: Tensor = self.base(x, *args, **kwargs)
        numbers = self._rows.of(x)
        for number, layer in zip(self._numbers, self.layers, strict=True):
            own = (numbers == number).nonzero()[:, 0]
            if len(own):
                given = [_rows_of(value, own, len(numbers)) for value in args]
                named = {k: _rows_of(value, own, len(numbers)) for k, value in kwargs.items()}
                output = output.index_copy(0, own, layer(x[own], *given, **named))
        return output


def mix_adapters(base: nn.Module, adapted: Sequence[nn.Module], *, rows: AdapterRows) -> None:
    """Give ``base`` the adapters of the models ``adapted``, in place, numbered from 1.

    Args:
        base: a model without adapters.
        adapted: models on the same parameters, each with an adapter.
        rows: by which the adapter of each row is chosen.

    Raises:
        ValueError: if one adapter saves a module inside which another one adapts layers, or the
            model is divided among processes.
    """
    by_name: dict[str, dict[int, AdapterLayer]] = {}
    for number, model in enumerate(adapted, start=1):
        for name, layer in adapter_layers(model).items():
            by_name.setdefault(name, {})[number] = layer
    for name in by_name:
        outer = [other for other in by_name if other != name and is_inside(name, [other])]
        if outer:
            raise ValueError(
                f"one adapter adapts {name}, another one trains all of {outer[0]}; these cannot "
                "answer in one batch"
            )
    fused = expert_weights(base)
    for name, layers in by_name.items():
        if name in fused:
            module, weight = fused[name]
            experts = {n: layer for n, layer in layers.items() if isinstance(layer, LoraExperts)}
            base_weight = module.get_parameter(weight)
            mixed: nn.Module = MixedExperts(base_weight, experts, count=len(adapted), rows=rows)
            compute_by(module, weight, mixed)
            continue
        module = base.get_submodule(name)
        if isinstance(module, ParallelLinear):
            raise ValueError(f"{name} is divided among processes; load the model in one")
        linear = {
            n: layer
            for n, layer in layers.items()
            if isinstance(layer, LoraLinear) and layer.trained_bias is None
        }
        if len(linear) == len(layers):
            mixed = MixedLinear(module, linear, count=len(adapted), rows=rows)
        else:
            mixed = MixedModule(module, layers, rows=rows)
        replace_part(base, name, mixed)


def _rows_of(value: object, own: Tensor, count: int) -> object:
    """The rows ``own`` of a tensor with ``count`` rows; anything else as it is."""
    if isinstance(value, Tensor) and value.dim() and len(value) == count:
        return value[own]
    return value
