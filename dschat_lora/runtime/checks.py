"""Checks that the stages compose: each finds one mistake in the options, before torch is imported.

A check takes the config and what the options name, such as a model's source. It raises a
ValueError that names option, value and remedy; returns the config with something resolved; or
returns None.
"""

import importlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from packaging.version import Version

from dschat_lora.checkpoint.adapter_config import WEIGHTS_FILE, verify_adapter
from dschat_lora.checkpoint.history import is_checkpoint
from dschat_lora.checkpoint.manifest import (
    WEIGHTS_INDEX,
    DamagedError,
    safetensors_header,
    weight_map,
)
from dschat_lora.checkpoint.quantization import stored_bits
from dschat_lora.config.bundled import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.config.data import DataConfig, SourceConfig
from dschat_lora.config.files import read_json
from dschat_lora.config.groups import LoadConfig, LoraConfig, ParallelConfig, Switch
from dschat_lora.config.held import held_object, is_held
from dschat_lora.config.stages import StageConfig
from dschat_lora.config.when import without_effect
from dschat_lora.models.option_checks import check_divides, check_files, check_four_bits
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.terminal import note_once
from dschat_lora.runtime.resume import is_first_rank, settle

if TYPE_CHECKING:
    from dschat_lora.runtime.resume import Resumable

# What configurations of models call the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ConfigT = TypeVar("ConfigT")
ResumableT = TypeVar("ResumableT", bound="Resumable")
DataT = TypeVar("DataT", bound=SourceConfig)
StageT = TypeVar("StageT", bound=StageConfig)
InputsT = TypeVar("InputsT")
Check = Callable[[ConfigT, InputsT], ConfigT | None]


def apply_checks(
    config: ConfigT, inputs: InputsT, checks: Iterable[Check[ConfigT, InputsT]]
) -> ConfigT:
    """The config after every check in turn; the first that fails is the one a user reads."""
    for check in checks:
        config = check(config, inputs) or config
    return config


def resolve_stage(
    config: ResumableT, check: Callable[[ResumableT], ResumableT], *, stage: str
) -> ResumableT:
    """The checked config of a stage, with the checkpoint it resumes from.

    Where a run is to be resumed, the first rank chooses the checkpoint, and the others wait for
    it (:func:`dschat_lora.runtime.run.open_run`): their config comes back as it is.
    """
    if config.checkpoint is None:
        if config.run.resume_from_checkpoint and not is_first_rank():
            return config
        config = settle(config, stage=stage)
    return check(config)


def model_fields(source: ModelSource) -> dict[str, Any]:
    """The configuration of a local base; empty for one of the hub."""
    path = Path(source.base) / "config.json"
    if not path.is_file():
        return {}
    try:
        fields = read_json(path)
    except ValueError as error:
        raise ValueError(f"--model_name_or_path: {path} is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--model_name_or_path: {path} must hold a JSON object")
    return fields


def model_name(source: ModelSource) -> str:
    """The model and its adapter, for the first line of a run."""
    base = "the bundled tiny model" if source.bundled else source.base
    return base + (f" with the adapter {source.adapter}" if source.adapter else "")


def find_of_kind(name: str | None, tasks: tuple[str, ...], *, option: str) -> ModelSource:
    """The model that an option names, of a kind that it takes, with the adapter as it was written.

    Raises:
        ValueError: naming ``option`` in front of what it was given.
    """
    try:
        source = find_model(name)
        check_adapter_files(source)
        check_task(source, tasks)
    except ValueError as error:
        raise ValueError(str(error).replace("--model_name_or_path", option)) from error
    return source


def check_adapter_files(source: ModelSource) -> None:
    """Refuse an adapter whose files are not those of its manifest, or that fits another base."""
    if source.adapter is not None and is_first_rank():
        verify_adapter(source.adapter)
        if not is_checkpoint(source.adapter):
            check_widths(source.adapter, Path(source.base))


