"""What the processes of :class:`helpers.ranks.Ranks` do: training runs of tiny models."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import deepspeed
import numpy as np
import torch

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.config.groups import LoraConfig, ModelConfig, OptimConfig, RunConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import SampleSources, StepLoader, eval_batches
from dschat_lora.data.packing import make_rows
from dschat_lora.engine.build import DTYPES, EngineSettings, TrainEngine
from dschat_lora.engine.distributed import data_rank, data_world_size, rank, world_size
from dschat_lora.engine.state import EngineState
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import Meter
from dschat_lora.report.log import RunLog
from dschat_lora.runtime.setup import shard_model
from dschat_lora.supervised.loop import (
    TrainProgress,
    evaluate,
    fit,
    make_train_schedule,
)
from dschat_lora.supervised.objectives import SUPERVISED, BatchLoss, causal_lm_loss
from helpers.steps import train_steps
from helpers.tensor_parallel import divided, divided_rows, replicas_differ
from helpers.tiny import LENGTH, VOCAB, ragged_samples

LORA = {"lora_dim": 4, "lora_alpha": 8.0}
RATE = 5e-3


CARD = {"data": {"training data": "random"}, "metrics": {}, "versions": {}}


class NoTokenizer:
    """As much of a tokenizer as building and saving the tiny models asks for."""

    pad_token_id, eos_token_id = 0, 2

    def __len__(self):
        return VOCAB

    def save_pretrained(self, directory):
        (Path(directory) / "tokenizer_config.json").write_text("{}", encoding="utf-8")


def rate_factors(steps):
    """A warm-up and a decay, so that a rate that stays or comes late shows."""
    return [min(1.0, (step + 1) / 3) * (1 - step / (2 * steps)) for step in range(steps)]


def engine_settings(
    *,
    dtype="fp32",
    stage=0,
    micro=4,
    accumulation=1,
    max_grad_norm=1.0,
    deepspeed_json=None,
    offload=False,
):
    # Else ZeRO 3 keeps parameters as small as these whole on every rank.
    sharded = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    return EngineSettings(
        dtype=dtype,
        zero_stage=stage,
        offload=offload,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        max_grad_norm=max_grad_norm,
        betas=(0.9, 0.95),
        epsilon=1e-8,
        deepspeed_json=sharded | (deepspeed_json or {}),
    )


def load_model(path, lora, *, dtype="fp32", meta=False, group=None, seed=1, **options):
    """The model at ``path`` with an adapter, as the stage builds it."""
    options = ModelConfig(**{"attn_implementation": "sdpa"} | options)
    config = load_config(path, options)
    model = load_causal_lm(path, config, options, dtype=DTYPES[dtype], meta=meta, group=group)
    apply_lora(model, LoraConfig(**lora), seed=seed)
    return model


def build(path, lora, settings, *, rate=RATE, checkpointing=False, group=None, bits=None, **optim):
    """(model, engine) as the stage builds them; call on every rank."""
    meta = settings.zero_stage == 3 and data_rank() > 0
    model = load_model(path, lora, dtype=settings.dtype, meta=meta, group=group, base_bits=bits)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard_model(model, settings)
    config = OptimConfig(learning_rate=rate, lora_learning_rate=rate, **optim)
    return model, TrainEngine(CausalLMLoss(model), parameter_groups(model, config), settings)


def loader(samples, *, micro, accumulation, packing=False, group=None, sources=()):
    """The rows of this process, or of those of ``group``, which divide them.

    Each of ``sources`` but the last one has a single sample.
    """
    size = 1 if group is None else group.size
    lengths = torch.tensor([len(sample.input_ids) for sample in samples]).numpy()
    numbers = np.minimum(np.arange(len(samples)), len(sources) - 1)
    told = SampleSources(sources, numbers, [1.0] * len(sources))
    return StepLoader(
        samples,
        rows=make_rows(lengths, max_seq_len=LENGTH, packing=packing, seed=3),
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        rank=data_rank() // size,
        world_size=data_world_size() // size,
        seed=3,
        collate=SampleCollator(0, context=group, num_sources=len(sources)),
        sources=told if sources else None,
    )


def overflowing_at(step, micro_steps):
    """The usual loss, but in window ``step`` the last rank's first gradient is infinite."""
    calls = iter(range(10**9))

    def loss(engine, batch):
        loss = causal_lm_loss(engine, batch).total
        if next(calls) == step * micro_steps and rank() == world_size() - 1:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return BatchLoss(loss)

    return replace(SUPERVISED, loss=loss)


