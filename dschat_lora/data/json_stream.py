"""Values of a long JSON text, of which only a part is in memory."""

import json
import re
from typing import IO

from dschat_lora.config.files import TOO_DEEP, json_object

READ_AT_A_TIME = 2**20  # characters
LOOK_AHEAD = 1000
MOST_CHARACTERS = 32 * 2**20  # of a value
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonError(ValueError):
    """Text that is not JSON: the line and column, from 1, and what is wrong there."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(line, column, message)
        self.line, self.column, self.message = line, column, message


class JsonStream:
    """A cursor in a text: what is behind it is forgotten."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._text, self._at = file, "", 0
        self._decode = json.JSONDecoder(object_pairs_hook=json_object).raw_decode
        self._first_column = 1  # of the text that is in memory
        self._counted = 0  # characters of it, of whose lines ...
        self._line = 1  # ... this is the last

    @property
    def line(self) -> int:
        """The line of the cursor, from 1."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def next(self) -> str:
        """The next character that is no white space, "" at the end; the cursor stands before it."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def skip(self, character: str) -> bool:
        """Pass the next character if it is this one."""
        is_next = self.next() == character
        self._at += is_next
        return is_next

    def skip_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Pass what a pattern of less than ``LOOK_AHEAD`` characters matches here."""
        while len(self._text) - self._at < LOOK_AHEAD and self._read():
            pass
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def value(self) -> object:
        """The next value.

        Raises:
            JsonError: if it is not JSON.
        """
        self.next()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # The rest of the value may not have been read yet.
                if not self._read():
                    raise self.error(error.msg, error.pos) from error
                continue
            except (RecursionError, ValueError) as error:
                # Of a key twice, a number too long, or a value too large.
                deep = isinstance(error, RecursionError)
                raise self.error(TOO_DEEP if deep else str(error)) from error
            # A number may go on in what has not been read.
            whole = isinstance(value, (dict, list, str)) or len(self._text) - end >= LOOK_AHEAD
            if whole or not self._read():
                self._at = end
                return value

    def error(self, message: str, at: int | None = None) -> JsonError:
        """An error at the cursor, or at a character of the text in memory."""
        at = self._at if at is None else at
        line = self.line + self._text.count("\n", self._at, at)
        newline = self._text.rfind("\n", 0, at)
        column = at - newline if newline >= 0 else self._first_column + at
        return JsonError(line, column, message)

    def _read(self) -> bool:
        """Read on, twice as much each time that it is not enough; False at the end."""
        kept = self._text[self._at :]
        if len(kept) > MOST_CHARACTERS:
            raise self.error(f"the value is longer than {MOST_CHARACTERS:,} characters")
        more = self._file.read(max(READ_AT_A_TIME, len(kept)))
        if more:
            self._first_column = self.error("").column
            self._text, self._at, self._counted = kept + more, 0, 0
        return bool(more)
