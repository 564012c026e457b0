"""The programs of steps 1 and 2 and of DPO, each from a checked config to the saved result."""

from functools import partial
from pathlib import Path

from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.data.rows import DataKind
from dschat_lora.models.build import check_balancing
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.source import find_model
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.run import OpenRun, open_run
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised
from dschat_lora.supervised.batching import (
    make_pair_layout,
    make_sample_layout,
    make_unpaired_layout,
    resolve_head,
)
from dschat_lora.supervised.dpo_reference import make_reference
from dschat_lora.supervised.kto import say_balance
from dschat_lora.supervised.objectives import SUPERVISED, reward_objective
from dschat_lora.supervised.plan import show_plan
from dschat_lora.supervised.setup import build_engine, note_unused_margins, set_up
from dschat_lora.supervised.train import make_answers, train


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
    coefficient = run.config.model.router_aux_loss_coef
    network = CausalLMLoss(setup.adapted.model, router_aux_loss_coef=coefficient)
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