def train(
    path,
    *,
    lora=LORA,
    dtype="fp32",
    stage=0,
    micro=4,
    accumulation=1,
    max_grad_norm=1.0,
    deepspeed_json=None,
    offload=False,
    checkpointing=False,
    steps=30,
    samples=64,
    packing=False,
    overflow_at=None,
    tensor_parallel=1,
    sequence_parallel=False,
    context_parallel=1,
    bits=None,
    sources=(),
    optim=None,
    want_gradient=False,
    save_adapter_to=None,
    save_merged_to=None,
):
    """Train for ``steps``; what a test may want to know, as numbers and whole CPU tensors."""
    settings = engine_settings(
        dtype=dtype,
        stage=stage,
        micro=micro,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        deepspeed_json=deepspeed_json,
        offload=offload,
    )
    with (
        divided(tensor_parallel, sequence_parallel=sequence_parallel) as group,
        divided_rows(context_parallel) as row_group,
    ):
        model, engine = build(
            path,
            lora,
            settings,
            checkpointing=checkpointing,
            group=group,
            bits=bits,
            **(optim or {}),
        )
        before = gather_to_cpu(_base_parameters(model))
        source = loader(
            ragged_samples(samples),
            micro=micro,
            accumulation=accumulation,
            packing=packing,
            group=row_group,
            sources=sources,
        )
        objective = SUPERVISED
        if overflow_at is not None:
            objective = overflowing_at(overflow_at, accumulation)
        gradient = _record_gradient(engine, model) if want_gradient else {}
        windows = (window for epoch in range(10**6) for window in source.epoch(epoch))
        results, unlike = [], set()
        for step, result in enumerate(train_steps(engine, windows, objective, rate_factors(steps))):
            results.append(result)
            unlike |= {f"{name} after step {step + 1}" for name in replicas_differ(model)}
        after = gather_to_cpu(_base_parameters(model))
        _save(model, lora, path, save_adapter_to, save_merged_to)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        report = {
            "losses": [result.loss for result in results],
            "norms": [result.outcome.grad_norm for result in results],
            "skipped": [result.outcome.skipped for result in results],
            "scales": [result.outcome.loss_scale for result in results],
            "targets": [result.counts.num_targets for result in results],
            "means": [result.means for result in results],
            "rates": [max(result.learning_rates.values()) for result in results],
            "trained": gather_to_cpu(trained),
            "base_changed": [name for name in before if not torch.equal(before[name], after[name])],
            "unlike": sorted(unlike),
            "gradient": gradient,
        }
        release(engine)
        return report


def train_many(runs):
    """Several runs after another, as :func:`train`."""
    return [train(**arguments) for arguments in runs]


def evaluate_samples(path, *, stage, batch_size, samples, packing=False):
    """(loss, targets, batches of this rank) of the untrained model."""
    settings = engine_settings(stage=stage)
    _, engine = build(path, LORA, settings)
    rows = ragged_samples(samples, seed=5)
    lengths = torch.tensor([len(sample.input_ids) for sample in rows]).numpy()
    batches = list(
        eval_batches(
            rows,
            rows=make_rows(lengths, max_seq_len=LENGTH, packing=packing, seed=3),
            batch_size=batch_size,
            rank=rank(),
            world_size=world_size(),
            collate=SampleCollator(0),
        )
    )
    result = evaluate(engine, batches, SUPERVISED)
    release(engine)
    return {
        "loss": result.loss,
        "targets": result.counts.num_targets,
        "own": [batch.num_targets for batch in batches],
    }


