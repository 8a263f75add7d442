"""The options that commands share, made of their tables (`ssd.config.descriptions`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
import msgspec
from click.core import ParameterSource
from msgspec import inspect
from msgspec.structs import replace

from ssd.cli.command import headed, main_option
from ssd.cli.option_types import SPECIAL, click_type
from ssd.cli.sources import SPECULATIVE, TableOption, config_option
from ssd.config.descriptions import FILES, SAMPLING, described
from ssd.config.params import SamplingDefaults, fan_out_fields, field_types
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.law import MAX_SEED

_Command: TypeAlias = Callable[..., Any]
_Function = TypeVar("_Function", bound=_Command)
_OF_ENGINE = EngineOptions.__struct_fields__


def with_options(
    function: _Command,
    defaults: msgspec.Struct,
    without: Collection[str] = (),
    *,
    kinds: Mapping[str, click.ParamType] = SPECIAL,
    variables: bool = True,
    in_file: bool = False,
) -> _Command:
    """Add an option to a command for each described field of `defaults` but those in `without`.

    `max_num_seqs` becomes `--max-num-seqs` and, with `variables` or as an engine option, SSD_MAX_NUM_SEQS. A tuple
    takes its flag several times. The further flag of a boolean turns it off. `kinds`: types by name. With `in_file` the
    advanced options have neither flag nor variable."""
    types = field_types(type(defaults))
    entries = [(name, entry) for name, entry in described(type(defaults)).items() if name not in without]
    for name, entry in reversed(entries):
        kind, several = kinds.get(name) or click_type(types[name]), isinstance(types[name], inspect.VarTupleType)
        flag, hidden = name.replace("_", "-"), in_file and entry.advanced
        switch = isinstance(kind, click.types.BoolParamType)
        default = getattr(defaults, name)
        option = click.option(
            *[f"--{flag}/{(*entry.flags, f'--no-{flag}')[0]}"] if switch else [f"--{flag}", *entry.flags],
            cls=TableOption,
            type=kind,
            default="auto" if name in SPECIAL and not several and default in ((), 0) else default,
            multiple=several,
            show_default=True,
            envvar=f"SSD_{name.upper()}" if (variables or name in _OF_ENGINE) and not hidden else None,
            heading=entry.heading,
            in_file=hidden,
            help=entry.help + getattr(kind, "help", ""),
        )
        function = option(function)
    return function


def table_options(
    defaults: msgspec.Struct, name: str, without: Collection[str] = (), **settings: Any
) -> Callable[[_Function], _Command]:
    """Pass the options of the table of `defaults` to a command as `name`; those in `without` keep their defaults.

    The `settings` are those of `with_options`."""
    names = [each for each in defaults.__struct_fields__ if each not in without]

    def decorate(function: _Function) -> _Command:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            found = replace(defaults, **{each: values.pop(each) for each in names})
            return function(**{name: found}, **values)

        return with_options(call, defaults, without, **settings)

    return decorate


engine_options = functools.partial(table_options, EngineOptions(), "engine")


def local_engine_options(function: _Function) -> _Command:
    """Add the engine options and --config to a command whose engine runs for one answer or chat."""
    return engine_options(in_file=True)(config_option(function))


def address_options(function: _Function) -> _Function:
    """Add `address`, a running engine's, and `keys`, the folder with a client's keys for it."""
    keys = headed(
        "--keys",
        type=click.Path(path_type=Path, file_okay=False),
        heading=FILES,
        help="Folder that ssd keys made for this client, for a tcp address with keys.",
    )
    help = "Use the running engine at this address: ipc:// or tcp://, of one here also http://host:port or a pid."
    return main_option("--address", help=help)(keys(function))


def sampling_options(max_tokens: int) -> Callable[[_Function], _Command]:
    """Add options named as fields of `SamplingParams`; None: not given, the model may have its own."""
    options = [
        main_option(
            "--max-tokens",
            type=click.IntRange(min=1),
            default=max_tokens,
            show_default=True,
            help="Longest answer, in tokens.",
        ),
        headed(
            "--seed",
            type=click.IntRange(0, MAX_SEED),
            heading=SAMPLING,
            help="Same seed, same tokens. Default: random.",
        ),
        headed("--stop", multiple=True, heading=SAMPLING, help="Text to stop before; up to 16 times."),
        headed("--ignore-eos", is_flag=True, heading=SAMPLING, help="Go on after the end-of-text token."),
    ]

    def decorate(function: _Function) -> _Command:
        rest = functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)
        return with_options(rest, SamplingDefaults(), variables=False)

    return decorate


def speculation_changes(context: click.Context, engine: EngineOptions, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the speculation settings that flags, environment and file ask a running engine for.

    Raises UsageError if a flag names any other engine option but those in `without`, which the command has itself."""
    sources = {name: context.get_parameter_source(name) for name in _OF_ENGINE if name not in without}
    for name, source in sources.items():
        if source is ParameterSource.COMMANDLINE and name not in SPECULATIVE:
            raise UsageError(f"--{name.replace('_', '-')} cannot be changed in the running engine of --address")
    said = [name for name in SPECULATIVE if sources.get(name) not in (ParameterSource.DEFAULT, None)]
    changes = {name: getattr(engine, name) for name in said}
    return changes | (fan_out_fields(changes["fan_out"]) if "fan_out" in changes else {})
