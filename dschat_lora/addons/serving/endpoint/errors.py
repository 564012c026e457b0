"""Errors of requests for answers, as OpenAI's interface reports them, and of decoders."""

import json
from typing import Any

MAX_DEPTH = 64
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that gets no answer, and why.

    Args:
        status: of HTTP.
        message: one line for a person.
        param: the field of the body that is wrong.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": " ".join(self.message.split()),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """A mistake in the body of a request."""
    return ApiError(400, message, param=param, code=code)


class BusyError(Exception):
    """No room for another request."""


class StoppedError(Exception):
    """The decoder takes no further requests."""


class TooLongError(ValueError):
    """Prompt and answer do not fit the model."""


class UnsupportedError(ValueError):
    """What decodes answers cannot do what is asked; ``param`` is the field that asks for it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def check_value(value: object) -> None:
    """Refuse a JSON value that is nested too deeply, or whose texts have half a character.

    Raises:
        ValueError: saying which.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"it has text with {half}, which is half a character") from error
