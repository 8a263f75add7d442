"""The error for text that is not a valid grammar."""

from __future__ import annotations

from ssd.errors import RequestError


def refused(cause: str) -> RequestError:
    """Return the error for a grammar that cannot be used."""
    line = " ".join(cause.replace("<non-verbose/>", "").split()) or "it cannot be read"
    return RequestError("invalid_request", f"structured output: {line[:256]}", "structured")
