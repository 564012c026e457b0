"""What is done with trained models and with data in Python: the verbs of their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dschat_lora.api.options import Data, Model, option_values, with_options
from dschat_lora.api.process import on_first_process, run_in_process
from dschat_lora.commands.stages import STAGES, planned_card, with_verb_defaults
from dschat_lora.config.bundled import BUNDLED_MODEL
from dschat_lora.config.held import is_held
from dschat_lora.config.options import build_config, options_in_python, typed_options
from dschat_lora.config.stages import AuditConfig
from dschat_lora.config.verbs import EvalConfig, GenerateConfig, MergeConfig, TuneConfig
from dschat_lora.report.markup import safe
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.score.builtin_rewards import check_scorer
from dschat_lora.runtime.checks import require_packages
from dschat_lora.runtime.stage_main import late
from dschat_lora.runtime.validation import check_audit, check_eval, check_reading

_OF_COMMANDS = ("output_path", "json", "html", "keep", "min_reward")
ConfigT = TypeVar("ConfigT")
Message = Mapping[str, str]
_NAMED = ("model_name_or_path", "data_path")  # arguments under a shorter name


@with_options(GenerateConfig, *_NAMED, *_OF_COMMANDS, "reward_model", "reward_function")
def generate(
    model: Model | None, prompts: str | Sequence[str | Sequence[Message]], **sampling: Any
) -> list[str]:
    """Answers to prompts, greedily unless told otherwise.

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
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if all(isinstance(each, Mapping) and "role" in each for each in given):
        given = [given] if given else []  # one conversation
    if not given:
        return []
    with ExitStack() as stack:
        model = BUNDLED_MODEL if model is None else model
        values: dict[str, Any] = {"model_name_or_path": model}
        if all(isinstance(each, str) for each in given):
            values["prompts"] = given
        else:
            values["data_path"] = [{"prompt": each} for each in given]
        config = _config(GenerateConfig, values, sampling, stack)
        stack.enter_context(run_in_process())
        check_reading(config, ("CAUSAL_LM",))
        answers: list[str] = late("supervised.generate:answer_texts")(config)
        return answers


@with_options(EvalConfig, *_NAMED, "json")
def evaluate(model: Model | None, data: Data | None, **options: Any) -> dict[str, float]:
    """Perplexity, preferences or rewards of a model on rows of data.

    Args:
        model: as in ``generate``; of a reward model scores and preferences are measured.
        data: rows, as in ``dschat_lora.sft``; None with ``tasks``, which have their own.
        **options: those of ``dschat-lora eval --help`` by their names. ``judge_function`` may be a
            function, and ``reward_model`` a run.

    Returns:
        The numbers that the command prints, by name.
    """
    with ExitStack() as stack:
        model = BUNDLED_MODEL if model is None else model
        values: dict[str, Any] = {"model_name_or_path": model}
        values |= {} if data is None else {"data_path": data}
        config = _config(EvalConfig, values, options, stack)
        stack.enter_context(run_in_process())
        scores, make_judge = eval_parts(config)
        measure = late("addons.evaluation.measure:evaluate_model")
        found: dict[str, float] = measure(config, scores=scores, make_judge=make_judge)
        return found


def eval_parts(config: EvalConfig) -> tuple[bool, Any]:
    """Whether a reward model is evaluated, and what makes the judge, if there is one."""
    judge = judge_maker("judge_function", config.judge_function)
    return check_eval(config), judge


def judge_maker(option: str, name: str | None) -> Any:
    """What makes the judge that an option names, None without a name.

    Raises:
        ValueError: if the name is none of a function.
    """
    if name is None:
        return None
    named: dict[str, Any] = {option: name}
    RewardsConfig(**named)  # refuses what names no function
    check_scorer(option, name)
    return partial(late("api.demo_judge:make_judge"), option, name)


