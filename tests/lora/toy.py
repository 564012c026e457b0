"""A toy language model with every kind of layer that adapters meet, in plain torch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from dschat_lora.lora.model import adapters_disabled, base_names

VOCAB, WIDTH = 11, 6


class Conv1D(nn.Module):
    """GPT-2's layout: weight (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.c_proj = Conv1D(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return x + self.c_proj(F.gelu(self.q_proj(self.norm(x))))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.project(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def toy_model(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy().to(dtype).eval()


def random_ids(seed=1):
    return torch.randint(1, VOCAB, (2, 5), generator=torch.Generator().manual_seed(seed))


def randomise(parameters, seed=2):
    """Give every trained value a non-trivial size, so that a wrong formula shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def call_merged(model, merged, *args, **kwargs):
    """What ``model`` returns with ``merged`` (the merged state dict) as its weights."""
    weights = {name: merged[original] for original, name in base_names(model).items()}
    with adapters_disabled(model):
        return functional_call(model, weights, args, kwargs, tie_weights=False)
