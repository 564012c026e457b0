"""Step 1: supervised fine-tuning of a causal language model, with LoRA or in full.

    deepspeed training/step1_sft/main.py --lora_dim 128 --gradient_accumulation_steps 8

Without --model_name_or_path and --data_path the bundled tiny model and data are used. The loss
is taken on completions and their end-of-sequence token only.
"""

from dschat_lora.commands.train import run_stage

if __name__ == "__main__":
    run_stage("sft", description=__doc__)
