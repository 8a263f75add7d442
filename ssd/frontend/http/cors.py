"""Cross-origin resource sharing: the sites whose pages a browser lets read answers, by default none."""

from __future__ import annotations

import re
from collections.abc import Collection

from ssd.frontend.http.errors import Headers
from ssd.frontend.http.exchange import Exchange

_NAMES = re.compile(rb"[\w-]+(?:\s*,\s*[\w-]+)*", re.ASCII)  # of header fields
_QUOTAS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
_EXPOSED = ", ".join(["x-request-id", "request-id", "retry-after", *_QUOTAS]).encode()
_MOST_BYTES = 1024
_MAX_AGE_S = 600


class CrossOrigin:
    """The answer's headers for pages of `origins`, such as "https://app.example"; "*" is any."""

    def __init__(self, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = {origin.lower().encode() for origin in origins}

    def headers(self, exchange: Exchange) -> Headers:
        if self._any:
            return {b"access-control-allow-origin": b"*", b"access-control-expose-headers": _EXPOSED}
        if not self._origins:
            return {}
        origin = exchange.header(b"origin")
        if origin is None or origin.lower() not in self._origins:
            return {b"vary": b"origin"}  # so that no cache gives it to another page
        return {
            b"access-control-allow-origin": origin,
            b"access-control-expose-headers": _EXPOSED,
            b"vary": b"origin",
        }

    def preflight(self, exchange: Exchange, methods: Collection[str]) -> Headers | None:
        """Return the headers that answer a browser's question before a page's request, or None if it is none."""
        asked = exchange.header(b"access-control-request-method")
        if exchange.scope["method"] != "OPTIONS" or asked is None or exchange.header(b"origin") is None:
            return None
        if b"access-control-allow-origin" not in self.headers(exchange):
            return None
        found = {
            b"access-control-allow-methods": ", ".join(methods).encode(),
            b"access-control-max-age": b"%d" % _MAX_AGE_S,
        }
        names = exchange.header(b"access-control-request-headers") or b""
        if len(names) <= _MOST_BYTES and _NAMES.fullmatch(names):
            found[b"access-control-allow-headers"] = names
        if exchange.header(b"access-control-request-private-network") == b"true":
            found[b"access-control-allow-private-network"] = b"true"
        return found
