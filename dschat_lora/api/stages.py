"""Training in Python: each stage by a function with its command's options, and what a run left."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dschat_lora.api.options import (
    Data,
    Model,
    PathLike,
    Reward,
    function_name,
    option_values,
    reward_options,
    with_options,
)
from dschat_lora.api.process import only_run, run_in_process
from dschat_lora.api.tracebacks import api_boundary
from dschat_lora.api.verbs import Message, generate
from dschat_lora.commands.stages import STAGES, check_as_verb
from dschat_lora.config.addons import load as load_object
from dschat_lora.config.addons import provided
from dschat_lora.config.files import parse_json
from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.options import build_config, options_in_python
from dschat_lora.config.stages import (
    DpoStageConfig,
    RewardStageConfig,
    StageConfig,
    SupervisedConfig,
)
from dschat_lora.models.source import find_model
from dschat_lora.report.directory import read_object
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.caller import Callback, Caller
from dschat_lora.runtime.stage_main import late

# Options that are arguments under a shorter name.
NAMED = (
    *("model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path"),
    *("data_path", "eval_data_path", "resume_from_checkpoint"),
)


@api_boundary
class Run:
    """A run that has ended, or a model that can be used like its result.

    In Jupyter it shows itself: how it ended, its curve, held-out results and answers.

    Attributes:
        path: the directory.
        record: the content of run.json: options, versions, counts; empty for what is no run.
        metrics: the lines of metrics.jsonl; empty for what is no run.
    """

    path: Path
    record: dict[str, Any]
    metrics: list[dict[str, Any]]

    def __init__(
        self, path: str | os.PathLike[str], *, record: Mapping[str, Any] | None = None
    ) -> None:
        """Read a directory; ``record`` stands for its run.json, where a run wrote none."""
        self.path = Path(path)
        file = self._home / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self.record = dict(record or read_object(self._home / "run.json"))
        self.metrics = [parse_json(line) for line in lines if record is None]

    def __repr__(self) -> str:
        path = self.path
        with suppress(OSError, ValueError):  # the directory was removed; or another one
            path = path.relative_to(Path.cwd())
        return f"<Run {path}: {self.status}>"

    @property
    @api_boundary
    def adapter(self) -> Path | None:
        """The directory of the adapter in PEFT's layout; None where a whole model was trained."""
        return find_model(str(self.path)).adapter

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, or what run.json says of a run that ended otherwise."""
        status = str(self.record.get("status", "finished"))
        return "stopped" if status.startswith(("stopped", "interrupted")) else status

    @property
    def summary(self) -> dict[str, Any]:
        """``first`` and ``last``: the metrics of the evaluations before and after training."""
        evals = [line for line in self.metrics if line.get("kind") == "eval"]
        return {"first": evals[0], "last": evals[-1]} if evals else {}

    @property
    def _home(self) -> Path:
        """The directory with run.json: this one, or one above it."""
        homes = [self.path, *self.path.absolute().parents[:2]]
        return next((each for each in homes if (each / "run.json").is_file()), self.path)

    def generate(
        self, prompts: str | Sequence[str | Sequence[Message]], **sampling: object
    ) -> list[str]:
        """Answers to prompts; see ``dschat_lora.generate``."""
        return generate(self, prompts, **sampling)

    def report(self) -> Path:
        """The page about the run, written anew, by the first process of a launch."""
        if (write := _run_view("page")) is None:
            raise ValueError("Run.report is of an add-on that is not installed")
        path: Path = write(self._home)
        return path

    def _repr_html_(self) -> str | None:
        show = _run_view("html")
        return show and show(self._home, status=self.status, path=self.path)


def _run_view(name: str) -> Callable[..., Any] | None:
    """A way to show runs that an add-on provides: ``page``, ``html`` or ``live``."""
    path = provided("run_view").get(name)
    return None if path is None else load_object(path)


@api_boundary
def load(path: str | Path) -> Run:
    """A finished run, an adapter, a merged model or a checkpoint by its directory.

    Args:
        path: directory, or the hub name of a model.

    Raises:
        ValueError: if nothing usable is there, nor a model of that name on the hub.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a directory or hub name, got {type(path).__name__}")
    home = Path(path).expanduser()
    if not (home / "run.json").is_file():
        try:
            source = find_model(str(home) if home.exists() else str(path))
            if not home.exists():
                late("models.loading:load_config")(source.base, ModelConfig())
        except ValueError as error:
            if "trust_remote_code" not in str(error):  # it is there, with code
                raise ValueError(str(error).replace("--model_name_or_path ", "")) from error
    return Run(home.absolute() if home.exists() else home)


@with_options(SupervisedConfig, *NAMED)
def sft(
    model: Model | None = None,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: object,
) -> Run:
    """Fine-tune a language model on rows of text, of answers or of conversations (step 1).

    Args:
        model: hub name, directory, earlier ``Run``, or (model, tokenizer) that are loaded,
            which are not changed; the bundled tiny model when absent.
        data: path or paths, list of dicts or of texts, DataFrame, ``datasets.Dataset``, or another
            iterable of dicts that can be gone through again; the bundled data when absent.
        eval_data: held-out rows, likewise; by default a share of the data (``eval_ratio``).
        output_dir: what the run writes; a temporary directory when absent.
        callbacks: functions ``f(event, step, metrics)``, called on rank 0 with each line of
            metrics.jsonl; one that returns ``"stop"`` ends the run at the next step, with a
            checkpoint and the status "stopped".
        resume: ``"latest"``, ``"auto"`` or a checkpoint to go on from.
        quiet: print nothing.
        **options: those of ``dschat-lora sft --help all``, by their names.

    Returns:
        The run, with its directory, metrics and adapter. Call on every rank of a launch.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for a value, a file or a row that cannot be used, in the words of the command.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint is saved.
    """
    common = common_options(data, eval_data, output_dir, resume)
    return train("sft", {"model_name_or_path": model, **common}, options, callbacks, quiet)


