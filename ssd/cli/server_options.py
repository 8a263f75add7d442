"""What `ssd launch` takes beside the engine options: how clients reach it, a configuration file, a dry run."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec import inspect

from ssd.cli.options import Names, Row, as_flag, with_options
from ssd.cli.quantities import Real
from ssd.config import Limits
from ssd.errors import UsageError
from ssd.files import read_bounded
from ssd.server_config import ServerOptions

_MOST_BYTES = 2**20  # of a configuration file
_LIMITS = inspect.type_info(Limits)
assert isinstance(_LIMITS, inspect.StructType)
_BOUNDS = {limit.name: limit.type for limit in _LIMITS.fields}


def _limit(name: str) -> click.ParamType:
    """What a limit may be, as its field of `Limits` has it."""
    bounds = _BOUNDS[name]
    if isinstance(bounds, inspect.IntType):
        return click.IntRange(bounds.ge, bounds.le)
    assert isinstance(bounds, inspect.FloatType)
    return Real(bounds.gt, bounds.le, min_open=True)


_SERVER: list[Row] = [
    (("--http/--no-http",), None, "Serve HTTP beside ZeroMQ."),
    (("--host",), str, "Address that HTTP listens on."),
    (("--port",), click.IntRange(0, 65535), "Its port; 0: any free one."),
    (("--uds",), str, "Listen on this Unix socket instead."),
    (("--api-key-file",), str, "File with the keys that clients must show, one a line; only its owner may read it."),
    (
        ("--allowed-host",),
        Names(),
        "Host name by which HTTP may be asked without keys, as behind a proxy; may be given several times.",
    ),
    (("--zmq-bind",), str, "Let ZeroMQ clients of other machines in at this address, as tcp://0.0.0.0:5555."),
    (("--zmq-keys",), str, "Folder of `ssd keys` with the engine's key and the list of clients."),
    (("--insecure/--no-insecure",), None, "Let other machines in without keys."),
    (
        ("--served-model-name",),
        Names(),
        "Name of the model for clients; may be given several times. Default: --target.",
    ),
    (("--metrics-compat",), click.Choice(["none", "vllm"]), "Give the metrics under vLLM's names, too."),
    (
        ("--cache-report/--no-cache-report",),
        None,
        "Tell clients how much of a prompt was cached.",
    ),
    (("--max-open-requests",), _limit("max_open_requests"), "Requests that run or wait; more are refused (503)."),
    (("--max-n",), _limit("max_n"), "Choices of one prompt."),
    (("--max-prompts",), _limit("max_prompts"), "Prompts of one HTTP request."),
    (("--max-body-bytes",), _limit("max_body_bytes"), "Size of an HTTP body."),
    (("--max-header-bytes",), _limit("max_header_bytes"), "Size of the headers of an HTTP request."),
    (("--max-header-lines",), _limit("max_header_lines"), "Number of its headers."),
    (
        ("--slow-reader-tokens",),
        _limit("slow_reader_tokens"),
        "Tokens a client may leave unread; more abort its request.",
    ),
    (("--slow-reader-seconds",), _limit("slow_reader_seconds"), "Seconds it may leave any unread."),
]


def server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the server options to a command, which gets them as `server`, a `ServerOptions`."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        server = ServerOptions(**{name: values.pop(name) for name in ServerOptions.__struct_fields__})
        return function(server=server, **values)

    return with_options(call, _SERVER, ServerOptions())


def config_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config FILE`: TOML whose keys are flags. What a flag or the environment says counts more."""
    return click.option(
        "--config",
        envvar="SSD_CONFIG",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        callback=_read,
        is_eager=True,
        expose_value=False,
        help="TOML file with any of these options, as in `max-num-seqs = 16`; flags and SSD_* count more.",
    )(function)


def _read(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        values = tomllib.loads(read_bounded(path, _MOST_BYTES, pipe=True).decode())
    except UsageError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from None
    known = {option.name: option for option in ctx.command.params if option.name not in (param.name, "dry_run")}
    given = {key.replace("-", "_"): value for key, value in values.items()}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise click.BadParameter(f"{path}: unknown option {unknown[0].replace('_', '-')}", ctx, param)
    ctx.default_map = {name: as_flag(value, known[name]) for name, value in given.items()}
