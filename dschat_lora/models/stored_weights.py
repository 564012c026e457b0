"""Weights in files by the names that they have in the model, whatever form the files hold them in.

transformers' own rules rename, join and split what is stored (per-expert weights become fused ones)
and turn blocks of codes into values; one weight is made at a time.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
from transformers.utils import cached_file

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.manifest import weight_map
from dschat_lora.checkpoint.quantization import base_file, quantization, stored_form
from dschat_lora.checkpoint.tensors import save_tensors
from dschat_lora.engine.distributed import device
from dschat_lora.lora import nf4
from dschat_lora.lora.autograd import QuantState
from dschat_lora.lora.layers import full_shape, is_quantized, state_of
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.parallel import group_of, shard_of

_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"
_PACKED = f".{nf4.STATE_KEY}"
_CODES = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Source:
    """What a weight is made of: the one key that it has, or those that a rule joins.

    Attributes:
        keys: in the files, with the part of the rule that each matches.
        rule: None where the weight is stored as it is.
        name: of the first weight that the rule makes.
    """

    rule: WeightConverter | None
    name: str
    keys: list[tuple[str, str]] = field(default_factory=list)


class StoredWeights:
    """The weights at ``path``, a directory, a name on the hub or a file, for ``model``.

    Raises:
        ValueError: if there are no files, or none of a kind that may be read: without ``pickled``
            they must be safetensors.
    """

    def __init__(self, model: PreTrainedModel, path: str, *, pickled: bool = True) -> None:
        self._model = model
        # The text model of a composite one is named by the rules of that.
        named = model.on_meta() if hasattr(model, "on_meta") else model
        self._whole = _Whole(model, config=named.config)
        if (form := base_file(path)) is not None:
            where, named_file = form.located(path)
            file = str(cached_file(where, *named_file.values()))
            tensors, rules = form.weights(model, file)
            self._files = dict.fromkeys(tensors, _Tensors(tensors))
        else:
            fields = PretrainedConfig.get_config_dict(path)[0]
            stored = stored_form(fields, path)
            quantizer = None if stored is None else stored.quantizer(quantization(fields), model)
            rules = get_model_conversion_mapping(named, hf_quantizer=quantizer)
            self._files = _files(path, pickled=pickled)
        weights = {key.rpartition(_PACKED)[0] for key in self._files if key.endswith(_PACKED)}
        parts = {key for key in self._files if key.rpartition(".weight.")[0] + ".weight" in weights}
        self._sources = _sources(named, self._files.keys() - parts, rules)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def packed_layers(self) -> list[str]:
        """Names of the layers whose weights are stored in NF4."""
        own = self._model.state_dict()
        return [
            name.removesuffix(".weight")
            for name, source in self._sources.items()
            if name in own
            and source.rule is None
            and f"{source.keys[0][1]}{_PACKED}" in self._files
        ]

    def packed(self, name: str, state: QuantState) -> nn.Parameter | None:
        """A weight that is to have this ``state``, where it is stored in NF4."""
        key = self._sources[name].keys[0][1]
        if f"{key}{_PACKED}" not in self._files:
            return None
        try:
            return nf4.from_stored(
                lambda part: self._tensor(f"{key}{part}"),
                shape=full_shape(self._model.get_parameter(name)),
                dtype=state.dtype,
                transposed=state.transposed,
            )
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None

    @contextmanager
    def piece(self, name: str) -> Iterator[Any]:
        """A weight, to be sliced: a tensor, or the handle of one that a safetensors file holds."""
        source = self._sources[name]
        key = source.keys[0][1]
        if source.rule is None:
            with _opened(self._files[key]) as tensors:
                yield tensors.get_slice(key)
            return
        rule = deepcopy(source.rule)
        for pattern, each in source.keys:
            rule.add_tensor(source.name, each, pattern, lambda each=each: self._read(each))
        made = rule.convert(source.name, model=self._whole, config=self._whole.config)
        if name not in made:
            raise ValueError(f"{key} cannot be made into {name}")
        value = made[name]
        yield (value[0] if isinstance(value, list) else value).detach()

    def read(self, name: str) -> Tensor:
        """A weight, whole."""
        with self.piece(name) as piece:
            weight: Tensor = piece[...]
        return weight

    def others(self) -> dict[str, Tensor]:
        """What the files hold beside the weights of the model, by key.

        Raises:
            ValueError: if some of it is quantised: beside whole weights it could not be read.
        """
        own = self._model.state_dict()
        keys = (
            key
            for name, source in self._sources.items()
            if name not in own
            for _, key in source.keys
        )
        tensors = {key: self._tensor(key) for key in keys}
        for key, tensor in tensors.items():
            if f"{key}{_PACKED}" in self._files or tensor.dtype in _CODES:
                raise ValueError(f"{key} is quantised, which a merged model cannot contain")
        return tensors

    def _read(self, key: str) -> Tensor:
        with _opened(self._files[key]) as tensors:
            weight: Tensor = tensors.get_slice(key)[...]
        return weight

    def _tensor(self, key: str) -> Tensor:
        if key not in self._files:
            raise ValueError(f"lacks {key}")
        with _opened(self._files[key]) as tensors:
            tensor: Tensor = tensors.get_tensor(key)
        check_finite(tensor, key)
        return tensor


class _Whole:
    """A model as rules of conversion ask for it: parameters whole and not quantised, without data.

    Rules make values in the type of the parameter; those to be quantised are made in float32.
    """

    def __init__(
        self, model: PreTrainedModel, prefix: str = "", *, config: PretrainedConfig
    ) -> None:
        self._model, self._prefix, self.config = model, prefix, config

    def get_submodule(self, name: str) -> "_Whole":
        return _Whole(self._model, f"{self._prefix}{name}.", config=self.config)

    def get_parameter(self, name: str) -> Tensor:
        own = self._model.get_parameter(self._prefix + name)
        dtype = torch.float32 if is_quantized(own) else own.dtype
        return torch.empty(full_shape(own), dtype=dtype, device="meta")

    def __getattr__(self, name: str) -> Tensor:
        return self.get_parameter(name)


def add_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put further tensors into a saved model, in a file of their own."""
    if not tensors:
        return
    index, single = directory / (_SAFETENSORS + _INDEX), directory / _SAFETENSORS
    if single.is_file():
        with _opened(str(single)) as stored:
            names = dict.fromkeys(stored.keys(), "model-text.safetensors")
        single.rename(directory / "model-text.safetensors")
    else:
        names = dict(weight_map(index))
    save_tensors(tensors, directory / "model-rest.safetensors")
    names |= dict.fromkeys(tensors, "model-rest.safetensors")
    size = sum((directory / name).stat().st_size for name in set(names.values()))
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2))


