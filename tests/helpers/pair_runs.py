"""What the processes of :class:`helpers.ranks.Ranks` do with pairs: reward models and DPO."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dschat_lora.config.groups import LoraConfig, ModelConfig, OptimConfig
from dschat_lora.config.options import build_config
from dschat_lora.config.stages import DpoConfig, DpoStageConfig, RewardConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.data.loader import StepLoader, eval_batches
from dschat_lora.data.packing import make_rows
from dschat_lora.data.samples import PairSample, TokenSet, UnpairedSample, write_samples
from dschat_lora.engine.build import DTYPES, TrainEngine
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.engine.state import EngineState
from dschat_lora.engine.zero import Snapshot, gather_to_cpu
from dschat_lora.lora.model import apply_lora, lora_layers
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.loading import load_config
from dschat_lora.models.reward_model import RewardModel, load_reward_model
from dschat_lora.runtime.setup import shard_model
from dschat_lora.supervised.dpo_reference import WithReference, logprobs_at, reference_logprobs
from dschat_lora.supervised.loop import evaluate
from dschat_lora.supervised.pair_objectives import answer_logprobs, dpo_objective, reward_objective
from dschat_lora.supervised.stages import loss_of_type
from helpers.runs import (
    LORA,
    RATE,
    _base_parameters,
    _record_gradient,
    engine_settings,
    load_model,
    rate_factors,
    release,
)
from helpers.steps import train_steps
from helpers.tensor_parallel import divided_rows
from helpers.tiny import LENGTH, VOCAB

SEED = 3
# DeepSpeed's own: parameters as small as these models' are whole on every rank.
PERSISTENT = {"zero_optimization": {}}


class Keeping(PairCollator):
    """Stands in for a collator: a batch is its rows."""

    def __call__(self, rows):
        return rows

    def empty(self):
        return []


def ragged_pairs(count, *, seed=0):
    """Pairs whose prompts, shared beginnings and answers have all kinds of lengths."""
    generator = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        prompt, further, *rest = (int(generator.integers(0, limit)) for limit in (8, 4, 7, 7))
        chosen, rejected = rest
        rejected += chosen + rejected == 0  # one answer may begin the other, not be it
        size = 1 + prompt + further
        ids = generator.integers(3, VOCAB, size + chosen + rejected).astype(np.int32)
        if chosen and rejected and ids[size] == ids[size + chosen]:
            ids[size] = 3 + (ids[size] - 2) % (VOCAB - 3)
        pairs.append(PairSample(ids, 1 + prompt, size, chosen, margin=(number % 3) / 2))
    return pairs


def ragged_unpaired(count):
    """Good and bad answers of all kinds of lengths, each with another one to its prompt."""
    return [
        UnpairedSample(pair.chosen, pair.rejected[pair.prompt_length :], pair.prompt_length, label)
        for pair, label in zip(ragged_pairs(count), [1, 1, 0] * count, strict=False)
    ]


def token_set(pairs, directory, kind="pairs"):
    """The pairs as a stage has them, on disk."""
    path = Path(directory) / f"pairs-{rank()}.arrow"
    write_samples(path, pairs, kind)
    return TokenSet.read(path, kind)


def strong(model):
    """Factors as a trained adapter has them, so that the adapter shows in every value."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            if not layer.weight.is_meta:
                layer.lora_B.copy_(0.1 * torch.randn(layer.lora_B.shape, generator=generator))
    return model


def load_reward(path, lora, *, dtype="fp32", meta=False):
    """A reward model as the stage builds it, its adapter a continued one."""
    options = ModelConfig()
    config = load_config(path, options)
    model = load_reward_model(path, config, options, dtype=DTYPES[dtype], seed=1, meta=meta)
    saved = ("score",) if lora["lora_dim"] else ()
    apply_lora(model, LoraConfig(**lora, modules_to_save=saved), seed=1)
    return strong(model)


def load_policy(path, lora, *, dtype="fp32", meta=False):
    """A policy as the stage builds it, its adapter a continued one."""
    return strong(load_model(path, lora, dtype=dtype, meta=meta))