def release(engine):
    """Undo what DeepSpeed put on the model and its parameters."""
    engine._engine.destroy()


def _record_gradient(engine, model):
    """A dict that holds the first step's whole gradient once the engine has stepped."""
    gradient, step = {}, engine._engine.step
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def recording_step():
        if not gradient:
            for name, parameter in parameters.items():
                full = deepspeed.utils.safe_get_full_grad(parameter)
                gradient[name] = full.detach().clone()
        return step()

    engine._engine.step = recording_step
    return gradient


def _base_parameters(model):
    adapter = adapter_parameters(model)
    return {name: p for name, p in model.named_parameters() if name not in adapter}


def _save(model, lora, path, adapter_directory, merged_directory):
    if adapter_directory is not None:
        options = {"base": path, "tokenizer": NoTokenizer(), "card": CARD}
        save_adapter(Path(adapter_directory), model, LoraConfig(**lora), **options)
    if merged_directory is not None:
        probe = torch.arange(3, 12)[None]
        options = {"tokenizer": NoTokenizer(), "dropouts": {}, "max_kl": 1e-6}
        save_merged(Path(merged_directory), model.eval(), probe_ids=probe, **options)


class NoKeeper:
    """Keeps nothing, for loops that are not about checkpoints."""

    def requests(self):
        return []

    def is_stopping(self, requests, last=False):
        return False

    def is_due(self, step):
        return False

    def after_step(self, step, requests, *, skipped, last):
        return False

    def stop(self, step):
        raise AssertionError("nobody asked")

    def broken_weight(self):
        return None

    def last_good(self):
        return "There is no checkpoint"


def infinite_loss(engine, batch):
    return BatchLoss(causal_lm_loss(engine, batch).total * math.inf)


def _fit(
    engine,
    model,
    loss,
    *,
    accumulation=1,
    max_steps,
    checkpointer,
    evaluate_at,
    run=RunConfig(),  # noqa: B008
):
    """How :func:`fit` ends with a loss of one's own: its error, its lines and its progress."""
    meter = Meter(describe(model), gradient_checkpointing=False, world_size=1, device=engine.device)
    source = loader(ragged_samples(64), micro=2, accumulation=accumulation)
    progress, error = TrainProgress(), ""
    with tempfile.TemporaryDirectory() as directory:
        with RunLog(Path(directory), active=rank() == 0) as log:
            try:
                fit(
                    engine,
                    source,
                    replace(SUPERVISED, loss=loss),
                    make_train_schedule(
                        OptimConfig(max_steps=max_steps), run, source.steps_per_epoch
                    ),
                    progress=progress,
                    rate_factor=lambda step: 1.0,
                    seed=1,
                    checkpointer=checkpointer,
                    meter=meter,
                    log=log,
                    evaluate_at=evaluate_at,
                )
            except ValueError as raised:
                error = str(raised)
        path = Path(directory) / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    release(engine)
    lines = [json.loads(line) for line in text.splitlines()]
    return {"error": error, "lines": lines, "progress": progress.state()}


def fit_with_infinite_gradients(path, *, stage, dtype="fp32"):
    """How a run ends none of whose gradients is finite."""
    model, engine = build(path, LORA, engine_settings(stage=stage, micro=2, dtype=dtype))
    evaluated = []
    options = {"max_steps": 60, "checkpointer": NoKeeper(), "evaluate_at": evaluated.append}
    return {"evaluated": evaluated, **_fit(engine, model, infinite_loss, **options)}


