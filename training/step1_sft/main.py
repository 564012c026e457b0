"""Step 1: supervised fine-tuning of a causal language model, with LoRA or in full.

    deepspeed training/step1_sft/main.py --lora_dim 128 --gradient_accumulation_steps 8

Without --model_name_or_path and --data_path the bundled tiny model and data are used. The loss
is taken on completions and their end-of-sequence token only.
"""

from dschat_lora.cli.options import run_main
from dschat_lora.config import SupervisedConfig
from dschat_lora.preflight import check_supervised


def main(config: SupervisedConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora import stage
    from dschat_lora.data.batch import SampleCollator
    from dschat_lora.models.build import build_causal_lm
    from dschat_lora.models.causal_lm import CausalLMLoss
    from dschat_lora.objective import SUPERVISED
    from dschat_lora.run import open_run

    with open_run(config, name="sft", check=check_supervised) as output:
        setup = stage.set_up(output, build_causal_lm, phase=1, kind="samples", task="CAUSAL_LM")
        if output.directory is None:
            return  # a dry run
        config, tokenizer, data = setup.config, setup.tokenizer, setup.data

        engine = stage.build_engine(setup, CausalLMLoss(setup.adapted.model))
        stage.settle_head(engine, len(tokenizer), output)
        packing = stage.settle_packing(engine, config.data.packing, len(tokenizer), output)
        collate = SampleCollator(int(tokenizer.pad_token_id))
        stage.train(
            setup,
            engine,
            stage.train_loader(setup, data.train, collate, packing=packing),
            SUPERVISED,
            stage.make_evaluator(setup, engine, data.eval, collate, SUPERVISED, packing=packing),
            answers=stage.make_answers(setup, engine),
        )


if __name__ == "__main__":
    run_main(SupervisedConfig, check_supervised, main, description=__doc__)
