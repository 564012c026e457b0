"""GLUE with transformers' Trainer: RoBERTa or DeBERTa-v2 with LoRA on query and value.

    torchrun --nproc_per_node 8 training/nlu_glue/main.py --model_name_or_path roberta-base \
        --task_name mnli --apply_lora --lora_r 8 --lora_alpha 16

Rows come from the hub, or from local files (--data_dir, --train_file). What is trained is the
LoRA factors and the head; without --apply_lora every weight.
"""

from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.validation import check_glue, describe_plan, fix_environment
from dschat_lora.runtime.stage_main import run_main


def main(config: GlueConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    if config.dry_run:
        describe_plan(config)
        return
    fix_environment(config.seed)
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora.experiments.glue.train import run_glue

    run_glue(config)


if __name__ == "__main__":
    run_main(GlueConfig, check_glue, main, description=__doc__)
