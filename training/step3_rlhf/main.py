r"""Step 3: PPO (or RLOO, GRPO) of an actor on its own responses, all roles on one frozen base.

    deepspeed training/step3_rlhf/main.py --actor_model_name_or_path output/sft \
        --critic_model_name_or_path output/reward

The reference is the actor as it is before training. Rows bring prompts; answers in them are not
read. With no model and no data named, the bundled ones are used and the bundled world judges.
"""

from dschat_lora.commands.train import run_stage

if __name__ == "__main__":
    run_stage("rlhf", description=__doc__)
