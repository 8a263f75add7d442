"""From what a person asks of a server (addresses, names, keys, limits) to a `Server`, or a message that says what is
wrong."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from ssd.config import Limits, Server
from ssd.errors import UsageError
from ssd.frontend.keys import read_keys
from ssd.ipc.listening import is_loopback

_NEEDED = ("uvicorn", "httptools", "prometheus_client")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server options of `ssd launch`."""

    http: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key_file: str | None = None
    insecure: bool = False
    served_model_name: tuple[str, ...] = ()
    metrics_compat: str = "none"
    max_open_requests: int = Limits().max_open_requests
    max_n: int = Limits().max_n
    max_prompts: int = Limits().max_prompts
    max_body_bytes: int = Limits().max_body_bytes
    max_header_bytes: int = Limits().max_header_bytes
    max_header_lines: int = Limits().max_header_lines
    slow_reader_tokens: int = Limits().slow_reader_tokens
    slow_reader_seconds: float = Limits().slow_reader_seconds


def resolve_server(options: ServerOptions, model: str) -> Server:
    """Check what can be checked before anything starts. `model` is the name where none is given. Raises UsageError."""
    if options.http:
        _check_http(options)
    limits = {name: getattr(options, name) for name in Limits.__struct_fields__}
    given = {name: getattr(options, name) for name in ("http", "host", "port", "uds", "api_key_file", "metrics_compat")}
    names = options.served_model_name or (model,)
    try:
        return msgspec.convert({**given, "names": names, "limits": limits}, Server)
    except msgspec.ValidationError as error:
        raise UsageError(f"server options: {error}") from None


def _check_http(options: ServerOptions) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"HTTP needs {', '.join(missing)}: install ssd[http], or give --no-http to serve ZeroMQ clients only"
        )
    if options.api_key_file is not None:
        read_keys(options.api_key_file)
    elif options.uds is None and not is_loopback(options.host) and not options.insecure:
        raise UsageError(
            f"--host {options.host} lets other machines in: give --api-key-file, or --insecure if that is meant"
        )
