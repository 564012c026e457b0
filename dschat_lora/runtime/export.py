"""Writing what a run trained: the adapter, or the whole model where more than that was trained."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.checkpoint.model_card import public_name
from dschat_lora.config.addons import installed
from dschat_lora.config.groups import ModelConfig, OptimConfig
from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.stages import StageConfig
from dschat_lora.config.verb_names import VERBS
from dschat_lora.data.media import FIRST_ID
from dschat_lora.data.samples import TokenSet
from dschat_lora.engine.distributed import world_size
from dschat_lora.lora.rates import adapter_learning_rate
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.models.loading import Tokenizer, end_ids, stop_at, stored_dropouts
from dschat_lora.models.source import ModelSource
from dschat_lora.report.record import package_versions
from dschat_lora.report.terminal import fitted_command
from dschat_lora.runtime.run import OpenRun

if TYPE_CHECKING:
    from dschat_lora.lora.merge import MergeReport


def export_trained(
    run: OpenRun[StageConfig],
    directory: Path,
    adapted: AdaptedModel,
    *,
    source: ModelSource,
    tokenizer: Tokenizer,
    model: ModelConfig,
    data_path: Sequence[str],
    metrics: Mapping[str, Any],
    probe_ids: Tensor,
    label: str = "",
    tensors: Mapping[str, Tensor] | None = None,
) -> "MergeReport | None":
    """Write ``adapter``, and ``model`` if it is asked for or more was trained; on every rank.

    The model is in evaluation mode. ``data_path`` and ``metrics`` are for the adapter's card, and
    ``label`` is what the log calls it. A written model is compared with the trained one on
    ``probe_ids``, (B, T). ``tensors`` (whole, on rank 0) take the place of the model's own values.

    Returns:
        How far the written model differs, on rank 0; None where none was written.
    """
    options = run.config.run
    # of the role's own options
    prefix = "critic_" if label.startswith("critic") else "actor_" if label else ""
    if adapted.task == "CAUSAL_LM":
        stop_at(adapted.model, end_ids(tokenizer))
    adapter_alone = adapted.lora.lora_dim > 0 and adapted.lora.only_optimize_lora
    if adapter_alone:
        save_adapter(
            directory / "adapter",
            adapted.model,
            adapted.lora,
            base=source.base,
            tokenizer=tokenizer,
            card={
                "data": {
                    "training data": " ".join(map(public_name, data_path)),
                    **getattr(adapted.model, "media", {}),
                },
                "training": card_settings(run.config, prefix=prefix),
                "metrics": metrics,
                "versions": package_versions(),
            },
            base_bits=adapted.base_bits,
            base_fingerprint=weights_fingerprint(source.base) if adapted.base_bits == 4 else "",
            rope_scaling=adapted.rope_scaling,
            task_type=adapted.task,
            tensors=tensors,
        )
        run.log.say(f"{label}adapter written to {directory / 'adapter'}")
    if adapter_alone and not options.merge_adapter:
        return None
    # Without adapters nothing is merged that could be refused; other tensors differ on purpose.
    refusable = adapted.targets and tensors is None
    return save_merged(
        directory / "model",
        adapted.model,
        tokenizer=tokenizer,
        probe_ids=probe_ids,
        max_kl=options.merge_max_kl if refusable else math.inf,
        dropouts=stored_dropouts(source.base, model),
        tensors=tensors,
    )


# Of a run's options: those that a model card states.
_ON_CARD = (
    *("learning_rate", "lora_learning_rate", "weight_decay", "lr_scheduler_type"),
    *("num_warmup_steps", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
    *("per_device_training_batch_size", "gradient_accumulation_steps", "max_seq_len"),
    *("loss_type", "beta", "algorithm", "reference", "kl_coef", "seed"),
)


def card_settings(config: StageConfig, *, prefix: str = "") -> dict[str, Any]:
    """How a run trained one of its models, whose own options begin with ``prefix``."""
    values = flatten(config)
    own = getattr(config, "reference", None)
    reference = "" if own is None else f"{own.role}_model_name_or_path"
    names = [reference if name == "reference" else name for name in _ON_CARD]
    stated = {name: values.get(prefix + name, values.get(name)) for name in names}
    optim = config.optim
    if isinstance(optim, OptimConfig):
        stated["lora_learning_rate"] = adapter_learning_rate(optim)
        stated["learning_rate"] = None  # the base's, which does not train
    if stated["learning_rate"] == "auto":
        ruled = getattr(getattr(config, prefix.rstrip("_"), None), "ruled", None) or (None, None)
        stated["learning_rate"], stated["lora_learning_rate"] = ruled
    stated["processes"] = world_size()
    return {name.replace("_", " "): value for name, value in stated.items() if value is not None}


def first_ids(samples: TokenSet, count: int, *, max_length: int) -> list[int]:
    """Token ids of the first ``count`` samples in a row, at most ``max_length`` and 256."""
    ids = [int(i) for n in range(min(count, len(samples))) for i in samples[n].input_ids]
    # Without what stands for inputs beside text, which the written model alone does not take.
    return [i for i in ids if i < FIRST_ID][: min(256, max_length)]


_ACTOR = "actor_model_name_or_path"
# Options that say which rows there are and how they are read: the next stage needs them too.
_ROWS = (
    *("data_path", "data_split_name", "columns", "data_weights"),
    *("max_source_rows", "eval_data_path", "eval_ratio", "data_split", "overlong", "bad_rows"),
    "chat_template_kwargs",
)


def say_next_steps(run: OpenRun[StageConfig], *, has_pairs: bool = False) -> None:
    """Log commands to paste, of verbs that are installed; see :func:`next_commands`."""
    if run.directory is None:
        return
    commands = []
    if not run.caller.in_python:
        there = {*VERBS, *(verb for addon in installed().values() for verb in addon.verbs)}
        commands = next_commands(run.stage, run.config, run.directory, has_pairs=has_pairs)
        commands = [each for each in commands if each.split()[1] in there]
    if commands:
        run.log.say("next:")
    for command in commands:
        run.log.say(fitted_command(command, "  "))
    for each in run.observers:
        run.log.say(each.words)


def next_commands(
    stage: str, config: StageConfig, directory: Path, *, has_pairs: bool
) -> list[str]:
    """Commands that work with what a stage wrote and read; none for a stage of another kind.

    ``has_pairs`` says that all rows are pairs of answers, which a reward model learns from.
    """
    values, home = flatten(config), str(directory)
    rows = {name: values[name] for name in _ROWS if name in config.given}

    def typed(verb: str, *words: str, **options: object) -> str:
        return shlex.join(["dschat-lora", verb, *words, *command_line(options)])

    if stage == "reward":
        actor = {}
        if named := values["model_name_or_path"]:
            # The reward model's base is an actor if SFT wrote it.
            base = Path(named).expanduser()
            places = [base, *base.parents[:3]] if base.is_dir() else []
            of_run = any((place / "run.json").is_file() for place in places)
            actor = {_ACTOR: named if of_run else "OUTPUT_OF_SFT"}
        return [
            typed("chat", named or "base", reward=home),
            typed("rlhf", **actor, critic_model_name_or_path=home, **rows),
        ]
    has_actor = _ACTOR in values
    if not (has_actor or stage in ("sft", "dpo")):
        return []
    trained = directory / "actor" if has_actor else directory
    commands = [typed("chat", home)]
    if stage == "sft" and has_pairs:
        length = {"max_seq_len": values["max_seq_len"]} if "max_seq_len" in config.given else {}
        commands.append(typed("reward", model_name_or_path=home, **rows, **length))
    elif (trained / "adapter").is_dir() and not (trained / "model").exists():
        commands.append(typed("merge", home))
    return commands
