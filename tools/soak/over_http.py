"""Asks the same questions over HTTP, and compares the answers with those over ZeroMQ."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tools.soak.answers import Answer
from tools.soak.asking import Request
from tools.soak.driver import DISCONNECTED

_PATIENCE_S = 120.0
_AGAIN_S = 0.1


@dataclass
class Asked:
    """What came of it. `told` counts errors by code; those with status 429 and 503 say to try again."""

    finished: int = 0
    altered: int = 0
    hung: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)


async def ask_over_http(
    url: str, model: str, requests: Iterator[Request], reference: Mapping[int, Answer], asked: Asked
) -> None:
    """Send one request after the other, until cancelled."""
    while True:
        request = next(requests)
        try:
            status, body = await asyncio.to_thread(post, url, _body(model, request))
        except TimeoutError:
            asked.hung += 1
        except (OSError, http.client.HTTPException):
            asked.told[DISCONNECTED] += 1
            await asyncio.sleep(_AGAIN_S)
        else:
            _count(status, json.loads(body), reference[request.number], asked)


def post(url: str, body: bytes, patience_s: float = _PATIENCE_S) -> tuple[int, bytes]:
    """Ask for a chat; return status and answer. Raises OSError or HTTPException for a broken connection."""
    where = urlsplit(url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=patience_s)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _body(model: str, request: Request) -> bytes:
    params = request.params
    said = [{"role": message.role, "content": message.content} for message in request.messages]
    asked = {
        "model": model,
        "messages": said,
        "temperature": params.temperature,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "return_token_ids": True,
    }
    return json.dumps(asked).encode()


def _count(status: int, body: dict, expected: Answer, asked: Asked) -> None:  # type: ignore[type-arg]
    if status != 200:
        (asked.told if status in (429, 503) else asked.errors)[body["error"]["code"]] += 1
        return
    (choice,) = body["choices"]
    asked.finished += 1
    asked.altered += Answer(choice["token_ids"], choice["message"]["content"], choice["finish_reason"]) != expected
