"""Step 2: a reward model that scores an answer at its last token, from pairs of answers.

    deepspeed training/step2_reward/main.py --model_name_or_path output/sft --lora_dim 16

Rows have a prompt, a chosen and a rejected answer, perhaps with a margin. Without
--model_name_or_path and --data_path the bundled tiny model and data are used.
"""

from functools import partial
from typing import TYPE_CHECKING

from dschat_lora.config.stages import RewardStageConfig
from dschat_lora.runtime.stage_main import run_main
from dschat_lora.runtime.validation import REWARD, check_supervised

if TYPE_CHECKING:
    from dschat_lora.runtime.run import Run

check = partial(check_supervised, rules=REWARD)


def main(config: RewardStageConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora.runtime.run import open_run

    with open_run(config, name="reward", check=check) as run:
        train_reward(run)  # a function of its own: its engine must not outlive the run


def train_reward(run: "Run[RewardStageConfig]") -> None:
    """Train, evaluate and save; call on every rank."""
    from dschat_lora.models.reward_model import RewardModel
    from dschat_lora.supervised.batching import make_pair_layout
    from dschat_lora.supervised.objectives import reward_objective
    from dschat_lora.supervised.setup import build_engine, note_unused_margins, set_up
    from dschat_lora.supervised.train import train

    setup = set_up(run, phase=2, kind="pairs", task="SEQ_CLS")
    if run.directory is None:
        return  # a dry run
    if run.config.reward.reward_loss != "bradley_terry":
        note_unused_margins(setup)
    engine = build_engine(setup, RewardModel(setup.adapted.model))
    layout = make_pair_layout(setup, engine, run.config.pairs)
    train(setup, engine, setup.data, layout, reward_objective(run.config.reward))


if __name__ == "__main__":
    run_main(RewardStageConfig, check, main, description=__doc__)
