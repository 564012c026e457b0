"""Direct preference optimisation: a policy from pairs of answers, without a reward model.

    deepspeed training/step2_dpo/main.py --model_name_or_path output/sft --lora_dim 16

The reference, where the loss has one, is the model as it is before training. Rows have a prompt, a
chosen and a rejected answer; for --loss_type kto also a prompt, a completion and a label. Without
--model_name_or_path and --data_path the bundled tiny model and data are used.
"""

from functools import partial
from typing import TYPE_CHECKING

from dschat_lora.config.stages import DpoStageConfig
from dschat_lora.runtime.stage_main import run_main
from dschat_lora.runtime.validation import DPO, check_supervised

if TYPE_CHECKING:
    from dschat_lora.data.rows import DataKind
    from dschat_lora.runtime.run import Run

check = partial(check_supervised, rules=DPO)


def main(config: DpoStageConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora.runtime.run import open_run

    with open_run(config, name="dpo", check=check) as run:
        train_dpo(run)  # a function of its own: its engine must not outlive the run


def train_dpo(run: "Run[DpoStageConfig]") -> None:
    """Train, evaluate and save; call on every rank."""
    from dschat_lora.models.causal_lm import CausalLMLogprobs
    from dschat_lora.supervised.batching import (
        make_pair_layout,
        make_unpaired_layout,
        resolve_head,
    )
    from dschat_lora.supervised.dpo_reference import make_reference
    from dschat_lora.supervised.kto import say_balance
    from dschat_lora.supervised.setup import build_engine, note_unused_margins, set_up
    from dschat_lora.supervised.train import make_answers, train

    dpo = run.config.dpo
    kind: DataKind = "unpaired" if dpo.is_unpaired else "pairs"
    setup = set_up(run, phase=2, kind=kind, task="CAUSAL_LM")
    if run.directory is None:
        return  # a dry run
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


if __name__ == "__main__":
    run_main(DpoStageConfig, check, main, description=__doc__)
