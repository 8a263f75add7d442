"""The chat page: one static file, whose headers let it run its own script and ask this server."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from ssd.config.engine import ServerConfig
from ssd.frontend.http.exchange import Exchange
from ssd.frontend.http.openapi import Route

_KIND = b"text/html; charset=utf-8"


def routes(server: ServerConfig) -> list[Route]:
    return [Route("GET", "/", Page().show, "", open=True)] if server.ui else []


class Page:
    """The bytes of page.html and their headers, whose policy lets its script make no HTML of text."""

    def __init__(self) -> None:
        self._html = (files("ssd.plugins.page") / "page.html").read_bytes()
        policy = {
            "default-src": "'none'",
            "script-src": _hash_of(b"script", self._html),
            "style-src": _hash_of(b"style", self._html),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        self._headers = {
            b"content-security-policy": "; ".join(map(" ".join, policy.items())).encode(),
            b"cache-control": b"no-cache",
            b"referrer-policy": b"no-referrer",
            b"x-content-type-options": b"nosniff",
        }

    async def show(self, _: object, exchange: Exchange) -> None:
        await exchange.reply(self._html, kind=_KIND, headers=self._headers)


def _hash_of(tag: bytes, html: bytes) -> str:
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
