"""Errors as HTTP answers, in the shape of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ssd.frontend.http import answers

Headers: TypeAlias = Mapping[bytes, bytes]

_STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "overloaded": 429,
    "rate_limit_exceeded": 429,
    "loading": 503,
    "restarting": 503,
    "engine_restarted": 503,
    "shutting_down": 503,
    "slow_reader": 408,
}
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
# Sampling parameters that have another name in a body.
_FIELDS = {"speculation": "speculative"}
_SHOWN = 128  # characters of a client's text that an error repeats
_RETRY = {status: {b"retry-after": b"1"} for status in (429, 503)}


class HttpError(Exception):
    """An answer with another status than 200."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Headers | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})


def refusal(code: str, message: str, param: str | None = None) -> HttpError:
    """Convert a RequestError to an HTTP error, with `param` if the request is to blame."""
    status = _STATUS.get(code, 500)
    blamed = _FIELDS.get(param or "", param) if status == 400 else None
    return HttpError(status, message, code, blamed, _RETRY.get(status))


def invalid(param: str | None, message: str, code: str = "invalid_value") -> HttpError:
    return HttpError(400, message, code, param)


def missing(param: str) -> HttpError:
    return invalid(param, f"{param} is required", "missing_parameter")


def given(value: Any, param: str) -> Any:
    """Return the value of a field that the request needs. Raises HttpError."""
    if value is None:
        raise missing(param)
    return value


def cut(name: str) -> str:
    return name[:_SHOWN]


def bare_error(error: HttpError, request_id: str | None = None) -> answers.BareError:
    """Return the body of an error at doors that tell its message alone."""
    return answers.BareError(error.message)


def error_object(error: HttpError, request_id: str | None = None) -> answers.Error:
    """Return the body of an error; `request_id` is for doors whose body has it."""
    kind = _KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return answers.Error(answers.ErrorDetail(error.message, kind, error.param, error.code))
