"""Direct preference optimisation: a policy from pairs of answers, without a reward model.

    deepspeed training/step2_dpo/main.py --model_name_or_path output/sft --lora_dim 16

The reference, where the loss has one, is the model as it is before training. Rows have a prompt, a
chosen and a rejected answer; for --loss_type kto also a prompt, a completion and a label. Without
--model_name_or_path and --data_path the bundled tiny model and data are used.
"""

from dschat_lora.commands.train import run_stage

if __name__ == "__main__":
    run_stage("dpo", description=__doc__)
