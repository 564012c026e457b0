"""Encoding of text with exactly one beginning-of-sequence and no end-of-sequence."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dschat_lora.data.templates import BUILT_IN_TEMPLATE

PROBES = ("a", "1", "\u4e2d")  # a vocabulary may lack some scripts
# Spaces, digits, line ends, other scripts and a joiner: options of tokenizers act on these.
DESCRIBED = [
    "a",
    " a  b",
    "Hello, world! 12345",
    "\n\nHuman: x\n\nAssistant:",
    "\u00e9\u4e2d\U0001f600",
]


class Tokenizer(Protocol):
    """The part of a ``transformers`` tokenizer that preparation uses."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None

    def get_vocab(self) -> dict[str, int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    def get_chat_template(self, *, tools: object = None) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: object) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def __call__(self, text: list[str], **options: object) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], **options: object) -> str: ...

    def encode(self, text: str, **options: object) -> list[int]: ...


@dataclass(frozen=True)
class Encoder:
    """A tokenizer that adds beginning-of-sequence once and never end-of-sequence."""

    tokenizer: Tokenizer
    bos: tuple[int, ...]  # what the tokenizer puts before a text by default, or would
    suffix: int  # number of tokens it puts behind

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts that begin a sequence, beginning-of-sequence at most once."""
        return [self.begin_once(ids) for ids in self.encode_raw(texts)]

    def encode_raw(self, texts: Sequence[str]) -> list[list[int]]:
        """As :meth:`encode`, but a text with a beginning-of-sequence of its own has it twice."""
        encoded = call(self.tokenizer, texts, add_special_tokens=True)
        return [ids[: -self.suffix] for ids in encoded] if self.suffix else encoded

    def encode_alone(self, text: str) -> list[int]:
        """Tokens of a text that continues a sequence."""
        return call(self.tokenizer, [text], add_special_tokens=False)[0]

    def begins_twice(self, ids: Sequence[int]) -> bool:
        """True if the sequence begins with a doubled beginning-of-sequence."""
        size = len(self.bos)
        return size > 0 and tuple(ids[: 2 * size]) == self.bos * 2

    def begin_once(self, ids: list[int]) -> list[int]:
        """``ids`` without a second beginning-of-sequence."""
        while self.begins_twice(ids):
            ids = ids[len(self.bos) :]
        return ids


def make_encoder(tokenizer: Tokenizer) -> Encoder:
    """An encoder that knows what the tokenizer puts around a text by default.

    Raises:
        ValueError: if it finds no token in any probe, as one without vocabulary does, or
            changes a text's own tokens along with what it puts around them.
    """
    for probe in PROBES:
        bare = call(tokenizer, [probe], add_special_tokens=False)[0]
        if not bare:
            continue
        full = call(tokenizer, [probe], add_special_tokens=True)[0]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                bos = tuple(full[:start])
                if not bos and tokenizer.bos_token_id is not None:
                    bos = (tokenizer.bos_token_id,)
                return Encoder(tokenizer, bos, len(full) - len(bare) - start)
        raise ValueError(
            f"the tokenizer reads {probe!r} as {full} with special tokens, as {bare} without"
        )
    raise ValueError(f"the tokenizer finds no token in any of {PROBES}; is the vocabulary empty?")


def call(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each text.

    By the tokenizer of ``tokenizers`` itself, unless its class calls it in a way of its own, or
    padding, truncation or the reading of special tokens are set otherwise, which a call sets right.
    """
    if not texts:
        return []
    from transformers import PreTrainedTokenizerFast as Fast  # heavy

    own = type(tokenizer)
    if isinstance(tokenizer, Fast) and all(
        getattr(own, name, None) is getattr(Fast, name, None)
        for name in ("__call__", "_encode_plus", "_batch_encode_plus", "backend_tokenizer")
    ):
        backend = tokenizer.backend_tokenizer
        cuts_or_pads = backend.truncation is not None or backend.padding is not None
        if not cuts_or_pads and backend.encode_special_tokens == tokenizer.split_special_tokens:
            encode = backend.encode_batch_fast  # without the position of each token in the text
            return [each.ids for each in encode(list(texts), add_special_tokens=add_special_tokens)]
    return tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning of long texts: --overlong handles them
    )["input_ids"]


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything about a tokenizer that may change its output."""
    # Encoding comes first: it resets padding and truncation of an earlier caller, which the
    # serialised form would include.
    probes = [call(tokenizer, DESCRIBED, add_special_tokens=special) for special in (True, False)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = tokenizer.chat_template
    return {
        "class": type(tokenizer).__name__,
        "probes": probes,
        "rules": hashlib.blake2b(rules.encode(), digest_size=16).hexdigest(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        # That of the package stands where the tokenizer has none.
        "chat_template": None if template == BUILT_IN_TEMPLATE else template,
    }
