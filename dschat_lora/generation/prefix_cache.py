"""Prefix cache: keys and values of sequences that have ended, for prompts that begin as they do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.models.backbone import recurrent_layers

Layers = dict[int, tuple[Tensor, Tensor]]  # (heads, T, D) keys and values of each layer
MIN_PREFIX = 16  # tokens; fewer are computed again
KEPT_BYTES = 2**30  # most that the keys and values of a base's ended sequences take
KEPT_TOKENS = 8192  # most of them, however small, as each prompt is compared with all


def can_keep_prefixes(model: PreTrainedModel) -> bool:
    """Whether all that layers keep of a prefix are keys and values, the same in longer texts.

    A recurrent layer has one state, of the whole text; some rotary embeddings change their
    frequencies with the length of the text.
    """
    types = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    varies = any(kind in each for each in types for kind in ("dynamic", "longrope"))
    return not varies and not recurrent_layers(model)


def prefix_tokens(model: PreTrainedModel, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens that may be taken from another text; see ``reads_whole`` of a model, if it has it.

    From the first token of at least that on, what is kept of a part does not tell how all is read.
    """
    least = getattr(model, "reads_whole", None)
    whole = [] if least is None else [n for n, token in enumerate(tokens) if token >= least]
    return tokens[: whole[0]] if whole else tokens


@dataclass(frozen=True, eq=False)
class EndedSequence:
    """Tokens, their adapter's number, and their keys and values."""

    adapter: int
    tokens: Sequence[int]
    layers: Layers


class PrefixCache:
    """Sequences that have ended; those that were not used for longest make room for new ones."""

    def __init__(self) -> None:
        self._sequences: list[EndedSequence] = []  # the most recently used is the last

    def find(self, adapter: int, tokens: Sequence[int]) -> tuple[Layers, int]:
        """Layers of the sequence with the longest common prefix, and the prefix's length.

        The length is 0, and there are no layers, where it would be less than ``MIN_PREFIX``.
        """
        best, length = None, MIN_PREFIX - 1
        for sequence in self._sequences:
            common = common_prefix(sequence.tokens, tokens) if sequence.adapter == adapter else 0
            if common > length:
                best, length = sequence, common
        if best is None:
            return {}, 0
        self._sequences.remove(best)
        self._sequences.append(best)
        return best.layers, length

    def add(
        self,
        adapter: int,
        tokens: Sequence[int],
        copy: Callable[[int], Layers],
        *,
        token_bytes: int,
    ) -> None:
        """Keep one more, or as much of its beginning as may be kept in all.

        Args:
            adapter: the number of its adapter.
            tokens: of the sequence.
            copy: copies the keys and values of so many of its first tokens.
            token_bytes: of the keys and values of one token.
        """
        most = min(KEPT_TOKENS, KEPT_BYTES // token_bytes)
        tokens = tokens[:most]
        if len(tokens) < MIN_PREFIX or self.find(adapter, tokens)[1] == len(tokens):
            return
        kept = [
            old
            for old in self._sequences
            if old.adapter != adapter or tokens[: len(old.tokens)] != old.tokens
        ]
        while sum(len(old.tokens) for old in kept) + len(tokens) > most:
            kept.pop(0)
        self._sequences = kept
        self._sequences.append(EndedSequence(adapter, tokens, copy(len(tokens))))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    differing = (place for place, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(first), len(second)))
