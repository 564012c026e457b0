"""Decoding state of a batch of a model without a key-value cache."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from dschat_lora.algos.devices import to_device
from dschat_lora.generation.batch_state import Kept
from dschat_lora.generation.sampling import Responses
from dschat_lora.lora.parallel import group_of


class RecomputedRows:
    """Rows without a cache: each step recomputes them, slow but right for any causal model.

    Rows are padded on the right, which no token before the padding attends to.
    """

    def __init__(self, model: PreTrainedModel, *, pad_id: int, device: torch.device) -> None:
        self._model, self._pad_id, self._device = model, pad_id, device
        self._group = group_of(model)
        self._texts: list[list[int]] = []
        self._chosen = torch.zeros(1, dtype=torch.int64, device=device)
        self.sequences: list[int] = []

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        *,
        copies: int,
        kept: Kept | None = None,
    ) -> None:
        """Choose the first token of each response; nothing was kept."""
        self._responses = responses
        self._texts = [list(prompt) for prompt in prompts for _ in range(copies)]
        self.sequences = list(range(len(self._texts)))
        self.step()

    def step(self) -> None:
        """Choose the next token of every row."""
        texts = [self._texts[sequence] for sequence in self.sequences]
        width = max(len(text) for text in texts)
        rows = [text + [self._pad_id] * (width - len(text)) for text in texts]
        lengths = to_device(torch.tensor([len(text) for text in texts]), self._device)
        real = torch.arange(width, device=self._device) < lengths[:, None]
        ids = to_device(torch.tensor(rows), self._device)
        output = self._model(input_ids=ids, attention_mask=real.long(), use_cache=False)
        rows_of = torch.arange(len(texts), device=self._device)
        sequences = to_device(torch.tensor(self.sequences), self._device)
        logits = output.logits[rows_of, lengths - 1]
        tokens = self._responses.advance(logits, sequences, self._chosen, self._group)
        self._chosen += 1
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)

    def keep(self, alive: Sequence[bool]) -> None:
        """Drop the sequences that have ended."""
        pairs = zip(self.sequences, alive, strict=True)
        self.sequences = [sequence for sequence, lives in pairs if lives]
