"""Programs of steps 1 and 2 and of DPO, from a checked config to the saved result or its plan."""

from functools import partial
from pathlib import Path

from dschat_lora.config.groups import is_on
from dschat_lora.config.stages import (
    DpoStageConfig,
    PairConfig,
    RewardStageConfig,
    SupervisedConfig,
)
from dschat_lora.data.batch import PairCollator, PairLayout, SampleCollator
from dschat_lora.data.loader import Collator, SampleCounts, StepLoader
from dschat_lora.data.rows import DataKind
from dschat_lora.data.unpaired_batch import UnpairedCollator
from dschat_lora.engine.distributed import data_world_size, device
from dschat_lora.models.build import check_balancing
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.source import find_model
from dschat_lora.perf.shape import describe as describe_shape
from dschat_lora.perf.throughput import step_flops
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.dry_run import say_options, say_sample, say_time
from dschat_lora.runtime.loop import check_repeats
from dschat_lora.runtime.run import OpenRun, open_run
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised
from dschat_lora.supervised.batching import (
    BatchLayout,
    make_pair_layout,
    make_sample_layout,
    make_unpaired_layout,
    resolve_head,
    train_loader,
)
from dschat_lora.supervised.dpo_reference import make_reference
from dschat_lora.supervised.kto import say_balance
from dschat_lora.supervised.loop import make_train_schedule
from dschat_lora.supervised.objectives import SUPERVISED, reward_objective
from dschat_lora.supervised.setup import SupervisedSetup, build_engine, note_unused_margins, set_up
from dschat_lora.supervised.train import make_answers, size_warnings, train


def run_sft(config: SupervisedConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 1, supervised fine-tuning; gives its directory, None for a dry run."""
    with open_run(config, name="sft", check=check_supervised, caller=caller) as run:
        train_sft(run)  # a function of its own: its engine must not outlive the run
    return run.directory


def run_reward(config: RewardStageConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 2, a reward model from pairs of answers; as :func:`run_sft`."""
    check = partial(check_supervised, rules=REWARD)
    with open_run(config, name="reward", check=check, caller=caller) as run:
        train_reward(run)
    return run.directory


def run_dpo(config: DpoStageConfig, caller: Caller = NOBODY) -> Path | None:
    """Direct preference optimisation, and the losses related to it; as :func:`run_sft`."""
    check = partial(check_supervised, rules=DPO)
    with open_run(config, name="dpo", check=check, caller=caller) as run:
        train_dpo(run)
    return run.directory


def train_sft(run: OpenRun[SupervisedConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    check_balancing(find_model(run.config.model.model_name_or_path), run.config.model)
    setup = set_up(run, phase=1, kind="samples", task="CAUSAL_LM")
    if run.directory is None:
        show_plan(setup, "samples")
        return
    network = CausalLMLoss(
        setup.adapted.model,
        router_aux_loss_coef=run.config.model.router_aux_loss_coef,
        neftune_noise_alpha=run.config.model.neftune_noise_alpha,
    )
    engine = build_engine(setup, network)
    resolve_head(engine, len(setup.tokenizer), run)
    layout, answers = make_sample_layout(setup, engine), make_answers(setup, engine)
    train(setup, engine, setup.data, layout, SUPERVISED, answers=answers)


def train_reward(run: OpenRun[RewardStageConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    setup = set_up(run, phase=2, kind="pairs", task="SEQ_CLS")
    if run.directory is None:
        show_plan(setup, "pairs", run.config.pairs)
        return
    if run.config.reward.reward_loss != "bradley_terry":
        note_unused_margins(setup)
    engine = build_engine(setup, RewardModel(setup.adapted.model))
    layout = make_pair_layout(setup, engine, run.config.pairs)
    train(setup, engine, setup.data, layout, reward_objective(run.config.reward))


def train_dpo(run: OpenRun[DpoStageConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    dpo = run.config.dpo
    kind: DataKind = "unpaired" if dpo.is_unpaired else "pairs"
    setup = set_up(run, phase=2, kind=kind, task="CAUSAL_LM")
    if run.directory is None:
        show_plan(setup, kind, None if dpo.is_unpaired else run.config.pairs)
        return
    if dpo.is_unpaired:
        say_balance(setup, dpo)
    else:
        note_unused_margins(setup)
    engine = build_engine(setup, CausalLMLogprobs(setup.adapted.model))
    resolve_head(engine, len(setup.tokenizer), run)
    if dpo.is_unpaired:
        layout = make_unpaired_layout(setup, engine)
    else:
        layout = make_pair_layout(setup, engine, run.config.pairs)
    reference = make_reference(setup, engine, layout, dpo)
    train(
        setup,
        engine,
        reference,
        layout,
        reference.objective,
        answers=make_answers(setup, engine),
        extra_flops=reference.extra_flops,
    )


def show_plan(setup: SupervisedSetup, kind: DataKind, pairs: PairConfig | None = None) -> None:
    """Say what the run would do; call on every rank.

    The model is taken to keep the sequences of a row apart: a run looks at its weights.
    """
    config, run = setup.config, setup.run
    if config.data.streaming:
        run.log.say(f"  steps        {config.optim.max_steps:,}, of rows that are streamed")
        say_sample(run, config.data, setup.tokenizer, kind)
        say_options(run)
        return
    loader = train_loader(setup, setup.data.train, _planned_layout(setup, kind, pairs))
    assert isinstance(loader, StepLoader), "it was said what is streamed"
    schedule = make_train_schedule(config.optim, config.run, loader.steps_per_epoch)
    check_repeats(config.data, setup.data.times, schedule)
    for warning in size_warnings(setup, loader, schedule):
        run.log.say(f"  warning      {warning}")
    passes = schedule.num_steps / max(1, loader.steps_per_epoch)
    flops = passes * _epoch_flops(setup, loader.counts) / data_world_size()
    if flops:
        dtype = setup.settings.torch_dtype
        say_time(run, steps=schedule.num_steps, flops=flops, device=device(), dtype=dtype)
    else:
        run.log.say("  time         unknown, or nothing is trained")
    say_sample(run, config.data, setup.tokenizer, kind)
    say_options(run)


def _planned_layout(
    setup: SupervisedSetup, kind: DataKind, pairs: PairConfig | None
) -> BatchLayout:
    pad_id, packing = int(setup.tokenizer.pad_token_id), setup.config.data.packing
    collate: Collator = SampleCollator(pad_id)
    if pairs is not None:
        layout: PairLayout = "shared" if pairs.share_prompt else "separate"
        collate = PairCollator(pad_id, layout, tight=True)
    elif kind == "unpaired":
        collate = UnpairedCollator(pad_id)
    fills_rows = packing or pairs is not None
    return BatchLayout(collate, packing, setup.config.max_row_tokens if fills_rows else None)


def _epoch_flops(setup: SupervisedSetup, counts: SampleCounts) -> float:
    """Operations of all devices in an epoch; 0 where the architecture is not understood."""
    try:
        shape = describe_shape(setup.adapted.model)
    except ValueError:
        return 0.0
    return step_flops(
        shape,
        num_tokens=float(counts.tokens.sum()),
        num_attended=float(counts.attended.sum()),
        num_targets=float(counts.targets.sum()),
        gradient_checkpointing=is_on(setup.config.model.gradient_checkpointing),
    ).hardware
