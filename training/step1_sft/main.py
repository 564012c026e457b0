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
    from dschat_lora.evaluation import Evaluator, SampleAnswers
    from dschat_lora.memory import explaining_memory
    from dschat_lora.models.build import build_causal_lm, check_targets
    from dschat_lora.models.causal_lm import CausalLMLoss, causal_lm_loss, load_tokenizer
    from dschat_lora.models.source import find_model
    from dschat_lora.run import open_run
    from dschat_lora.schedule import rate_factor
    from dschat_lora.trainer import Progress, fit, make_plan

    with open_run(config, name="sft", check=check_supervised) as output:
        config = output.config
        source = find_model(config.model.model_name_or_path)
        check_targets(source, config.model, config.lora)
        tokenizer = load_tokenizer(source.tokenizer, config.model)
        data = stage.prepare_data(config, tokenizer, phase=1, output=output)

        settings = stage.engine_settings(config)
        adapted = build_causal_lm(
            source,
            tokenizer,
            config.model,
            config.lora,
            dtype=settings.torch_dtype,
            seed=config.run.seed,
            meta=stage.wants_shape_only(config, settings),
        )
        stage.describe(config, settings, adapted, output)
        if output.directory is None:
            return  # a dry run

        output.closing.enter_context(explaining_memory(adapted, config, settings, output.directory))
        identity = stage.identify(adapted, tokenizer, data, settings)
        stage.place(adapted.model, settings)
        engine = stage.build_engine(CausalLMLoss(adapted.model), adapted, config, settings)
        packing = stage.settle_packing(engine, config, tokenizer, output)
        loader = stage.train_loader(data.train, config, tokenizer, packing=packing, output=output)
        plan = make_plan(config.optim, config.run, loader.steps_per_epoch)
        evaluator = Evaluator(
            engine, data.eval, causal_lm_loss, config, tokenizer, output, packing=packing
        )
        samples = SampleAnswers(engine, data.eval, tokenizer, config.run, output)
        meter = stage.make_meter(adapted, config, settings, output)
        progress = Progress()
        keeper = stage.make_keeper(
            engine,
            adapted,
            loader,
            identity=identity,
            parts={"progress": progress, "evaluation": evaluator, "answers": samples},
            output=output,
        )

        keeper.restore(num_steps=plan.num_steps)
        samples.show("before")
        with output.interrupts.deferred():
            fit(
                engine,
                loader,
                causal_lm_loss,
                plan,
                progress=progress,
                rate_factor=rate_factor(
                    config.optim.lr_scheduler_type,
                    num_warmup_steps=config.optim.num_warmup_steps,
                    num_steps=plan.num_steps,
                ),
                seed=config.run.seed,
                meter=meter,
                log=output.log,
                evaluate_at=evaluator,
                keeper=keeper,
            )
        if plan.num_steps:
            samples.show("after")
            stage.finish(
                engine,
                adapted,
                source,
                config,
                tokenizer,
                results=evaluator.before_and_after(),
                probe_ids=stage.probe_batch(
                    data.eval, tokenizer, max_length=config.data.max_seq_len
                ),
                meter=meter,
                output=output,
            )


if __name__ == "__main__":
    run_main(SupervisedConfig, check_supervised, main, description=__doc__)
