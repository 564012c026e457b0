"""Training GPT-2 to put data into words: the common loop, with a smoothed loss and LoRA files."""

from dataclasses import replace
from pathlib import Path

import torch

from dschat_lora.addons.loralib.lora_only import write_lora_only
from dschat_lora.addons.nlg.config import NlgConfig
from dschat_lora.addons.nlg.gpt2_checkpoint import gpt2_with_weights, read_gpt2_checkpoint
from dschat_lora.addons.nlg.validation import (
    check_training,
    in_optimizer_steps,
    schedule,
    weights_file,
)
from dschat_lora.checkpoint.tensors import writing
from dschat_lora.config.staging import staged_directory
from dschat_lora.engine.distributed import on_rank_zero
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.runtime.run import OpenRun, open_run
from dschat_lora.supervised.batching import make_sample_layout, resolve_head
from dschat_lora.supervised.dry_run import show_plan
from dschat_lora.supervised.objectives import SUPERVISED
from dschat_lora.supervised.setup import SupervisedSetup, build_engine, set_up
from dschat_lora.supervised.train import make_answers, train


def run_training(config: NlgConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    with open_run(config, check=check_training) as run:
        _train(run)  # a function of its own: its engine must not outlive the run


def _train(run: OpenRun[NlgConfig]) -> None:
    run = with_weights(run)
    setup = set_up(run)
    optim = in_optimizer_steps(run.config).optim
    setup = replace(setup, config=replace(setup.config, optim=optim))
    directory = run.directory
    if directory is None:
        show_plan(setup)
        return
    factors = directory / "lora"
    network = CausalLMLoss(
        setup.adapted.model,
        label_smoothing=run.config.label_smoothing,
        neftune_noise_alpha=run.config.model.neftune_noise_alpha,
    )
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
        on_checkpoint=lambda step: save_factors(setup, factors / f"step-{step:08d}.safetensors"),
        on_epoch=(
            (lambda epoch: save_factors(setup, factors / f"epoch-{epoch}.safetensors"))
            if run.config.save_epochs
            else None
        ),
    )


def with_weights(run: OpenRun[NlgConfig]) -> OpenRun[NlgConfig]:
    """The run with a base of the weights of ``--init_checkpoint``; call on every rank.

    Where that is a file, the base is written to ``base/`` of the output directory, where the
    adapter finds it later.

    Raises:
        ValueError: if the file holds LoRA factors, or does not fit the base.
    """
    config = run.config
    weights = weights_file(config.init_checkpoint)
    if weights is None or run.directory is None:
        return run
    base = run.directory / "base"
    on_rank_zero(lambda: _write_base(config, weights, base))
    return replace(
        run, config=replace(config, model=replace(config.model, model_name_or_path=str(base)))
    )


def _write_base(config: NlgConfig, weights: Path, directory: Path) -> None:
    name = find_model(config.model.model_name_or_path).base
    checkpoint = read_gpt2_checkpoint(weights)
    if checkpoint.factors is not None:
        raise ValueError(
            f"--init_checkpoint {weights} contains LoRA weights, but training starts from a base "
            "without any: merge them first, or decode with them"
        )
    model = gpt2_with_weights(name, config.model, checkpoint, dtype=torch.float32)
    with staged_directory(directory) as staging, writing(directory):
        model.save_pretrained(staging)
        load_tokenizer(name, config.model).save_pretrained(staging)


def save_factors(setup: SupervisedSetup, path: Path) -> None:
    """Write the trained LoRA tensors alone, in loralib's layout; call on every rank."""
    adapted = setup.adapted
    if adapted.lora.lora_dim == 0:
        return
    tensors = gather_to_cpu(adapter_parameters(adapted.model))
    on_rank_zero(lambda: write_lora_only(path, tensors, adapted.lora, base=setup.source.base))