def _sources(model: PreTrainedModel, keys: Collection[str], rules: list[Any]) -> dict[str, _Source]:
    """What each weight of the model is made of, by its name there."""
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names = model.state_dict()
    sources: dict[str, _Source] = {}
    # In the order in which transformers reads them, or experts would change places.
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, names
        )
        if name not in names and key in names:
            name, pattern = key, None
        if pattern is None:
            sources[name] = _Source(None, name, [("", key)])
            continue
        rule = of_pattern[pattern]
        source = sources.setdefault(name, _Source(rule, name))
        source.keys.append((pattern, key))
        first, *others = rule.target_patterns
        sources |= {name.replace(first, other): source for other in others}
    return sources


def _files(path: str, *, pickled: bool) -> dict[str, Any]:
    """File of each key."""
    for single in (_SAFETENSORS, *([_PICKLE] if pickled else [])):
        if (index := cached(path, single + _INDEX)) is not None:
            names = weight_map(Path(index))
            files = {name: cached(path, name) for name in set(names.values())}
            if lacking := sorted(name for name, file in files.items() if file is None):
                raise ValueError(f"there is no {lacking[0]}")
            return {key: str(files[name]) for key, name in names.items()}
        if (file := cached(path, single)) is not None:
            with _opened(file) as tensors:
                return dict.fromkeys(tensors.keys(), file)
    if pickled:
        raise ValueError(f"there is neither {_SAFETENSORS} nor {_PICKLE}")
    raise ValueError(
        f"there is no {_SAFETENSORS}; --tensor_parallel_size above 1 reads weights in parts, "
        "which takes safetensors files"
    )