@with_options(MergeConfig, *_NAMED, "json")
def merge(model: Model, output_dir: str | os.PathLike[str] | None = None, **options: Any) -> Path:
    """Write base and adapter as one transformers model.

    Args:
        model: a run, or the path of one or of its adapter.
        output_dir: default: ``model/`` beside the adapter.
        **options: those of ``dschat-lora merge --help`` by their names.

    Returns:
        The directory of the model.

    Raises:
        ValueError: if there is no adapter, or rounding moves the model by too much.
    """
    with ExitStack() as stack:
        values = {"model_name_or_path": model, "output_dir": output_dir}
        config = _config(MergeConfig, values, options, stack)
        stack.enter_context(run_in_process())
        directory: Path = late("runtime.merge:check_merge")(config)
        on_first_process(lambda: late("runtime.merge:merge_model")(config))
        return directory


@dataclass(frozen=True)
class Audit:
    """What a stage would learn of data, and what is wrong with it.

    Attributes:
        counts: numbers of rows, samples and tokens by name.
        samples: those asked for by ``show``: ``input_ids``, ``supervised`` and ``row``.
        warnings: what is unlikely to be meant.
        refusal: why a run would not take the data; None where it would.
        text: all of it for a person.
    """

    counts: dict[str, Any]
    samples: list[dict[str, Any]]
    warnings: list[str]
    refusal: str | None
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{safe(self.text)}</pre>"


@with_options(AuditConfig, *_NAMED, "json", "html")
def audit(data: Data | None = None, model: Model | None = None, **options: Any) -> Audit:
    """What a stage would learn of data; nothing is trained.

    Args:
        data: rows, as in ``dschat_lora.sft``.
        model: whose tokenizer and chat template read them.
        **options: those of ``dschat-lora audit --help`` by their names, such as ``stage="reward"``
            and ``show=3``.
    """
    with ExitStack() as stack:
        values = {"model_name_or_path": model, "data_path": data}
        config = _config(AuditConfig, values, options, stack)
        stack.enter_context(run_in_process())
        found = late("runtime.data_audit:audit_data")(check_audit(config))
        facts = found.to_dict()
        return Audit(
            found.counts,
            facts["samples"],
            facts["warnings"],
            found.refusal,
            "\n".join(found.lines()),
        )


@dataclass(frozen=True)
class Plan:
    """Memory and time of a stage before anything is loaded.

    Attributes:
        facts: what ``dschat-lora plan --json`` gives: sizes are bytes on one device.
        text: what it prints.
        peak: most bytes at a time on a device.
        fits: whether it fits as it was given; None without a device.
        command: a command line that fits; None where nothing was found.
    """

    facts: dict[str, Any] = field(repr=False)
    text: str = field(repr=False)
    peak: int = field(repr=False)
    fits: bool | None = field(repr=False)
    command: str | None = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{safe(self.text)}</pre>"


def plan(
    stage: str,
    model: Model | None = None,
    data: Data | None = None,
    *,
    device: str | None = None,
    num_gpus: int | None = None,
    **options: Any,
) -> Plan:
    """Memory and time of a stage, and settings that fit a device; no weights are loaded.

    Args:
        stage: "sft", "reward", "dpo", "rlhf" or "distill".
        model: as in ``dschat_lora.sft``, or the name of a published one without its files.
        data: rows, if their lengths are to count.
        device: memory such as "24GB", or the name of a card (the command's ``--for``).
        num_gpus: processes, one for each GPU.
        **options: those of the stage, by their names.

    Raises:
        ValueError: as the stage would refuse its options, or for an unknown architecture.
    """
    _check_stage_name(stage)
    if num_gpus is not None and num_gpus < 1:
        raise ValueError(f"num_gpus must be >= 1, got {num_gpus}")
    card = planned_card(device)
    with ExitStack() as stack:
        typed = _stage_options(stage, model, data, options, stack)
        facts, text = late("addons.planning.plan_report:described_plan")(
            stage, typed, card=card, processes=num_gpus or 1
        )
    return Plan(facts, text, int(facts["peak"]), facts["fits"], facts["command"])


@dataclass(frozen=True)
class Tuned:
    """What a search came to.

    Attributes:
        path: the directory, with ``report.html``, the curves of all trials.
        best: options of the best trial, beside those that were given, as arguments of the stage.
        value: the held-out measure of that trial.
        trials: ``trial``, ``options``, ``steps``, the measure and ``ended`` of each, as printed.
        command: the command line that trains with the best options.
    """

    path: Path
    best: dict[str, float]
    value: float
    trials: list[dict[str, str]]
    command: str


