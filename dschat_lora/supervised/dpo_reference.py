"""DPO's reference: the policy as it was before training, as numbers or looked through again."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dschat_lora.config.stages import DpoConfig
from dschat_lora.data.batch import PairBatch
from dschat_lora.data.cache import load_or_build, read_content
from dschat_lora.data.loader import Collator, assign_to_ranks, eval_batches
from dschat_lora.data.packing import PackedRow
from dschat_lora.data.samples import PairSample, Samples, TokenSet
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import broadcast_, on_rank_zero, rank, sum_tensor_
from dschat_lora.engine.zero import Snapshot
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.fingerprint import config_fingerprint
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import Flops, StepCounts, forward_flops
from dschat_lora.runtime.checks import cache_directory
from dschat_lora.supervised.batching import BatchLayout, row_share, rows_of
from dschat_lora.supervised.objectives import AnswerLoss, Network, Objective
from dschat_lora.supervised.pair_objectives import answer_logprobs, dpo_objective
from dschat_lora.supervised.setup import SupervisedSetup

_FILE = "logprobs.npy"


class WithReference:
    """Pairs with the reference's log-probabilities of their answers."""

    def __init__(self, pairs: TokenSet, logprobs: NDArray[np.float32]) -> None:
        self._pairs, self._logprobs = pairs, logprobs

    def __getitem__(self, index: int) -> PairSample:
        chosen, rejected = self._logprobs[index].tolist()
        return replace(self._pairs[index], reference=(chosen, rejected))


