"""Validation of data-to-text training, decoding and evaluation, and the learning-rate schedule.

Options of microsoft/LoRA's GPT-2 scripts are taken as those of this package.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dschat_lora.addons.loralib.seeds import check_starts_runs
from dschat_lora.addons.nlg.config import (
    CARDS,
    DecodeConfig,
    EvaluateConfig,
    FormatConfig,
    NlgConfig,
    NlgOptimConfig,
)
from dschat_lora.addons.nlg.predictions import chosen_predictions, predictions_to_format
from dschat_lora.algos.schedules import constant, cosine, cycle, linear
from dschat_lora.checkpoint.adapter_config import verify_adapter
from dschat_lora.checkpoint.history import STATE_FILE
from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.roles import MODEL
from dschat_lora.data.rows import check_sources
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.directory import read_object
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.checks import Check, check_task, model_fields, require_packages
from dschat_lora.runtime.directory import check_can_be_made, check_file_can_be_made
from dschat_lora.runtime.validation import Inputs
from dschat_lora.supervised.validation import check_supervised

_TARGETS = {"target_modules", "lora_module_name"}
# Options that set the rate, except in a cycle.
_RATES = ("lora_learning_rate", "lora_lr_multiplier", "num_warmup_steps")


def with_our_options(config: NlgConfig) -> NlgConfig:
    """The config with what ``--obj``, ``--fp16``, ``--model_card`` and ``--lora_dim 0`` mean.

    Raises:
        ValueError: if an option contradicts the one that does the same here.
    """
    model, data, lora, given = config.model, config.data, config.lora, config.given
    if config.obj == "jlm":
        data = replace(data, train_on_prompt=True)
    elif "obj" in given and data.train_on_prompt:
        raise ValueError("--obj clm and --train_on_prompt contradict each other; give one")
    if config.fp16:
        if model.dtype not in ("auto", "fp16"):
            raise ValueError(f"--fp16 and --dtype {model.dtype} contradict each other; give one")
        model = replace(model, dtype="fp16")
    name = _named_model(model.model_name_or_path, config.init_checkpoint, config.model_card)
    if name != model.model_name_or_path:
        model, given = replace(model, model_name_or_path=name), given | {"model_name_or_path"}
    of_lora = given & set(LoraConfig.__dataclass_fields__) - {"lora_dim"}
    if lora.lora_dim == 0 and (dropped := sorted(of_lora)):
        log_once(f"  note         --lora_dim 0 trains every weight: no {', '.join(dropped)}")
        lora, given = LoraConfig(lora_dim=0), given - set(dropped)
    return replace(config, model=model, data=data, lora=lora, given=given)


def with_base(config: DecodeConfig) -> DecodeConfig:
    """The config with the model that ``--init_checkpoint`` and ``--model_card`` name.

    Raises:
        ValueError: as :func:`with_our_options`, or if there is no such checkpoint.
    """
    name = _named_model(config.model_name_or_path, config.init_checkpoint, config.model_card)
    path = Path(config.output_path).expanduser()
    if config.work_dir is not None and not path.is_absolute():
        path = Path(config.work_dir).expanduser() / path
    return replace(config, model_name_or_path=name, output_path=str(path))


def weights_file(init_checkpoint: str | None) -> Path | None:
    """The file of weights that ``--init_checkpoint`` names; None where it names a model."""
    path = None if init_checkpoint is None else Path(init_checkpoint).expanduser()
    return path if path is not None and path.is_file() else None


def _named_model(name: str | None, init_checkpoint: str | None, card: str | None) -> str | None:
    """The model to load, without the weights of a file of weights."""
    of_card = None if card is None else CARDS[card]
    if init_checkpoint is None:
        return name or of_card
    if weights_file(init_checkpoint) is not None:
        if name is None and of_card is None:
            raise ValueError(
                f"--init_checkpoint {init_checkpoint} is a file of weights; name its model with "
                "--model_card gpt2.md or --model_name_or_path"
            )
        return name or of_card
    if name not in (None, init_checkpoint):
        raise ValueError(
            f"--init_checkpoint {init_checkpoint} and --model_name_or_path {name} both name a "
            "model; give one"
        )
    path = Path(init_checkpoint).expanduser()
    if path.suffix in (".pt", ".pth", ".bin", ".safetensors") and not path.exists():
        run = path.parent
        is_run = (run / "run.json").is_file()
        at = f"; {run} is a run: give --init_checkpoint {run}" if is_run else ""
        raise ValueError(f"--init_checkpoint {init_checkpoint} does not exist{at}")
    return init_checkpoint


def with_query_and_value(config: NlgConfig, inputs: Inputs) -> NlgConfig:
    """With new adapters on queries and values, packed in GPT-2 with keys, unless options differ."""
    lora, given, source = config.lora, config.given, inputs.sources.of(MODEL)
    if source.adapter is not None or lora.lora_dim == 0:
        return config
    packed = model_fields(source).get("model_type", "gpt2") == "gpt2" or "enable_lora" in given
    if not _TARGETS & given:
        lora = replace(lora, target_modules=("c_attn",) if packed else ("q_proj", "v_proj"))
    if "enable_lora" not in given and lora.target_modules == ("c_attn",):
        lora = replace(lora, enable_lora=("q", "v"))
    return replace(config, lora=lora)


def check_cycle(config: NlgConfig, inputs: Inputs) -> None:
    """Refuse other options of length and rate with ``--lr_scheduler_type cycle``."""
    optim = config.optim
    if optim.lr_scheduler_type != "cycle":
        return
    if optim.max_steps:
        raise ValueError(
            f"--max_steps {optim.max_steps} and --i_steps {optim.i_steps} both set the length of "
            "the run; give one"
        )
    for name in _RATES:
        if name in config.given:
            raise ValueError(
                f"--{name} is not used by --lr_scheduler_type cycle, whose rates are --i_lrs "
                f"{optim.i_lrs}; drop it"
            )


def check_epochs(config: NlgConfig, inputs: Inputs) -> None:
    """Refuse to keep every epoch's factors where there are none."""
    adapter = inputs.sources.of(MODEL).adapter
    if config.save_epochs and config.lora.lora_dim == 0 and adapter is None:
        raise ValueError("--save_epochs saves LoRA weights, but --lora_dim 0 has none")


