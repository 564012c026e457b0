"""Sampling from adapters as they were when they were saved, several requests in a batch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_lora.addons.tinker.bases import Base
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.config.groups import LoraConfig
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.kv_cache import TRIED
from dschat_lora.generation.sampling import MIN_TEMPERATURE, Sampling, undrawn_reason
from dschat_lora.models.loading import share_parameters

NEW_TOKENS_MULTIPLE = 64  # most tokens of a batch are rounded up, so that few sizes come
MAX_TOP = 128  # most tokens whose log-probabilities are asked for at a position
_ROWS = 256  # positions whose logits are formed at a time


@dataclass(frozen=True)
class SampleOptions:
    """How tokens are drawn.

    Attributes:
        stop: texts or tokens that end an answer beside the tokenizer's own end; None: that alone;
            empty: nothing does, not even that.
        seed: of the draws.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    seed: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "temperature": (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0 or at least {MIN_TEMPERATURE:g}",
            ),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "-1 (all) or 1 and more"),
        }
        for name, (holds, allowed) in checks.items():
            if not holds:
                raise ValueError(
                    f"sampling_params.{name} must be {allowed}, got {getattr(self, name)}"
                )

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The options of the decoder; log-probabilities are those of the model at temperature 1."""
        greedy = self.temperature == 0
        return Sampling(
            max_new_tokens,
            do_sample=not greedy,
            temperature=1.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            policy_temperature=1.0,
        )


@dataclass(frozen=True)
class SampleRequest:
    """Answers that are wanted to a prompt, and log-probabilities of it.

    Attributes:
        prompt_logprobs: whether those of the prompt's tokens are asked for.
        top_prompt, top_sample: likeliest tokens whose log-probabilities are, at each position.
        targets: (len(prompt) - 1, K) int64 tokens whose are, -1 for none.
        last: so many tokens at the prompt's end have them; None: all but the first.
    """

    prompt: tuple[int, ...]
    num_samples: int
    options: SampleOptions
    prompt_logprobs: bool = False
    top_prompt: int = 0
    top_sample: int = 0
    targets: Tensor | None = None
    last: int | None = None


@dataclass(frozen=True)
class SampledSequence:
    """An answer: its end included, if it has one."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    top: tuple[Tensor, Tensor] | None = None  # (T, k) tokens and log-probabilities


@dataclass(frozen=True)
class SampleResult:
    """What came of a request; what is of the prompt begins with its second token."""

    sequences: list[SampledSequence]
    prompt_logprobs: Tensor | None = None  # (T - 1,)
    top_prompt: tuple[Tensor, Tensor] | None = None  # (T - 1, k) each
    targets: Tensor | None = None  # (T - 1, K), 0 where none was asked for


