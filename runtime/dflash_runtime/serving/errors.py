"""Errors as clients see them: a status and OpenAI's JSON. And the JSON encoding of our answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette import responses

from dflash_protocol.errors import (
    DaemonUnavailable,
    DflashError,
    ModelFileError,
    NotFinite,
    RenderingUnavailable,
    SettingsError,
    UnsupportedModel,
)
from dflash_protocol.process.output import ascii_json


class JSONResponse(responses.JSONResponse):
    """JSON in ASCII, so that names cannot send control sequences to the terminal of a client like
    curl; parsed, it is the same."""

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return ascii_json(content).encode()


class ApiError(Exception):
    """A request that cannot be answered. `param` names the field that is wrong, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def api_error(error: BaseException) -> ApiError:
    """Any exception as an ApiError: our own with their message, others as an internal error."""
    match error:
        case ApiError():
            return error
        case SettingsError():
            name, equals, _ = str(error).partition("=")
            param = name if equals and name.isidentifier() else None
            return ApiError(400, str(error), param=param)
        case UnsupportedModel():
            return ApiError(400, str(error), code="chat_template_failed")
        case DaemonUnavailable() | ModelFileError():
            return ApiError(503, str(error), kind="server_error", code="model_unavailable")
        case RenderingUnavailable():
            return unavailable(str(error), "rendering_unavailable", retry_after_s=1)
        case NotFinite():
            return ApiError(500, str(error), kind="server_error", code="not_finite")
        case DflashError():
            return ApiError(500, str(error), kind="server_error")
    return ApiError(500, "internal error; see the server's log", kind="server_error")


def unavailable(message: str, code: str, *, retry_after_s: int) -> ApiError:
    """The server cannot take this request now."""
    return ApiError(
        503, message, kind="server_error", code=code, headers={"Retry-After": str(retry_after_s)}
    )
