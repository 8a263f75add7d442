"""Errors that a user can act on. Any other error is a bug and keeps its traceback in the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SsdError(Exception):
    """A failure whose message is meant for people. The command line ends with its `exit_code`."""

    exit_code = 1


class UsageError(SsdError):
    """Bad input that is known before anything runs: a flag, a name, a file."""

    exit_code = 2


class RequestError(SsdError):
    """One request was refused or failed; the engine goes on.

    `code` is part of the protocol. `param` is the sampling parameter to blame, `index` the request's in its batch."""

    index: int | None = None

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickle: other processes can raise the error too.
        return RequestError, (self.code, str(self), self.param)

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 2 if self.code == "invalid_request" else 1


def refused_grammar(cause: str) -> RequestError:
    line = " ".join(cause.replace("<non-verbose/>", "").split()) or "it cannot be read"
    return RequestError("invalid_request", f"structured output: {line[:256]}", "structured")


class RequestTimeoutError(RequestError):
    def __init__(self) -> None:
        super().__init__("timeout", "the request was not finished in the time it was given, and was cancelled")


class EngineDeadError(SsdError):
    """A process that the engine needs has ended; the message says which and how."""


def out_of_memory(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not known and not any(words in said for words in ("allocate memory", "failed to map segment")):
        return ""
    return f"not enough memory ({said.rpartition('DefaultCPUAllocator: ')[2] or type(error).__name__})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