def cached(path: str, name: str) -> str | None:
    """Where a file of a directory or a hub name lies; None where it has none."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else str(file)


class _Tensors(dict[str, Any]):
    """Tensors by the methods of an open safetensors file."""

    get_tensor = get_slice = dict.__getitem__


@contextmanager
def _opened(file: "str | _Tensors") -> Iterator[Any]:
    """The tensors of a file, which it maps: pages of one that stays open count as memory."""
    if isinstance(file, _Tensors):
        yield file
    elif file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    else:
        yield _Tensors(torch.load(file, map_location="cpu", mmap=True, weights_only=True))


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within, modules are built with parameters on the meta device, and with real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def load_parts(model: PreTrainedModel, path: str, *, new: Collection[str] = ()) -> set[str]:
    """Fill the meta parameters of ``model`` with what this rank holds of them, on CPU.

    Args:
        model: perhaps divided by :func:`dschat_lora.models.tensor_parallel.divide`, perhaps with
            layers that are to hold 4 bits: their weights are quantised as they are read, unless
            the files hold them so.
        path: directory or hub name.
        new: names that the files may lack; those come out uninitialised.

    Returns:
        The names that the files lacked.

    Raises:
        ValueError: if the files lack a weight, or hold one of another shape or one that is not
            finite, or the model is divided and they are no safetensors.
    """
    stored = StoredWeights(model, path, pickled=group_of(model) is None)
    missing: set[str] = set()
    for aliases in parameter_names(model):
        parameter = model.get_parameter(aliases[0])
        state = state_of(parameter)
        name = next((name for name in aliases if name in stored), None)
        new_parameter = None
        if name is None:
            missing.update(aliases)
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        elif state is None or (new_parameter := stored.packed(name, state)) is None:
            with stored.piece(name) as piece:
                value = _own_part(piece, name, parameter)
                if state is not None:
                    new_parameter = nf4.quantize(
                        value, dtype=state.dtype, transposed=state.transposed, worker=device()
                    )
        if new_parameter is None:
            new_parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
            new_parameter.__dict__.update(parameter.__dict__)
        for alias in aliases:
            replace_part(model, alias, new_parameter)
    check_whole(missing, new=new)
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored.read(name))
    return missing


def check_whole(lacking: Collection[str], *, new: Collection[str] = ()) -> None:
    """Refuse files that are ``lacking`` weights, but for ``new`` ones."""
    missing = sorted(set(lacking) - set(new))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"the files lack {', '.join(missing[:3])}{more}")


def parameter_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _own_part(piece: Any, key: str, parameter: Tensor) -> Tensor:
    """This rank's part of a stored tensor, in the type of ``parameter``, or to be quantised."""
    stored = torch.Size(piece.shape if isinstance(piece, Tensor) else piece.get_shape())
    wanted, shard = full_shape(parameter), shard_of(parameter)
    if stored != wanted:
        raise ValueError(f"{key} has the shape {tuple(stored)}, the model {tuple(wanted)}")
    if shard is None:
        whole: Tensor = piece[:]
        if whole.dtype not in (*_FLOATS, parameter.dtype):
            raise ValueError(f"{key} holds {whole.dtype} codes without scales that are known")
        if state_of(parameter) is None:
            # A copy: of a pickle a view would keep the file's pages, and unpacked values may be
            # transposed, which DeepSpeed does not broadcast.
            whole = whole.to(
                parameter.dtype,
                copy=isinstance(piece, Tensor),
                memory_format=torch.contiguous_format,
            )
        check_finite(whole, key)
        return whole
    dim = shard.dim % len(stored)
    parts = [
        piece[tuple([slice(None)] * dim + [slice(start, stop)])] for start, stop in shard.ranges()
    ]
    # Never a view of more than the part.
    own = torch.cat([part.to(parameter.dtype) for part in parts], dim).contiguous()
    check_finite(own, key)
    return own
