"""The errors that the API returns, in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

from bagu.errors import BaguError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(BaguError):
    """An error for the client: an HTTP status, and a body in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = f"{self.message} ({self.hint})" if self.hint else self.message
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code or self.status}}


class UnknownModel(ApiError):
    """No model of the server has the name of a request. What raises it does not know the API key; the handler in api.py
    adds the names that the key may see."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(status, message, param="model", code="model_not_found" if status == 404 else None)
