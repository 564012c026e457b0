"""Programs of step 2 and of DPO, from a checked config to the saved result or its plan."""

from functools import partial
from pathlib import Path

from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig
from dschat_lora.data.rows import DataKind
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.run import OpenRun, open_run
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised
from dschat_lora.supervised.batching import make_pair_layout, resolve_head
from dschat_lora.supervised.dpo_reference import make_reference
from dschat_lora.supervised.objectives import answer_loss
from dschat_lora.supervised.pair_objectives import reward_objective
from dschat_lora.supervised.setup import build_engine, note_unused_margins, set_up
from dschat_lora.supervised.train import make_answers, train


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


def train_reward(run: OpenRun[RewardStageConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    setup = set_up(run, phase=2, kind="pairs", task="SEQ_CLS")
    if run.directory is None:
        from dschat_lora.supervised.dry_run import show_plan

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
    loss = answer_loss(dpo)
    kind: DataKind = "pairs" if loss is None else "unpaired"
    setup = set_up(run, phase=2, kind=kind, task="CAUSAL_LM")
    if run.directory is None:
        from dschat_lora.supervised.dry_run import show_plan

        pairs = run.config.pairs if loss is None else None
        show_plan(setup, kind, pairs, None if loss is None else loss.collator)
        return
    if loss is None:
        note_unused_margins(setup)
    else:
        loss.begin(setup)
    engine = build_engine(setup, CausalLMLogprobs(setup.adapted.model))
    resolve_head(engine, len(setup.tokenizer), run)
    if loss is None:
        layout = make_pair_layout(setup, engine, run.config.pairs)
    else:
        layout = loss.make_layout(setup, engine)
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
