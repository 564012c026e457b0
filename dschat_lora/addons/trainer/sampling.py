"""Sampling with a Trainer's weights: options, seeds, and continuations of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from dschat_lora.addons.trainer.build import TrainerParts, decoding
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.config.plurals import counted
from dschat_lora.engine.distributed import max_over_ranks
from dschat_lora.generation.sampling import Sampling, undrawn_reason

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Key = int | tuple[int, ...]  # of random numbers


@dataclass(frozen=True)
class Sample:
    """A continuation of a prompt."""

    tokens: list[int]  # its end token included, if it has one
    logprobs: list[float]  # in nats, in the distribution that each token was drawn from
    text: str  # without special tokens


def draw(
    parts: TrainerParts,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[Sequence[int]],
) -> list[list[Sample]]:
    """As many continuations of each prompt as it has seeds; call on every rank.

    Raises:
        ValueError: if a token cannot be drawn on some rank, as a weight is not finite.
    """
    copies = max(map(len, seeds), default=1)
    size = max(1, parts.config.batch.per_device_eval_batch_size // copies)
    # Prompts of like length are decoded together.
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    chunks = int(max_over_ranks(-(-len(order) // size)))
    result: list[list[Sample]] = [[] for _ in prompts]
    broken = 0.0
    with decoding(parts) as (decode, keep_going):
        for chunk in range(chunks):
            numbers = order[chunk * size : (chunk + 1) * size]
            responses = decode(
                [prompts[n] for n in numbers],
                sampling,
                seeds=[seeds[n] for n in numbers],
                keep_logprobs=True,
                keep_going=keep_going,
            )
            broken += sum(responses.undrawn())
            samples = [
                Sample(tokens, logprobs, parts.tokenizer.decode(tokens, skip_special_tokens=True))
                for tokens, logprobs in zip(
                    responses.tokens(), responses.sampler_logprobs(), strict=True
                )
            ]
            for place, n in enumerate(numbers):
                result[n] = samples[place * copies :][:copies]
    if max_over_ranks(broken):
        raise ValueError(undrawn_reason(()))
    return result


def make_sampling(max_tokens: int, temperature: float, top_p: float, top_k: int) -> Sampling:
    """Options of sampling; a temperature of 0 is greedy.

    Raises:
        ValueError: for one that is not allowed.
    """
    for name, value in (("max_tokens", max_tokens), ("top_k", top_k)):
        _check_whole(name, value)
    greedy = temperature == 0
    try:
        return Sampling(
            int(max_tokens),
            do_sample=not greedy,
            temperature=1.0 if greedy else temperature,
            top_p=top_p,
            top_k=int(top_k),
        )
    except ValueError as error:
        words = str(error).replace("max_new_tokens", "max_tokens")
        raise ValueError(words.replace("do_sample False", "0")) from error


def check_fits(prompts: Sequence[Sequence[int]], max_tokens: int, limit: int | None) -> None:
    """Refuse prompts that leave no room for an answer within the model's positions."""
    for number, ids in enumerate(prompts):
        if limit is not None and len(ids) + max_tokens > limit:
            raise ValueError(
                f"prompts[{number}] has {counted(len(ids), 'token')}: "
                f"with max_tokens {max_tokens} that is "
                f"more than the model's {limit} positions"
            )


def make_seeds(seed: Key | Sequence[Key], count: int, copies: int) -> list[list[int]]:
    """A seed of each sample of each prompt; the keys are those of rollouts of step 3."""
    _check_whole("num_samples", copies)
    if copies < 1:
        raise ValueError(f"num_samples must be 1 or more, got {copies}")
    if isinstance(seed, list):
        if len(seed) != count:
            raise ValueError(
                f"seed has {counted(len(seed), 'value')} for {counted(count, 'prompt')}"
            )
        keys = [_key(each) for each in seed]
    else:
        keys = [(*_key(seed), number) for number in range(count)]
    return [[stream_seed("rollout", *key, copy) for copy in range(copies)] for key in keys]


def _check_whole(name: str, value: object) -> None:
    if not _is_whole(value):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def _key(seed: object) -> tuple[int, ...]:
    key = seed if isinstance(seed, tuple) else (seed,)
    if not all(map(_is_whole, key)):
        raise ValueError(
            f"seed must be a whole number, a tuple of them, or a list of one for each prompt, "
            f"got {seed!r}"
        )
    return tuple(map(int, key))


def _is_whole(value: object) -> bool:
    """Whether it is a whole number, perhaps of numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)
