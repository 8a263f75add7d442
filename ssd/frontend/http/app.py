"""The ASGI application: finds the endpoint of a request, checks its Host and API key, turns errors into answers."""

from __future__ import annotations

import logging
import re
import secrets
import socket
from collections.abc import Iterator

from ssd.config.engine import ServerConfig
from ssd.errors import RequestError
from ssd.frontend.http.cors import CrossOrigin
from ssd.frontend.http.endpoints import ROUTES
from ssd.frontend.http.errors import HttpError, cut, refusal
from ssd.frontend.http.exchange import Exchange, Gone, Receive, Scope, Send
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.service import Service
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.listening import is_loopback
from ssd.system import registered

log = logging.getLogger("ssd.http")


class App:
    """The answer to every HTTP request. Raises UsageError for a file of API keys that cannot be used."""

    def __init__(self, manager: RequestManager, listening: socket.socket) -> None:
        server = manager.config.server
        self._service = Service(manager, [*ROUTES, *_of_doors(server)])
        self._cross_origin = CrossOrigin(server.allow_origins)
        self._hosts = {name.lower() for name in (server.host, *server.allowed_hosts)}
        local = listening.family != socket.AF_UNIX and is_loopback(listening.getsockname()[0])
        self._checks_host = local and not self._service.keys
        by_path: dict[str, dict[str, Route]] = {}
        self._by_header = [route for route in self._service.routes if route.header]
        for route in self._service.routes:
            if not route.header:
                by_path.setdefault(route.path, {})[route.method] = route
        self._by_path = {path: methods for path, methods in by_path.items() if "{" not in path}
        self._patterns = {_pattern(path): methods for path, methods in by_path.items() if "{" in path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        exchange.more_headers = self._cross_origin.headers(exchange)
        try:
            await self._dispatch(exchange)
        except Gone:
            pass
        except HttpError as error:
            if not exchange.started:
                await exchange.fail(error)
        except RequestError as error:
            await exchange.fail(refusal(error.code, str(error), error.param))
        except Exception:
            log.exception("a bug in answering %s (request %s):", scope["path"], exchange.id)
            if exchange.started:
                raise
            await exchange.fail(HttpError(500, f"internal error (request {exchange.id})", "internal_error"))
        finally:
            exchange.end()

    async def _dispatch(self, exchange: Exchange) -> None:
        if self._checks_host:
            self._check_host(exchange)
        path = exchange.scope["path"]
        methods = self._by_path.get(path)
        if methods is None:
            path = path.rstrip("/")
            methods = self._by_path.get(path) or self._matching(exchange, path)
        preflight = None if methods is None else self._cross_origin.preflight(exchange, methods)
        if preflight is not None:  # it never has a key
            await exchange.reply(b"", 204, headers=preflight)
            return
        method = exchange.scope["method"]
        route = None if methods is None else methods.get("GET" if method == "HEAD" else method)
        for other in self._by_header:
            if route is not None and other[:2] == route[:2] and exchange.header(other.header) is not None:
                route = other
        if methods:
            exchange.error_object = (route or next(iter(methods.values()))).error  # of all routes of a path
        if self._service.keys and not (route is not None and route.open):
            self._authenticate(exchange)
        if methods is None:
            raise HttpError(404, f"there is no {cut(path)}{self._hint(path)}", "not_found")
        if route is None:
            allowed = ", ".join(methods)
            message, headers = f"{method} is not for this path; {allowed} is", {b"allow": allowed.encode()}
            raise HttpError(405, message, "method_not_allowed", headers=headers)
        if self._service.accounts is not None:
            exchange.account = self._service.accounts.of(exchange.key)
        await route.handler(self._service, exchange)

    def _matching(self, exchange: Exchange, path: str) -> dict[str, Route] | None:
        for pattern, methods in self._patterns.items():
            if found := pattern.fullmatch(path):
                exchange.path = found.groupdict()
                return methods
        return None

    def _hint(self, path: str) -> str:
        ends = [known for known in self._by_path if path.endswith(known.removeprefix("/v1")) and known != "/"]
        if not ends:
            return ""
        known = max(ends, key=len)
        clients = next(iter(self._by_path[known].values())).clients
        return f"; {known} is there ({clients})"

    def _check_host(self, exchange: Exchange) -> None:
        # A page of a site whose name was made to lead to this machine (DNS rebinding) asks by that name.
        if (header := exchange.header(b"host")) is None:
            return  # HTTP/1.0, which no browser speaks
        given = header.decode("latin-1")
        name = re.sub(r":\d*$", "", given).lower()
        if not (is_loopback(name.strip("[]")) or name.endswith(".localhost") or name in self._hosts):
            message = f"the Host {cut(given)!r} is not one of this server's; --allowed-host NAME adds one"
            raise HttpError(403, message, "host_not_allowed")

    def _authenticate(self, exchange: Exchange) -> None:
        kind, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
        if kind.lower() != b"bearer":
            given = exchange.header(b"x-api-key") or b""
        matches = [secrets.compare_digest(given.strip(), key) for key in self._service.keys]
        exchange.key = given.strip()
        if not any(matches):
            message = "give a valid key as Authorization: Bearer KEY, or as X-Api-Key: KEY"
            raise HttpError(401, message, "invalid_api_key", headers={b"www-authenticate": b"Bearer"})


def _of_doors(server: ServerConfig) -> Iterator[Route]:
    """Yield the routes of doors, sorted by the doors' names: the last of several for one path counts."""
    own = {(route.method, route.path) for route in ROUTES}
    for name, routes in registered.load_all(registered.DOORS).items():
        for route in routes(server):
            if route.header or (route.method, route.path) not in own:
                yield route
            else:
                log.warning("door %s: %s %s is left out, since the core has it", name, route.method, route.path)


def _pattern(path: str) -> re.Pattern[str]:
    # A model's name may have slashes.
    return re.compile(
        re.sub(r"{(\w+)}", lambda name: f"(?P<{name[1]}>{'.+' if name[1] == 'model' else '[^/]+'})", path), re.DOTALL
    )
