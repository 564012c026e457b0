"""A pretrained model with its adapter, whole or as the empty shape of one."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of
from dschat_lora.checkpoint.score_class import HEAD
from dschat_lora.config.addons import load, provided
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import command_line
from dschat_lora.config.roles import Task
from dschat_lora.data.media import MediaReader
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import is_quantized
from dschat_lora.lora.model import adapter_parameters, apply_lora, lora_layers, with_expert_settings
from dschat_lora.lora.names import is_inside
from dschat_lora.lora.parallel import group_of
from dschat_lora.lora.targets import adaptable_parts, choose_targets, expert_names
from dschat_lora.models.causal_lm import balancing_loss
from dschat_lora.models.composite import left_out_words
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.models.four_bit_base import kind_of, packed_how, whole_weights_warning
from dschat_lora.models.loading import Tokenizer, load_causal_lm, load_config, share_parameters
from dschat_lora.models.source import ModelSource, trained_rope


@dataclass(frozen=True)
class AdaptedModel:
    """A transformers model whose chosen layers carry LoRA factors."""

    model: PreTrainedModel
    lora: LoraConfig  # as applied; layers by name where an adapter is continued
    targets: list[str]  # adapted modules, in model order
    task: Task = "CAUSAL_LM"
    base_bits: int = 16  # of the linear layers of the blocks
    rope_scaling: str | None = None  # where it is not the base's own
    warning: str | None = None  # where the adapter is on another base than its own
    stored_as: str | None = None  # how files hold the weights, where they are quantised

    def facts(self) -> Iterator[str]:
        """What the start-up says of the base, a line each."""
        if words := left_out_words(self.model):
            yield f"composite    {words}"
        if self.stored_as not in (None, "nf4"):
            dtype = str(self.model.dtype).removeprefix("torch.")
            yield f"base         {self.stored_as} files, whose values are unpacked to {dtype}"
        if self.base_bits == 4:
            how = packed_how(self.stored_as)
            yield f"base         linear layers of the blocks are held in 4 bits (NF4), {how}"
        if self.warning is not None:
            yield f"warning      {self.warning}"
        if words := peft_warning(self.model):
            yield f"warning      {words}"


def build_causal_lm(
    source: ModelSource,
    tokenizer: Tokenizer,
    config: ModelConfig,
    lora: LoraConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    meta: bool,
    base: PreTrainedModel | None = None,
    group: TensorGroup | None = None,
) -> AdaptedModel:
    """Load the base, add or continue the adapter, and set what trains.

    ``seed`` draws the adapter's initial values. With ``base``, a model that is loaded already, the
    result is another model on the same weights. The other arguments are those of
    :func:`~dschat_lora.models.loading.load_causal_lm`.

    Raises:
        ValueError: if something cannot be loaded or does not fit.
    """
    config = as_trained(config, source)
    kind: str | None = None
    if base is not None:
        model = share_parameters(base)
    else:
        model_config = load_config(source.base, config)
        kind = kind_of(model_config, source.base)
        model = load_causal_lm(
            source.base, model_config, config, dtype=dtype, meta=meta, group=group
        )
    _load_rest(model, source, lora, meta=meta)
    adapted = _adapt(model, source, tokenizer, config, lora, seed=seed, task="CAUSAL_LM")
    if config.add_eot_token:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return replace(adapted, stored_as=kind, rope_scaling=config.rope_scaling)


def build_reward_model(
    source: ModelSource,
    tokenizer: Tokenizer,
    config: ModelConfig,
    lora: LoraConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    meta: bool,
    new_head: bool = True,
    base: PreTrainedModel | None = None,
    group: TensorGroup | None = None,
) -> AdaptedModel:
    """As :func:`build_causal_lm`, with a scalar head that trains in full beside the factors.

    The adapter of a language model is continued under a new head, that of a reward model with
    its own. ``new_head`` draws a head where there is none; else that is an error. ``base`` may be a
    language or a reward model, whose weights below the head are shared.

    Raises:
        ValueError: if something cannot be loaded or does not fit.
    """
    adapter = source.adapter_config
    if adapter is not None and adapter.task_type != "SEQ_CLS" and not new_head:
        raise ValueError(
            f"--model_name_or_path {source.adapter} is an adapter of a {adapter.task_type} model, "
            "not of a reward model (SEQ_CLS)"
        )
    config = as_trained(config, source)
    model_config = load_config(source.base, config)
    kind = kind_of(model_config, source.base)
    # transformers scores the token before the padding: with end-of-sequence as padding it would
    # look before the end of every answer. Without any, it takes one sequence at a time.
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    model_config.pad_token_id = None if pad == eos else pad
    names = getattr(model_config, "architectures", None) or []
    has_head = adapter is None and any(n.endswith("ForSequenceClassification") for n in names)
    head_seed = seed if adapter is not None or (new_head and not has_head) else None
    from dschat_lora.models.reward_model import load_reward_model

    model = load_reward_model(
        source.base,
        model_config,
        config,
        dtype=dtype,
        seed=head_seed,
        meta=meta,
        base=base,
        group=group,
    )
    lora = _with_head(lora)
    _load_rest(model, source, lora, meta=meta)
    adapted = _adapt(model, source, tokenizer, config, lora, seed=seed, task="SEQ_CLS")
    return replace(adapted, stored_as=kind, rope_scaling=config.rope_scaling)


def as_trained(config: ModelConfig, source: ModelSource) -> ModelConfig:
    """The options with the base's bits and rotation that the adapter was trained on, if not given.

    Raises:
        ValueError: if another rotation is given.
    """
    bits = 4 if config.base_bits is None and source.base_bits == 4 else config.base_bits
    return replace(config, base_bits=bits, rope_scaling=trained_rope(config.rope_scaling, source))


def bits_of(model: PreTrainedModel) -> int:
    """Bits of the linear layers of the blocks: 16 or 4."""
    return 4 if any(is_quantized(p) for p in model.parameters()) else 16


def check_targets(
    source: ModelSource,
    config: ModelConfig,
    lora: LoraConfig,
    task: Task = "CAUSAL_LM",
    *,
    given: Collection[str] = (),
    expert_learning_rate: float | None = None,
    group: TensorGroup | None = None,
) -> None:
    """Try the choice of layers on the empty shape of the model, before anything takes long.

    Of an adapter that is continued, options that were ``given`` must choose its layers.

    Raises:
        ValueError: if a choice matches nothing or other layers than the adapter's, experts have
            options and none is adapted, or the model cannot be found.
    """
    rules = [name for name in ("lora_module_name", "target_modules") if name in given]
    if lora.lora_dim == 0 or (source.adapter is not None and not rules):
        return
    model_config = load_config(source.base, config)
    if task == "CAUSAL_LM":
        model = load_causal_lm(
            source.base, model_config, config, dtype=torch.float32, meta=True, group=group
        )
    else:
        from dschat_lora.models.reward_model import load_reward_model

        lora = _with_head(lora)
        model = load_reward_model(
            source.base, model_config, config, dtype=torch.float32, seed=0, meta=True, group=group
        )
    _load_rest(model, source, lora, meta=True)
    if source.adapter is not None:
        stored = source.planned or lora_config_of(source.adapter)
        if choose_targets(model, lora) != choose_targets(model, stored):
            assert source.adapter_config is not None
            own = source.adapter_config.target_modules
            raise ValueError(
                f"{' '.join(command_line({rules[0]: getattr(lora, rules[0])}))} selects other "
                f"layers than the adapter {source.adapter} has "
                f"({own if isinstance(own, str) else ' '.join(own)}); drop the option to continue "
                "training it, or merge it first (--merge_adapter) to train a new one on top"
            )
        return
    targets = apply_lora(model, lora, seed=0)
    _check_experts(model, targets, lora, expert_learning_rate)


def attach_media(adapted: AdaptedModel, media: MediaReader | None, base: str | None = None) -> None:
    """Have a model take what rows hold beside text, if they do; see :meth:`MediaReader.attach`.

    Raises:
        ValueError: if layers are adapted that text does not run through, and there is nothing else.
    """
    if media is not None:
        media.attach(adapted.model, base)
        vars(adapted.model)["media"] = media.facts
    elif beside := [n for n in adapted.targets if is_inside(n, getattr(adapted.model, "rest", ()))]:
        raise ValueError(
            f"the adapter has factors of {beside[0]}, which text-only rows do not train; exclude "
            "such layers, or merge the adapter first"
        )


def _load_rest(
    model: PreTrainedModel, source: ModelSource, lora: LoraConfig, *, meta: bool
) -> None:
    """Have an add-on load what stands beside a text model, if layers of it are adapted."""
    for path in provided("rest").values():
        load(path)(model, source, lora, meta=meta)


def check_balancing(source: ModelSource, config: ModelConfig) -> None:
    """Refuse ``--router_aux_loss_coef`` for a model without such a loss, by its empty shape.

    Raises:
        ValueError: as it says, or if the model cannot be found.
    """
    if config.router_aux_loss_coef:
        base = source.base, load_config(source.base, config), config
        model = load_causal_lm(*base, dtype=torch.float32, meta=True)
        balancing_loss(model, config.router_aux_loss_coef)


def _check_experts(
    model: PreTrainedModel, targets: list[str], lora: LoraConfig, rate: float | None = None
) -> None:
    """Refuse options of experts where none is adapted."""
    given = {
        "expert_lora_dim": lora.expert_lora_dim,
        "expert_lora_alpha": lora.expert_lora_alpha,
        "expert_learning_rate": rate,
    }
    option = next((f"--{name} {value:g}" for name, value in given.items() if value), None)
    experts = expert_names(model)
    if option is None or experts.intersection(targets):
        return
    if not experts:
        raise ValueError(
            f"{option} is for mixtures of experts, but this model has no experts to adapt; drop "
            "the option"
        )
    raise ValueError(
        f"{option} is for experts, but none are among the adapted layers; drop the option, or add "
        "experts to --target_modules"
    )


def _with_head(lora: LoraConfig) -> LoraConfig:
    """The head trains in full beside the factors."""
    if lora.lora_dim == 0 or HEAD in lora.modules_to_save:
        return lora
    return replace(lora, modules_to_save=(*lora.modules_to_save, HEAD))


def _adapt(
    model: PreTrainedModel,
    source: ModelSource,
    tokenizer: Tokenizer,
    config: ModelConfig,
    lora: LoraConfig,
    *,
    seed: int,
    task: Task,
) -> AdaptedModel:
    """Put the adapter in and set what trains."""
    _fit_vocabulary(model, tokenizer, config, lora)
    new_parts: tuple[str, ...] = ()
    if source.adapter is not None:
        stored = source.planned or lora_config_of(source.adapter)
        if source.planned is None:
            _check_layers(model, source.adapter, stored)
        new_parts = _new_parts(source, stored, task)
        lora = replace(
            stored,
            lora_dropout=lora.lora_dropout,
            only_optimize_lora=lora.only_optimize_lora,
            modules_to_save=(*stored.modules_to_save, *new_parts),
        )
    targets = apply_lora(model, lora, seed=seed)
    lora = with_expert_settings(model, lora, targets)
    if source.adapter is not None and source.planned is None:
        names = adapter_parameters(model)
        load_adapter(model, source.adapter, new={n for n in names if is_inside(n, new_parts)})
    if config.add_eot_token:
        model.config.eos_token_id = tokenizer.eos_token_id
    bits = bits_of(model)
    warning = base_warning(model, source, tokenizer, bits=bits) or whole_weights_warning(model)
    return AdaptedModel(model, lora, targets, task, bits, warning)


def base_warning(
    model: PreTrainedModel, source: ModelSource, tokenizer: Tokenizer, *, bits: int
) -> str | None:
    """What to say where the adapter of ``source`` is not on the base that it was trained on.

    Args:
        model: with that adapter, on ``bits`` bits, not sharded.
        source: of base and adapter.
        tokenizer: of the model.
        bits: of the base that it is on, 16 or 4.

    Returns:
        None where the base is the adapter's own, or nothing is known of that.
    """
    own = source.adapter_config
    if own is None or own.base_bits is None:
        return None
    where = f"the adapter {source.adapter} was trained on"
    if own.base_fingerprint and own.base_fingerprint != weights_fingerprint(source.base):
        return (
            f"{where} other weight files than {source.base} has now; its outputs may differ from "
            "those in training"
        )
    if own.base_bits == bits:
        return None
    words = f"{where} a {own.base_bits}-bit base, but this one has {bits} bits"
    if group_of(model) is None and not any(p.is_meta for p in model.parameters()):
        for path in provided("base_distance").values():
            apart = load(path)(model, source, tokenizer, bits)
            words += f": {apart:.2g} nats per token (KL) apart"
    return f"{words}; --base_bits {own.base_bits} restores it"


def _check_layers(model: PreTrainedModel, adapter: Path, stored: LoraConfig) -> None:
    """Refuse an adapter of layers that the model does not have, or that take none here."""
    known = adaptable_parts(model)
    lost = [name for name in stored.target_modules if name not in known]
    if not lost:
        return
    words = f"the adapter {adapter} has factors of {lost[0]}, which "
    where = getattr(model, "text_path", None)
    named = {**dict(model.named_parameters()), **dict(model.named_modules())}
    if lost[0] in named:
        kind = type(named[lost[0]]).__name__
        raise ValueError(
            f"{words}is a {kind} that does not support adapters here: merge the adapter into its "
            "base with PEFT and train the result"
        )
    raise ValueError(
        f"{words}is not a layer of this model"
        + ("" if where is None else f": of a composite model {where} alone is loaded")
    )


def _new_parts(source: ModelSource, stored: LoraConfig, task: Task) -> tuple[str, ...]:
    """Modules that train in full and that the adapter does not bring: a reward model's head."""
    if task == "CAUSAL_LM" or HEAD in stored.modules_to_save:
        return ()
    assert source.adapter_config is not None
    if source.adapter_config.task_type == "SEQ_CLS":
        raise ValueError(
            f"--model_name_or_path {source.adapter} is the adapter of a reward model, but its "
            f"{HEAD} head is missing; save it again with modules_to_save=[{HEAD!r}]"
        )
    return (HEAD,)


