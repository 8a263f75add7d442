from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec

from ssd.frontend.http.errors import HttpError, error_object, refusal
from ssd.frontend.http.exchange import JSON, encoder

Headers: TypeAlias = list[tuple[bytes, bytes]]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"expect"}  # headers of one connection only


class ForwardedRequest(msgspec.Struct, frozen=True):
    """A client's request on its way to a replica. The router compares `prompt`, which is never empty."""

    prompt: str
    method: str
    target: str
    headers: Headers
    body: bytes


class Ingress:
    """The ASGI application before the replicas: sends each request to one, and streams its answer back."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        async def application(scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
            if scope["type"] == "http":
                await self._answer(scope, receive, send)

        return application  # a method would be taken for an application of ASGI 2

    async def _answer(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        from ray.exceptions import RayError

        body = await self._body(receive)
        if body is None:
            message = f"a body has at most {self._max_body_bytes} bytes"
            return await _refuse(send, HttpError(413, message, "body_too_large"))
        query = scope["query_string"].decode("latin-1")
        target = quote(scope["path"], safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
        headers = [(name, value) for name, value in end_to_end(scope["headers"]) if name != b"content-length"]
        request = ForwardedRequest(prompt_of(body) or target, scope["method"], target, headers, body)
        is_stream: bool | None = None  # None: nothing has been sent
        try:
            async for part in self._replicas.options(stream=True).ask.remote(request):
                if isinstance(part, bytes):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                else:
                    is_stream = (b"content-type", b"text/event-stream") in [(n, v.split(b";")[0]) for n, v in part[1]]
                    await send({"type": "http.response.start", "status": part[0], "headers": part[1]})
        except RayError:  # the replica, its machine or its frontend is lost
            lost = refusal("engine_restarted", "the engine of this request was lost; try again")
            if is_stream is None:
                return await _refuse(send, lost)
            if not is_stream:
                raise  # which breaks the connection, so that the client does not take a part for the whole
            event = b"data: " + encoder.encode(error_object(lost)) + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _body(self, receive: _Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def prompt_of(body: bytes) -> str:
    """Return the prompt of a request, by whose beginning a replica is found; "" if there is none."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return ""
    if not isinstance(found, dict):
        return ""
    said = [found[name] for name in ("system", "instructions", "prompt", "messages", "input") if name in found]
    return "\n".join(each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in said)


def end_to_end(headers: Headers) -> Headers:
    """Return the headers that a proxy passes on, their names in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _HOP]


async def _refuse(send: _Send, error: HttpError) -> None:
    headers = [(b"content-type", JSON), *error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": encoder.encode(error_object(error))})
