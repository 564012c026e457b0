"""Reward models, DPO, step 3 and decoding, by processes that may hold one model between them."""

import json
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from dschat_lora.commands.stages import STAGES
from dschat_lora.config.options import parse_config
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import form_grid, rank
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.kv_cache import fast_attention
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.parallel import own_part, whole_sequences
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.supervised.stages import run_dpo, run_reward
from helpers.rlhf_course import LETTERS, train_rlhf, vowels
from helpers.runs import load_model, release
from helpers.step1 import metrics, write_jsonl
from helpers.tensor_parallel import divided, replicas_differ

CPU = torch.device("cpu")
RUNS = {"step2_reward": ("reward", run_reward), "step2_dpo": ("dpo", run_dpo)}


def write_pairs(path, count, *, seed=0):
    """Pairs of answers of ragged lengths, for a tokenizer of one token a letter."""
    generator = torch.Generator().manual_seed(seed)

    def text(longest):
        size = int(torch.randint(1, longest + 1, (), generator=generator))
        return "".join(LETTERS[int(n)] for n in torch.randint(0, 26, (size,), generator=generator))

    rows = [{"prompt": text(9), "chosen": text(8), "rejected": text(8)} for _ in range(count)]
    return write_jsonl(Path(path), rows)


ASKED = []  # responses that this process scored


def counted_vowels(prompts, responses):
    """A reward that depends on the text, and keeps in mind what it was asked."""
    ASKED.extend(responses)
    return vowels(prompts, responses)


@contextmanager
def watched_replicas():
    """Within, every step adds what ranks of a group hold unlike to ``unlike``.

    Yields:
        (unlike, stepped): names of parameters, and the engine of each step.
    """
    unlike, stepped, queue_step = [], [], TrainEngine.queue_step

    def watched(self):
        outcome = queue_step(self)
        stepped.append(self)
        unlike.extend(replicas_differ(self.module))
        return outcome

    with mock.patch.object(TrainEngine, "queue_step", watched):
        yield unlike, stepped


# ---------------------------------------------------------------------------- runs


def train_pairs_many(runs):
    """Several runs after another, as :func:`train_pairs`."""
    return [train_pairs(**arguments) for arguments in runs]


def train_pairs(stage, argv):
    """A stage of step 2 as its script runs it, in the processes at hand: its log and replicas."""
    name, run_stage = RUNS[stage]
    config = STAGES[name].check(parse_config(STAGES[name].config, [str(each) for each in argv]))
    try:
        with (
            # The process group is the tests'.
            mock.patch("dschat_lora.runtime.run.init_distributed"),
            mock.patch("dschat_lora.runtime.run.shutdown"),
            watched_replicas() as (unlike, stepped),
        ):
            run_stage(config)
        for engine in set(stepped):
            release(engine)
    finally:
        form_grid(1)
    lines = metrics(config.run.output_dir) if rank() == 0 else []
    return {"lines": json.dumps(lines), "unlike": unlike}


def train_roles_many(runs):
    """Several runs after another, as :func:`train_roles`."""
    return [train_roles(**arguments) for arguments in runs]


def train_roles(argv, *, layer_by_layer=False):
    """As :func:`helpers.rlhf_course.train_rlhf`, and what this rank drew, and its replicas."""
    drawn, generate = [], Generator.__call__
    ASKED.clear()

    def watched(self, *args, **kwargs):
        responses = generate(self, *args, **kwargs)
        drawn.append([(list(each.tokens), list(each.logprobs)) for each in responses])
        return responses

    try:
        with (
            mock.patch.object(Generator, "__call__", watched),
            watched_replicas() as (unlike, stepped),
        ):
            report = train_rlhf(argv, layer_by_layer=layer_by_layer)
    finally:
        form_grid(1)
    return {
        **report,
        "drawn": drawn,
        "unlike": unlike,
        "watched": len(stepped),
        "asked": len(ASKED),
    }


# ---------------------------------------------------------------------------- decoding


def decode_many(paths, **options):
    """Of several models, as :func:`decode`."""
    return [decode(path, **options) for path in paths]


def decode(path, *, tensor_parallel=1, sequence_parallel=False):
    """What an adapted model answers, with and without a cache; its logits, quick and slow."""
    with divided(tensor_parallel, sequence_parallel=sequence_parallel) as group:
        model = load_model(path, {"lora_dim": 4}, group=group, seed=0).eval()
        _draw_factors(model)
        cached = _responses(model)
        with mock.patch("dschat_lora.generation.generate.takes_cache", return_value=False):
            recomputed = _responses(model)
        ids = torch.arange(3, 18)[None]
        with torch.no_grad(), whole_sequences(model):
            slow = model(input_ids=ids, use_cache=False).logits
            with FastLinears(model).in_use(), fast_attention(model):
                quick = model(input_ids=ids, use_cache=False).logits
    return {
        "cached": (cached.tokens(), cached.logprobs()),
        "recomputed": (recomputed.tokens(), recomputed.logprobs()),
        "slow": slow,
        "quick": quick,
    }


@torch.no_grad()
def _draw_factors(model):
    """Values that show in every token, the same whoever holds which part."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("lora_B"):
            shard = getattr(parameter, "tensor_shard", None)
            shape = parameter.shape if shard is None else shard.full_shape(parameter.shape)
            whole = 0.3 * torch.randn(shape, generator=generator)
            parameter.copy_(own_part(parameter, whole))


def _responses(model):
    """To three prompts, two each, of which some end early."""
    prompts = [[5, 6, 7, 8, 9], [10, 11], list(range(3, 20))]
    decoder = Decoder(model, eos_ids=range(2, 8), pad_id=0, device=CPU)
    seeds = [[11, 12], [13, 14], [15, 16]]
    return decoder(prompts, Sampling(10, temperature=1.3), seeds=seeds, keep_logprobs=True)