def _fit_vocabulary(
    model: PreTrainedModel, tokenizer: Tokenizer, config: ModelConfig, lora: LoraConfig
) -> None:
    """Make room for tokens added to the tokenizer, where their embeddings will be trained."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= rows:
        return
    if lora.lora_dim > 0:
        words = f"the tokenizer has {len(tokenizer)} tokens, the model {rows}"
        if config.add_eot_token and int(tokenizer.eos_token_id) >= rows:
            raise ValueError(
                f"{words}: a new --eot_token has an untrained embedding, which LoRA does not "
                "train; use a token the model knows"
            )
        raise ValueError(
            f"{words}: the tokenizer's tokens from {rows} on "
            f"({tokenizer.convert_ids_to_tokens(rows)!r}, ...) have no embedding, and LoRA would "
            "not train one; use the model's own tokenizer, or resize the embedding and train all "
            "weights (--lora_dim 0)"
        )
    model.resize_token_embeddings(len(tokenizer))


def peft_warning(model: nn.Module) -> str | None:
    """What to say where stock PEFT drops factors of ``model``; None where it takes them all.

    PEFT applies to their names what transformers applies to those of a checkpoint, and a pattern
    meant for other names may hit them.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # a transformers that renames nothing so
        return None
    whole = getattr(model, "on_meta", lambda: model)()  # of a text model, the composite one
    rules = [r for r in get_model_conversion_mapping(whole) if isinstance(r, WeightRenaming)]
    renamed = {
        name: new.removesuffix(".weight")
        for name in lora_layers(model)
        if (new := rename_source_key(f"{name}.weight", rules, [])[0]) != f"{name}.weight"
    }
    if not renamed:
        return None
    name, new = next(iter(renamed.items()))
    return (
        f"stock PEFT drops the factors of {len(renamed)} layers such as {name}, which "
        f"transformers renames to {new}; this package and `merge` keep them: to use the adapter "
        "in PEFT, exclude them with --target_modules"
    )
