"""Composite checkpoints: a text model beside vision or sound, of which the text model is loaded.

The rest is neither built nor read. Modules keep the names that they have in the composite model, so
that an adapter fits the checkpoint that it was trained on, and a merge writes it whole again.
"""

import copy
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from dschat_lora.checkpoint.score_class import register_score_class
from dschat_lora.config.roles import Task
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.stored_weights import StoredWeights, add_tensors, cached
from dschat_lora.models.text_classes import causal_lm_over, reward_model_over

_HEADS: Mapping[Task, str] = {"CAUSAL_LM": "lm_head", "SEQ_CLS": "score"}
_AUTOS: Mapping[Task, tuple[type[_BaseAutoModelClass], ...]] = {
    "CAUSAL_LM": (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM),
    "SEQ_CLS": (AutoModelForSequenceClassification,),
}
_WHOLE = "composite"  # field of the text model's configuration
# Of images, sound and chats; tokenizers write their own.
_BESIDE = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Types whose text model is tested to compute alone what it computes in the composite one.
TRIED = frozenset(
    (
        *("gemma3", "gemma3n", "gemma4", "internvl", "llama4", "llava", "llava_next"),
        *("llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
        "smolvlm",
    )
)


@dataclass(frozen=True)
class TextModelPlace:
    """Where the text model stands in its composite model."""

    auto: str  # transformers' Auto class of the composite model
    shell: type[PreTrainedModel]  # the composite class, which builds the text model alone
    kind: type[PreTrainedModel]  # of the text model below its head
    path: str  # of that
    head: str | None  # path of the output head; None where the composite model has none
    tied: bool  # the head is the embedding
    left_out: tuple[str, ...]  # paths of what is not built


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the text model in a composite one, which it keeps; else ``config``.

    Raises:
        ValueError: if the text model cannot be taken out.
    """
    if "text_config" not in config.sub_configs or _find_class(config, "CAUSAL_LM")[0] is None:
        return config
    text = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = _find_place(config, "CAUSAL_LM").tied
    setattr(text, _WHOLE, config)
    return text


def whole_config(config: PretrainedConfig) -> PretrainedConfig | None:
    """The configuration of the composite model whose text model ``config`` is of, if it is one."""
    return getattr(config, _WHOLE, None)


def auto_class(
    config: PretrainedConfig, task: Task
) -> type[PreTrainedModel] | type[_BaseAutoModelClass]:
    """The class that builds and reads a model, by ``from_config`` and ``from_pretrained``.

    Raises:
        ValueError: if ``config`` is of a text model that cannot work outside its composite one.
    """
    whole = whole_config(config)
    if whole is None:
        if task == "SEQ_CLS":
            register_score_class(config)
        return _AUTOS[task][0]
    place = _find_place(whole, task)
    make = causal_lm_over if task == "CAUSAL_LM" else reward_model_over
    own = _find_class(config, task)[0] or make(place.kind)
    paths = {"model": place.path, _HEADS[task]: place.head or _HEADS[task]}
    members = {"place": place, "paths": paths, "__module__": place.kind.__module__}

    def part(name: str) -> property:
        """What a text model calls ``name`` and the composite one keeps below another module."""

        def get(self: TextModel) -> nn.Module:
            module = self._modules.get(name)
            return self.get_submodule(self.paths[name]) if module is None else module

        return property(get)

    members |= {name: part(name) for name, path in paths.items() if path.split(".")[0] != name}
    return type(own.__name__, (TextModel, own), members)


def left_out_words(model: PreTrainedModel) -> str | None:
    """What to say where ``model`` is the text model of a composite one."""
    whole = whole_config(model.config)
    if whole is None or not isinstance(model, TextModel):
        return None
    rest = ", ".join(model.place.left_out)
    state = "not loaded"
    if model.rest:
        state = "loaded, with adapters"
    elif model.frozen_rest is not None:
        state = f"frozen, {model.frozen_rest[1] / 2**20:.3g} MiB in {str(model.dtype)[6:]}"
    return f"the text model of {whole.model_type}, {model.text_path}, trains; {rest} {state}"


def merged_words(model: PreTrainedModel) -> str | None:
    """What a merge of ``model`` holds beside it, where it is the text model of a composite one."""
    whole = whole_config(model.config)
    if whole is None or not isinstance(model, TextModel):
        return None
    if model.place.head is None:
        kind = whole.model_type
        return f"it is the text model alone: transformers has no reward model of {kind}"
    kept = "merged too" if model.rest else "unchanged"
    return f"it is still a {whole.model_type} model: {', '.join(model.place.left_out)} {kept}"


def check_alone(model: PreTrainedModel) -> None:
    """Refuse a text model that computes something else without the rest of its composite model.

    Types for which that is tested are not tried here. Nothing is on the meta device.

    Raises:
        ValueError: saying how much they differ on eight tokens, or why they cannot be compared.
    """
    whole = whole_config(model.config)
    if whole is None or whole.model_type in TRIED:
        return
    if group_of(model) is not None:
        raise ValueError(_cannot(whole, "not tested with --tensor_parallel_size above 1"))
    shell, is_causal = model.on_meta(), "lm_head" in model.paths
    for part in model.paths.values() if is_causal else [model.text_path]:
        replace_part(shell, part, model.get_submodule(part))
    inputs = {"input_ids": torch.arange(1, 9, device=model.device)[None], "use_cache": False}
    try:
        with torch.no_grad():
            alone, within = (
                each(**inputs).logits if is_causal else each.base_model(**inputs)[0]
                for each in (model.eval(), shell.eval())
            )
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(_cannot(whole, f"it does not work so: {error}")) from error
    off = (alone - within).abs().max() / within.abs().max().clamp(min=1e-12)
    if not off <= 1e-3:
        raise ValueError(_cannot(whole, f"its outputs differ by {off:.2g}"))


class TextModel(PreTrainedModel):  # type: ignore[misc]
    """Mixed into a class of text models: its modules stand where the composite model has them."""

    place: TextModelPlace
    paths: Mapping[str, str]  # of the model below its head, and of the head
    rest: tuple[str, ...] = ()  # paths of what else of the composite model is here, to be adapted
    frozen_rest: tuple[str, int] | None = None  # digest and bytes of what is read beside the model
    rest_rate: float | None = None  # of adapters in the rest, where it is not that of others

    def __init__(self, config: PretrainedConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        kind = self.place.kind
        if type(self._modules.get("model")) is not kind:
            raise ValueError(_cannot(config, f"{type(self).__name__} is not over {kind.__name__}"))
        parts = dict(self._modules)
        self._modules.clear()
        for name, module in parts.items():
            assert module is not None
            _put(self, name, self.paths.get(name, name), module)

        def moved(name: str) -> str:
            first, dot, rest = name.partition(".")
            return self.paths.get(first, first) + dot + rest

        for tied in ("_tied_weights_keys", "all_tied_weights_keys"):
            names = getattr(self, tied) or {}
            setattr(self, tied, {moved(name): moved(other) for name, other in names.items()})

    @property
    def text_path(self) -> str:
        """Path of the text model; the composite one has modules of like names beside it."""
        return self.place.path

    @property
    def auto_name(self) -> str:
        """The Auto class of transformers that loads the composite model."""
        return self.place.auto

    @property
    def base_model(self) -> nn.Module:
        """The model below its head."""
        own = self._modules.get("model")
        if own is None or isinstance(own, _Alias):
            return self.get_submodule(self.text_path)
        return own

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put another embedding in place."""
        self.base_model.set_input_embeddings(value)  # type: ignore[operator]

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Put another output head in place."""
        replace_part(self, self.paths["lm_head"], value)

    def put_rest(self, whole: nn.Module | None) -> None:
        """Have the modules of a composite model beside its text model here too; None: none."""
        for path in self.place.left_out:
            above, _, last = path.rpartition(".")
            if whole is not None:
                setattr(self.get_submodule(above), last, getattr(whole.get_submodule(above), last))
            elif self.rest:
                delattr(self.get_submodule(above), last)
        self.rest = () if whole is None else self.place.left_out

    def on_meta(self) -> PreTrainedModel:
        """The composite class of what is here; its names are those that files are read by."""
        kind = self.whole_class if self.rest else self.place.shell
        return _on_meta(kind, _with_text(self.config))

    @property
    def whole_class(self) -> type[PreTrainedModel]:
        """The composite class of transformers."""
        return self.place.shell.__mro__[2]

    @classmethod
    def from_config(cls, config: PretrainedConfig, **options: object) -> PreTrainedModel:
        """As ``AutoModel.from_config``."""
        options.pop("trust_remote_code", None)
        model: PreTrainedModel = cls._from_config(config, **options)
        return model

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: PretrainedConfig | None = None,
        output_loading_info: bool = False,
        **options: object,
    ) -> PreTrainedModel | tuple[PreTrainedModel, Mapping[str, object]]:
        """As ``AutoModel.from_pretrained``, of the files of a composite model.

        Without ``config`` they may also be of a text model that :meth:`save_pretrained` wrote.
        """
        config = config or text_config(AutoConfig.from_pretrained(path))
        if (whole := whole_config(config)) is None:
            return AutoModelForSequenceClassification.from_pretrained(path, **options)
        shell, report = cls.place.shell.from_pretrained(
            path, config=_with_text(config), output_loading_info=True, **options
        )
        with torch.device("meta"):
            model = cls._from_config(config)
        for part in filter(None, (cls.place.path, cls.place.head)):
            replace_part(model, part, shell.get_submodule(part))
        model.config = model.base_model.config
        setattr(model.config, _WHOLE, whole)
        # A head that the composite model does not have.
        new = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        for name in new:
            empty = torch.empty_like(model.get_parameter(name), device="cpu", dtype=shell.dtype)
            replace_part(model, name, nn.Parameter(empty))
        if model.can_generate():
            model.generation_config = shell.generation_config
        report["missing_keys"] = {*report["missing_keys"], *new}
        return (model.eval(), report) if output_loading_info else model.eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the composite model: its text model as this one is, the rest as it was read.

        A head that the composite model does not have is saved with the text model alone.
        """
        whole, directory = whole_config(self.config), Path(directory)
        assert whole is not None
        if self.place.head is None:
            self._save_alone(directory)
            return
        shell = self.on_meta()
        shell.load_state_dict(self.state_dict(), strict=False, assign=True)
        shell.tie_weights()
        if self.can_generate():
            shell.generation_config = self.generation_config
        shell.save_pretrained(directory)
        add_tensors(directory, StoredWeights(shell, whole._name_or_path).others())
        for name in _BESIDE:
            if (file := cached(whole._name_or_path, name)) is not None:
                shutil.copy(file, directory / name)

    def _save_alone(self, directory: Path) -> None:
        config = copy.deepcopy(self.config)
        vars(config).pop(_WHOLE)
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise ValueError(
                f"transformers has no reward model of {config.model_type} that could be written; "
                "use the adapter"
            )
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, dtype=self.dtype)
        values = {
            re.sub(rf"^{re.escape(self.text_path)}\.", "model.", name): value
            for name, value in self.state_dict().items()
        }
        model.load_state_dict(values, assign=True)
        model.save_pretrained(directory)


