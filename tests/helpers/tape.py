"""What a CUDA graph is to a GPU, on a CPU."""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Tape(TorchDispatchMode):
    """What a CUDA graph is to a GPU: the operations of one step, to be run again as they were."""

    def __init__(self, step):
        super().__init__()
        self.operations = []
        with self:
            step()
        self.fresh = True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "local_scalar" not in str(operation), "a step waits for its numbers"
        output = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, output))
        return output

    def __call__(self):
        if self.fresh:
            # A graph only records at first; the tape has already run what it recorded.
            self.fresh = False
            return
        known = {}
        for operation, args, kwargs, recorded in self.operations:
            args, kwargs = tree_map(lambda x: known.get(id(x), x), (args, kwargs))
            output = operation(*args, **kwargs)
            tree_map(lambda old, new: known.__setitem__(id(old), new), recorded, output)
