"""Options that commands share. Every engine option can also be set as SSD_<NAME> in the environment."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
from click.core import ParameterSource

from ssd.cli.quantities import Real
from ssd.config import MAX_RANKS
from ssd.errors import UsageError
from ssd.launch_config import EngineOptions
from ssd.params import MAX_CHAINS, MAX_FAN_OUT, MAX_LOOKAHEAD, MAX_SEED, Speculation

_Function = TypeVar("_Function", bound=Callable[..., Any])
Row: TypeAlias = tuple[tuple[str, ...], Any, str]  # flags, type, help

_SPECULATION = Speculation.__struct_fields__  # the engine options that a single request may set too


class Lookahead(click.IntRange):
    """A number, or "auto" as 0."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value in ("auto", 0):
            return 0
        number: int = super().convert(value, param, ctx)
        return number


class Names(click.types.StringParamType):
    """A name; an environment variable holds several, with commas between them."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [name.strip() for name in rv.split(",")]


class FanOut(click.ParamType):
    """ "3", "3,2,1" or "[3,2,1]" as a tuple of numbers; "auto" as none."""

    name = "auto|N|list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if value in ("auto", ""):
            return ()
        numbers = re.sub(r"^\s*\[(.*)\]\s*$", r"\1", value).split(",")
        if not all(re.fullmatch(r"\s*\d{1,4}\s*", number) for number in numbers):
            self.fail(f"{value!r} is neither a number nor a list such as 3,2,1", param, ctx)
        fan_out = tuple(int(number) for number in numbers)
        if not all(1 <= number <= MAX_FAN_OUT for number in fan_out):
            self.fail(f"{value!r}: each number must be in the range 1 to {MAX_FAN_OUT}", param, ctx)
        return fan_out


def as_flag(value: object, option: click.Parameter) -> str | list[str]:
    """A value of JSON or TOML as it would stand behind a flag, so that the flag's own checks see it."""
    if getattr(option, "multiple", False):
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return json.dumps(value) if isinstance(value, dict) else str(value)


def with_options(function: Callable[..., Any], table: Sequence[Row], defaults: object) -> Callable[..., Any]:
    """Add an option for each row to a command. Its first long flag names a field of `defaults`, the parameter of the
    command, and (SSD_ before it, in capitals) a variable of the environment."""
    for flags, kind, text in reversed(table):
        name = _field((flags, kind, text))
        default = getattr(defaults, name)
        several = isinstance(kind, Names)
        if isinstance(default, tuple) and not several:
            default = ",".join(map(str, default)) or "auto"
        if isinstance(kind, Lookahead):
            default = default or "auto"
        option = click.option(
            *flags,
            type=kind,
            default=default,
            multiple=several,
            show_default=True,
            envvar=f"SSD_{name.upper()}",
            help=text,
        )
        function = option(function)
    return function


def _field(row: Row) -> str:
    """The field that an option sets."""
    return row[0][0].split("/")[0].removeprefix("--").replace("-", "_")


_POSITIVE, _COUNT = click.IntRange(min=1), click.IntRange(0, 2**31 - 1)
_QUANTIZE = click.Choice(["none", "int8"])
_ENGINE: list[Row] = [
    (("--target",), str, "Model to run: a built-in name, a folder, or a hub name."),
    (
        ("--draft",),
        Names(),
        "Model or EAGLE-3 head that speculates; several models, smallest first, are a cascade. Default: the built-in "
        "one for its target.",
    ),
    (("--mode",), click.Choice(["ar", "sd", "ssd"]), "Plain, speculative, or speculative speculative decoding."),
    (("--num-speculative-tokens", "-k"), Lookahead(1, MAX_LOOKAHEAD), "Tokens the draft proposes per round."),
    (
        ("--fan-out", "-f"),
        FanOut(),
        "Guesses prepared for each accepted length: N, or K + 1 numbers, the last one for all accepted.",
    ),
    (("--budget",), click.IntRange(2, MAX_CHAINS), "Most guesses prepared in a round where the fan-out is auto."),
    (("--backup",), str, "What to do when no prepared guess fits: auto, jit (wait), ngram, none, or a plugin's name."),
    (
        ("--sampler",),
        click.Choice(["coupled", "rejection"]),
        "At temperature > 0: the tokens of ar, or their law alone.",
    ),
    (("--saguaro-c",), Real(0, 1), "Weight of prepared tokens in what is drafted, for rejection."),
    (("--dtype",), click.Choice(["float32", "bfloat16", "float16"]), "Type of weights and activations."),
    (("--draft-dtype",), click.Choice(["float32", "bfloat16", "float16"]), "The draft's. Default: what is fast here."),
    (("--quantize",), _QUANTIZE, "int8: weights in 8 bits, a quarter of the bytes to read, on a CPU."),
    (("--draft-quantize",), _QUANTIZE, "The draft's. Default: as the target, or what is fast."),
    (("--max-model-len",), _POSITIVE, "Longest prompt and completion together, in tokens."),
    (("--max-num-seqs",), click.IntRange(1, 1024), "Requests run at the same time."),
    (("--max-num-batched-tokens",), click.IntRange(1, 65536), "Tokens of one step."),
    (
        ("--kv-cache-memory-bytes",),
        _POSITIVE,
        "Memory of the target's KV cache. Default: on a CPU at most a quarter of it all, on a GPU what is left.",
    ),
    (
        ("--gpu-memory-utilization",),
        Real(0, 1, min_open=True),
        "Share of a GPU's memory that target and draft may use together.",
    ),
    (
        ("--tensor-parallel-size", "-tp"),
        click.IntRange(1, MAX_RANKS),
        "Processes the target is split over: on a GPU or an equal part of its cores each.",
    ),
    (("--nnodes",), click.IntRange(1, MAX_RANKS), "Machines that these processes run on, equally many on each."),
    (("--node-rank",), click.IntRange(0, MAX_RANKS - 1), "Which of them this is; those but 0 only follow."),
    (("--rdzv-endpoint",), str, "Where they meet: HOST:PORT, an address of node 0."),
    (("--target-cpus",), str, "Cores of the target, as 0-2,5. Default: apart from the draft's."),
    (("--draft-cpus",), str, "Cores of the draft."),
    (("--device",), str, "Where the target runs: cpu, cuda or cuda:N."),
    (("--draft-device",), str, "Where the draft runs."),
    (("--deterministic/--no-deterministic",), None, "Make results independent of batch shapes, at some cost."),
    (
        ("--attention",),
        click.Choice(["auto", "torch", "triton", "flash-attn"]),
        "Kernels of attention on a GPU. auto: triton where it is installed.",
    ),
    (("--enforce-eager/--no-enforce-eager",), None, "Record no CUDA graphs: slower, less memory, quick to start."),
    (
        ("--load-format",),
        click.Choice(["auto", "dummy", "mock"]),
        "dummy: random weights. mock: no model, tokens at once, for testing clients.",
    ),
    (
        ("--synthetic-acceptance-length",),
        Real(1, MAX_LOOKAHEAD + 1),
        "With --load-format dummy: models agree so that a round of sd takes so many tokens, by -k and -f.",
    ),
    (
        ("--synthetic-hit-rate",),
        Real(0, 1),
        "Share of rounds that ssd prepares for then. Default: as the paper's Llama pair.",
    ),
    (("--revision",), str, "Branch, tag or commit of a target from the hub."),
    (("--draft-revision",), Names(), "The draft's; of several drafts one each, in their order, empty for none."),
    (("--shutdown-timeout",), Real(0, 86400), "Seconds that open requests get at the end."),
    (("--step-timeout",), Real(1, 86400), "Seconds one step may take before its process is restarted."),
    (("--telemetry/--no-telemetry",), None, "Record what target and draft do, for ssd top and ssd trace."),
]


