"""One engine, as `ssd launch` starts it, in an actor of Ray Serve."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ssd.errors import SsdError
from ssd.ipc.listening import api_keys, is_loopback
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from ssd.plugins.ray.ingress import ForwardedRequest, Headers, end_to_end

if TYPE_CHECKING:
    from aiohttp import ClientSession

OPEN = "open_requests"
"""Name of the figure that decides the number of replicas."""


class Replica:
    """Starts an engine and asks it. Ray Serve calls these methods."""

    def __init__(self, engine: bytes, server: bytes) -> None:
        """Start the engine. The options are JSON, and are resolved on this machine."""
        options = msgspec.json.decode(server, type=ServerOptions)
        self._held = ExitStack()
        if is_loopback(options.host):  # then the engine checks the Host header of a request
            options = replace(options, host="127.0.0.1", port=0)
        else:
            folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="ssd-http-"))
            options = replace(options, uds=f"{folder}/http.sock")
        config = resolve(msgspec.json.decode(engine, type=EngineOptions), options)
        self._key = next((key.decode() for key in api_keys(config.server)), None)
        self._uds, self._engine = options.uds, self._held.enter_context(Engine(config))

    def _session(self) -> ClientSession:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, UnixConnector

        connector = TCPConnector() if self._uds is None else UnixConnector(self._uds)
        return ClientSession(
            "http://engine" if self._uds is not None else self._engine.url,
            connector=connector,
            timeout=ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def ask(self, request: ForwardedRequest) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Yield the status and the headers of the engine's answer, then the parts of its body."""
        from yarl import URL

        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]
        async with (
            self._session() as session,
            session.request(
                request.method,
                URL(request.target, encoded=True),
                headers=headers,
                data=request.body or None,
                allow_redirects=False,
            ) as answer,
        ):
            yield answer.status, end_to_end(list(answer.raw_headers))
            async for piece in answer.content.iter_any():
                yield piece

    async def record_autoscaling_stats(self) -> dict[str, float]:
        from prometheus_client.parser import text_string_to_metric_families

        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        async with self._session() as session, session.get("/metrics", headers=headers) as answer:
            families = text_string_to_metric_families(await answer.text())
        wanted = ("ssd:num_requests_running", "ssd:num_requests_waiting")
        return {OPEN: sum(sample.value for family in families if family.name in wanted for sample in family.samples)}

    def check_health(self) -> None:
        """Raise the cause if the engine has ended by itself. Serve then starts another replica."""
        if self._engine.wait(0.0):
            raise self._engine.failure or SsdError("the engine ended by itself")

    def __del__(self) -> None:
        self._held.close()
