"""The places where options stand beside flags: a TOML file, and an object with all of speculation.

tomllib reads the file; click prefers flags to variables (`envvar`) to the file (`default_map`). Ours, as click lacks
them: unknown keys are refused, and a file's value is checked as a flag's text (click would take 2.7 for the integer 2).
`auto_envvar_prefix` would make variables of all options, such as SSD_DRY_RUN."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ssd.cli.command import HeadedOption, headed, main_option, server_options
from ssd.cli.option_types import as_flag
from ssd.config.descriptions import SPECULATION
from ssd.config.params import Speculation
from ssd.errors import UsageError, did_you_mean
from ssd.launch.options import EngineOptions
from ssd.system import registered
from ssd.system.files import read_bounded

SPECULATIVE = tuple(name for name in Speculation.__struct_fields__ if name in EngineOptions.__struct_fields__)
"""The engine options that a single request may set too."""
_OBJECT = "ssd.speculative-config"  # of a context: the object of --speculative-config, and its source
_MOST_BYTES = 2**20  # of a configuration file
_WEAKER = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


class TableOption(HeadedOption):
    """The flag of a table's entry. `in_file` leaves it to the file of --config."""

    def __init__(self, *args: Any, in_file: bool, **kwargs: Any) -> None:
        super().__init__(*args, hidden=in_file, **kwargs)
        self._in_file = in_file

    def consume_value(self, ctx: click.Context, opts: Any) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if self._in_file and source is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"{self.opts[0]} is a flag of ssd launch; {ctx.info_name} reads it in the file of --config"
            )
        given, by = ctx.meta.get(_OBJECT, ({}, source))
        if self.name in given and source not in _WEAKER[: _WEAKER.index(by) + 1]:
            return as_flag(given[self.name], self), by  # a name counts more than an object of the same source
        return value, source


def read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Take the options in a TOML file as defaults, and lay tables for commands of plugins aside in `meta`.

    The server's options are passed over where a command lacks them: one file does for all commands."""
    if path is None:
        return
    try:
        values = tomllib.loads(read_bounded(path, _MOST_BYTES, pipe=True).decode())
    except UsageError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from None
    options = [option for option in ctx.command.params if isinstance(option, click.Option)]
    known = {option.name: option for option in options if option.name not in (param.name, "dry_run", "help_all")}
    tables = registered.names(registered.TABLES)
    ctx.meta[registered.TABLES] = {name: values.pop(name) for name in tables if name in values}
    given = {key.replace("-", "_"): value for key, value in values.items()}
    if "speculative_config" in given:
        given = _speculation(as_flag(given.pop("speculative_config"))) | given
    allowed = {*filter(None, known), *server_options()}
    if unknown := sorted(given.keys() - allowed):
        name, names = unknown[0].replace("_", "-"), [each.replace("_", "-") for each in allowed]
        raise click.BadParameter(f"{path}: unknown option {name}{did_you_mean(name, names)}", ctx, param)
    ctx.default_map = {name: as_flag(value, known[name]) for name, value in given.items() if name in known}


READ: dict[str, Any] = {
    "type": click.Path(exists=True, dir_okay=False, path_type=Path),
    "callback": read_config,
    "is_eager": True,
    "expose_value": False,
}
"""Settings of an option or an argument whose file is read."""
config_option = main_option(
    "--config",
    envvar="SSD_CONFIG",
    **READ,
    help="TOML file with options, as in `max-num-seqs = 16`; flags and SSD_* count more.",
)


def _read_speculation(ctx: click.Context, param: click.Parameter, text: str | None) -> None:
    if text is not None:
        ctx.meta[_OBJECT] = _speculation(text), ctx.get_parameter_source(param.name or "")


def _speculation(text: str) -> dict[str, Any]:
    """Return the object of JSON with options of speculation in `text`. Raises click's errors."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"no valid JSON: {error}", param_hint="--speculative-config") from None
    if not isinstance(given, dict) or not given.keys() <= set(SPECULATIVE):
        raise click.BadParameter(
            f"give an object with any of {', '.join(SPECULATIVE)}", param_hint="--speculative-config"
        )
    return given


speculative_config_option = headed(
    "--speculative-config",
    metavar="JSON",
    envvar="SSD_SPECULATIVE_CONFIG",
    callback=_read_speculation,
    is_eager=True,
    expose_value=False,
    heading=SPECULATION,
    help=f"All options of speculation at once: an object with any of {', '.join(SPECULATIVE)}.",
)
