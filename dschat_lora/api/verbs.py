"""What is done with trained models and with data in Python: the verbs of their names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dschat_lora.api.options import Model, option_values, with_options
from dschat_lora.api.process import on_first_process, run_in_process
from dschat_lora.config.addons import addon_options
from dschat_lora.config.bundled import BUNDLED_MODEL
from dschat_lora.config.options import build_config, nested_prefix, option_names, options_in_python
from dschat_lora.config.verbs import GenerateConfig, MergeConfig
from dschat_lora.runtime.stage_main import late
from dschat_lora.runtime.validation import check_generate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OF_COMMANDS = ("output_path", "json", "html")
# Of add-ons that write files in place of answers.
_OF_ADDONS = tuple(
    nested_prefix("", each) + name
    for each in fields(addon_options("generate"))
    if hasattr(each.metadata["group"], "generate")
    for name in option_names(each.metadata["group"])
)
ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
Message = Mapping[str, str]
_NAMED = ("model_name_or_path", "data_path")  # arguments under a shorter name


@with_options(GenerateConfig, *_NAMED, *_OF_COMMANDS, *_OF_ADDONS)
def generate(
    model: Model | None, prompts: str | Sequence[str | Sequence[Message]], **sampling: object
) -> list[str]:
    """Answers to prompts, greedily unless sampling is asked for, as by a ``temperature``.

    Args:
        model: as in ``dschat_lora.sft``: a name, a path, a run, (model, tokenizer), or None for the
            bundled tiny model.
        prompts: texts to go on from, or messages that the chat template renders.
        **sampling: options of ``dschat-lora generate --help`` by their names, such as
            ``max_new_tokens``, ``do_sample``, ``temperature``, ``num_return_sequences``, ``seed``.
            ``chat=True`` takes texts for messages of a user.

    Returns:
        An answer to each prompt, in order; with ``num_return_sequences`` so many for each.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for a value that cannot be used, and a prompt that is too long.
    """
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a list of texts or of messages, got {prompts!r:.60}")
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if all(isinstance(each, Mapping) and "role" in each for each in given):
        given = [given] if given else []  # one conversation
    if not given:
        return []
    for number, each in enumerate(given):
        of_messages = isinstance(each, Iterable) and not isinstance(each, Mapping)
        if not isinstance(each, str) and not (
            of_messages and all(isinstance(message, Mapping) for message in each)
        ):
            raise TypeError(
                f"prompts[{number}] must be a text or a list of messages, got {each!r:.60}"
            )
    with ExitStack() as stack:
        model = BUNDLED_MODEL if model is None else model
        values: dict[str, Any] = {"model_name_or_path": model}
        if all(isinstance(each, str) for each in given):
            values["prompts"] = given
        else:
            values["data_path"] = [{"prompt": each} for each in given]
        config = config_of(GenerateConfig, values, sampling, stack, _OF_ADDONS)
        stack.enter_context(run_in_process())
        check_generate(config)
        answers: list[str] = late("supervised.generate:answer_texts")(config)
        return answers


@with_options(MergeConfig, *_NAMED, "json")
def merge(
    model: Model, output_dir: str | os.PathLike[str] | None = None, **options: object
) -> Path:
    """Write base and adapter as one transformers model.

    Args:
        model: a run, or the path of one or of its adapter.
        output_dir: default: ``model/`` beside the adapter.
        **options: those of ``dschat-lora merge --help`` by their names.

    Returns:
        The directory of the model.

    Raises:
        ValueError: if there is not an adapter, or rounding moves the model by too much.
    """
    with ExitStack() as stack:
        values = {"model_name_or_path": model, "output_dir": output_dir}
        config = config_of(MergeConfig, values, options, stack)
        stack.enter_context(run_in_process())
        directory: Path = late("runtime.merge:merged_directory")(config)
        on_first_process(lambda: late("runtime.merge:merge_model")(config))
        return directory


def config_of(
    config_class: type[ConfigT],
    given: Mapping[str, object],
    options: Mapping[str, object],
    stack: ExitStack,
    of_commands: Sequence[str] = (),
) -> ConfigT:
    """The options of a verb, with names for objects.

    The command alone has ``of_commands`` too.

    Raises:
        TypeError: for one that has an argument of its own, or says what a command writes.
    """
    for name in options:
        if name in (*_NAMED, *given):
            raise TypeError(f"{name} is given by an argument of its own, too; give one")
        if name in (*_OF_COMMANDS, *of_commands):
            raise TypeError(f"--{name} is an option of the command alone: a function returns all")
    named = option_values(config_class, {**given, **options}, stack)
    return build_config(config_class, options_in_python(config_class, named))