def address_options(function: _Function) -> _Function:
    """Add `address`, that of a running engine, and `keys`, a client's folder for it."""
    keys = click.option(
        "--keys",
        type=click.Path(path_type=Path, file_okay=False),
        help="The folder that ssd keys made for this client; for a tcp address with keys.",
    )
    return click.option("--address", help="Use the running engine at this address.")(keys(function))


def sampling_options(max_tokens: int) -> Callable[[_Function], _Function]:
    """Add options that are named as fields of `SamplingParams`; `max_tokens` is the default of that one."""
    options = [
        click.option("--temperature", type=Real(0, 100), default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=_COUNT, default=0, help="Sample from the K likeliest; 0: all."),
        click.option(
            "--top-p",
            type=Real(0, 1, min_open=True),
            default=1.0,
            help="Sample from the likeliest that make up this share.",
        ),
        click.option(
            "--min-p", type=Real(0, 1), default=0.0, help="Leave out tokens below this share of the likeliest's."
        ),
        click.option("--max-tokens", type=_POSITIVE, default=max_tokens, show_default=True),
        click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Same seed, same tokens. Default: random."),
        click.option("--stop", multiple=True, help="Text to stop before; up to four times."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token."),
    ]
    return lambda function: functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def speculation_changes(context: click.Context, engine: EngineOptions) -> dict[str, Any]:
    """What flags and environment ask of a running engine's way to speculate. The rest it has decided already."""
    sources = {name: context.get_parameter_source(name) for name in EngineOptions.__struct_fields__}
    for name, source in sources.items():
        if source is ParameterSource.COMMANDLINE and name not in _SPECULATION:
            raise UsageError(f"--{name.replace('_', '-')} cannot be changed in the running engine of --address")
    unsaid = (ParameterSource.DEFAULT, None)  # None: the command has no such option
    return {name: getattr(engine, name) for name in _SPECULATION if sources[name] not in unsaid}


def engine_options_but(*left_out: str) -> Callable[[_Function], Callable[..., Any]]:
    """Add the engine options to a command, which gets them as `engine`, an `EngineOptions`. Fields that are `left_out`
    keep their defaults; there is no --speculative-config then, which could set them all the same."""
    table = [row for row in _ENGINE if _field(row) not in left_out]

    def decorate(function: _Function) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            if not left_out:
                values |= _speculative(values.pop("speculative_config"))
            engine = EngineOptions(**{name: values.pop(name) for name in map(_field, table)})
            return function(engine=engine, **values)

        return with_options(call if left_out else whole(call), table, EngineOptions())

    whole = click.option(
        "--speculative-config",
        metavar="JSON",
        envvar="SSD_SPECULATIVE_CONFIG",
        help=f"The options of speculation at once, as an object with any of {', '.join(_SPECULATION)}.",
    )
    return decorate


engine_options = engine_options_but()


_SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def _speculative(text: str | None) -> dict[str, Any]:
    """The options in `text`, which count less than those that the same source, or a stronger one, gives by name."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"no valid JSON: {error}", param_hint="--speculative-config") from None
    if not isinstance(given, dict) or not given.keys() <= set(_SPECULATION):
        raise click.BadParameter(
            f"give an object with any of {', '.join(_SPECULATION)}", param_hint="--speculative-config"
        )
    ctx = click.get_current_context()
    flags = {option.name: option for option in ctx.command.params}
    source = ctx.get_parameter_source("speculative_config")
    stronger = _SOURCES[: _SOURCES.index(source) + 1] if source in _SOURCES else ()
    return {
        name: flags[name].type_cast_value(ctx, as_flag(value, flags[name]))
        for name, value in given.items()
        if ctx.get_parameter_source(name) not in stronger
    }
