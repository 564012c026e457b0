"""Models that share parameters: module trees over the very same tensors."""

import copy
from typing import TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def share_parameters(module: ModuleT) -> ModuleT:
    """Another tree of modules over the parameters and buffers of ``module`` themselves.

    What is later put in place of a layer of one tree (an adapter), and hooks on one tree's modules,
    are not seen by the other; a changed value of a weight is.
    """
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