class Watching(NoKeeper):
    """Keeps nothing but looks at what the engine has learnt after each step."""

    def __init__(self, state):
        self._state = state
        self.seen = [dict(state.tensors())]

    def after_step(self, step, requests, *, skipped, last):
        self.seen.append(dict(self._state.tensors()))
        return False


def fit_with_infinite_losses(path, *, stages, infinite):
    """What :func:`fit` does where losses are infinite whose gradient is finite.

    Args:
        path: of the model.
        stages: of ZeRO, one run each.
        infinite: [step, micro-batch, rank] of each such loss.
    """
    return [_fit_with_infinite_losses(path, stage, infinite) for stage in stages]


def _loss_with_infinities(infinite):
    """The loss of [step, micro-batch, rank], of two micro-batches a step, with infinite ones."""
    calls = iter(range(10**9))

    def loss(engine, batch):
        loss = causal_lm_loss(engine, batch).total
        step, micro = divmod(next(calls), 2)
        return BatchLoss(loss + math.inf if [step, micro, rank()] in infinite else loss)

    return loss


def _fit_with_infinite_losses(path, stage, infinite):
    model, engine = build(path, LORA, engine_settings(stage=stage, micro=2, accumulation=2))
    watching = Watching(EngineState(engine, model))
    options = {"accumulation": 2, "max_steps": 5, "evaluate_at": lambda step: None}
    loss = _loss_with_infinities(infinite)
    report = _fit(engine, model, loss, checkpointer=watching, **options)
    return {"seen": watching.seen, **report}


class SavesEvery(NoKeeper):
    """Keeps what was learnt by each step of an interval, or one at which a request is fulfilled."""

    def __init__(self, state, *, interval, asked_at):
        self._state, self._interval, self._asked_at, self._queued = state, interval, asked_at, 0
        self.saved = {}

    def requests(self):
        self._queued += 1  # the step that is being queued
        return [float(0 < self._asked_at <= self._queued and self._asked_at not in self.saved)]

    def is_due(self, step):
        return step % self._interval == 0

    def after_step(self, step, requests, *, skipped, last):
        if saves := self.is_due(step) or any(requests):
            self.saved[step] = dict(self._state.tensors())
            self._asked_at = 0 if any(requests) else self._asked_at
        return saves


def fit_reading_late(path, *, lates, infinite, asked_at=0, fails_at=0, dtype="fp32"):
    """What :func:`fit` does where results are read a step late, as on a GPU, and where they aren't.

    Args:
        path: of the model.
        lates: whether they are, one run each.
        infinite: [step, micro-batch, rank] of each loss that is.
        asked_at: step with a request to save, if any.
        fails_at: step that fails as it is queued, if any.
        dtype: of computation.
    """
    return [_fit_reading_late(path, late, infinite, asked_at, fails_at, dtype) for late in lates]


def _fit_reading_late(path, late, infinite, asked_at, fails_at, dtype):
    settings = engine_settings(micro=2, accumulation=2, dtype=dtype)
    model, engine = build(path, LORA, settings)
    state, evaluated, queue_step = EngineState(engine, model), {}, engine.queue_step
    keeper = SavesEvery(state, interval=4, asked_at=asked_at)
    made = iter(range(1, 10**9))

    def failing():
        if next(made) == fails_at:
            raise ValueError("the step failed")
        return queue_step()

    options = {"accumulation": 2, "max_steps": 9, "run": RunConfig(eval_interval=3)}
    with (
        mock.patch.object(engine, "queue_step", failing),
        mock.patch("dschat_lora.supervised.loop.reads_late", return_value=late),
        # A machine without a GPU has no pinned memory.
        mock.patch("dschat_lora.supervised.loop.pinned_window", lambda window: window),
    ):
        report = _fit(
            engine,
            model,
            _loss_with_infinities(infinite),
            checkpointer=keeper,
            evaluate_at=lambda step: evaluated.update({step: dict(state.tensors())}),
            **options,
        )
    return {"saved": keeper.saved, "evaluated": evaluated, **report}
