"""Files written by processes that share a model, read by others that share it another way."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.engine.distributed import broadcast_string, data_world_size, rank
from dschat_lora.engine.state import EngineState
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.supervised.objectives import SUPERVISED
from helpers.runs import (
    CARD,
    LORA,
    NoTokenizer,
    build,
    engine_settings,
    load_model,
    loader,
    rate_factors,
    release,
)
from helpers.steps import train_steps
from helpers.tensor_parallel import divided
from helpers.tiny import ragged_samples

ROWS = 4  # of a step, over all shares of the data


def carry_on(path, directory, layouts, handed, steps=2):
    """Train in each layout and save; load them in others, and go on for a step.

    Args:
        path: of the model.
        directory: receives states and adapters.
        layouts: (size of the tensor groups, ZeRO stage).
        handed: (size that saved, size that loads).
        steps: before saving.

    Returns:
        ``saved``: by layout what the run that wrote it held, and its next loss. ``loaded``: by
        both layouts the same of the run that read it. ``adapters``: what a model holds then that
        read the adapter's file.
    """
    directory = Path(directory)
    saved, loaded, adapters = {}, {}, {}
    for size, stage in layouts:
        with divided(size) as group:
            run = _Run(path, stage, group)
            run.train(0, steps)
            run.save(directory / f"{size}")
            saved[size] = run.held(), run.train(steps, 1)
            release(run.engine)
    for writer, reader in handed:
        with divided(reader) as group:
            run = _Run(path, dict(layouts)[reader], group)
            run.load(directory / f"{writer}")
            loaded[writer, reader] = run.held(), run.train(steps, 1)
            release(run.engine)
            model = load_model(path, LORA, group=group)
            load_adapter(model, directory / f"{writer}" / "adapter")
            adapters[writer, reader] = gather_to_cpu(adapter_parameters(model))
    return {"saved": saved, "loaded": loaded, "adapters": adapters}


class _Run:
    """A tiny language model on an engine; its steps are those of one fixed run."""

    def __init__(self, path, stage, group):
        self.micro, self.path = ROWS // data_world_size(), path
        settings = engine_settings(stage=stage, micro=self.micro)
        self.model, self.engine = build(path, LORA, settings, group=group)
        self.state = EngineState(self.engine, self.model)

    def train(self, first, count):
        """Losses of so many steps from ``first`` on."""
        source = loader(ragged_samples(64), micro=self.micro, accumulation=1)
        windows = [next(source.epoch(0, step)) for step in range(first, first + count)]
        rates = rate_factors(10)[first : first + count]
        return [r.loss for r in train_steps(self.engine, windows, SUPERVISED, rates)]

    def held(self):
        """What it has learnt, on rank 0."""
        return dict(self.state.tensors())

    def save(self, directory):
        """State and adapter."""
        facts, tensors = self.state.facts(), self.held()
        _save_adapter(directory / "adapter", self.model, LoraConfig(**LORA), self.path)
        if rank() == 0:
            save_file(tensors, directory / "state.safetensors")
            (directory / "state.json").write_text(json.dumps(facts))

    def load(self, directory):
        """Become what was saved."""
        facts = json.loads(
            broadcast_string((directory / "state.json").read_text() if rank() == 0 else "")
        )
        tensors = load_file(directory / "state.safetensors") if rank() == 0 else {}
        self.state.load(facts, tensors.__getitem__)


def _save_adapter(directory, model, lora, path):
    save_adapter(directory, model, lora, base=path, tokenizer=NoTokenizer(), card=CARD)


def through(path, pairs, ids, *, size=2, sequence_parallel=False):
    """Logits of the model with each adapter that stock PEFT wrote, which is then written anew.

    Args:
        path: of the model.
        pairs: (adapter to read, adapter to write) each.
        ids: (B, T) token ids.
        size: of the tensor group.
        sequence_parallel: of the group.
    """
    logits = []
    with divided(size, sequence_parallel=sequence_parallel) as group:
        for source, target in pairs:
            options = ModelConfig()
            config = load_config(path, options)
            model = load_causal_lm(
                path, config, options, dtype=torch.float32, meta=False, group=group
            )
            lora = lora_config_of(source)
            apply_lora(model, lora, seed=3)
            load_adapter(model, source)
            with torch.no_grad(), whole_sequences(model):
                logits.append(model(input_ids=torch.tensor(ids)).logits)
            _save_adapter(Path(target), model, lora, path)
    return logits


def fingerprints(path, sizes):
    """Base and adapter as one hash each, by the size of the tensor group."""
    hashes = []
    for size in sizes:
        with divided(size) as group:
            model = load_model(path, LORA, group=group)
            hashes.append((base_fingerprint(model), adapter_fingerprint(model)))
    return hashes
