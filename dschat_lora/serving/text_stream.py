"""Text of tokens as they come, up to a stop string."""

from collections.abc import Sequence

from dschat_lora.models.loading import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the first bytes of a character
_MOST_TOKENS = 8  # of a character; bytes that make none are shown as such


class TextStream:
    """Decodes tokens one by one; all pieces together are the text of all tokens at once.

    Text is held back while it may be part of a character or the beginning of a stop string.

    Args:
        tokenizer: of the model; special tokens leave no text.
        stop: strings that end the text, which are left out of it.
        strip: leave out white space in front.

    Attributes:
        stopped: whether a stop string was met.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, strip: bool) -> None:
        self._tokenizer, self._stop, self._strip = tokenizer, tuple(stop), strip
        self._ids: list[int] = []
        self._start = self._read = 0  # a token's text depends on those from ``start`` on
        self._waiting = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._read < _MOST_TOKENS:
            return ""
        self._take(text)
        return self._release(self._held_back())

    def finish(self) -> str:
        """The rest, when no token follows."""
        if not self.stopped:
            self._take(self._new_text())
        return self._release(0)

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _take(self, text: str) -> None:
        self._start, self._read = self._read, len(self._ids)
        self._waiting += text
        if self._strip:
            self._waiting = self._waiting.lstrip()
            self._strip = not self._waiting
        found = [at for stop in self._stop if (at := self._waiting.find(stop)) >= 0]
        if found:
            self._waiting, self.stopped = self._waiting[: min(found)], True

    def _held_back(self) -> int:
        """Number of last characters that a stop string may begin with."""
        if self.stopped:
            return 0
        longest = max(map(len, self._stop), default=1)
        for size in range(min(longest - 1, len(self._waiting)), 0, -1):
            if any(stop.startswith(self._waiting[-size:]) for stop in self._stop):
                return size
        return 0

    def _release(self, held_back: int) -> str:
        cut = len(self._waiting) - held_back
        text, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