def check_seeds(config: NlgConfig, inputs: Inputs) -> None:
    """Refuse several runs in the processes of one, and to go on with several."""
    if config.seeds == 1:
        return
    check_starts_runs(config.seeds, "nlg")
    if config.run.resume_from_checkpoint is not None:
        raise ValueError(
            "--seeds starts new runs; resume one of its runs with that run's --output_dir"
        )


def check_length(config: NlgConfig, inputs: Inputs) -> None:
    """Refuse a run of less than one optimizer step."""
    in_optimizer_steps(config)


def check_accumulation(config: NlgConfig, inputs: Inputs) -> None:
    """Refuse to resume at another accumulation with a schedule that counts micro-batches."""
    if not config.checkpoint or not config.optim.scheduler_counts_micro_steps:
        return
    state = read_object(Path(config.checkpoint) / STATE_FILE)
    before = state["config"]["gradient_accumulation_steps"]
    now = config.batch.gradient_accumulation_steps
    if now != before:
        raise ValueError(
            f"--scheduler_counts_micro_steps: the run had {before} micro-batches a step and would "
            f"have {now} from here on, which changes its rates and length; go on with the same "
            "number of processes and --per_device_train_batch_size"
        )


def in_optimizer_steps(config: NlgConfig) -> NlgConfig:
    """The config with the run's length, if options tell it, in optimizer steps, at least one."""
    optim = config.optim
    steps = optim.cycle_points[0][-1] if optim.lr_scheduler_type == "cycle" else optim.max_steps
    micro = _micro_steps(config)
    if 0 < steps < micro:
        raise ValueError(
            f"--scheduler_counts_micro_steps: {steps} micro-steps make no optimizer step of "
            f"--gradient_accumulation_steps {micro}"
        )
    return replace(config, optim=replace(optim, max_steps=steps // micro))


NLG_CHECKS: tuple[Check[NlgConfig, Inputs], ...] = (
    check_cycle,
    check_length,
    check_epochs,
    check_seeds,
    check_accumulation,
    with_query_and_value,
)


def check_training(config: NlgConfig) -> NlgConfig:
    """The config with the original's options as ours, checked as any supervised stage."""
    return check_supervised(with_our_options(config), first=NLG_CHECKS)


def schedule(config: NlgConfig) -> Callable[[int], Callable[[int], float]]:
    """From the optimizer steps of the whole run, the multiplier of the peak rate at each.

    Where micro-steps are counted, each with an advance of the schedule, the optimizer's k-th step
    is at the last of its micro-steps, ``k * accumulation - 1`` counted from 0.
    """
    optim, micro = config.optim, _micro_steps(config)
    return lambda num_steps: (
        lambda step: rate_factor(optim, (step + 1) * micro - 1, total=num_steps * micro)
    )


def rate_factor(optim: NlgOptimConfig, step: int, *, total: int) -> float:
    """The rate over ``--learning_rate`` after ``step`` of ``total`` advances of the schedule."""
    name, warmup = optim.lr_scheduler_type, optim.num_warmup_steps
    if name == "cycle":
        steps, rates = optim.cycle_points
        return cycle(step, steps=steps, rates=rates) / optim.learning_rate
    if name == "constant":
        return constant(step, warmup=warmup)
    return (linear if name == "linear" else cosine)(step, warmup=warmup, total=total)


def _micro_steps(config: NlgConfig) -> int:
    """Advances of the schedule for each optimizer step."""
    counts = config.optim.scheduler_counts_micro_steps
    return config.batch.gradient_accumulation_steps if counts else 1


def check_decode(config: DecodeConfig) -> DecodeConfig:
    """The config, if its model and its data can be there."""
    config = with_base(config)
    source = find_model(config.model_name_or_path)
    _check_factors(config, source)
    if source.adapter is not None:
        verify_adapter(source.adapter)
    check_task(source, ("CAUSAL_LM",))
    check_sources(DataConfig(data_path=config.data_path), "prompts")
    check_file_can_be_made(config.output_path, "output_path")
    return config


def check_evaluate(config: EvaluateConfig) -> EvaluateConfig:
    """The config, if its predictions can be read and the metrics' packages are there."""
    chosen_predictions(config)
    require_packages("evaluate", "sacrebleu", "nltk", extra="nlg")
    if config.output_path is not None:
        check_file_can_be_made(config.output_path, "output_path")
    return config


def check_format(config: FormatConfig) -> FormatConfig:
    """The config, if its files can be read and made."""
    predictions_to_format(config)
    check_file_can_be_made(config.output_pred_file, "output_pred_file")
    if config.profile == "e2e":
        check_file_can_be_made(config.output_ref_file, "output_ref_file")
    else:
        check_can_be_made(Path(config.output_ref_file).expanduser(), "output_ref_file")
    return config


def _check_factors(config: DecodeConfig, source: ModelSource) -> None:
    """Refuse options of factors where there are none, or whose base is not named."""
    path, base, adapter = config.lora_path, config.model_name_or_path, source.adapter
    weights = weights_file(config.init_checkpoint)
    if weights is not None and (path is not None or adapter is not None):
        other = f"--lora_path {path}" if path is not None else f"the adapter {adapter}"
        raise ValueError(
            f"--init_checkpoint {weights} needs a base without LoRA weights, not {other}"
        )
    if path is not None:
        if base is None:
            raise ValueError(
                f"--lora_path {path} contains only LoRA weights; give their base with "
                "--model_name_or_path"
            )
        if adapter is not None:
            raise ValueError(
                f"--model_name_or_path {base} already has an adapter; --lora_path {path} needs a "
                "base without one"
            )
        if not Path(path).expanduser().is_file():
            raise ValueError(f"--lora_path {path} is not a file; give a .safetensors, .pt or .bin")
    elif weights is None:
        _check_described(config, source)


def _check_described(config: DecodeConfig, source: ModelSource) -> None:
    """Refuse rank, alpha and parts that differ from the adapter's, or describe nothing."""
    typed = {"lora_dim": config.lora_dim or None, "lora_alpha": config.lora_alpha}
    if (known := source.adapter_config) is not None:
        for name, value in (("lora_dim", known.r), ("lora_alpha", known.lora_alpha)):
            if typed[name] not in (None, value):
                raise ValueError(
                    f"--{name} is {typed[name]:g}, but {source.adapter} has {value:g}; drop it"
                )
        typed = {}
    wrong = [name for name, value in typed.items() if value is not None]
    if wrong := [*wrong, *["enable_lora"][: len(config.enable_lora)]]:
        raise ValueError(f"--{wrong[0]} describes a --lora_path, which is not given")
