"""Decoding by the continuous batching of transformers, in the place of our own."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.rl.draw.completions import EngineError
from dschat_lora.rl.draw.engine import Asked, Drawn, EngineDecoder, EngineSite, Pending

_BLOCK = 256  # tokens of a block of keys and values, by transformers' default
_PART = 512  # tokens of prompts that are read at a time


def transformers_engine(site: EngineSite) -> EngineDecoder:
    """The engine of the site's model."""
    batch_size = site.config.batch.rows_decoded
    engine = TransformersEngine(
        site.rollout.eval(), eos_ids=site.ends, pad_id=site.pad_id, batch_size=batch_size
    )
    return EngineDecoder(engine, site)


class TransformersEngine:
    """Draws responses with :meth:`transformers.PreTrainedModel.generate_batch`.

    A call is repeated by the same seeds, but a response depends on what else is in the call.

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
    def draw(self, asked: Sequence[Asked], sampling: Sampling) -> Pending[list[Drawn]]:
        """The responses, which are drawn at once.

        Raises:
            EngineError: if transformers gives none to one.
        """
        if not asked:
            return list
        most = max(row.limit for row in asked)
        longest = max(len(row.prompt) for row in asked) + most
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), whole_sequences(self._model):
            torch.manual_seed(stream_seed("transformers", *(row.seed for row in asked)))
            found = self._model.generate_batch(
                [row.prompt for row in asked],
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