def check_widths(adapter: Path, base: Path) -> None:
    """Refuse an adapter with a factor whose input width no layer of that name has in the base.

    What else tells bases apart shows once the model is there. A base of the hub, one without
    safetensors and one whose files hold packed weights are not looked at.

    Raises:
        ValueError: naming the adapter, its base, and the first layer that differs.
    """
    if "quantization_config" in model_fields(ModelSource(str(base))):
        return
    try:
        names = sorted(set(weight_map(base / WEIGHTS_INDEX).values()))
    except DamagedError:
        names = ["model.safetensors"]
    shapes: dict[str, list[list[int]]] = {}  # of the layers whose names end so
    try:
        for file in names:
            for name, tensor in safetensors_header(base / file).items():
                if name.endswith(".weight"):
                    shapes.setdefault(name.split(".")[-2], []).append(tensor["shape"])
    except DamagedError:
        return  # loading says what is damaged
    for name, tensor in safetensors_header(adapter / WEIGHTS_FILE).items():
        module, _, factor = name.partition(".lora_A.")
        layers = shapes.get(module.rpartition(".")[2], [])
        if (
            factor
            and layers
            and tensor["shape"]
            and not any(tensor["shape"][-1] in shape for shape in layers)
        ):
            raise ValueError(
                f"the adapter {adapter} belongs to another base than {base}: its lora_A of "
                f"{module} has {tensor['shape'][-1]} inputs, but that layer of the base is "
                f"{' x '.join(map(str, layers[0]))}; set base_model_name_or_path in its "
                "adapter_config.json to its base"
            )


def architecture_names(fields: Mapping[str, Any]) -> list[str]:
    """What a model's configuration says of its class; empty if that is no list of names."""
    names = fields.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def task_of(source: ModelSource) -> str | None:
    """PEFT's name of the kind of model: that of its adapter, SEQ_CLS of scores; None if unknown."""
    if source.adapter_config is not None:
        return source.adapter_config.task_type
    architectures = architecture_names(model_fields(source))
    is_scored = any(name.endswith("ForSequenceClassification") for name in architectures)
    return "SEQ_CLS" if is_scored else None


def check_task(source: ModelSource, tasks: tuple[str, ...]) -> None:
    """Refuse a language model where a reward model is wanted and the other way round."""
    task = task_of(source)
    if task is None and tasks == ("SEQ_CLS",) and Path(source.base).is_dir():
        task = "CAUSAL_LM"
    name = source.adapter or source.base
    if task is not None and task not in tasks:
        kinds = {"CAUSAL_LM": "a language model", "SEQ_CLS": "a reward model"}
        raise ValueError(
            f"--model_name_or_path {name} is {kinds.get(task, f'a {task} model')}, but this needs "
            f"{' or '.join(kinds[each] for each in tasks)}"
            + ", the output of step 2"
            * (tasks == ("SEQ_CLS",))
        )
    if task == "SEQ_CLS" and source.adapter is not None and not is_checkpoint(source.adapter):
        tensors = safetensors_header(source.adapter / WEIGHTS_FILE)
        if not any(".score." in name for name in tensors):
            raise ValueError(
                f"--model_name_or_path {name} is the adapter of a reward model, but its score head "
                "is missing; save it again with modules_to_save=['score']"
            )


def continued_lora(lora: LoraConfig, source: ModelSource, given: frozenset[str]) -> LoraConfig:
    """The settings of the adapter that ``--model_name_or_path`` continues, else as given.

    Of options that name layers :func:`dschat_lora.models.build.check_targets` finds out.

    Raises:
        ValueError: where an option contradicts the adapter.
    """
    adapter = source.adapter_config
    if adapter is None:
        fields = model_fields(source) if lora.lora_dim and lora.expert_lora_dim else {}
        fields = fields | fields.get("text_config", {})
        if fields and not any(fields.get(name) for name in EXPERT_COUNTS):
            raise ValueError(
                f"--expert_lora_dim {lora.expert_lora_dim} is for mixtures of experts, but "
                f"{source.base} is not one; drop the option"
            )
        return lora
    if "lora_dropout" not in given:
        lora = replace(lora, lora_dropout=adapter.lora_dropout)
    stored: dict[str, Any] = {
        "lora_dim": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "use_rslora": adapter.use_rslora,
        "train_bias": adapter.bias,
        "enable_lora": adapter.enable_lora,
    }
    for name, value in {**stored, "modules_to_save": adapter.modules_to_save}.items():
        mine = getattr(lora, name)
        if name in given and mine != value:
            if isinstance(value, tuple):
                mine, value = (" ".join(parts) or "nothing" for parts in (mine, value))
            raise ValueError(
                f"--{name} is {mine!r}, but the adapter {source.adapter} has {value!r}; drop the "
                "option to continue training it, or merge it first (--merge_adapter) to train a "
                "new one on top"
            )
    for name in sorted({"expert_lora_dim", "expert_lora_alpha"} & given):
        raise ValueError(f"--{name} is determined by the adapter {source.adapter}; drop the option")
    return replace(lora, **stored)


