"""Errors as OpenAI's interface says them."""

from typing import Any

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
