"""Pretrained causal language models and their tokenizers, read from files."""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging
from transformers.utils.logging import disable_progress_bar

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.manifest import WEIGHTS_INDEX, weight_map
from dschat_lora.checkpoint.quantization import base_file, located
from dschat_lora.config.groups import LoadConfig, ModelConfig
from dschat_lora.config.values import parse_rope_scaling
from dschat_lora.data.chat import end_tokens
from dschat_lora.data.templates import BUILT_IN_TEMPLATE, read_chat_template
from dschat_lora.engine.distributed import planned_varlen
from dschat_lora.kernels.support import runs_kernels
from dschat_lora.kernels.trial import try_kernels
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.models.attention import LONG, flash_3
from dschat_lora.models.composite import auto_class, check_alone, text_config
from dschat_lora.models.four_bit_base import four_bits_of, hold_four_bits, kind_of, take_kind
from dschat_lora.models.fused import fuse_kernels, keep_plain
from dschat_lora.models.option_checks import original_positions, position_limit
from dschat_lora.models.stored_weights import check_whole, empty_parameters, load_parts

# The run has a log of its own; a bar for each of a few weights says nothing.
disable_progress_bar()
_DROPOUT_NAMES = ("dropout", "dropout_prob", "drop", "pdrop", "layerdrop")
ModuleT = TypeVar("ModuleT", bound=nn.Module)
MOST_PARTS = 10_000  # layers or labels; no model has more
_COUNTS = re.compile(r"(n|num)_(\w+_)?(layers?|labels)")


def load_tokenizer(path: str, config: ModelConfig) -> Tokenizer:
    """The model's tokenizer, right-padding, with EOS standing in where it has no pad token.

    It has a chat template, of ``--chat_template``, its own or the built-in one, and is saved with
    it.

    Raises:
        ValueError: if there is none at ``path``, or it knows no end of sequence.
    """
    with hub_errors("--model_name_or_path", path, "tokenizer"):
        where, more = located(path)
        code = config.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=code, **more)
    if config.add_eot_token:
        tokenizer.add_special_tokens({"eos_token": config.eot_token})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no end-of-sequence token; name one with "
            "--add_eot_token --eot_token TOKEN"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = BUILT_IN_TEMPLATE
    return tokenizer


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """End-of-sequence, and the special tokens with which the chat template ends an answer."""
    ends = tokenizer.convert_tokens_to_ids(list(end_tokens(tokenizer)))
    return [int(tokenizer.eos_token_id), *ends]


def stop_at(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Add end tokens to the model's generation config, which is saved with it."""
    known = model.generation_config.eos_token_id
    ends = list(known) if isinstance(known, list | tuple) else [] if known is None else [known]
    if len(ids) > 1 and not set(ids) <= set(ends):
        model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *ids]))


def load_config(path: str, config: ModelConfig) -> PretrainedConfig:
    """The model's configuration with every dropout set to ``--dropout``.

    Of a composite model it is that of the text model.

    Raises:
        ValueError: if it cannot be read, is that of an encoder-decoder model, or the weights are
            quantised in a way that is not known.
    """
    model_config = read_config(path, config)
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"--model_name_or_path {path}: {model_config.model_type} models are encoder-decoders, "
            "but only decoders can be trained: causal language models such as Llama, Qwen or OPT"
        )
    kind_of(model_config, path)
    for name in _dropouts(model_config):
        setattr(model_config, name, 0.0 if name == "layerdrop" else config.dropout)
    if scaling := parse_rope_scaling(config.rope_scaling):
        _scale_rope(model_config, scaling)
    return model_config