def check_lora_options(lora: LoraConfig, given: frozenset[str]) -> None:
    """Refuse two choices of layers, and options of adapters or experts where there are none."""
    if {"lora_module_name", "target_modules"} <= given:
        raise ValueError("--lora_module_name and --target_modules both select layers; give one")
    of_experts = {"expert_lora_dim", "expert_lora_alpha", "expert_learning_rate"}
    chosen = {"lora_module_name", "target_modules", "modules_to_save"}
    needless = sorted(given & (chosen | of_experts))
    if lora.lora_dim == 0 and needless:
        raise ValueError(
            f"--{needless[0]} needs --lora_dim > 0: without it all weights are trained"
        )
    needless = sorted(given & of_experts - {"expert_lora_dim"})
    if lora.expert_lora_dim == 0 and needless:
        raise ValueError(
            f"--{needless[0]} is for trained experts, but --expert_lora_dim 0 leaves them frozen; "
            "drop one"
        )


def settled_base_bits(
    asked: int | None,
    source: ModelSource,
    lora: LoraConfig | None = None,
    *,
    trains: bool = False,
    tensor_parallel_size: int = 1,
) -> Literal[16, 4]:
    """Bits of a base: of its files where they are quantised, else as asked for or by its adapter.

    Raises:
        ValueError: if the base cannot be loaded, or not train what is to train, in so many bits.
    """
    stored = stored_bits(model_fields(source), source.base)
    if stored == 4 and asked == 16:
        raise ValueError(
            f"--base_bits 16: the files of {source.base} have 4 bits; drop the option, or give "
            "the original 16-bit model"
        )
    if 4 not in (stored, asked or source.base_bits):
        return 16
    check_four_bits(lora or LoraConfig(), trains=trains, tensor_parallel_size=tensor_parallel_size)
    return 4


def check_divided(source: ModelSource, parallel: ParallelConfig) -> None:
    """Refuse a local model that ``--tensor_parallel_size`` does not divide.

    One of the hub is checked once its configuration is here.
    """
    size = parallel.tensor_parallel_size
    try:
        check_divides(model_fields(source), size)
        check_files(Path(source.base), size)
    except ValueError as error:
        name = "the bundled tiny model" if source.bundled else f"--model_name_or_path {source.base}"
        raise ValueError(f"{name}: {error}") from error


def recomputing(parallel: ParallelConfig, switches: Mapping[str, Switch]) -> dict[str, Switch]:
    """Whether models recompute, by option: with ``--offload_activations`` auto is on.

    Raises:
        ValueError: if all are off, so that it finds no input to move.
    """
    if not parallel.offload_activations:
        return dict(switches)
    settled: dict[str, Switch] = {n: True if v == "auto" else v for n, v in switches.items()}
    if not any(settled.values()):
        typed = " ".join(f"--no-{name}" for name in switches)
        raise ValueError(
            f"--offload_activations offloads the inputs of recomputed blocks, but {typed} "
            "recomputes none; drop one of them"
        )
    return settled