class _Alias(nn.Module):
    """A module of a composite model that passes its calls to the text model within it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.get_submodule(self.path)(*args, **kwargs)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or not self.__dict__.get("_modules"):
                raise
            return getattr(self.get_submodule(self.path), name)


def _put(model: nn.Module, name: str, path: str, module: nn.Module) -> None:
    """Register what ``model`` calls ``name`` at ``path``."""
    first, _, rest = path.partition(".")
    *above, last = path.split(".")
    parent = model
    for step in above:
        if step not in parent._modules:
            alias = _Alias(rest) if parent is model and first == name else nn.Module()
            parent._modules[step] = alias
        parent = parent.get_submodule(step)
    parent._modules[last] = module


def _find_class(
    config: PretrainedConfig, task: Task
) -> tuple[type[PreTrainedModel], str] | tuple[None, str]:
    """transformers' class of a model, not of its text model alone, and the Auto class of that.

    None and the first Auto class where there is none.
    """
    for auto in _AUTOS[task]:
        if type(config) in auto._model_mapping:
            classes = auto._model_mapping[type(config)]
            kind = classes[0] if isinstance(classes, tuple) else classes
            text = type(config.get_text_config())
            if text is type(config) or kind.config_class is not text:
                return kind, auto.__name__
    return None, _AUTOS[task][0].__name__


def _find_place(config: PretrainedConfig, task: Task) -> TextModelPlace:
    """Where a composite model of ``config`` has its text model.

    Raises:
        ValueError: if it cannot be taken out.
    """
    whole, auto = _find_class(config, task)
    has_head = whole is not None
    whole = whole or _find_class(config, "CAUSAL_LM")[0]
    assert whole is not None
    shell = type(whole.__name__, (_Shell, whole), {"__module__": whole.__module__})
    model = _on_meta(shell, config)
    names = {id(module): name for name, module in model.named_modules()}
    decoder, head = model.text_parts()
    return TextModelPlace(
        auto,
        shell,
        type(decoder),
        names[id(decoder)],
        names[id(head)] if has_head else None,
        head.weight is model.get_input_embeddings().weight,
        tuple(model.left_out),
    )


class _Shell(PreTrainedModel):  # type: ignore[misc]
    """Mixed into a composite class: of its model the text model and its head alone are built."""

    _keys_to_ignore_on_load_unexpected = (".*",)

    def __init__(self, config: PretrainedConfig, *args: object, **kwargs: object) -> None:
        with unbuildable_left_out():
            super().__init__(config, *args, **kwargs)
        self.left_out = _prune(self, self.text_parts())

    def text_parts(self) -> tuple[PreTrainedModel, nn.Module]:
        """The text model below its head, and the head."""
        head = getattr(self, "score", None) or self.get_output_embeddings()
        decoder = self.get_decoder()
        while head in decoder.modules():
            decoder = decoder.model
        if type(decoder.config) is not type(self.config.get_text_config()) or head is None:
            raise ValueError(_cannot(self.config, "it has no decoder of its own with a head"))
        return decoder, head


def _cannot(config: PretrainedConfig, why: str) -> str:
    return (
        f"the text model of {config.model_type} cannot be trained without the rest ({why}); give a "
        "checkpoint of a text model"
    )


def _prune(module: nn.Module, kept: tuple[nn.Module, ...], prefix: str = "") -> list[str]:
    """Remove all but ``kept`` parts; returns the paths of what went."""
    gone = []
    for name, child in list(module.named_children()):
        if child in kept or not [*child.parameters(), *child.buffers()]:
            continue  # what has no values, such as a soft cap of logits, may belong to the head
        if any(each in kept for each in child.modules()):
            gone += _prune(child, kept, f"{prefix}{name}.")
        else:
            delattr(module, name)
            gone.append(f"{prefix}{name}")
    for name in list(module._parameters):
        delattr(module, name)
        gone.append(f"{prefix}{name}")
    vars(module)["_is_hf_initialized"] = True  # transformers would draw values of what went
    return gone


@contextmanager
def unbuildable_left_out() -> Iterator[None]:
    """Within, a part whose library is not installed (timm) is built empty."""
    build = AutoModel.from_config

    def from_config(*args: object, **kwargs: object) -> nn.Module:
        try:
            return build(*args, **kwargs)
        except ImportError:
            return nn.Module()

    AutoModel.from_config = from_config
    try:
        yield
    finally:
        del AutoModel.from_config


def _on_meta(shell: type[PreTrainedModel], whole: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return shell._from_config(copy.deepcopy(whole))


def _with_text(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the composite model with that of its text model in place."""
    text = copy.deepcopy(config)
    whole = text.__dict__.pop(_WHOLE)
    whole.text_config, whole.num_labels = text, text.num_labels
    whole.tie_word_embeddings = text.tie_word_embeddings
    whole.dtype = text.dtype
    return whole
