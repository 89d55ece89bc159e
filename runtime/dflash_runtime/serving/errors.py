"""Errors as clients see them: a status, and JSON in the form of the door they knocked at. And the
JSON encoding of our answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from starlette import responses
from starlette.types import Scope

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
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def rename(self, names: Mapping[str, str]) -> None:
        """Call the field as it is called in a door's own bodies, by `names`."""
        old = self.param
        if old is None or (new := names.get(old)) is None:
            return
        self.param = new
        if self.message.startswith(f"{old}: "):
            self.message = new + self.message.removeprefix(old)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


ErrorForm: TypeAlias = Callable[[ApiError], dict[str, Any]]
"""The JSON of an error, in a door's form."""

ERROR_FORM = "dflash.error_form"
"""Key of the request's scope for the form of its errors; set by the gate."""


REFUSAL = "dflash.refusal"
"""Key of the request's scope for the error that was its answer, if one was."""

HAS_LINE = "dflash.has_line"
"""Key of the request's scope; set once it is to have a log line of its own, whatever its end."""


def error_form(scope: Scope) -> ErrorForm:
    """The form of a request's errors: OpenAI's, unless its door has another."""
    form: ErrorForm = scope.get(ERROR_FORM, openai_error)
    return form


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """An error as the response to a request, which is noted in its scope."""
    scope[REFUSAL] = error
    return JSONResponse(error_form(scope)(error), error.status, error.headers)


def openai_error(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return error.body


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