@torch.no_grad()
def reference_logprobs(
    engine: TrainEngine[BackboneModel],
    pairs: TokenSet,
    *,
    rows: Sequence[PackedRow],
    collate: Collator,
    batch_size: int,
    share: Mapping[str, int],
    cache: Path,
    identity: object,
    say: Callable[[str], None] = lambda line: None,
    unit: str = "pairs",
    logprobs: Callable[[Network, Any], Tensor] = answer_logprobs,
) -> NDArray[np.float32]:
    """(len(pairs), 2) log-probabilities in nats of chosen and rejected answers, from the cache.

    What is not there is computed with ``engine``, over a ``CausalLMLogprobs``, as it is: so before
    anything is trained or restored. ``rows`` are of pair numbers, each of which is in one row;
    ``share`` is :func:`~dschat_lora.supervised.batching.row_share`'s. ``identity`` is what the
    results depend on, JSON-ready; complete on rank 0. ``unit`` is what messages call a sample,
    and ``logprobs`` gives those of both answers of a batch. Call on every rank.
    """
    text = json.dumps([identity, pairs.digest], sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    directory = cache / f"reference-{key}"
    known = on_rank_zero(lambda: _read(directory, len(pairs)))
    if rank() == 0 and known is not None:
        say(f"  reference    log-probabilities of {len(pairs):,} {unit} read from {directory}")
    elif rank() == 0:
        say(f"  reference    log-probabilities of {len(pairs):,} {unit} are computed ...")
    if not broadcast_(torch.tensor(float(known is not None), device=engine.device)):
        engine.eval()
        shares, sums = share["world_size"], torch.zeros(len(pairs), 2, device=engine.device)
        numbered = assign_to_ranks(rows, batch_size=batch_size, world_size=shares)
        batches = eval_batches(pairs, rows=rows, batch_size=batch_size, collate=collate, **share)
        for own_rows, batch in zip(numbered[share["rank"] :: shares], batches, strict=True):
            of_batch = logprobs(engine, batch.to(engine.device))
            if batch.num_samples:
                sums[[n for row in own_rows for n in row]] = torch.stack(of_batch.chunk(2), dim=1)
        # Each pair was counted on one rank, so the sum is a collection.
        known = sum_tensor_(sums).cpu().numpy()
        if broken := int((~np.isfinite(known)).any(1).sum()):
            raise ValueError(
                f"the reference's log-probabilities of {broken:,} of {len(pairs):,} {unit} are "
                "not finite; try --dtype bf16 or fp32"
            )
        on_rank_zero(lambda: load_or_build(directory, lambda path: _write(path, known)))
    values = torch.zeros(len(pairs), 2, device=engine.device)
    if rank() == 0:
        values.copy_(torch.from_numpy(known))
    shared: NDArray[np.float32] = broadcast_(values).cpu().numpy()
    return shared


def _read(directory: Path, size: int) -> NDArray[np.float32] | None:
    """What :func:`_write` wrote; None where nothing sound is there."""
    if read_content(directory) is None:
        return None
    values: NDArray[np.float32] = np.load(directory / _FILE)
    return values if values.shape == (size, 2) else None


def _write(directory: Path, values: NDArray[np.float32] | None) -> dict[str, Any]:
    assert values is not None
    np.save(directory / _FILE, values)
    return {"pairs": len(values)}


@torch.no_grad()
def logprobs_at(snapshot: Snapshot, engine: TrainEngine[BackboneModel], batch: PairBatch) -> Tensor:
    """Log-probabilities of a batch's answers as they were then, (2 P,) of pairs; on every rank.

    Dropout is off, whatever the engine's mode.
    """
    was_training = engine.module.training
    engine.eval()
    with snapshot.in_place():
        values = answer_logprobs(engine, batch)
    if was_training:
        engine.train()
    return values


@dataclass(frozen=True)
class ReferencedData:
    """DPO's objective and the data it is taken on, which may bring the reference's values."""

    objective: Objective
    train: Samples
    eval: Samples
    extra_flops: Callable[[StepCounts], Flops] | None = None


def make_reference(
    setup: SupervisedSetup,
    engine: TrainEngine[BackboneModel],
    batch_layout: BatchLayout,
    dpo: DpoConfig,
    loss: AnswerLoss,
) -> ReferencedData:
    """The model as it is, before anything is trained or restored; call on every rank.

    A loss without a reference gets its objective alone.
    """
    data, config = setup.data, setup.config
    if not dpo.has_reference:
        return ReferencedData(dpo_objective(dpo), data.train, data.eval)
    if not dpo.precompute_ref_log_probs:
        trained = [p for p in setup.adapted.model.parameters() if p.requires_grad]
        return ReferencedData(
            loss.make_objective(config, partial(logprobs_at, Snapshot(trained), engine)),
            data.train,
            data.eval,
            partial(_forward_flops, engine, passes=1 + 2 * loss.passes),
        )
    known = partial(
        reference_logprobs,
        engine,
        collate=batch_layout.collate,
        batch_size=config.batch.per_device_eval_batch_size,
        share=row_share(setup),
        cache=cache_directory(config.data),
        say=setup.run.log.say,
        unit=loss.unit,
        logprobs=loss.logprobs,
        identity=[
            *(setup.identity.get(name) for name in ("model", "start", "adapter", "dtype")),
            config_fingerprint(setup.adapted.model.config),
        ],
    )
    # Training pairs are not looked at by a run that only evaluates.
    sets = (data.train, data.eval) if config.optim.num_train_epochs else (data.eval,)
    positions = batch_layout.collate.positions
    *trained, held_out = (
        WithReference(pairs, known(pairs, rows=rows_of(setup, positions(pairs), batch_layout)))
        for pairs in sets
    )
    train = trained[0] if trained else data.train
    extra = partial(_forward_flops, engine, passes=loss.passes) if loss.passes else None
    objective = loss.make_objective(config, lambda batch: batch.reference)
    return ReferencedData(objective, train, held_out, extra)


def _forward_flops(engine: TrainEngine[BackboneModel], counts: StepCounts, *, passes: int) -> Flops:
    """FLOPs of so many more forward passes; none where the architecture is not understood.

    Mismatched answers are taken to be as long as a step's own: over all steps they are.
    """
    network = engine.module
    try:
        shape = describe_shape(network.model)
    except ValueError:
        return Flops()
    dense = not network.backbone.skips_padding(engine.device)
    once = forward_flops(
        shape,
        num_tokens=counts.num_tokens,
        num_attended=counts.num_attended,
        num_targets=counts.num_targets,
        num_positions=counts.num_positions if dense else None,
        num_scored_pairs=counts.num_scored_pairs if dense else None,
    )
    return sum([once] * passes, Flops())
