"""How samples and pairs lie in rows, and whether the model at hand keeps them apart there."""

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dschat_lora.config.groups import is_on
from dschat_lora.config.plurals import counted
from dschat_lora.config.stages import PairConfig, SupervisedConfig
from dschat_lora.data.batch import PairCollator, PairLayout, SampleCollator
from dschat_lora.data.loader import (
    Collator,
    Loader,
    StepLoader,
    Tail,
    sample_sources,
    sources_in_metrics,
)
from dschat_lora.data.packing import (
    PackedRows,
    SampleCounts,
    TokenBudget,
    fill,
    keep_rows,
    make_rows,
)
from dschat_lora.data.samples import Samples
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import context, local_rank_first, rank, world_size
from dschat_lora.lora.collectives import ContextGroup
from dschat_lora.models.architecture_checks import ArchitectureReport, check_architecture
from dschat_lora.models.backbone import Backbone, BackboneModel
from dschat_lora.models.causal_lm import LMHeadModel
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import Flops, step_flops
from dschat_lora.report.texts import operations
from dschat_lora.runtime.checks import cache_directory
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import resolve_logits
from dschat_lora.supervised.setup import SupervisedSetup

# Samples from which on their rows are kept in the cache: to pack more takes seconds.
KEPT_FROM = 100_000


@dataclass(frozen=True)
class BatchLayout:
    """How a run's samples or pairs become batches."""

    collate: Collator
    packing: bool  # rows hold several of them
    # most of a row under --tokens_per_device; None: each of them has a row of its own
    row_tokens: int | None = None


def make_sample_layout(setup: SupervisedSetup, engine: TrainEngine[BackboneModel]) -> BatchLayout:
    """Of samples, after a look at how the user's own model treats them; call on every rank."""
    tokenizer, wanted = setup.tokenizer, setup.config.data.packing
    packing = resolve_packing(engine, wanted, len(tokenizer), setup.run)
    collate = SampleCollator(
        int(tokenizer.pad_token_id),
        context=context_group(setup, engine),
        num_sources=len(sources_in_metrics(setup.config.data, setup.data)),
    )
    return BatchLayout(collate, packing, row_tokens(setup, engine) if packing else None)


def context_group(
    setup: SupervisedSetup, engine: TrainEngine[BackboneModel]
) -> ContextGroup | None:
    """The ranks that divide rows with this one; None where none do.

    Raises:
        ValueError: if the model's layers cannot be told which tokens are a sequence.
    """
    ranks, size = context(), setup.config.parallel.context_parallel_size
    if ranks is None:
        return None
    backbone = engine.module.backbone
    if not backbone.is_divisible:
        raise ValueError(
            f"--context_parallel_size {size} needs a model whose tokens interact only in sdpa "
            f"attention, which {type(backbone.model).__name__} is not"
        )
    return ContextGroup(ranks, rank() % size, size)