def build_pair_engine(path, task, lora, settings):
    """(model, engine) as the stage builds them; call on every rank."""
    load, network = (
        (load_reward, RewardModel) if task == "reward" else (load_policy, CausalLMLogprobs)
    )
    model = load(path, lora, dtype=settings.dtype, meta=settings.zero_stage == 3 and rank() > 0)
    shard_model(model, settings)
    optim = OptimConfig(learning_rate=RATE, lora_learning_rate=RATE)
    return model, TrainEngine(network(model), parameter_groups(model, optim), settings)


def trained_of(model):
    """Parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def objective_of(task, options, model, engine, *, on_the_fly):
    """The stage's objective; DPO's reference comes with the pairs or from a snapshot."""
    if task == "reward":
        return reward_objective(RewardConfig(**options))
    reference = lambda batch: batch.reference  # noqa: E731
    if on_the_fly:
        reference = partial(logprobs_at, Snapshot(list(trained_of(model).values())), engine)
    config = build_config(DpoStageConfig, options)
    if not config.dpo.has_reference:
        return dpo_objective(config.dpo)
    return loss_of_type(config).make_objective(config, reference)


def share_of(group):
    """Which rows this process reads, or those of ``group``, which divide them."""
    size = 1 if group is None else group.size
    return {"rank": rank() // size, "world_size": world_size() // size}


def pair_loader(samples, lengths, collate, *, micro, accumulation, packing=False):
    return StepLoader(
        samples,
        rows=make_rows(lengths, max_seq_len=2 * LENGTH, packing=packing, seed=SEED),
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        **share_of(collate.context),
        seed=SEED,
        collate=collate,
    )


def train_pairs(
    path,
    *,
    task="reward",
    options=None,
    lora=LORA,
    dtype="fp32",
    stage=0,
    micro=8,
    accumulation=1,
    steps=5,
    pairs=19,
    layout="shared",
    packing=False,
    on_the_fly=False,
    context_parallel=1,
    deepspeed_json=None,
    offload=False,
):
    """Train for ``steps``; what a test may want to know, as numbers and whole CPU tensors."""
    settings = engine_settings(
        dtype=dtype,
        stage=stage,
        micro=micro,
        accumulation=accumulation,
        deepspeed_json=deepspeed_json,
        offload=offload,
    )
    model, engine = build_pair_engine(path, task, lora, settings)
    before = gather_to_cpu(_base_parameters(model)) if lora["lora_dim"] else {}
    objective = objective_of(task, options or {}, model, engine, on_the_fly=on_the_fly)
    loss_type = (options or {}).get("loss_type")
    with tempfile.TemporaryDirectory() as directory, divided_rows(context_parallel) as group:
        collate, more = PairCollator(0, layout, tight=group is not None, context=group), {}
        if loss_type == "kto":
            loss = loss_of_type(DpoStageConfig(dpo=DpoConfig(loss_type=loss_type)))
            more["logprobs"] = loss.logprobs
            collate = replace(loss.collator(0), context=group)
            samples = token_set(ragged_unpaired(pairs), directory, "unpaired")
        else:
            samples = token_set(ragged_pairs(pairs), directory)
        lengths, source = collate.counts(samples).positions, samples
        if task == "dpo" and loss_type not in ("orpo", "simpo") and not on_the_fly:
            source = WithReference(samples, _reference(engine, samples, collate, directory, **more))
        loader = pair_loader(
            source, lengths, collate, micro=micro, accumulation=accumulation, packing=packing
        )
        gradient = _record_gradient(engine, model)
        windows = (window for epoch in range(10**6) for window in loader.epoch(epoch))
        results, seen = [], []

        def watched():
            for window in windows:
                seen.append([batch.num_samples for batch in window])
                yield window

        results = list(train_steps(engine, watched(), objective, rate_factors(steps)))
    after = gather_to_cpu(_base_parameters(model)) if lora["lora_dim"] else {}
    report = {
        "losses": [result.loss for result in results],
        "norms": [result.outcome.grad_norm for result in results],
        "means": [result.means for result in results],
        "pairs": [result.counts.num_samples for result in results],
        "own": seen[:steps],
        "trained": gather_to_cpu(trained_of(model)),
        "base_changed": [name for name in before if not torch.equal(before[name], after[name])],
        "gradient": gradient,
    }
    release(engine)
    return report


def train_pairs_many(runs):
    """Several runs after another, as :func:`train_pairs`."""
    return [train_pairs(**arguments) for arguments in runs]


def _reference(
    engine, samples, collate, directory, *, packing=False, batch_size=3, identity="a", **more
):
    lengths = collate.counts(samples).positions
    # One cache for all ranks, as a file system is.
    box = [str(directory)]
    torch.distributed.broadcast_object_list(box, 0)
    return reference_logprobs(
        engine,
        samples,
        rows=make_rows(lengths, max_seq_len=2 * LENGTH, packing=packing, seed=SEED),
        collate=collate,
        batch_size=batch_size,
        share=share_of(collate.context),
        cache=Path(box[0]),
        identity=identity if rank() == 0 else None,
        **more,
    )


def reference_values(path, *, cache, calls, stage=0, dtype="fp32"):
    """(values, forward passes of this rank) of each call for the reference's values.

    Args:
        path: of the model.
        cache: directory of all calls.
        calls: what differs: ``packing``, ``layout``, ``batch_size``, ``identity``, ``pairs``,
            and ``damage``, done to every file of values before.
        stage: of ZeRO.
        dtype: of the model.
    """
    settings = engine_settings(stage=stage, dtype=dtype)
    _, engine = build_pair_engine(path, "dpo", LORA, settings)
    passes = []
    engine.module.register_forward_hook(lambda *_: passes.append(1))
    reports = []
    with tempfile.TemporaryDirectory() as directory:
        for call in calls:
            samples = token_set(ragged_pairs(call.get("pairs", 19), seed=7), directory)
            if rank() == 0 and call.get("damage"):
                for file in Path(cache).glob("reference-*/*.npy"):
                    damage(file, call["damage"])
            torch.distributed.barrier()
            passes.clear()
            values = _reference(
                engine,
                samples,
                PairCollator(0, call.get("layout", "shared")),
                cache,
                packing=call.get("packing", False),
                batch_size=call.get("batch_size", 3),
                identity=call.get("identity", "a"),
            )
            reports.append((torch.from_numpy(values.copy()), len(passes)))
    release(engine)
    return reports


def damage(file, kind):
    """Make a file wrong as a bad disk, a full one or a lost directory entry does."""
    content = bytearray(file.read_bytes())
    if kind == "gone":
        file.unlink()
        return
    if kind == "flipped":
        content[-5] ^= 0x40
    file.write_bytes(content[: len(content) // 2] if kind == "cut" else content)


def look_back(path, *, stage, persistent=False, offload=False, dtype="fp32", when="trained"):
    """What :meth:`Snapshot.in_place` shows inside and leaves behind.

    Args:
        path: of the model.
        stage: of ZeRO.
        persistent: leave small parameters whole on every rank at ZeRO 3.
        offload: of the optimizer.
        dtype: of the base.
        when: ``first``, before any forward pass; ``trained``, after three steps; ``restored``,
            once the engine has become another one that was trained.
    """
    settings = _eight_a_step(stage, persistent, offload, dtype)
    batch = PairCollator(0, "shared")([[pair] for pair in ragged_pairs(4, seed=9)])
    model, engine = build_pair_engine(path, "dpo", LORA, settings)
    trained = trained_of(model)
    start, snapshot = gather_to_cpu(trained), Snapshot(list(trained.values()))
    expected = _values_at_the_start(path, dtype, batch)
    if when == "trained":
        _some_steps(engine, 0, 3)
    elif when == "restored":
        state, facts, tensors = EngineState(engine, model), *_learnt_elsewhere(path, settings)
        state.load(facts, lambda key: tensors[key])
    before = gather_to_cpu(trained)
    was_training = engine.module.training
    with snapshot.in_place():
        inside = gather_to_cpu(trained)
    twice = [logprobs_at(snapshot, engine, batch) for _ in range(2)]
    mode_kept = engine.module.training == was_training
    after = gather_to_cpu(trained)
    now, further = _evaluated(engine, batch), _some_steps(engine, 3, 2)
    report = {
        "start": start,
        "inside": inside,
        "before": before,
        "after": after,
        "expected": expected,
        "seen": twice,
        "now": now,
        "further": further,
        "mode_kept": mode_kept,
        "persistent": sum(getattr(p, "ds_persist", False) for p in trained.values()),
    }
    release(engine)
    return report


def undisturbed_steps(path, *, stage, persistent=False, dtype="fp32", offload=False):
    """(outcomes of steps 3 and 4, log-probabilities before them) where nobody looks back."""
    settings = _eight_a_step(stage, persistent, offload, dtype)
    _, engine = build_pair_engine(path, "dpo", LORA, settings)
    _some_steps(engine, 0, 3)
    batch = PairCollator(0, "shared")([[pair] for pair in ragged_pairs(4, seed=9)])
    now, further = _evaluated(engine, batch), _some_steps(engine, 3, 2)
    release(engine)
    return {"further": further, "now": now}


def _eight_a_step(stage, persistent, offload, dtype):
    """Settings of steps of eight pairs."""
    json = PERSISTENT if persistent else None
    options = {"micro": 8 // world_size(), "deepspeed_json": json, "offload": offload}
    return engine_settings(stage=stage, dtype=dtype, **options)


@torch.no_grad()
def _evaluated(network, batch):
    network.eval()
    return answer_logprobs(network, batch)


def _some_steps(engine, first, count):
    """(loss, norm) of steps that make chosen answers likelier."""
    objective = dpo_objective(DpoConfig(), lambda batch: torch.zeros_like(batch.reference))
    pairs, collate = ragged_pairs(8 * 5, seed=2), PairCollator(0, "shared")
    outcomes = []
    for step in range(first, first + count):
        rows = [[pair] for pair in pairs[8 * step : 8 * step + 8]][rank() :: world_size()]
        (result,) = train_steps(engine, [[collate(rows)]], objective, [1.0])
        outcomes.append((result.loss, result.outcome.grad_norm))
    return outcomes


def _values_at_the_start(path, dtype, batch):
    """Log-probabilities without an engine."""
    return _evaluated(CausalLMLogprobs(load_policy(path, LORA, dtype=dtype)), batch)


def _learnt_elsewhere(path, settings):
    """(facts, tensors) of an engine that was trained."""
    model, engine = build_pair_engine(path, "dpo", LORA, settings)
    _some_steps(engine, 0, 3)
    state = EngineState(engine, model)
    learnt = state.facts(), dict(state.tensors())
    release(engine)
    return learnt


def evaluate_pairs(path, *, task="reward", options=None, stage=0, pairs=11, batch_size=3, **shape):
    """What :func:`evaluate` says of an untrained model, and which pairs this rank had."""
    _, engine = build_pair_engine(path, task, LORA, engine_settings(stage=stage))
    collate = PairCollator(0, shape.get("layout", "shared"))
    with tempfile.TemporaryDirectory() as directory:
        samples = token_set(ragged_pairs(pairs, seed=5), directory)
        rows = make_rows(
            collate.counts(samples).positions,
            max_seq_len=2 * LENGTH,
            packing=shape.get("packing", False),
            seed=SEED,
        )
        batches = list(
            eval_batches(
                samples,
                rows=rows,
                batch_size=batch_size,
                rank=rank(),
                world_size=world_size(),
                collate=collate,
            )
        )
    objective = objective_of(task, options or {}, None, engine, on_the_fly=False)
    result = evaluate(engine, batches, objective)
    release(engine)
    return {
        "loss": result.loss,
        "columns": result.columns,
        "described": objective.describe(result.loss, result.columns),
        "own": [batch.num_samples for batch in batches],
    }
