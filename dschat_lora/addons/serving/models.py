"""Models that answer together, the adapters of one base in one batch; and one that scores."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dschat_lora.addons.serving.config import AnswerConfig, NamedSource, find_models
from dschat_lora.addons.serving.endpoint.text import chat_ids
from dschat_lora.addons.serving.grammars import Grammars
from dschat_lora.addons.serving.mixed import AdapterRows, mix_adapters
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.chat import Chat, make_chat
from dschat_lora.data.encoder import Encoder, make_encoder
from dschat_lora.data.media import MediaReader
from dschat_lora.data.messages import Message
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.engine.zero import broken_parameters
from dschat_lora.generation.generate import check_cache
from dschat_lora.generation.kv_cache import TRIED
from dschat_lora.generation.slots import SlotRows
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.models.loading import (
    PreTrainedModel,
    Tokenizer,
    end_ids,
    load_causal_lm,
    load_config,
    load_tokenizer,
    share_parameters,
)
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import note
from dschat_lora.runtime.checks import find_of_kind
from dschat_lora.supervised.inference import attached_media
from dschat_lora.supervised.scorer import LoadedRewardModel

NO_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class BaseBatch:
    """A base whose requests, with whichever of its adapters, are decoded in one batch."""

    base: PreTrainedModel  # without adapters
    rows: SlotRows
    limit: int  # most tokens of prompt and answer
    rope_scaling: str | None = None  # where it is not that of the base's files

    @cached_property
    def broken_weights(self) -> list[str]:
        """Names of the base's weights that are not finite, looked at once an answer failed."""
        return broken_parameters(dict(self.base.named_parameters()))


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as requests name it."""

    name: str
    base_path: str  # hub name or directory
    batch: BaseBatch
    adapter: int  # its number in the batch; 0 is the base
    tokenizer: Tokenizer
    chat: Chat
    encoder: Encoder
    end_ids: frozenset[int]

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer."""
        return self.batch.limit

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        return int(self.batch.base.get_input_embeddings().num_embeddings)

    @property
    def media(self) -> MediaReader | None:
        """What reads inputs beside text; None where the model takes text alone."""
        return self.chat.media

    @cached_property
    def grammars(self) -> Grammars:
        """That answers of this model follow."""
        return Grammars(self.tokenizer, vocabulary_size=self.vocabulary_size, end_ids=self.end_ids)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Tokens of a prompt as a text, with beginning-of-sequence where the tokenizer adds one."""
        return self.encoder.encode([prompt])[0]

    def chat_ids(
        self, messages: Sequence[Message], columns: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokens of messages up to the assistant's turn; see :func:`chat_ids`.

        Raises:
            ValueError: if the chat template refuses them.
        """
        return chat_ids(
            messages,
            self.chat,
            self.encoder,
            self.tokenizer,
            columns=columns,
            most=self.batch.limit,
        )


@torch.no_grad()
def open_models(config: AnswerConfig, *, with_base: bool) -> dict[str, ServedModel]:
    """Load each base once, and the models of the command line on them, by name.

    Raises:
        ValueError: if something cannot be loaded or does not fit.
    """
    named = find_models(config.models, with_base=with_base)
    by_base: dict[tuple[str, str | None], list[NamedSource]] = {}
    for each in named:
        by_base.setdefault((each.source.base, each.source.rope_scaling), []).append(each)
    served: dict[str, ServedModel] = {}
    for sources in by_base.values():
        served |= _open_base(sources, config)
    return {each.name: served[each.name] for each in named}


def _open_base(named: Sequence[NamedSource], config: AnswerConfig) -> dict[str, ServedModel]:
    base, rope = named[0].source.base, named[0].source.rope_scaling
    options = replace(config.loading.model(), rope_scaling=rope)
    if options.base_bits is None:
        # That of all adapters: the others would be on another base than their own.
        bits = {each.source.base_bits for each in named if each.source.adapter is not None}
        options = replace(options, base_bits=4 if bits == {4} else None)
    here, dtype = device(), DTYPES[resolve_dtype(options.dtype)]  # a wrong GPU is said first
    model = load_causal_lm(base, load_config(base, options), options, dtype=dtype, meta=False)
    model = model.requires_grad_(False).to(here).eval()
    check_cache(model)
    tokenizers = {each.name: load_tokenizer(each.source.tokenizer, options) for each in named}
    # One for all adapters, whose prompts are read in one batch.
    media = attached_media(config, tokenizers[named[0].name], named[0].source, model)
    adapted = [each for each in named if each.source.adapter is not None]
    numbers = {each.name: number for number, each in enumerate(adapted, start=1)}
    mixed, rows = model, None
    if adapted or config.takes_adapters:
        mixed = share_parameters(model)  # the layers of the model itself stay as they are
        TRIED[mixed] = TRIED.get(model, False)
    if adapted:
        trees = [_adapted(each, model, tokenizers[each.name], options) for each in adapted]
        rows = AdapterRows(model.device)
        mix_adapters(mixed, trees, rows=rows)
    positions = getattr(model.config, "max_position_embeddings", None) or NO_LIMIT
    if (asked := config.max_seq_len) > positions:
        raise ValueError(
            f"--max_seq_len {asked} is more than the {positions} positions of the model"
        )
    pad_id = int(tokenizers[named[0].name].pad_token_id)
    slots = _slots(mixed, rows, pad_id, config)
    batch = BaseBatch(model, slots, asked or positions, rope)
    served = {}
    for name, tokenizer in tokenizers.items():
        chat = replace(make_chat(tokenizer, config.loading.chat_template_kwargs), media=media)
        encoder, ends = make_encoder(tokenizer), frozenset(end_ids(tokenizer))
        number = numbers.get(name, 0)
        served[name] = ServedModel(name, base, batch, number, tokenizer, chat, encoder, ends)
    return served


