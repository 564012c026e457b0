"""The program of step 1, from a checked config to the saved result or its plan."""

from pathlib import Path

from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.models.build import check_balancing
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.models.source import find_model
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.run import OpenRun, open_run
from dschat_lora.runtime.validation import check_supervised
from dschat_lora.supervised.batching import make_sample_layout, resolve_head
from dschat_lora.supervised.objectives import SUPERVISED
from dschat_lora.supervised.setup import build_engine, set_up
from dschat_lora.supervised.train import make_answers, train


def run_sft(config: SupervisedConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 1, supervised fine-tuning; gives its directory, None for a dry run."""
    with open_run(config, name="sft", check=check_supervised, caller=caller) as run:
        train_sft(run)  # a function of its own: its engine must not outlive the run
    return run.directory


def train_sft(run: OpenRun[SupervisedConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    check_balancing(find_model(run.config.model.model_name_or_path), run.config.model)
    setup = set_up(run, phase=1, kind="samples", task="CAUSAL_LM")
    if run.directory is None:
        from dschat_lora.supervised.dry_run import show_plan

        show_plan(setup)
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
