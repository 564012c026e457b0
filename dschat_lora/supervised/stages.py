"""Programs of steps 1 and 2 and of DPO, from a checked config to the saved result or its plan."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from dschat_lora.config.addons import load, provided
from dschat_lora.config.stages import (
    DpoStageConfig,
    PairConfig,
    RewardStageConfig,
    SupervisedConfig,
)
from dschat_lora.data.batch import PairCollator, PairLayout, SampleCollator
from dschat_lora.data.loader import Collator
from dschat_lora.models.build import check_balancing
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.source import find_model
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.run import open_run
from dschat_lora.supervised.batching import make_pair_layout, make_sample_layout, resolve_head
from dschat_lora.supervised.dpo_reference import make_reference
from dschat_lora.supervised.objectives import SUPERVISED, AnswerLoss
from dschat_lora.supervised.pair_objectives import (
    answer_logprobs,
    dpo_objective,
    reward_objective,
)
from dschat_lora.supervised.setup import SupervisedSetup, build_engine, note_unused_margins, set_up
from dschat_lora.supervised.train import make_answers, train
from dschat_lora.supervised.validation import check_supervised

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


def run_sft(config: SupervisedConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 1, supervised fine-tuning; gives its directory, None for a dry run."""
    return run_stage(config, caller, train_sft, lambda _: SampleCollator, first=check_loss)


def run_reward(config: RewardStageConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 2, a reward model from pairs of answers; as :func:`run_sft`."""
    return run_stage(config, caller, train_reward, lambda own: planned_collator(own.pairs))


def run_dpo(config: DpoStageConfig, caller: Caller = NOBODY) -> Path | None:
    """Direct preference optimisation, and the losses related to it; as :func:`run_sft`."""
    return run_stage(config, caller, train_dpo, lambda own: loss_of_type(own).collator)


def run_stage(
    config: ConfigT,
    caller: Caller,
    train: Callable[[SupervisedSetup, ConfigT], None],
    collator: Callable[[ConfigT], Callable[[int], Collator]],
    first: Callable[[ConfigT], None] = lambda _: None,
) -> Path | None:
    """Set up and ``train``, or show the plan of a dry run; gives the directory.

    ``collator`` gives what makes batches of a padding token's id, as far as options tell. ``first``
    refuses what needs torch to be known, before anything takes long.
    """
    with open_run(config, check=check_supervised, caller=caller) as run:
        first(run.config)
        setup = set_up(run)
        if run.directory is None:
            from dschat_lora.supervised.dry_run import show_plan

            show_plan(setup, collator(run.config))
        else:
            train(setup, run.config)  # a function of its own: its engine must not outlive the run
    return run.directory


def check_loss(config: SupervisedConfig) -> None:
    """Refuse a loss that the model does not have."""
    check_balancing(find_model(config.model.model_name_or_path), config.model)


def train_sft(setup: SupervisedSetup, config: SupervisedConfig) -> None:
    """Train, evaluate and save; call on every rank."""
    network = CausalLMLoss(
        setup.adapted.model,
        router_aux_loss_coef=config.model.router_aux_loss_coef,
        neftune_noise_alpha=config.model.neftune_noise_alpha,
    )
    engine = build_engine(setup, network)
    resolve_head(engine, len(setup.tokenizer), setup.run)
    layout, answers = make_sample_layout(setup, engine), make_answers(setup, engine)
    train(setup, engine, setup.data, layout, SUPERVISED, answers=answers)


def train_reward(setup: SupervisedSetup, config: RewardStageConfig) -> None:
    """Train, evaluate and save; call on every rank."""
    if config.reward.reward_loss != "bradley_terry":
        note_unused_margins(setup)
    engine = build_engine(setup, RewardModel(setup.adapted.model))
    layout = make_pair_layout(setup, engine, config.pairs)
    train(setup, engine, setup.data, layout, reward_objective(config.reward))


def loss_of_type(config: DpoStageConfig) -> AnswerLoss:
    """What ``--loss_type`` names, of pairs or of an add-on."""
    if config.dpo.is_unpaired:
        loss: AnswerLoss = load(provided("answer_loss")[config.dpo.loss_type])
        return loss
    return AnswerLoss(
        collator=planned_collator(config.pairs),
        make_layout=partial(make_pair_layout, pairs=config.pairs),
        make_objective=lambda _, reference: dpo_objective(config.dpo, reference),
        logprobs=answer_logprobs,
        begin=note_unused_margins,
        unit="pairs",
        passes=0,
    )


def planned_collator(pairs: PairConfig) -> Callable[[int], PairCollator]:
    """What makes batches of pairs, of a padding token's id, as far as options tell."""
    layout: PairLayout = "shared" if pairs.share_prompt else "separate"
    return partial(PairCollator, layout=layout, tight=True)


def train_dpo(setup: SupervisedSetup, config: DpoStageConfig) -> None:
    """Train, evaluate and save; call on every rank."""
    loss = loss_of_type(config)
    loss.begin(setup)
    engine = build_engine(setup, CausalLMLogprobs(setup.adapted.model))
    resolve_head(engine, len(setup.tokenizer), setup.run)
    layout = loss.make_layout(setup, engine)
    reference = make_reference(setup, engine, layout, config.dpo, loss)
    train(
        setup,
        engine,
        reference,
        layout,
        reference.objective,
        answers=make_answers(setup, engine),
        extra_flops=reference.extra_flops,
    )
