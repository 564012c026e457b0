"""Pretrained causal language models, their tokenizers, and the loss without full logits."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar

from dschat_lora.algos.logprobs import linear_logprobs, token_logprobs
from dschat_lora.algos.segments import Spans
from dschat_lora.algos.sft import MAX_CHUNK_LOGITS, head_logits, linear_cross_entropy
from dschat_lora.algos.vocabulary import VocabularyPart
from dschat_lora.checkpoint.quantization import located
from dschat_lora.config.groups import ACTIVE_EXPERTS, LoadConfig, ModelConfig
from dschat_lora.data.chat import end_tokens
from dschat_lora.data.templates import BUILT_IN_TEMPLATE, read_chat_template
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.parallel import ParallelLinear, Shard, Split
from dschat_lora.models.architecture_checks import check_architecture, head_is_linear
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.composite import auto_class, check_alone, text_config
from dschat_lora.models.four_bit_base import four_bits_of, hold_four_bits, kind_of, take_kind
from dschat_lora.models.loading import check_loaded, check_local_files, hub_errors
from dschat_lora.models.shard_loading import empty_parameters, load_parts
from dschat_lora.models.tensor_parallel import divide

# The run has a log of its own; a bar for each of a few weights says nothing.
disable_progress_bar()
T = TypeVar("T")
_BALANCE = "load_balancing_loss_func"  # of a module of transformers that has experts
_DROPOUT_NAMES = ("dropout", "dropout_prob", "drop", "pdrop", "layerdrop")


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
            "and only decoders train here: causal language models such as Llama, Qwen or OPT"
        )
    kind_of(model_config, path)
    for name in _dropouts(model_config):
        setattr(model_config, name, 0.0 if name == "layerdrop" else config.dropout)
    return model_config


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
        if more and importlib.util.find_spec("gguf") is None:
            raise ImportError("GGUF files need a package: pip install 'dschat_lora[gguf]'")
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
            model = build_divided(build, group, meta=meta)
            if four_bits is not None:
                hold_four_bits(model, path, four_bits)
            if not meta:
                load_parts(model, path)
                check_alone(model)
                with suppress(OSError):  # as transformers, which many models do without
                    model.generation_config = GenerationConfig.from_pretrained(located(path)[0])
            return _with_body(model)
        model, report = auto.from_pretrained(
            path, config=model_config, output_loading_info=True, **kwargs
        )
        check_loaded(model, report["missing_keys"])
        check_alone(model)
        return _with_body(model)


def _with_body(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose ``base_model`` is what lies below its head."""
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


def build_divided(
    build: Callable[[], PreTrainedModel], group: TensorGroup | None, *, meta: bool
) -> PreTrainedModel:
    """What ``build`` makes, without values of parameters, and what ``group`` leaves of it here.

    Buffers are real unless all of it is to be on the meta device.
    """
    with torch.device("meta") if meta else empty_parameters():
        model = build()
    if group is not None:
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
                "has no such kernel in transformers; leave the option out, which takes another"
            ) from error
        raise


def attention_note(model: PreTrainedModel, config: LoadConfig) -> str | None:
    """What to tell of the kernel that ``--attn_implementation auto`` has chosen, if not sdpa."""
    if config.attn_implementation != "auto" or model.config._attn_implementation != "eager":
        return None
    return f"attention is eager: {model.config.model_type} has no sdpa in transformers"


class LMHeadModel(BackboneModel):
    """A causal language model whose head is run apart from its backbone.

    ``full_logits`` takes the model's own logits instead, for architectures that transform them
    after the head.
    """

    full_logits = False

    def logits(self, logit_positions: Tensor, *rows: Any) -> Tensor:
        """(N, V) of the model's own head; the rows are as for the backbone."""
        with fp32_logits(self.model):
            logits, places = self.backbone.run(lambda **x: self.model(**x).logits, *rows)
        if places is not None:
            logit_positions = torch.searchsorted(places, logit_positions)
        return logits[logit_positions]