def _scale_rope(config: PretrainedConfig, scaling: Mapping[str, Any]) -> None:
    """Put ``scaling`` in place of the scaling of a configuration, with the positions it reaches.

    Raises:
        ValueError: if the model has no rotary embeddings, or transformers refuses the scaling.
    """
    rope, typed = getattr(config, "rope_parameters", None), f"--rope_scaling {json.dumps(scaling)}"
    if not rope or config.nested_rope_parameter_keys(rope):
        how = (
            "uses different rotary embeddings in different layers"
            if rope
            else "has no rotary embeddings"
        )
        raise ValueError(f"{typed}: a {config.model_type} model {how}; drop the option")
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    fields = config.to_dict()
    config.max_position_embeddings = position_limit(fields, scaling)
    if scaling["rope_type"] != "linear":
        kept["original_max_position_embeddings"] = original_positions(fields)
    config.rope_parameters = {**kept, **scaling}
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError) as error:
        raise ValueError(f"{typed}: {error.args[0]}") from error


def stored_dropouts(path: str, config: ModelConfig) -> dict[str, float]:
    """Dropout probabilities that the model came with, by the names of its configuration."""
    return _dropouts(read_config(path, config))


def read_config(path: str, config: ModelConfig) -> PretrainedConfig:
    """The configuration as it is stored, of the text model where there are several.

    Raises:
        ValueError: if it cannot be read.
    """
    with hub_errors("--model_name_or_path", path, "configuration"):
        where, more = located(path)
        if (file := base_file(path)) is not None:
            file.check_installed()
        check_local_files(where, PretrainedConfig.get_config_dict(where, **more)[0])
        code = config.trust_remote_code
        return text_config(AutoConfig.from_pretrained(where, trust_remote_code=code, **more))


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
    names = vars(config).items()
    return {k: v for k, v in names if k.endswith(_DROPOUT_NAMES) and isinstance(v, float)}


def load_causal_lm(
    path: str,
    model_config: PretrainedConfig,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    meta: bool,
    group: TensorGroup | None = None,
) -> PreTrainedModel:
    """The pretrained model, whose weights are read straight into ``dtype``.

    ``path`` is a local directory or a hub name, ``model_config`` from :func:`load_config`. With
    ``meta`` it is the empty shape, for a rank that receives its shards from rank 0. Of the ranks of
    ``group`` each reads its part alone; without one the model is whole.
    """
    kwargs = load_options(config, dtype)
    kind = take_kind(model_config, path)
    four_bits = four_bits_of(kind, config)
    with hub_errors("--model_name_or_path", path, "model"), attention_errors(model_config, config):
        auto = auto_class(model_config, "CAUSAL_LM")
        if meta or group is not None or kind is not None or four_bits is not None:
            build = partial(auto.from_config, model_config, **kwargs)
            model = build_without_values(build, group, meta=meta)
            if four_bits is not None:
                hold_four_bits(model, path, four_bits)
            if not meta:
                load_parts(model, path)
                check_alone(model)
                with suppress(OSError):  # as transformers, which many models do without
                    model.generation_config = GenerationConfig.from_pretrained(located(path)[0])
            return complete(model, config)
        model, report = auto.from_pretrained(
            path, config=model_config, output_loading_info=True, **kwargs
        )
        check_loaded(model, report["missing_keys"])
        check_alone(model)
        return complete(model, config)


