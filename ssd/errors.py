"""Errors that a user can do something about; everything else is a bug and keeps its traceback in the log."""

from __future__ import annotations


class SsdError(Exception):
    """A failure whose message is meant for people. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(SsdError):
    """Bad input that could be known before anything ran: a flag, a name, a file."""

    exit_code = 2


class RequestError(SsdError):
    """One request refused or failed; the engine goes on. `code` is machine-readable and part of the protocol; `param`
    is the sampling parameter that is to blame, where one is, and `index` the number of the request in its batch."""

    index: int | None = None

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 2 if self.code == "invalid_request" else 1


class RequestTimeoutError(RequestError):
    """A request took more time than its caller gave it, and was cancelled."""

    def __init__(self) -> None:
        super().__init__("timeout", "the request was not finished in the time it was given, and was cancelled")


class EngineDeadError(SsdError):
    """A process the engine cannot do without has ended; the message says which and how."""