@torch.no_grad()
def open_adapter(
    name: str, path: str, served: Iterable[ServedModel], config: AnswerConfig
) -> ServedModel:
    """A model with an adapter that comes while others answer, in a batch of its own.

    Its base, where one is served, may have another name there than in the adapter's files.

    Raises:
        ValueError: if it cannot be loaded or does not fit, or its base is not there.
    """
    source = find_of_kind(path, ("CAUSAL_LM",), option="lora_path")
    if source.adapter is None:
        raise ValueError(f"lora_path {path} is a full model, not an adapter")
    # The base's own tokenizer and ends where it is served, not those of one of its adapters.
    bases = {each.base_path: each for each in sorted(served, key=lambda each: -each.adapter)}
    base = bases.get(source.base)
    if base is None and len(bases) > 1:
        raise ValueError(f"lora_path {path} is an adapter of {source.base}, which is not served")
    base = base or next(iter(bases.values()))
    _check_own_base(path, source, base)
    model, rows = base.batch.base, AdapterRows(base.batch.base.device)
    tree = _adapted(NamedSource(name, source), model, base.tokenizer, config.loading.model())
    mixed = share_parameters(model)
    TRIED[mixed] = TRIED.get(model, False)
    mix_adapters(mixed, [tree], rows=rows)
    pad_id = int(base.tokenizer.pad_token_id)
    slots = _slots(mixed, rows, pad_id, config)
    return replace(
        base,
        name=name,
        batch=BaseBatch(model, slots, base.batch.limit, base.batch.rope_scaling),
        adapter=1,
    )


def _slots(
    model: PreTrainedModel, adapters: AdapterRows | None, pad_id: int, config: AnswerConfig
) -> SlotRows:
    slots = SlotRows(model.eval(), adapters, pad_id=pad_id, prefix_cache=config.prefix_cache)
    slots.prepare()  # here, where a lack of memory keeps this model alone from being served
    return slots


def _check_own_base(path: str, source: ModelSource, base: ServedModel) -> None:
    """Refuse an adapter that says it was trained on another base than the one that is served."""
    own = source.adapter_config
    assert own is not None, "an adapter has a configuration"
    bits = 4 if any(isinstance(each, NF4Linear) for each in base.batch.base.modules()) else 16
    if own.base_bits not in (None, bits):
        raise ValueError(
            f"lora_path {path} was trained on a {own.base_bits}-bit base, and {base.base_path} is "
            f"served in {bits} bits: start the server with --base_bits {own.base_bits}"
        )
    if own.rope_scaling != base.batch.rope_scaling:
        raise ValueError(
            f"lora_path {path} was trained with --rope_scaling {own.rope_scaling}, and "
            f"{base.base_path} is served with {base.batch.rope_scaling}: name the adapter when the "
            "server is started"
        )
    if own.base_fingerprint and own.base_fingerprint != weights_fingerprint(base.base_path):
        raise ValueError(
            f"lora_path {path} was trained on other weight files than {base.base_path} holds here: "
            "serve the base that it is an adapter of"
        )


def _adapted(
    named: NamedSource, base: PreTrainedModel, tokenizer: Tokenizer, options: ModelConfig
) -> PreTrainedModel:
    """The model of an adapter, on the parameters of ``base``."""
    embeddings = base.get_input_embeddings().num_embeddings
    if len(tokenizer) > embeddings:
        raise ValueError(
            f"{named.name}: its tokenizer has {len(tokenizer)} tokens, the base {embeddings}; "
            "merge the adapter and name the merged model instead"
        )
    adapted = build_causal_lm(
        named.source,
        tokenizer,
        options,
        LoraConfig(),
        dtype=base.dtype,
        seed=0,
        meta=False,
        base=base,
    )
    if adapted.warning is not None:
        note(f"warning: {adapted.warning}")
    if rest := getattr(adapted.model, "rest", ()):
        raise ValueError(
            f"{named.name}: its adapter has factors of {', '.join(rest)}, which several models "
            "have in common here; merge it and name the merged model instead"
        )
    return adapted.model.requires_grad_(False).eval()


class AnswerScorer:
    """The reward model of ``--reward``, on the base of the answering models where it is theirs."""

    def __init__(self, config: AnswerConfig, served: Iterable[ServedModel]) -> None:
        bases = {model.base_path: model.batch.base for model in served}
        options = config.loading.model(config.reward)
        self._scorer = LoadedRewardModel(options, bases=bases)
        self._chat = make_chat(self._scorer.tokenizer, config.loading.chat_template_kwargs)
        self._lock = threading.Lock()

    def score(self, messages: Sequence[Message]) -> float | None:
        """The score of the last message, an assistant's; None if the messages are too long.

        Raises:
            ValueError: if they cannot be scored.
        """
        row = parse_row(RawRow("messages", {"messages": list(messages)}))
        *_, record = to_records(row, self._chat, "pairs")
        with self._lock:
            return self._scorer.scores([record])[0]