def complete(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """The model by few kernels, whose ``base_model`` is what lies below its head."""
    planned = planned_varlen()  # where a GPU is planned, whether kernels in Triton run on it
    on_gpu = torch.cuda.is_available() if planned is None else True
    if planned is None and on_gpu:
        try_kernels(torch.device("cuda"))
    if config.fused_kernels == "on" or (config.fused_kernels == "auto" and on_gpu):
        on_cpu = config.fused_kernels == "on"
        mlps = on_cpu or (runs_kernels(torch.device("cuda")) if planned is None else planned)
        fuse_kernels(model, on_cpu=on_cpu, mlps=mlps)
    elif config.fused_kernels == "off":
        keep_plain(model)
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # Llama 4 has that of a whole with vision
    return model


def load_options(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What ``from_config`` and ``from_pretrained`` are given besides a configuration."""
    auto = config.attn_implementation == "auto"
    return {
        "dtype": dtype,
        # Given none, transformers chooses as "auto" does.
        "attn_implementation": None if auto else config.attn_implementation,
        "trust_remote_code": config.trust_remote_code,
    }


def build_without_values(
    build: Callable[[], PreTrainedModel], group: TensorGroup | None, *, meta: bool
) -> PreTrainedModel:
    """What ``build`` makes, without values of parameters, and what ``group`` leaves of it here.

    Buffers are real unless all of it is to be on the meta device.
    """
    with torch.device("meta") if meta else empty_parameters():
        model = build()
    if group is not None:
        from dschat_lora.models.tensor_parallel import divide

        divide(model, group)
    return model.eval()


@contextmanager
def attention_errors(model_config: PretrainedConfig, config: ModelConfig) -> Iterator[None]:
    """Say what to do where an architecture lacks the kernel that was asked for."""
    try:
        yield
    except ValueError as error:
        if "does not support an attention implementation through" in str(error):
            raise ValueError(
                f"--attn_implementation {config.attn_implementation}: {model_config.model_type} "
                "has no such implementation in transformers; drop the option to use another"
            ) from error
        raise


def attention_note(model: PreTrainedModel, config: LoadConfig) -> str | None:
    """What to tell of the kernel that ``--attn_implementation auto`` has chosen, if not torch's."""
    chosen = model.config._attn_implementation
    if chosen == "sdpa" and torch.cuda.is_available() and flash_3(torch.device("cuda")) is not None:
        return f"sequences of at least {LONG:,} positions use FlashAttention 3"
    if config.attn_implementation != "auto" or chosen != "eager":
        return None
    return f"attention is eager: {model.config.model_type} has no sdpa in transformers"


def share_parameters(module: ModuleT) -> ModuleT:
    """Another tree of modules over the parameters and buffers of ``module`` themselves.

    What is later put in place of a layer of one tree (an adapter), and hooks on one tree's modules,
    are not seen by the other; a changed value of a weight is.
    """
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def check_loaded(model: nn.Module, lacking: Collection[str], *, new: Collection[str] = ()) -> None:
    """Refuse files that are ``lacking`` weights, but for ``new`` ones, or hold NaN or infinities.

    Those may not show in what a model computes: torch's attention on a CPU hides NaN.

    Raises:
        ValueError: naming the first few.
    """
    check_whole(lacking, new=new)
    for name, parameter in model.named_parameters():
        if name not in lacking:
            check_finite(parameter, name)


def check_local_files(path: str, fields: Mapping[str, Any]) -> None:
    """Refuse what transformers would read elsewhere, wait for, or build for hours.

    ``fields`` are those of ``config.json``, ``path`` is a directory or a hub name.

    Raises:
        ValueError: naming the field or the file.
    """
    waiting: list[Any] = [fields]
    while waiting:
        part = waiting.pop()
        waiting += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            counted = _COUNTS.fullmatch(str(name)) is not None and type(value) is int
            if counted and not 0 <= value <= MOST_PARTS:
                raise ValueError(f"{name} of config.json must be 0 to {MOST_PARTS:,}, got {value}")
    index = Path(path) / WEIGHTS_INDEX
    if index.is_file():
        weight_map(index)


@contextmanager
def hub_errors(option: str, name: str, what: str) -> Iterator[None]:
    """Turn a failure to find or read ``name`` into a ValueError that names the option."""
    try:
        yield
    except Exception as error:
        # Of a damaged file libraries raise whatever its content leads them to, plain Exception
        # and AssertionError too.
        if type(error).__name__ == "OutOfMemoryError":  # of a GPU
            raise
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if "couldn't connect to" in reason:
            cause: BaseException = error
            while inner := cause.__cause__ or (
                None if cause.__suppress_context__ else cause.__context__
            ):
                cause = inner
            why = f"the hub cannot be reached ({cause})"
            if type(cause).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
                why = "HF_HUB_OFFLINE is set"
            reason = f"there is no directory of this name, and {why}"
        if "ignore_mismatched_sizes" in reason:
            reason = "its config.json describes weights of other shapes than its files hold"
        raise ValueError(f"{option} {name}: its {what} cannot be loaded: {reason}") from error


@contextmanager
def only_errors() -> Iterator[None]:
    """Inside the block transformers does not log what is unusual about a model."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
