"""Decoding by the continuous batching of transformers, in the place of our own."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.parallel import whole_sequences

_BLOCK = 256  # tokens of a block of keys and values, by transformers' default
_PART = 512  # tokens of prompts that are read at a time


class AskedResponse(NamedTuple):
    """A response that an engine is asked for."""

    prompt: list[int]
    seed: int
    limit: int  # most tokens


def asked_responses(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[Sequence[int]],
    limits: Sequence[int] | None,
) -> list[AskedResponse]:
    """Each response of a call of a decoder, prompt after prompt."""
    most = sampling.max_new_tokens
    bounds = [most] * len(prompts) if limits is None else [min(most, n) for n in limits]
    each = zip(prompts, seeds, bounds, strict=True)
    return [AskedResponse(list(p), seed, bound) for p, own, bound in each for seed in own]


@dataclass(frozen=True)
class DrawnResponses:
    """What an engine other than our own drew, read as :class:`Responses` are."""

    sequences: Sequence[tuple[Sequence[int], Sequence[float]]]  # tokens, log-probabilities in nats
    sampling: Sampling

    def tokens(self) -> list[list[int]]:
        """Every sequence's tokens, up to and including its end."""
        return [list(tokens) for tokens, _ in self.sequences]

    @property
    def cut(self) -> list[bool]:
        """Whether each sequence was given up before its end: it has no tokens."""
        return [not tokens for tokens, _ in self.sequences]

    def undrawn(self) -> list[bool]:
        """False for each: a token that cannot be drawn is an error of the engine."""
        return [False] * len(self.sequences)

    def sampler_logprobs(self) -> list[list[float]]:
        """Log-probability of every sequence's tokens in the distribution they were drawn from."""
        return [list(logprobs) for _, logprobs in self.sequences]

    def logprobs(self) -> list[list[float]]:
        """Likewise in the policy; NaN where tokens were drawn from another distribution."""
        if self.sampling.draws_from_policy:
            return self.sampler_logprobs()
        return [[torch.nan] * len(logprobs) for _, logprobs in self.sequences]


class TransformersDecoder:
    """Draws responses with :meth:`transformers.PreTrainedModel.generate_batch`.

    It is called as :class:`dschat_lora.generation.generate.Decoder` is. A call is repeated by the
    same seeds, but a response depends on what else is in the call. Prefixes are read anew.

    Args:
        model: in evaluation mode when it is called, with adapters unmerged.
        eos_ids: any of them ends a response.
        pad_id: any token.
        batch_size: responses at a time, for whose keys and values there is room.

    Raises:
        ValueError: if the installed transformers has no such batching.
    """

    def __init__(
        self, model: PreTrainedModel, *, eos_ids: Collection[int], pad_id: int, batch_size: int
    ) -> None:
        self._model, self._eos_ids, self._pad_id = model, sorted(eos_ids), pad_id
        self._batch_size = batch_size
        # Not in every transformers that will do otherwise.
        self._config_class: Any = getattr(transformers.generation, "ContinuousBatchingConfig", None)
        if not hasattr(self._config_class, "return_logprobs"):
            raise ValueError(
                "--rollout_engine transformers needs continuous batching with log-probabilities, "
                f"which transformers {transformers.__version__} lacks; 5.23 has it"
            )

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int] | None = None,
        prefixes: Sequence[tuple[int, int]] | None = None,
        keep_logprobs: bool = False,
        keep_going: Callable[[bool], bool] | None = None,
    ) -> DrawnResponses:
        """As many responses to each prompt as it has seeds, prompt after prompt.

        Raises:
            RuntimeError: if the engine gives no response to one.
        """
        rows = asked_responses(prompts, sampling, seeds=seeds, limits=limits)
        if not rows:
            return DrawnResponses((), sampling)
        most = max(row.limit for row in rows)
        longest = max(len(row.prompt) for row in rows) + most
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), whole_sequences(self._model):
            torch.manual_seed(stream_seed("transformers", *(row.seed for row in rows)))
            found = self._model.generate_batch(
                [row.prompt for row in rows],
                generation_config=self._options(sampling, most),
                continuous_batching_config=self._config_class(
                    num_blocks=self._batch_size * -(-longest // _BLOCK),
                    # Longer prompts are read in parts: the mask has so many rows.
                    max_batch_tokens=max(min(longest, _PART), self._batch_size),
                    return_logprobs=True,
                ),
                progress_bar=False,
                warmup=False,
            )
        answers = list(found.values())  # in the order of the prompts
        whole = [each for each in answers if each.error is None and each.generated_tokens]
        if len(whole) < len(rows):
            why = next((each.error for each in answers if each.error), "it gave no token")
            raise RuntimeError(
                f"--rollout_engine transformers drew {len(whole)} of {len(rows)} responses: {why}"
            )
        # What was drawn after a bound changes nothing before it.
        sequences = [
            (each.generated_tokens[: row.limit], each.logprobs[: row.limit])
            for each, row in zip(whole, rows, strict=True)
        ]
        return DrawnResponses(sequences, sampling)

    def _options(self, sampling: Sampling, max_new_tokens: int) -> GenerationConfig:
        names = ("temperature", "top_p", "top_k") if sampling.do_sample else ()
        drawn = {name: getattr(sampling, name) for name in names}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sampling.do_sample,
            eos_token_id=self._eos_ids,
            pad_token_id=self._pad_id,
            **drawn,
        )