def balancing_loss(model: PreTrainedModel, coefficient: float) -> Any:
    """The load-balancing loss that transformers has for the type of ``model``; None without one.

    Raises:
        ValueError: if it is to have a ``coefficient``, and there is none.
    """
    found = getattr(sys.modules[type(model).__module__], _BALANCE, None)
    if coefficient and found is None:
        raise ValueError(
            f"--router_aux_loss_coef {coefficient:g}: {type(model).__name__} of "
            "transformers has no load-balancing loss; drop the option"
        )
    return found


class CausalLMLoss(LMHeadModel):
    """A causal language model that returns the summed loss of a batch.

    Hidden states of supervised positions alone reach the output head, a chunk at a time. Labels are
    smoothed in training alone, where ``router_aux_loss_coef`` times the load-balancing loss of the
    model's experts is added for each supervised token.

    Raises:
        ValueError: if the model has no such loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        label_smoothing: float = 0.0,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        super().__init__(model)
        self.label_smoothing, self.router_aux_loss_coef = label_smoothing, router_aux_loss_coef
        self._balance = balancing_loss(model, router_aux_loss_coef)
        self.head = LinearHead(model.get_output_embeddings(), model.config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        logit_positions: Tensor,
        target_ids: Tensor,
        spans: Spans | None = None,
    ) -> Tensor:
        """Summed cross-entropy, fp32 scalar in nats; all arguments as in ``Batch``."""
        smoothing = self.label_smoothing if self.training else 0.0
        rows = input_ids, position_ids, segment_ids, None, spans
        if self.full_logits:
            logits = self.logits(logit_positions, *rows)
            return summed_cross_entropy(logits, target_ids, smoothing)
        self.backbone.records_routers = balances = self.training and self.router_aux_loss_coef > 0
        hidden = self.backbone(*rows)
        # Without a supervised position the graph still spans the model: every rank and every
        # micro-batch must run the same backward hooks.
        loss: Tensor = self.head(hidden.flatten(0, 1)[logit_positions], target_ids, smoothing)
        loss = loss + 0.0 * hidden[:, 0].float().sum()
        return loss + len(target_ids) * self._router_loss(segment_ids) if balances else loss

    def _router_loss(self, segment_ids: Tensor) -> Tensor:
        """The model's own load-balancing loss of the batch, times its coefficient."""
        logits, config = self.backbone.router_logits, self.model.config
        has_padding = len(logits[0]) == segment_ids.numel()  # else it was not computed
        mask = (segment_ids > 0).long() if has_padding else None
        active = next(n for name in ACTIVE_EXPERTS if (n := getattr(config, name, None)))
        balance: Tensor = self._balance(logits, logits[0].shape[-1], active, mask)
        return self.router_aux_loss_coef * balance


