"""What a CUDA graph is to a GPU, on a CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """The operations of a step, to be run again on the same memory, as a CUDA graph has them.

    Recording leaves all memory of before as it was.
    """

    def __init__(self, step):
        super().__init__()
        self.operations, self._made, self._before = [], set(), {}
        with self:
            step()
        for tensor, values in reversed(self._before.values()):
            tensor.data.copy_(values)
        self._before = None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert "local_scalar" not in str(operation), "a step waits for its numbers"
        for tensor in _written(operation, args, kwargs):
            if _storage(tensor) not in self._made:
                self._before.setdefault(_key(tensor), (tensor, tensor.detach().clone()))
        output = operation(*args, **kwargs)
        given = {_storage(x) for x in _tensors((args, kwargs))}
        self._made |= {_storage(x) for x in _tensors(output)} - given
        self.operations.append((operation, args, kwargs, output))
        return output

    @torch.no_grad()
    def __call__(self):
        for operation, args, kwargs, recorded in self.operations:
            output = operation(*args, **kwargs)
            for old, new in zip(_tensors(recorded), _tensors(output), strict=True):
                if _storage(old) != _storage(new):  # else a view, or written in place
                    old.data.copy_(new)


def _tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _key(tensor):
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _written(operation, args, kwargs):
    """Tensors that an operation writes into."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)