def tune(
    stage: str,
    model: Model | None = None,
    data: Data | None = None,
    *,
    rates: Sequence[float] = (),
    ranks: Sequence[int] = (),
    batches: Sequence[int] = (),
    trials: int = 0,
    seeds: int = 1,
    jobs: int = 1,
    metric: str | None = None,
    min_steps: int = 0,
    reduction_factor: int = 3,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    **options: Any,
) -> Tuned:
    """Find the learning rate of a stage and, if you like, its rank and batch, by short runs.

    Needs ``dschat_lora[tune]``. Runs are processes of their own; call it from the main thread.

    Args:
        stage: "sft", "reward", "dpo", "rlhf" or "distill".
        model: as in ``dschat_lora.sft``.
        data: a path, or several.
        rates: peak rates to try, of the adapter where there is one; by default that of the rules,
            times 1/8 to 8.
        ranks: values of ``lora_dim`` to try with each rate.
        batches: sizes of the training batch of a device to try with each.
        trials: in all; those beyond the listed ones are drawn where these were good.
        seeds: runs of a trial, whose mean counts.
        jobs: trials at a time.
        metric: held-out measure that decides; by default loss, of rlhf and distill reward.
        min_steps: optimizer steps after which a trial may end.
        reduction_factor: one of so many trials goes on.
        output_dir: of the search; the first free of ``output/tune-STAGE``, ... when absent.
        resume: go on with the search in ``output_dir``.
        **options: those of the stage, by their names; ``max_steps`` is a whole trial's length.

    Returns:
        The trials and the best options: ``dschat_lora.sft(model, data, **found.best)`` trains by
        them.

    Raises:
        TypeError: for an option that does not exist, and for rows, functions and other objects,
            which processes of their own cannot read.
        ValueError: for a value that cannot be used, or if no trial came to its end.
        SystemExit: after Ctrl-C, once the runs are saved; ``resume=True`` goes on.
    """
    _check_stage_name(stage)
    search = {
        "rates": rates,
        "ranks": ranks,
        "batches": batches,
        "trials": trials,
        "seeds": seeds,
        "jobs": jobs,
        "metric": metric,
        "min_steps": min_steps,
        "reduction_factor": reduction_factor,
        "output_dir": output_dir,
        "resume": resume,
    }
    config = build_config(TuneConfig, options_in_python(TuneConfig, search))
    with ExitStack() as stack:
        typed = _stage_options(stage, model, data, options, stack)
    for name, value in typed.items():
        if any(isinstance(each, str) and is_held(each) for each in _each(value)):
            raise TypeError(f"{name} must be a path or a name, which the runs can read themselves")
    require_packages("dschat_lora.tune", "optuna", extra="tune")
    return Tuned(**late("addons.planning.tune:run_tune")(config, stage, typed, None))


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _check_stage_name(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")


def _stage_options(
    stage: str, model: Model | None, data: Data | None, options: Mapping[str, Any], stack: ExitStack
) -> dict[str, Any]:
    """A stage's options as typed, none of which is out of its range."""
    role = "actor_" if stage in ("rlhf", "distill") else ""
    named = {f"{role}model_name_or_path": model, "data_path": data}
    given = {name: value for name, value in named.items() if value is not None}
    typed = options_in_python(STAGES[stage].config, option_values({**options, **given}, stack))
    config: Any = build_config(STAGES[stage].config, typed)
    return typed | typed_options(with_verb_defaults(config))


def _config(
    config_class: type[ConfigT],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    stack: ExitStack,
) -> ConfigT:
    """The options of a verb, with names for objects.

    Raises:
        TypeError: for one that has an argument of its own, or says what a command writes.
    """
    for name in options:
        if name in (*_NAMED, *given):
            raise TypeError(f"{name} is given by an argument of its own, too; give one")
        if name in _OF_COMMANDS:
            raise TypeError(f"--{name} is an option of the command alone: a function returns all")
    named = option_values({**given, **options}, stack)
    return build_config(config_class, options_in_python(config_class, named))  # type: ignore[type-var, arg-type]
