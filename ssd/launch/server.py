"""The server options of `ssd launch`, and their resolution into a checked `ServerConfig`."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from ssd.config.descriptions import CLIENTS, LIMITS, MAIN
from ssd.config.engine import DraftLink, Limits, PlainTools, Port, ServerConfig, check_text
from ssd.errors import UsageError
from ssd.ipc import keys
from ssd.ipc.listening import api_keys, is_loopback, tls_context
from ssd.launch.options import EngineOptions
from ssd.system import registered

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/,]{1,255}")  # as an Origin header has it
_HOST = re.compile(r"[^\s/:@\[\]]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]")  # as a Host header has it


class ServerOptions(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    heading: ClassVar[str] = CLIENTS
    http: Annotated[bool, "Serve HTTP beside ZeroMQ."] = True
    host: Annotated[str, "Address that HTTP listens on.", MAIN] = "127.0.0.1"
    port: Annotated[Port, "Its port; 0: any free one.", MAIN] = 8000
    uds: Annotated[str | None, "Listen on this Unix socket instead."] = None
    api_key_file: Annotated[
        str | None, "File with the keys that clients must show, one a line; only its owner may read it.", MAIN
    ] = None
    limits: Annotated[
        str | None, "TOML file with the requests and tokens a minute of each API key, and its requests at once.", LIMITS
    ] = None
    api_key: Annotated[tuple[str, ...], "A key that clients must show. Repeatable; SSD_API_KEY is seen by fewer."] = ()
    allowed_host: Annotated[tuple[str, ...], "Another host name that HTTP without keys answers to. Repeatable."] = ()
    allow_origin: Annotated[
        tuple[str, ...], "Let web pages of this origin ask, as https://app.example; *: any. Repeatable."
    ] = ()
    ssl_certfile: Annotated[str | None, "Serve HTTPS with the certificates in this PEM file."] = None
    ssl_keyfile: Annotated[str | None, "PEM file with the private key. Default: it is in --ssl-certfile."] = None
    zmq_bind: Annotated[str | None, "Let ZeroMQ clients of other machines in here, as tcp://0.0.0.0:5555."] = None
    zmq_keys: Annotated[str | None, "Folder of `ssd keys` with the engine's key and the list of clients."] = None
    draft_bind: Annotated[str | None, "Let ssd draft of other machines in at this address, as tcp://0.0.0.0:5556."] = (
        None
    )
    draft_keys: Annotated[str | None, "Folder of `ssd keys` with the list of those drafts, which read prompts."] = None
    draft_prompts: Annotated[
        Literal["all", "own"], "Requests such a draft reads: all, or own: of the client key with its name."
    ] = "all"
    insecure: Annotated[bool, "Let other machines in without keys."] = False
    served_model_name: Annotated[
        tuple[str, ...], "The model's name for clients. Repeatable. Default: --target or the cloud's name."
    ] = ()
    otlp_traces_endpoint: Annotated[
        str | None, "Send a span a request to this collector, as http://localhost:4318/v1/traces."
    ] = None
    ui: Annotated[bool, "Serve a chat page at / over HTTP."] = True
    tools: Annotated[
        PlainTools, "Tools for a model whose chat template has no place for them: told in plain text, or refused."
    ] = "auto"
    tool_call_parser: Annotated[
        str, "The model's format of calls: auto, a name in docs/serving.md, a plugin's, or none (plain JSON)."
    ] = registered.AUTO
    reasoning_parser: Annotated[
        str, "How it marks its thoughts: auto, a name in docs/serving.md, a plugin's, or none."
    ] = registered.AUTO


def resolve_server(options: ServerOptions, model: str) -> ServerConfig:
    """Check the options and return the configuration; `model` is a default name. Raises UsageError."""
    check_text(options)
    if options.http:
        _check_http(options)
    _check_zmq(options)
    _check_traces(options.otlp_traces_endpoint)
    registered.check(registered.TOOLS, "--tool-call-parser", options.tool_call_parser)
    registered.check(registered.REASONING, "--reasoning-parser", options.reasoning_parser)
    if not all(options.served_model_name):
        raise UsageError("--served-model-name must not be empty")
    given = {name: getattr(options, name) for name in ServerConfig.__struct_fields__ if hasattr(options, name)}
    given |= {"names": options.served_model_name or (model,), "allowed_hosts": options.allowed_host}
    given |= {"api_keys": options.api_key, "allow_origins": options.allow_origin}
    given |= {"limits": {name: getattr(options, name) for name in Limits.__struct_fields__}}
    try:
        server = msgspec.convert(given, ServerConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"server options: {error}") from None
    if options.http:
        _check_doors(server, options.insecure)
    if options.limits is None:
        return server
    if "read" not in registered.names(registered.QUOTAS):
        raise UsageError("--limits: this installation has no plugin for quotas")
    read = registered.load(registered.QUOTAS, "read")
    return msgspec.structs.replace(server, quotas=read(options.limits, api_keys(server).values()))


def _check_http(options: ServerOptions) -> None:
    for name in options.allowed_host:
        if not _HOST.fullmatch(name):
            raise UsageError(f"--allowed-host {name!r}: give a host name or an address, without scheme and port")
    if options.uds == "":
        raise UsageError("--uds must not be empty")
    for origin in options.allow_origin:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--allow-origin {origin!r}: give *, or scheme and host, as https://app.example:8080")
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise UsageError("--ssl-keyfile is the key of a certificate: give --ssl-certfile")


def _check_doors(server: ServerConfig, insecure: bool) -> None:
    """Read keys and certificate. Raises UsageError for access from other machines without keys."""
    keys = api_keys(server)
    tls_context(server)
    if not keys and server.uds is None and not is_loopback(server.host) and not insecure:
        raise UsageError(
            f"--host {server.host} lets other machines in: give --api-key-file, or --insecure if that is meant"
        )


def _check_traces(endpoint: str | None) -> None:
    if endpoint is None:
        return
    if not _URL.fullmatch(endpoint):
        raise UsageError(
            f"--otlp-traces-endpoint {endpoint!r}: give the URL of a collector, as http://localhost:4318/v1/traces"
        )
    try:
        missing = find_spec("opentelemetry.sdk") is None or find_spec(_EXPORTER) is None
    except ModuleNotFoundError:  # its parent package is missing
        missing = True
    if missing:
        raise UsageError("--otlp-traces-endpoint needs OpenTelemetry: install ssd-engine[otel]")


def _check_zmq(options: ServerOptions) -> None:
    if options.zmq_keys is not None:
        keys.check_server(Path(options.zmq_keys))
    if options.zmq_bind is None:
        return
    host = tcp_host("--zmq-bind", options.zmq_bind)
    if options.zmq_keys is None and not is_loopback(host) and not options.insecure:
        raise UsageError(
            f"--zmq-bind {options.zmq_bind} lets other machines in: give --zmq-keys (see ssd keys), or --insecure if "
            "that is meant"
        )


def draft_link(options: EngineOptions, server: ServerOptions) -> DraftLink | None:
    """Return the link for drafts on other machines, by a plugin, or None. Raises UsageError."""
    if server.draft_bind is None and server.draft_keys is None and server.draft_prompts == "all":
        return None
    if "draft" not in registered.names(registered.LINKS):
        raise UsageError("drafts on other machines (--draft-bind) need a plugin (draft in ssd.links): none is here")
    return registered.load(registered.LINKS, "draft")(options, server)


def tcp_host(option: str, address: str) -> str:
    """Return the host of an option's TCP address. Raises UsageError for any other text."""
    found = re.fullmatch(r"tcp://(\[[^]]+\]|[^:/]+):(\d{1,5})", address)
    if found is None or int(found[2]) > 65535:
        raise UsageError(f"{option} {address}: give an address such as tcp://127.0.0.1:5555")
    return found[1].strip("[]")
