"""Step 3: PPO (or RLOO, GRPO) of an actor on its own responses, all roles on one frozen base.

    deepspeed training/step3_rlhf/main.py --actor_model_name_or_path output/sft \
        --critic_model_name_or_path output/reward

The reference is the actor as it is before training. Rows bring prompts; answers in them are not
read. With no model and no data named, the bundled ones are used and the bundled world judges.
"""

from typing import TYPE_CHECKING

from dschat_lora.rlhf.config import RlhfConfig
from dschat_lora.rlhf.validation import NAME, check_rlhf
from dschat_lora.runtime.stage_main import run_main

if TYPE_CHECKING:
    from dschat_lora.runtime.run import Run


def main(config: RlhfConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora.runtime.run import open_run

    with open_run(config, name=NAME, check=check_rlhf) as run:
        train_rlhf(run)  # a function of its own: its engine must not outlive the run


def train_rlhf(run: "Run[RlhfConfig]") -> None:
    """Train, evaluate and save; call on every rank."""
    from dschat_lora.rlhf.engines import build_engines
    from dschat_lora.rlhf.export import finish
    from dschat_lora.rlhf.setup import set_up
    from dschat_lora.rlhf.train import train

    setup = set_up(run)
    if run.directory is None:
        return  # a dry run
    engines = build_engines(setup)
    result = train(setup, engines)
    finish(setup, engines, result)


if __name__ == "__main__":
    run_main(RlhfConfig, check_rlhf, main, description=__doc__)