class Sampler:
    """A model that answers: a base, or with an adapter's values as they were at some time."""

    def __init__(
        self, base: Base, lora: LoraConfig | None = None, values: Mapping[str, Tensor] | None = None
    ) -> None:
        self.base = base
        if lora is None:
            self._model = share_parameters(base.model)
        else:
            self._model = base.adapted(lora, tensors=values).model
        self._model.requires_grad_(False).eval()
        TRIED[self._model] = TRIED.get(base.model, True)
        self._decoders: dict[frozenset[int], Decoder] = {}

    def release(self) -> None:
        """Free what decoding keeps."""
        self._decoders.clear()

    def ends_of(self, options: SampleOptions) -> tuple[frozenset[int], tuple[str, ...]]:
        """Tokens that end an answer, and texts that do.

        A text that is a token added to the vocabulary, as special ones are, is that token.
        """
        if options.stop is None:
            return self.base.end_ids, ()
        added = self.base.tokenizer.added_tokens_decoder
        numbers = {str(token): number for number, token in added.items()}
        ends, texts = set(self.base.end_ids if options.stop else ()), []
        for each in options.stop:
            number = numbers.get(each) if isinstance(each, str) else each
            if number is None:
                texts.append(str(each))
            else:
                ends.add(number)
        return frozenset(ends), tuple(texts)

    @torch.no_grad()
    def __call__(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Answer requests whose options differ in length and seed alone, in one batch.

        Raises:
            ValueError: if a token cannot be drawn.
        """
        options = requests[0].options
        ends, texts = self.ends_of(options)
        answered = [each for each in requests if len(each.prompt) < self.base.limit]
        drawn = iter(self._drawn(answered, options, ends) if answered else ())
        results = []
        for each in requests:
            empty = SampledSequence([], [], stopped=False)
            sequences = [empty] * each.num_samples  # where the context is full
            if len(each.prompt) < self.base.limit:
                pairs = [next(drawn) for _ in range(each.num_samples)]
                sequences = [self._sequence(each, *pair, ends, texts) for pair in pairs]
            results.append(self._with_prompt(each, sequences))
        return results

    def _drawn(
        self, requests: Sequence[SampleRequest], options: SampleOptions, ends: frozenset[int]
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of the answers to requests, one behind the other."""
        if ends not in self._decoders:
            self._decoders[ends] = Decoder(
                self._model, eos_ids=ends, pad_id=self.base.pad_id, device=self._model.device
            )
        copies = {each.num_samples for each in requests}
        together = next(iter(copies)) if len(copies) == 1 else 1
        prompts, seeds, limits = [], [], []
        for each in requests:
            own = [stream_seed("sample", *each.options.seed, k) for k in range(each.num_samples)]
            for first in range(0, len(own), together):
                prompts.append(each.prompt)
                seeds.append(own[first : first + together])
                limits.append(each.options.max_tokens)
        most = max(limits)
        room = self.base.limit - max(map(len, prompts))
        most = min(most + -most % NEW_TOKENS_MULTIPLE, max(room, most))
        responses = self._decoders[ends](
            prompts, options.sampling(most), seeds=seeds, limits=limits, keep_logprobs=True
        )
        if any(responses.undrawn()):
            raise ValueError(undrawn_reason(()))
        return zip(responses.tokens(), responses.logprobs(), strict=True)

    def _sequence(
        self,
        request: SampleRequest,
        tokens: list[int],
        logprobs: list[float],
        ends: frozenset[int],
        texts: tuple[str, ...],
    ) -> SampledSequence:
        stopped = tokens[-1] in ends
        if texts and (count := self._until(tokens, texts)) is not None:
            tokens, logprobs, stopped = tokens[:count], logprobs[:count], True
        top = None
        if request.top_sample:
            first = len(request.prompt) - 1
            table = self._table([*request.prompt, *tokens])[first:]
            top = _top(table, request.top_sample)
        return SampledSequence(tokens, logprobs, stopped, top)

    def _until(self, tokens: Sequence[int], texts: Sequence[str]) -> int | None:
        """How many tokens hold one of the texts for the first time."""
        decode = self.base.tokenizer.decode
        if not any(text in decode(tokens) for text in texts):
            return None
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            held = decode(tokens[:middle])
            low, high = (low, middle) if any(t in held for t in texts) else (middle + 1, high)
        return low

    def _with_prompt(
        self, request: SampleRequest, sequences: list[SampledSequence]
    ) -> SampleResult:
        wanted = request.prompt_logprobs or request.top_prompt or request.targets is not None
        if not wanted:
            return SampleResult(sequences)
        table = self._table(request.prompt)
        if request.last is not None:
            table[: len(table) - request.last] = math.nan
        following = torch.tensor(request.prompt[1:], dtype=torch.int64)
        targets = None
        if request.targets is not None:
            chosen = table.gather(1, request.targets.clamp(min=0))
            targets = chosen.masked_fill(request.targets < 0, 0.0)
        return SampleResult(
            sequences,
            table.gather(1, following[:, None])[:, 0] if request.prompt_logprobs else None,
            _top(table, request.top_prompt) if request.top_prompt else None,
            targets,
        )

    def _table(self, tokens: Sequence[int]) -> Tensor:
        """(T - 1, V) fp32 log-probabilities of what follows each token but the last, on the CPU."""
        ids = torch.tensor([tokens], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        parts = [part.float().log_softmax(-1).cpu() for part in torch.split(logits, _ROWS)]
        return torch.cat(parts)


def _top(table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(T, k) likeliest tokens, and their log-probabilities, the likeliest first."""
    best = table.topk(min(count, table.shape[1]))
    return best.indices, best.values
