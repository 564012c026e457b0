"""Training GPT-2 to put data into words: the common loop, with a smoothed loss and LoRA files."""

from dataclasses import replace
from pathlib import Path

from dschat_lora.checkpoint.lora_only import write_lora_only
from dschat_lora.engine.collectives import on_rank_zero
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.experiments.nlg.config import NlgConfig
from dschat_lora.experiments.nlg.validation import check_training, in_optimizer_steps, schedule
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.runtime.run import Run, open_run
from dschat_lora.supervised.batching import make_sample_layout, resolve_head
from dschat_lora.supervised.objectives import SUPERVISED
from dschat_lora.supervised.plan import show_plan
from dschat_lora.supervised.setup import SupervisedSetup, build_engine, set_up
from dschat_lora.supervised.train import make_answers, train


def run_training(config: NlgConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    with open_run(config, name="nlg", check=check_training) as run:
        _train(run)  # a function of its own: its engine must not outlive the run


def _train(run: Run[NlgConfig]) -> None:
    setup = set_up(run, phase=1, kind="samples", task="CAUSAL_LM")
    optim = in_optimizer_steps(run.config).optim
    setup = replace(setup, config=replace(setup.config, optim=optim))
    directory = run.directory
    if directory is None:
        show_plan(setup, "samples")
        return
    network = CausalLMLoss(setup.adapted.model, label_smoothing=run.config.label_smoothing)
    engine = build_engine(setup, network)
    resolve_head(engine, len(setup.tokenizer), run)
    train(
        setup,
        engine,
        setup.data,
        make_sample_layout(setup, engine),
        SUPERVISED,
        answers=make_answers(setup, engine),
        lr_schedule=schedule(run.config),
        on_checkpoint=lambda step: save_factors(setup, directory / "lora", step),
    )


def save_factors(setup: SupervisedSetup, directory: Path, step: int) -> None:
    """Write the trained LoRA tensors alone, in loralib's layout; call on every rank."""
    adapted = setup.adapted
    if adapted.lora.lora_dim == 0:
        return
    tensors = gather_to_cpu(adapter_parameters(adapted.model))
    path = directory / f"step-{step:08d}.safetensors"
    on_rank_zero(lambda: write_lora_only(path, tensors, adapted.lora, base=setup.source.base))
