r"""GLUE with transformers' Trainer: RoBERTa or DeBERTa-v2 with LoRA on query and value.

    torchrun --nproc_per_node 8 training/nlu_glue/main.py --model_name_or_path roberta-base \
        --task_name mnli --apply_lora --lora_r 8 --lora_alpha 16

Rows come from the hub, or from local files (--data_dir, --train_file). What is trained is the
LoRA factors and the head; without --apply_lora every weight.
"""

import sys

from dschat_lora.config.addons import verb_path
from dschat_lora.runtime.stage_main import ended_in_one_line

if __name__ == "__main__":
    with ended_in_one_line():
        verb_path("glue")
    from dschat_lora.addons.glue.verbs import run_glue

    run_glue(sys.argv[1:], description=__doc__)