@with_options(RewardStageConfig, *NAMED)
def reward(
    model: Model | None = None,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: object,
) -> Run:
    """Train a reward model on pairs of answers (step 2); arguments as those of ``sft``."""
    common = common_options(data, eval_data, output_dir, resume)
    return train("reward", {"model_name_or_path": model, **common}, options, callbacks, quiet)


@with_options(DpoStageConfig, *NAMED)
def dpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: object,
) -> Run:
    """Train a policy by DPO, ORPO, SimPO or KTO; arguments as those of ``sft``."""
    common = common_options(data, eval_data, output_dir, resume)
    return train("dpo", {"model_name_or_path": model, **common}, options, callbacks, quiet)


@with_options(RlhfConfig, *NAMED, "reward_function")
def rlhf(
    model: Model | None = None,
    data: Data | None = None,
    *,
    rewards: Reward | Sequence[Reward] = (),
    critic: Model | None = None,
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: object,
) -> Run:
    """Train a policy on its own responses by PPO, RLOO or GRPO (step 3).

    The other arguments are those of ``sft``; ``model`` is the actor, ``data`` its prompts.

    Args:
        model: the actor, as in ``sft``.
        data: rows with prompts.
        rewards: what scores responses, one or several: functions that take ``responses`` (or
            ``completions``), ``prompts`` and columns of the data, runs of ``reward``, paths of
            reward models, names such as ``"builtin:length=12"``, or objects with ``names`` that
            give a reward by each of them. With ``reward_weights`` each has a weight.
        critic: reward model from which the critic starts, and which scores too; by default the
            first reward model of ``rewards``, if any.
        eval_data: held-out prompts.
        output_dir: as in ``sft``.
        callbacks: as in ``sft``.
        resume: as in ``sft``.
        quiet: print nothing.
        **options: those of ``dschat-lora rlhf --help all``, by their names.
    """
    with ExitStack() as stack:
        common = common_options(data, eval_data, output_dir, resume)
        weights = options.pop("reward_weights", None)
        named = {
            "actor_model_name_or_path": model,
            **common,
            **reward_options(rewards, critic, weights, stack),
        }
        return train("rlhf", named, options, callbacks, quiet)


def common_options(
    data: Data | None,
    eval_data: Data | None,
    output_dir: PathLike | None,
    resume: PathLike | None,
) -> dict[str, object]:
    """Options of every stage by their names."""
    return {
        "data_path": data,
        "eval_data_path": eval_data,
        "output_dir": output_dir,
        "resume_from_checkpoint": resume,
    }


def _checked_callback(callback: Callback) -> Callback:
    """A callback whose mistakes are those of a user's function, and not of an option."""
    if not callable(callback):
        raise TypeError(f"callbacks must be functions, got a {type(callback).__name__}")
    name = function_name(callback)
    with suppress(ValueError):  # of a builtin function without a signature
        signature = inspect.signature(callback)
        try:
            signature.bind("train", 0, {})
        except TypeError:
            words = f"callbacks take (event, step, metrics), {name} takes {signature}"
            raise TypeError(words) from None

    def called(event: str, step: int, metrics: dict[str, Any]) -> object:
        try:
            return callback(event, step, metrics)
        except (ValueError, OSError) as error:
            raise RuntimeError(f"the callback {name} failed: {error}") from error

    return called


def train(
    stage: str,
    named: Mapping[str, object],
    options: Mapping[str, object],
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    *,
    of_command: bool = False,
) -> Run:
    """Check the options as the command would, train, and give what the run left."""
    given = {name: value for name, value in named.items() if value is not None}
    if twice := sorted(given.keys() & options.keys()):
        raise TypeError(f"{twice[0]} is given by an argument of its own, too; give one")
    if not isinstance(callbacks, list | tuple):
        raise TypeError(f"callbacks must be a list of functions, got a {type(callbacks).__name__}")
    callbacks = [*map(_checked_callback, callbacks)]
    with ExitStack() as stack:
        config_class = STAGES[stage].config
        values = option_values(config_class, {**options, **given}, stack)
        config: StageConfig = build_config(config_class, options_in_python(config_class, values))
        stack.enter_context(only_run())
        stack.enter_context(run_in_process(quiet=quiet))
        if (shown := _run_view("live")) is not None:
            stack.enter_context(shown(stage, quiet=quiet))
        config = check_as_verb(config, stage)
        caller = Caller(callbacks, in_python=True, of_command=of_command)
        path = late(STAGES[stage].program)(config, caller)
    if path is None:
        return Run(config.run.output_dir or ".", record={"stage": stage, "status": "dry run"})
    return Run(path.absolute())
