"""Decoding by the continuous batching of transformers, in the place of our own."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.rl.draw.engine import Asked, Drawn, EngineDecoder, EngineSite, Pending
from dschat_lora.rl.options.engines import EngineError

_BLOCK = 256  # tokens of a block of keys and values, by transformers' default
_PART = 512  # tokens of prompts that are read at a time
# Types that ask the cache for its length, which that of continuous batching does not tell. It
# gives them the positions, so that their length is for nothing but a mask that they do not use.
_ASK_LENGTH = ("biogpt", "opt")


def transformers_engine(site: EngineSite) -> EngineDecoder:
    """The engine of the site's model."""
    return EngineDecoder(TransformersEngine(site), site)


class TransformersEngine:
    """Draws responses with :meth:`transformers.PreTrainedModel.generate_batch`.

    A call is repeated by the same seeds, but a response depends on what else is in the call.

    Raises:
        ValueError: if the installed transformers has no such batching, or none for the model.
    """

    def __init__(self, site: EngineSite) -> None:
        self._model, self._site = site.rollout.eval(), site  # with adapters unmerged
        # Not in every transformers that will do otherwise.
        config_class = getattr(transformers.generation, "ContinuousBatchingConfig", None)
        if not hasattr(config_class, "return_logprobs"):
            raise ValueError(
                "--rollout_engine transformers needs continuous batching with log-probabilities, "
                f"which transformers {transformers.__version__} lacks; 5.23 has it"
            )
        try:
            self.draw([Asked([site.pad_id], 0, 1, site.ends, 0, False)], Sampling(1))
        except EngineError as error:
            raise ValueError(
                f"--rollout_engine transformers: transformers {transformers.__version__} has no "
                f"continuous batching for model type {self._model.config.model_type}; use another "
                f"engine ({error})"
            ) from error

    @torch.no_grad()
    def draw(self, asked: Sequence[Asked], sampling: Sampling) -> Pending[list[Drawn]]:
        """The responses, which are drawn at once.

        Raises:
            EngineError: if transformers gives none to one.
        """
        if not asked:
            return list
        most = max(row.limit for row in asked)
        longest = max(len(row.prompt) for row in asked) + most
        rows, names = self._site.config.batch.rows_decoded, ("temperature", "top_p", "top_k")
        options = GenerationConfig(
            max_new_tokens=most,
            do_sample=sampling.do_sample,
            eos_token_id=sorted(self._site.ends),
            pad_token_id=self._site.pad_id,
            **{name: getattr(sampling, name) for name in names if sampling.do_sample},
        )
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(whole_sequences(self._model))
            if self._model.config.model_type in _ASK_LENGTH:
                hook = self._model.register_forward_pre_hook(_with_length, with_kwargs=True)
                stack.enter_context(hook)
            torch.manual_seed(stream_seed("transformers", *(row.seed for row in asked)))
            results = self._model.generate_batch(
                [row.prompt for row in asked],
                generation_config=options,
                continuous_batching_config=transformers.generation.ContinuousBatchingConfig(
                    num_blocks=rows * -(-longest // _BLOCK),  # for so many responses at a time
                    # Longer prompts are read in parts: the mask has so many rows.
                    max_batch_tokens=max(min(longest, _PART), rows),
                    return_logprobs=True,
                ),
                progress_bar=False,
                warmup=False,
            )
        answers = list(results.values())  # in the order of the prompts
        whole = [each for each in answers if each.error is None and each.generated_tokens]
        if len(whole) < len(asked):
            why = next((each.error for each in answers if each.error), "it gave no token")
            raise EngineError(
                f"--rollout_engine transformers drew {len(whole)} of {len(asked)} responses: {why}"
            )
        # What was drawn after a bound changes nothing before it.
        drawn = [
            Drawn(each.generated_tokens[: row.limit], each.logprobs[: row.limit])
            for each, row in zip(whole, asked, strict=True)
        ]
        return lambda: drawn


def _with_length(
    _: torch.nn.Module, given: tuple[object, ...], inputs: Mapping[str, Any]
) -> tuple[tuple[object, ...], Mapping[str, Any]]:
    """The inputs, whose cache says a length: 0, as all rows stand in one sequence."""
    inputs["cache"].get_seq_length = lambda *_: 0
    return given, inputs
