"""Step 1: supervised fine-tuning of a causal language model, with LoRA or in full.

    deepspeed training/step1_sft/main.py --lora_dim 128 --gradient_accumulation_steps 8

Without --model_name_or_path and --data_path the bundled tiny model and data are used. The loss
is taken on completions and their end-of-sequence token only.
"""

from typing import TYPE_CHECKING

from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.runtime.stage_main import run_main
from dschat_lora.runtime.validation import check_supervised

if TYPE_CHECKING:
    from dschat_lora.runtime.run import Run


def main(config: SupervisedConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora.runtime.run import open_run

    with open_run(config, name="sft", check=check_supervised) as run:
        train_sft(run)  # a function of its own: its engine must not outlive the run


def train_sft(run: "Run[SupervisedConfig]") -> None:
    """Train, evaluate and save; call on every rank."""
    from dschat_lora.models.causal_lm import CausalLMLoss
    from dschat_lora.supervised.batching import make_sample_layout, resolve_head
    from dschat_lora.supervised.objectives import SUPERVISED
    from dschat_lora.supervised.setup import build_engine, set_up
    from dschat_lora.supervised.train import make_answers, train

    setup = set_up(run, phase=1, kind="samples", task="CAUSAL_LM")
    if run.directory is None:
        return  # a dry run
    engine = build_engine(setup, CausalLMLoss(setup.adapted.model))
    resolve_head(engine, len(setup.tokenizer), run)
    layout, answers = make_sample_layout(setup, engine), make_answers(setup, engine)
    train(setup, engine, setup.data, layout, SUPERVISED, answers=answers)


if __name__ == "__main__":
    run_main(SupervisedConfig, check_supervised, main, description=__doc__)