def row_share(setup: SupervisedSetup) -> dict[str, int]:
    """Which share of the rows this process reads, and how many shares there are.

    Processes that hold one model between them, or divide rows among them, read the same.
    """
    shares = setup.config.parallel.shares(world_size())
    return {"rank": rank() * shares // world_size(), "world_size": shares}


def make_pair_layout(
    setup: SupervisedSetup, engine: TrainEngine[BackboneModel], pairs: PairConfig
) -> BatchLayout:
    """Of pairs, after the same look; call on every rank."""
    tokenizer = setup.tokenizer
    layout, packing = resolve_pair_layout(
        engine, pairs, packing=setup.config.data.packing, vocab_size=len(tokenizer), run=setup.run
    )
    context = context_group(setup, engine)
    collate = PairCollator(int(tokenizer.pad_token_id), layout, tight=True, context=context)
    # Packing is about what a step counts: pairs share rows without it too.
    most = row_tokens(setup, engine) if layout != "alone" else None
    return BatchLayout(collate, packing, most)


def row_tokens(setup: SupervisedSetup, engine: TrainEngine[BackboneModel]) -> int:
    """Most tokens of a packed row: all of a micro-batch's where attention is by samples.

    Under a mask, attention costs as much as the square of the row.
    """
    budget: int = setup.config.batch.tokens_per_device
    if budget and engine.module.backbone.skips_padding(engine.device):
        return budget
    return setup.config.max_row_tokens


def resolve_head(
    engine: TrainEngine[LMHeadModel], vocab_size: int, run: OpenRun[SupervisedConfig]
) -> None:
    """Take the model's own logits where its head is more than a linear layer. On every rank."""
    engine.eval()
    resolve_logits([engine.module], vocab_size=vocab_size, device=engine.device, run=run)


def resolve_packing(
    engine: TrainEngine[BackboneModel],
    wanted: bool,
    vocab_size: int,
    run: OpenRun[SupervisedConfig],
) -> bool:
    """Whether to pack, after a look at how the user's own model treats a packed row.

    Call on every rank.
    """
    backbone, report = _check_architecture(engine, vocab_size, run)
    if report.packing_is_exact and not backbone.own_mask:
        return wanted
    backbone.own_mask = True
    if wanted:
        run.log.say(
            "  note         packing is off: this architecture mixes the samples of a packed row "
            f"(relative error {report.packing_error:.1g})"
        )
    return False


def resolve_pair_layout(
    engine: TrainEngine[BackboneModel],
    wanted: PairConfig,
    *,
    packing: bool,
    vocab_size: int,
    run: OpenRun[SupervisedConfig],
) -> tuple[PairLayout, bool]:
    """How pairs are laid out and whether rows hold several, after the same look.

    Call on every rank.
    """
    backbone, report = _check_architecture(engine, vocab_size, run)
    if backbone.own_mask or not report.packing_is_exact:
        backbone.own_mask = True
        if packing or wanted.share_prompt:
            run.log.say(
                "  note         each answer gets its own row: this architecture mixes the "
                f"sequences of a row (relative error {report.packing_error:.1g})"
            )
        return "alone", False
    if wanted.share_prompt and report.tree_is_exact:
        return "shared", packing
    if wanted.share_prompt:
        run.log.say(
            "  note         answers do not share their prompt: this architecture mixes them "
            f"(relative error {report.tree_error:.1g})"
        )
    return "separate", packing


def _check_architecture(
    engine: TrainEngine[BackboneModel], vocab_size: int, run: OpenRun[SupervisedConfig]
) -> tuple[Backbone, ArchitectureReport]:
    backbone = engine.module.backbone
    engine.eval()
    report = check_architecture(backbone, vocab_size=vocab_size, device=engine.device)
    run.record.update({"probe": vars(report)})
    return backbone, report


def rows_of(
    setup: SupervisedSetup, lengths: NDArray[np.int64], batch_layout: BatchLayout
) -> PackedRows:
    """Rows of numbers of samples of these lengths, several a row if they are to be packed.

    Call on every rank.
    """
    packing = batch_layout.packing
    size, seed = setup.config.max_row_tokens, setup.config.run.seed

    def make() -> PackedRows:
        return make_rows(lengths, max_seq_len=size, packing=packing, seed=seed)

    return _cached_rows(setup, [size, seed], lengths, make) if packing else make()


def _cached_rows(
    setup: SupervisedSetup,
    options: list[int | None],
    lengths: NDArray[np.int64],
    make: Callable[[], PackedRows],
) -> PackedRows:
    """Rows of samples of these lengths, which one process of a node makes if they are many."""
    if lengths.shape[-1] < KEPT_FROM:
        return make()
    digest = hashlib.blake2b(lengths.tobytes(), digest_size=16).hexdigest()
    cache = cache_directory(setup.config.data)
    return local_rank_first(lambda: keep_rows(cache, [*options, digest], make))


def rows_per_step(setup: SupervisedSetup) -> int:
    """Rows, or micro-batches of a budget of tokens, of an optimizer step on all ranks."""
    batch = setup.config.batch
    rows: int = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
    return rows * row_share(setup)["world_size"]


def token_budget(setup: SupervisedSetup, batch_layout: BatchLayout) -> TokenBudget | None:
    batch = setup.config.batch
    if not batch.tokens_per_device:
        return None
    micro_batches = batch.gradient_accumulation_steps * row_share(setup)["world_size"]
    return TokenBudget(batch.tokens_per_device, micro_batches, batch_layout.row_tokens)


def step_options(setup: SupervisedSetup, batch_layout: BatchLayout) -> dict[str, Any]:
    """How rows become the micro-batches of a step: arguments of a :class:`StepLoader`."""
    batch = setup.config.batch
    return {
        "micro_batch_size": batch.per_device_train_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        **row_share(setup),
        "seed": setup.config.run.seed,
        "collate": batch_layout.collate,
        "budget": token_budget(setup, batch_layout),
    }


def train_loader(setup: SupervisedSetup, samples: Samples, batch_layout: BatchLayout) -> Loader:
    """This rank's micro-batches of every optimizer step, from samples perhaps with more in them."""
    config = setup.config
    if config.data.tail is not None:
        tail: Tail = config.data.tail
        return tail.loader(setup, batch_layout)
    counts = batch_layout.collate.counts(setup.data.train)
    budget = token_budget(setup, batch_layout)
    if budget is not None:
        options = [*dataclasses.astuple(budget), config.run.seed]
        lengths = np.stack([counts.tokens, counts.positions])
        rows = _cached_rows(
            setup, options, lengths, lambda: budget.groups(counts, seed=config.run.seed)
        )
    else:
        rows = rows_of(setup, counts.positions, batch_layout)
    loader = StepLoader(
        samples,
        rows=rows,
        **step_options(setup, batch_layout),
        counts=counts,
        sources=sample_sources(setup.data, [*setup.data.train_sources])
        if config.data.is_mixture
        else None,
    )
    log, capacity = setup.run.log, config.max_row_tokens
    units = counted(loader.rows_per_step, "row")
    if budget is not None:
        full = budget.fill(rows, counts)
        units = f"{loader.rows_per_step} x {budget.tokens:,} tokens, {full:.1%} full"
    elif batch_layout.packing:
        share = fill(rows, counts.tokens, capacity)
        log.say(
            f"  packing      {counted(len(rows), 'row')} of {capacity} tokens, {share:.1%} full"
        )
    steps = loader.steps_per_epoch
    flops = epoch_flops(setup, counts).model / max(1, steps)
    log.say(
        f"  steps        {steps:,} an epoch, of up to {units}: about "
        f"{counted(round(len(counts.tokens) / max(1, steps)), 'sample')}, "
        f"{counted(round(counts.tokens.sum() / max(1, steps)), 'token')}"
        f"{f' and {operations(flops)}' if flops else ''} each"
    )
    return loader


def epoch_flops(setup: SupervisedSetup, counts: SampleCounts) -> Flops:
    """FLOPs of an epoch on all devices; 0 of an architecture that is not understood."""
    try:
        shape = describe_shape(setup.adapted.model)
    except ValueError:  # the start-up said why
        return Flops()
    return step_flops(
        shape,
        num_tokens=float(counts.tokens.sum()),
        num_attended=float(counts.attended.sum()),
        num_targets=float(counts.targets.sum()),
        gradient_checkpointing=is_on(setup.config.model.gradient_checkpointing),
    )
