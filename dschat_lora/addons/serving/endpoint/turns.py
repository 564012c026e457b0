"""An answer's pieces as OpenAI's fields: text, tool calls and log-probabilities."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from transformers.convert_slow_tokenizer import bytes_to_unicode

from dschat_lora.addons.serving.endpoint.text import TextStream, decoded, held_back
from dschat_lora.data.tool_calls import parse_tool_calls
from dschat_lora.models.loading import Tokenizer

Kind = Literal["chat", "text"]
Finish = Literal["stop", "length"]
# What a call begins with in the forms that parse_tool_calls reads, but for a bare JSON object.
_BEGINNINGS = (
    *("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<|start|>", "<|channel|>", "to=functions."),
)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Piece:
    """Text of an answer as it comes; the last one says how it ended."""

    text: str
    tokens: int  # of the answer so far, the end token included
    finish: Finish | None = None
    error: str | None = None  # why there will be no more
    stopped: bool = False  # whether that is the decoder's end
    param: str | None = None  # the field of the request whose fault it is
    ids: tuple[int, ...] = ()  # tokens since the last piece, the end token included
    logprobs: tuple[float, ...] = ()  # of ``ids``, in nats, where they were asked for
    # Of each of ``ids`` the most probable tokens in its place and their log-probabilities.
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached: int = 0  # tokens of the prompt that were not computed again
    # Of the prompt's tokens but the first, in nats, with the last piece, where they were asked for.
    prompt_logprobs: Sequence[float] = ()

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


@dataclass
class Delta:
    """What is new in an answer."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    ids: tuple[int, ...] = ()


class Turn:
    """One answer: pieces become deltas, which together are the whole answer.

    Args:
        tokenizer: of the model.
        kind: of request, which decides the form of log-probabilities.
        prompt: tokens before it; with those of the answer they make the ids of calls.
        reads_calls: whether calls are looked for. Text that may be one is held back.
        parallel_calls: False keeps the first call.
        stop: strings that end the text.
        logprobs: how many alternatives are given beside each token; None: no log-probabilities.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kind: Kind,
        *,
        prompt: Sequence[int] = (),
        reads_calls: bool = False,
        parallel_calls: bool = True,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
    ) -> None:
        self._tokenizer, self._kind, self._prompt = tokenizer, kind, prompt
        self._reads_calls, self._parallel, self._stop = reads_calls, parallel_calls, stop
        self._top = logprobs
        self._ids: list[int] = []
        self._raw = TextStream(tokenizer, strip=False, shown=True)  # special tokens are in it
        self._raw_text = self._text = ""
        self._sent = 0  # characters of the text
        self._entries: list[dict[str, Any]] = []
        self._offset = 0  # characters of all tokens

    def add(self, piece: Piece) -> Delta:
        """What a piece adds; it may be empty."""
        self._text += piece.text
        self._ids += piece.ids
        if self._top is not None:
            self._entries += self._logprob_entries(piece)
        if piece.finish is not None:
            delta = self._last(piece, piece.finish)
        else:
            delta = Delta(self._certain(piece) if self._reads_calls else piece.text)
        delta.ids = piece.ids
        if self._entries and (delta.text or delta.finish):
            delta.logprobs, self._entries = self._joined(self._entries), []
        return delta

    def _certain(self, piece: Piece) -> str:
        """More text that is no part of a call."""
        self._raw_text += "".join(map(self._raw.add, piece.ids))
        if self._raw_text.lstrip().startswith("{"):
            return ""
        if any(beginning in self._raw_text for beginning in _BEGINNINGS):
            return ""
        text = self._text
        # The text beside calls is stripped.
        certain = text[: len(text) - held_back(text, _BEGINNINGS)].rstrip()
        new, self._sent = certain[self._sent :], max(self._sent, len(certain))
        return new

    def _last(self, piece: Piece, finish: Finish) -> Delta:
        if not self._reads_calls:
            return Delta(piece.text, finish=finish)
        special = {t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special}
        ids = list(self._ids)
        if ids and self._tokenizer.convert_ids_to_tokens(ids[-1]) in special:
            ids.pop()  # the end
        whole = decoded(self._tokenizer, ids, shown=True) if ids else self._text
        beside, calls = parse_tool_calls(whole)
        if not calls:
            return Delta(self._text[self._sent :], finish=finish)
        for token in special:
            beside = beside.replace(token, "")
        for stop in self._stop:
            beside = beside.partition(stop)[0]
        before = self._text[: self._sent]
        rest = beside[len(before) :] if beside.startswith(before) else ""
        kept = calls if self._parallel else calls[:1]
        made = [
            {
                "id": self._call_id(number),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(kept)
        ]
        return Delta(rest, made, finish="tool_calls")

    def _call_id(self, number: int) -> str:
        """Nine letters and digits, as Mistral's template demands, which depend on all tokens."""
        seen = json.dumps([list(self._prompt), self._ids, number])
        return hashlib.blake2b(seen.encode()).hexdigest()[:9]

    def _logprob_entries(self, piece: Piece) -> list[dict[str, Any]]:
        """Of each token, as ``/v1/chat/completions`` has them."""
        tops = piece.top_logprobs or ((),) * len(piece.ids)
        return [
            {
                **self._described(token, logprob),
                "top_logprobs": [self._described(*each) for each in top[: self._top]],
            }
            for token, logprob, top in zip(piece.ids, piece.logprobs, tops, strict=True)
        ]

    def _described(self, token: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(self._tokenizer, token)
        return {
            "token": content.decode(errors="replace"),
            "logprob": max(logprob, -9999.0),  # JSON has no infinity
            "bytes": list(content),
        }

    def _joined(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        if self._kind == "chat":
            return {"content": entries, "refusal": None}
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        best = [[*entry["top_logprobs"], entry] if self._top else [] for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{each["token"]: each["logprob"] for each in top} for top in best],
            "text_offset": offsets,
        }


@lru_cache(maxsize=2**16)
def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token adds to a text; those of special tokens are their names."""
    # Behind another token: some tokenizers leave out the space in front of a text.
    before = tokenizer.encode("a", add_special_tokens=False)
    text = decoded(tokenizer, [*before, token], shown=True)
    text = text[len(decoded(tokenizer, before, shown=True)) :]
    if "\ufffd" not in text:
        return text.encode()
    # A part of a character.
    name = tokenizer.convert_ids_to_tokens(token)
    if spelt := _BYTE.fullmatch(name):
        return bytes([int(spelt[1], 16)])
    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of GPT-2's BPE
    if all(letter in alphabet for letter in name):
        return bytes(alphabet[letter] for letter in name)
    return text.encode()