class CausalLMLogprobs(LMHeadModel):
    """A causal language model that returns log-probabilities of given tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head = LogprobHead(model.get_output_embeddings(), model.config.vocab_size)

    def fit_to_architecture(self, vocab_size: int, device: torch.device) -> None:
        """Have masks and logits made as this architecture needs them; call on every rank."""
        report = check_architecture(self.backbone, vocab_size=vocab_size, device=device)
        self.backbone.own_mask |= not report.packing_is_exact
        linear = head_is_linear(self.model, vocab_size=vocab_size, device=device)
        self.full_logits |= not linear

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        branch_ids: Tensor,
        logit_positions: Tensor,
        target_ids: Tensor,
        spans: Spans | None = None,
    ) -> Tensor:
        """(N,) fp32 log-probabilities in nats; all arguments as in ``PairBatch``.

        Without a token to predict the graph still spans the model.
        """
        rows = input_ids, position_ids, segment_ids, branch_ids, spans
        if self.full_logits:
            return token_logprobs(self.logits(logit_positions, *rows), target_ids)
        hidden = self.backbone(*rows)
        return self.head(hidden.flatten(0, 1)[logit_positions], target_ids)


class LinearHead(nn.Module):
    """The output embedding, applied and reduced chunk by chunk.

    A plain linear layer lends its parameters, so that ZeRO 3 gathers them for this module; any
    other module (an adapted or separately trained head) is called under checkpointing. Where a
    plain head is divided among ranks, none forms more than its own logits.
    """

    def __init__(self, head: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.rows = max(1, MAX_CHUNK_LOGITS // vocab_size)
        self.plain = is_plain(head)
        self.split: Split | None = None
        self.part: VocabularyPart | None = None
        if is_plain(head):
            self.weight: Tensor = head.weight
            self.bias: Tensor | None = head.bias
        else:
            self.module = head
        if isinstance(head, ParallelLinear):
            self.split, self.part = head.split, vocabulary_part(head)

    def forward(self, hidden: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Summed cross-entropy of (N, H) hidden states against (N,) targets."""
        if self.plain:
            operands = self._shared(hidden), self.weight, self.bias, targets
            return linear_cross_entropy(*operands, label_smoothing=label_smoothing, part=self.part)
        losses = self._by_chunks(self._chunk_loss, hidden, targets, label_smoothing)
        return sum(losses, hidden.new_zeros((), dtype=torch.float32))

    def _by_chunks(
        self, function: Callable[..., T], hidden: Tensor, tokens: Tensor, *options: float
    ) -> Iterator[T]:
        """``function`` of chunks of positions, whose logits are formed again for the gradient."""
        chunks = zip(torch.split(hidden, self.rows), torch.split(tokens, self.rows), strict=True)
        for h, t in chunks:
            yield checkpoint(function, h, t, *options, use_reentrant=False)

    def _chunk_loss(self, hidden: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        return summed_cross_entropy(self._logits(hidden), targets, label_smoothing)

    def _shared(self, hidden: Tensor) -> Tensor:
        """Hidden states of whose gradient each rank forms a part, if the head is divided."""
        return hidden if self.split is None else self.split.group.copy(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """(N, V) logits of (N, H) hidden states, all of them on every rank."""
        if not self.plain:
            return self.module(hidden)
        return _whole_logits(hidden, self.weight, self.bias, self.split)


def is_plain(head: nn.Module) -> TypeGuard[nn.Linear | ParallelLinear]:
    """Whether logits are a product with the head's own weight, which is not called for it."""
    return type(head) in (nn.Linear, ParallelLinear)


@contextmanager
def fp32_logits(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model's own head computes 16-bit weights by :func:`head_logits`, as losses do.

    What the model does to its logits is then done in fp32. A head that losses call, adapted or
    quantised, stays as it is.
    """
    head = model.get_output_embeddings()
    if not is_plain(head) or head.weight.dtype.itemsize > 2:
        yield
        return
    split = head.split if isinstance(head, ParallelLinear) else None
    module: nn.Module = head
    before = vars(module).get("forward")
    module.forward = lambda x: _whole_logits(x, head.weight, head.bias, split)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, split: Split | None
) -> Tensor:
    """(..., V) logits of (..., H) hidden states, of a divided head all of them on every rank."""

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return head_logits(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))

    return product(hidden, bias) if split is None else split.around(hidden, product, bias)


def summed_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """fp32 scalar in nats, of (N, V) logits against (N,) targets."""
    return nn.functional.cross_entropy(
        logits.float(), targets, reduction="sum", label_smoothing=label_smoothing
    )


class LogprobHead(LinearHead):
    """The output embedding as log-probabilities of given tokens, chunk by chunk."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """(N,) fp32 log-probabilities of (N,) tokens after (N, H) hidden states, in nats."""
        if self.plain and not self.weight.requires_grad:
            hidden = self._shared(hidden)
            return linear_logprobs(hidden, self.weight, self.bias, tokens, part=self.part)
        # A head that trains needs what the loss makes of each value.
        return torch.cat(list(self._by_chunks(self._chunk, hidden, tokens)))

    def _chunk(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(self._logits(hidden), tokens)


def vocabulary_part(head: ParallelLinear) -> VocabularyPart:
    """What this rank holds of a divided output head."""
    shard = Shard(head.split.group, 0, head.split.blocks)
    ((start, stop),) = shard.ranges()
    most = max(b - a for rank in range(shard.group.size) for a, b in shard.ranges(rank))
    return VocabularyPart(start, stop, most, shard.group.sum, shard.group.max)