def require_packages(user: str, *names: str, extra: str) -> None:
    """Refuse to go on without the packages of an extra, such as ``h11`` or ``mcp>=2``.

    Raises:
        ValueError: naming the first that lacks or is too old, its ``user``, and how to install it.
    """
    for needed in names:
        name, _, oldest = needed.partition(">=")
        is_there, older = importlib.util.find_spec(name) is not None, ""
        if is_there and oldest:
            try:
                is_there = Version(version(name)) >= Version(oldest)
                older = f", found {version(name)}"
            except PackageNotFoundError:  # a module of the user's has that name
                is_there = False
        if not is_there:
            raise ValueError(f"{user} needs {needed}{older}: pip install 'dschat_lora[{extra}]'")


def check_compile(load: LoadConfig, *zero_stages: int | None) -> None:
    """Refuse to compile what gathers its weights as it runs."""
    if load.compile and 3 in zero_stages:
        raise ValueError(
            "--compile cannot be combined with --zero_stage 3, which gathers the weights of each "
            "layer as it runs; use --zero_stage 2, or drop --compile"
        )


def note_without_effect(config: StageConfig) -> None:
    """Log a note on each option that was given and changes nothing; the first rank alone."""
    for message in without_effect(config):
        note_once(message)


def with_bundled(data: DataT, given: frozenset[str], **lengths: int) -> DataT:
    """The bundled rows in the place of data that is not named, by these lengths unless given.

    Raises:
        ValueError: if ``--data_path`` has no value.
    """
    if "data_path" in given:
        raise ValueError("--data_path is empty; give a file, or omit it to use the bundled data")
    return replace(
        data,
        data_path=(str(BUNDLED_DATA["train"]),),
        eval_data_path=data.eval_data_path or (str(BUNDLED_DATA["eval"]),),
        **{name: length for name, length in lengths.items() if name not in given},  # type: ignore[arg-type]
    )


def check_bundled_data_fits(source: ModelSource, *, stage: str, role: str = "") -> None:
    """Refuse the bundled data for another model than the bundled one and what was made of it.

    Raises:
        ValueError: naming the command with data.
    """
    fits, file = source.bundled, Path(source.tokenizer) / "tokenizer.json"
    if not fits:  # what runs make of the bundled model has its vocabulary
        with suppress(OSError, ValueError, KeyError, TypeError):
            own, bundled = (read_json(each) for each in (file, BUNDLED_MODEL / "tokenizer.json"))
            fits = bool(own["model"]["vocab"] == bundled["model"]["vocab"])
    if not fits:
        typed = f"--{role}model_name_or_path {shlex.quote(str(source.adapter or source.base))}"
        raise ValueError(
            f"{typed} needs --data_path, as the bundled data is for the bundled model: add "
            f"--data_path FILE, as in dschat-lora {stage} {typed} --data_path FILE"
        )


def check_function(option: str, name: str) -> None:
    """Refuse a function whose module cannot be found, without importing it."""
    if is_held(name):
        held_object(name, option)
        return
    module, spec = name.partition(":")[0], None
    with working_directory(), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        raise ValueError(
            f"--{option} {name}: there is no module {module} in the working directory or among "
            "the installed packages"
        )


def imported(option: str, name: str, kind: str) -> Any:
    """The object ``module:object`` of a user's; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is none, naming the ``option`` and the ``kind`` of object.
    """
    module_name, _, attribute = name.partition(":")
    with working_directory():
        try:
            module = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"--{option} {name} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"--{option} {name}: {module_name} has no {f'{kind} {attribute}'.strip()}")
    return getattr(module, attribute)


def check_command(option: str, command: str, remedy: str = "") -> None:
    """Refuse a command whose program is not there."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--{option} {command!r}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        first = words[0] if words else "nothing"
        raise ValueError(
            f"--{option} starts with {first}, which is not a program on the PATH{remedy}"
        )


@contextmanager
def working_directory() -> Iterator[None]:
    """Put the working directory on ``sys.path``, as ``python -m`` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def cache_directory(data: DataConfig) -> Path:
    """Where tokenised data and reference log-probabilities are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dschat_lora"
    return Path(data.data_output_path or default).expanduser()
