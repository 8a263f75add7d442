"""The routes' type, and the OpenAPI document made of them and of the structs that decode and encode."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import msgspec

from ssd import __version__
from ssd.config.engine import EngineConfig
from ssd.frontend.http.errors import HttpError, error_object
from ssd.frontend.http.exchange import Exchange

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_REF = "#/components/schemas/{name}"
# OpenAPI 3.1 describes a stream by its events. The data is a chunk as JSON, or [DONE].
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests are open; try again after `Retry-After`.",
    "503": "Loading, restarting or shutting down; try again after `Retry-After`.",
}


class Route(NamedTuple):
    """One endpoint.

    A name in braces in `path` stands for a part without slashes, `{model}` for any rest. `body`, `answer` and `events`
    are the structs that the document describes. `error` returns the body of an error, `stream` is the content type of
    `events`. A route without a `summary` is not in the document. One with a `header` takes the place of the path's own
    for requests with it. `clients` is the hint for a wrong base URL."""

    method: str
    path: str
    handler: Callable[[Any, Exchange], Awaitable[None]]
    summary: str
    body: type | None = None
    answer: type | None = None
    events: type | None = None
    open: bool = False
    error: Callable[[HttpError], Any] = error_object
    stream: str = EVENTS
    header: bytes = b""
    clients: str = "OpenAI's clients take a base URL that ends in /v1"


def document(routes: Sequence[Route], config: EngineConfig, keys: bool) -> dict[str, Any]:
    routes = [route for route in routes if route.summary]
    kinds = {kind for route in routes for kind in (route.body, route.answer, route.events)}
    kinds |= {_error(route) for route in routes}
    structs = [kind for kind in kinds if kind is not None and issubclass(kind, msgspec.Struct)]
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REF)
    named = dict(zip(structs, schemas, strict=True))
    _narrow(components, config)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, named, keys)
    schemes = {
        "key": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "ssd", "version": __version__, "description": "Completions by speculative decoding."},
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": schemes} if keys else {})},
    }


def _error(route: Route) -> Any:
    return get_type_hints(route.error)["return"]


def _narrow(components: dict[str, Any], config: EngineConfig) -> None:
    for name, schema in components.items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"type": "string", "enum": list(config.server.names)}


def _operation(route: Route, named: dict[Any, Any], keys: bool) -> dict[str, Any]:
    name = "_".join([route.method.lower(), *re.findall(r"\w+", route.path)])
    operation: dict[str, Any] = {"operationId": name, "summary": route.summary}
    content = {}
    if route.answer is not None:
        content["application/json"] = {"schema": named.get(route.answer, {"type": "object"})}
    if route.events is not None:
        content[route.stream] = {"schema": _EVENT} if route.stream == EVENTS else {}
    if route.path == "/metrics":
        content["text/plain"] = {"schema": {"type": "string"}}
    errors: dict[str, str] = {}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": named[route.body]}}}
        errors |= _ERRORS
    if names := re.findall(r"{(\w+)}", route.path):
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
        errors["404"] = "There is none of this name."
    if keys and not route.open:
        operation["security"] = [{"key": []}, {"header": []}]
        errors["401"] = "No valid key."
    error = {"application/json": {"schema": named[_error(route)]}}
    responses = {status: {"description": text, "content": error} for status, text in errors.items()}
    responses["200"] = {"description": route.summary, **({"content": content} if content else {})}
    if route.path.startswith("/health"):
        responses["503"] = {"description": "Not now."}
    return {**operation, "responses": responses}
