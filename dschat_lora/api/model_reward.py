"""A reward model as a reward function, beside the one of the run."""

from collections.abc import Sequence
from functools import cached_property

from dschat_lora.config.groups import ModelConfig
from dschat_lora.data.chat import Span
from dschat_lora.data.records import TextRecord
from dschat_lora.supervised.score import Scorer


class ModelReward:
    """Scores prompts with their responses by a reward model, which is loaded when it is needed.

    Args:
        path: directory of the reward model, or its hub name.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(ModelConfig(model_name_or_path=self._path))

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
        """A score of each response; None for one that is too long for the model."""
        records = [
            TextRecord(
                f"response {number}",
                "prompt-completion",
                (Span(prompt, target=False), Span(response, target=True)),
            )
            for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        return self._scorer.scores(records)
