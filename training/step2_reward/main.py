"""Step 2: a reward model that scores an answer at its last token, from pairs of answers.

    deepspeed training/step2_reward/main.py --model_name_or_path output/sft --lora_dim 16

Rows have a prompt, a chosen and a rejected answer, perhaps with a margin. Without
--model_name_or_path and --data_path the bundled tiny model and data are used.
"""

from dschat_lora.commands.train import run_stage

if __name__ == "__main__":
    run_stage("reward", description=__doc__)
