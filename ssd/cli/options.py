"""The options that commands share, and the headings of their help.

Every option of `ssd launch` can also be set in the environment, as SSD_<NAME>. click reads these, and the values of
--config as its `default_map`. It refuses no unknown name in that map, and takes no option without a flag from it."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
import msgspec
from click.core import ParameterSource
from msgspec import inspect

from ssd.bench.quantities import Real
from ssd.config.params import (
    MAX_FAN_OUT,
    MAX_LOOKAHEAD,
    MAX_SEED,
    FanOutChoice,
    Speculation,
    fan_out_fields,
    field_types,
)
from ssd.errors import UsageError, did_you_mean
from ssd.launch.options import EngineOptions
from ssd.system.files import read_bounded

_Command: TypeAlias = Callable[..., Any]
_Function = TypeVar("_Function", bound=_Command)

# The engine options that a single request may set too. The allocation is part of --fan-out.
_SPECULATION = tuple(name for name in Speculation.__struct_fields__ if name != "allocation")

_MAIN = "Main options"
_HEADINGS = {
    _MAIN: "target draft mode num_speculative_tokens lookaheads device max_model_len max_num_seqs host port "
    "api_key_file prompts_file system max_tokens temperature as_json chat address config dataset prompts tokens modes "
    "batch_sizes request_rate url out",
    "Input and output": "keys json_schema regex grammar",
    "Speculation": "fan_out budget backup sampler saguaro_c speculative_config",
    "Sampling": "top_k top_p min_p presence_penalty frequency_penalty repetition_penalty generation_config seed stop "
    "ignore_eos logprobs",
    "Weights": "dtype draft_dtype quantize draft_quantize activations load_format revision draft_revision",
    "Memory and batches": "max_num_batched_tokens kv_cache_memory_bytes kv_cache_dtype gpu_memory_utilization",
    "Processors": "draft_device tensor_parallel_size executor target_cpus draft_cpus mps attention enforce_eager "
    "deterministic",
    "Clients": "http uds api_key ssl_certfile ssl_keyfile allow_origin allowed_host zmq_bind zmq_keys "
    "draft_bind draft_keys draft_prompts insecure served_model_name metrics_compat "
    "otlp_traces_endpoint strict_fields cache_report tool_call_parser reasoning_parser",
    "Limits": "max_open_requests max_n max_prompts max_body_bytes max_header_bytes max_header_lines slow_reader_tokens "
    "slow_reader_seconds max_grammar_bytes grammar_timeout shutdown_timeout step_timeout",
}
"""Headings of the help, each with the names of its options. All others come last, under "Other options"."""


_ADVANCED = [
    "fan_out",
    "budget",
    "backup",
    "saguaro_c",
    "synthetic_acceptance_length",
    "synthetic_hit_rate",
    "telemetry",
    "mps",
    "enforce_eager",
    "executor",
    "attention",
    "step_timeout",
    "shutdown_timeout",
]
"""Engine options without a flag in commands whose engine runs for one answer or chat. A TOML file may set them."""
_VARIABLES = "CACHE CONFIG FAILPOINTS KERNELS LOG MOCK_ROUND_MS OVERLAP PDL PREBUILT SPECULATIVE_CONFIG TEST_DEVICE"
"""Variables, without `SSD_`, that are no engine or server option."""
_MOST_BYTES = 2**20  # of a configuration file
_HELP_ALL = "ssd.help-all"  # key of a context: True if every option is shown
_FROM_FILE = "ssd.engine"  # key of a context: engine options that only a file can set
REPLICAS = "ssd.replicas"


class GroupedCommand(click.Command):
    """A command whose --help shows its main options and `examples`, and --help-all every option under its heading."""

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples.strip().splitlines()
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option and exit.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name.removeprefix("--").removeprefix("no-").replace("-", "_") not in _ADVANCED:
                raise
            raise UsageError(
                f"{error.option_name} is a flag of ssd launch; {ctx.info_name} reads it in the file of --config"
            ) from None

    def invoke(self, ctx: click.Context) -> Any:
        _warn_of_unknown_variables()
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {param.name: param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        groups = {heading: names.split() for heading, names in _HEADINGS.items()}
        grouped = {name for names in groups.values() for name in names}
        groups["Other options"] = [name for name in params if name not in grouped]
        if not ctx.meta.get(_HELP_ALL):
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
            groups = {_MAIN: [*groups[_MAIN], "help", "help_all"]}
        for heading, names in groups.items():
            records = [params[name].get_help_record(ctx) for name in names if name in params]
            if shown := [record for record in records if record is not None]:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        if len(groups) == 1:
            formatter.write(f"\n{ctx.command_path} --help-all shows all {len(params)} options.\n")


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _server_options() -> tuple[str, ...]:
    from ssd.launch.server import ServerOptions  # imports ZeroMQ, which help does not need

    return ServerOptions.__struct_fields__


def _warn_of_unknown_variables() -> None:
    """Print the variables SSD_* that nothing reads, in one line on stderr."""
    options = (*EngineOptions.__struct_fields__, *_server_options())
    known = {f"SSD_{name}" for name in (*map(str.upper, options), *_VARIABLES.split())}
    unknown = sorted(name for name in os.environ if name.startswith("SSD_") and name not in known)
    if unknown:
        words = ", ".join(name + did_you_mean(name, known) for name in unknown[:3]) + ", ..." * (len(unknown) > 3)
        click.echo(f"warning: no setting has the name {words}", err=True)


class Lookahead(click.IntRange):
    """A number; "auto" becomes 0."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value in ("auto", 0):
            return 0
        number: int = super().convert(value, param, ctx)
        return number


class Names(click.types.StringParamType):
    """A name. The flag may be given several times; an environment variable holds several names between commas."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [name.strip() for name in rv.split(",")]


class FanOut(click.ParamType):
    """A tuple of numbers from "3", "3,2,1" or "[3,2,1]"; "auto" becomes the empty tuple, "theorem" stays."""

    name = "auto|theorem|N|list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FanOutChoice:
        if isinstance(value, tuple) or value == "theorem":
            choice: FanOutChoice = value
            return choice
        if value in ("auto", ""):
            return ()
        numbers = re.sub(r"^\s*\[(.*)\]\s*$", r"\1", value).split(",")
        if not all(re.fullmatch(r"\s*\d{1,4}\s*", number) for number in numbers):
            self.fail(f"{value!r} is neither a number nor a list such as 3,2,1", param, ctx)
        fan_out = tuple(int(number) for number in numbers)
        if not all(1 <= number <= MAX_FAN_OUT for number in fan_out):
            self.fail(f"{value!r}: each number must be in the range 1 to {MAX_FAN_OUT}", param, ctx)
        return fan_out


def _as_flag(value: object, option: click.Parameter | None = None) -> Any:
    """Return a value of JSON or TOML as text for its flag, so that the flag's own checks apply."""
    if getattr(option, "multiple", False):
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return json.dumps(value) if isinstance(value, dict) else str(value)


def with_options(function: _Command, helps: dict[str, str], defaults: msgspec.Struct) -> _Command:
    """Add an option to a command for each entry of `helps`, which names a field of `defaults`.

    The field's type is the option's. `max_num_seqs` becomes `--max-num-seqs`; the command's parameter has the field's
    name, and the environment variable is `SSD_MAX_NUM_SEQS`."""
    types = field_types(type(defaults))
    for name, text in reversed(helps.items()):
        kind, default = _kind(name, types), getattr(defaults, name)
        flag = name.replace("_", "-")
        option = click.option(
            f"--{flag}/--no-{flag}" if isinstance(kind, click.types.BoolParamType) else f"--{flag}",
            *_MORE_FLAGS.get(name, ()),
            type=kind,
            default="auto" if name in _SPECIAL else default,
            multiple=isinstance(kind, Names),
            show_default=True,
            envvar=f"SSD_{name.upper()}",
            help=text,
        )
        function = option(function)
    return function


def _kind(name: str, types: dict[str, inspect.Type]) -> click.ParamType:
    return _SPECIAL.get(name) or _click_type(types[name])


def _click_type(of: inspect.Type) -> click.ParamType:
    """Return the type of an option for a field, with the field's own bounds."""
    match of:
        case inspect.UnionType():  # with None
            return _click_type(of.types[0])
        case inspect.LiteralType():
            return click.Choice(of.values)
        case inspect.BoolType():
            return click.BOOL
        case inspect.IntType():
            return click.IntRange(of.ge, of.le)
        case inspect.FloatType():
            return Real(of.ge if of.gt is None else of.gt, of.le, min_open=of.gt is not None)
        case inspect.VarTupleType():
            return Names()
        case _:
            return click.STRING


_MORE_FLAGS = {
    "target": ("--model", "-m"),
    "num_speculative_tokens": ("-k",),
    "fan_out": ("-f",),
    "tensor_parallel_size": ("-tp",),
}
_SPECIAL: dict[str, click.ParamType] = {"num_speculative_tokens": Lookahead(1, MAX_LOOKAHEAD), "fan_out": FanOut()}
_ENGINE = {
    "target": "Model to run: a built-in name, a folder, a GGUF file or a hub name.",
    "draft": "Model or EAGLE-3 head that drafts. Several, smallest first, are a cascade. smollm2 has one built in.",
    "mode": "ar: plain. ngram: with prompt lookup. sd, ssd: with a draft, in turn or ahead. auto: whatever is fastest.",
    "num_speculative_tokens": "K: tokens the draft proposes per round.",
    "fan_out": "Outcomes prepared for each accepted length: one number, or K + 1 numbers for 0 to K accepted tokens. "
    "auto: the likeliest of all lengths; theorem: lists by Theorem 12.",
    "budget": "Most outcomes prepared per round when the fan-out is auto.",
    "backup": "What a cache miss does: auto, jit (wait for the draft), ngram, none, or a plugin's name.",
    "sampler": "At temperature > 0. coupled: the very tokens of ar. rejection: the same distribution, other tokens.",
    "saguaro_c": "With --sampler rejection: weight of prepared tokens in the draft's distribution.",
    "dtype": "Type of weights and activations. Default: float32 on a CPU, bfloat16 (or float16) on a GPU. On a CPU "
    "only float32 keeps weights of few bits in these bits: in 16 bits a 4-bit model takes four times the memory, and "
    "reads that for every token.",
    "draft_dtype": "The draft's type. Default: the one that is fast here.",
    "quantize": "int8: round weights to 8 bits, on a CPU: half the bytes of bfloat16 to keep and to read, less exact. "
    "Weights of few bits stay as they are.",
    "activations": "Inputs of layers whose weights have few bits. int8 is faster and less exact, float32 exact.",
    "draft_quantize": "The draft's. Default: the target's, or int8 where that is faster.",
    "max_model_len": "Longest prompt and answer together, in tokens. Default: the model's, if memory allows.",
    "max_num_seqs": "Most requests that run at the same time. Default: 8; on a GPU 32, or 64 from 64 GiB on.",
    "max_num_batched_tokens": "Most tokens of one step. Default: 256; on a GPU 2048, or 8192 from 64 GiB on.",
    "kv_cache_memory_bytes": "The target's KV cache. Default: a quarter of the memory at most, or the rest of a GPU.",
    "gpu_memory_utilization": "Share of a GPU's memory for target and draft together.",
    "tensor_parallel_size": "Split the target over this many GPUs, or equal groups of cores.",
    "executor": "local: all parts are on this machine. ray: on any machine of its Ray cluster.",
    "target_cpus": "The target's own cores, as 0-2,5. Default: all; in mode ssd all but the draft's.",
    "draft_cpus": "The draft's own cores. Default: those that ssd leaves it; in mode sd all.",
    "device": "Where the target runs: cpu, cuda or cuda:N.",
    "draft_device": "Where the draft runs. Default: cpu; with the target on a GPU the next free GPU, or the same, "
    "if there is room.",
    "mps": "Start CUDA's MPS for a target and a draft on the same GPU, and stop it with the engine.",
    "deterministic": "Make results independent of batch shapes. Slower.",
    "attention": "Attention backend on a GPU. auto: triton if it is installed, and for prompts flash-attn.",
    "kv_cache_dtype": "fp8: the target's keys and values in 8 bits, on a GPU. auto: in the type of the model.",
    "enforce_eager": "Capture no CUDA graphs: slower, less memory, quick to start.",
    "load_format": "dummy: random weights. mock: no model, scripted tokens, to test clients.",
    "synthetic_acceptance_length": "With --load-format dummy: let a round of sd commit so many tokens at this -k, -f.",
    "synthetic_hit_rate": "Hit rate for --synthetic-acceptance-length. Default: that of the paper's Llama pair.",
    "revision": "Branch, tag or commit of a target from the hub.",
    "draft_revision": "The draft's. Several drafts: one each, in their order; empty for none.",
    "generation_config": "auto: requests that do not say how to sample do as the model's generation_config.json says.",
    "shutdown_timeout": "Seconds that open requests get at the end.",
    "step_timeout": "Seconds a step may take before its process is restarted.",
    "telemetry": "Record what target and draft do, for ssd top and ssd trace.",
}
_POSITIVE, _COUNT = click.IntRange(min=1), click.IntRange(0, 2**31 - 1)


def address_options(function: _Function) -> _Function:
    """Add `address` of a running engine, and `keys`, the folder with a client's keys for it."""
    keys = click.option(
        "--keys",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder that ssd keys made for this client, for a tcp address with keys.",
    )
    help = "Use the running engine at this address: ipc:// or tcp://, of one here also http://host:port or a pid."
    return click.option("--address", help=help)(keys(function))


def sampling_options(max_tokens: int) -> Callable[[_Function], _Function]:
    """Add options named like fields of `SamplingParams`.

    An option that is not given is None if the model may have its own value. `max_tokens` is the default of
    --max-tokens."""
    share, penalty = Real(0, 1, min_open=True), Real(-2, 2)
    options = [
        click.option("--temperature", type=Real(0, 100), help="0 is greedy. Default: the model's own, or 0."),
        click.option("--top-k", type=_COUNT, help="Sample from the K likeliest tokens; 0: all. Default: the model's."),
        click.option(
            "--top-p", type=share, help="Sample from the likeliest tokens with this share. Default: the model's."
        ),
        click.option(
            "--min-p", type=Real(0, 1), help="Drop tokens below this share of the likeliest. Default: the model's."
        ),
        click.option(
            "--presence-penalty",
            type=penalty,
            help="Subtracted from logits of tokens in the answer. Default: the model's.",
        ),
        click.option(
            "--frequency-penalty",
            type=penalty,
            help="The same, for each time that they are there. Default: the model's.",
        ),
        click.option(
            "--repetition-penalty",
            type=Real(0, 100, min_open=True),
            help="Divides logits of tokens in prompt and answer; 1: off. Default: the model's.",
        ),
        click.option(
            "--max-tokens", type=_POSITIVE, default=max_tokens, show_default=True, help="Longest answer, in tokens."
        ),
        click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Same seed, same tokens. Default: random."),
        click.option("--stop", multiple=True, help="Text to stop before; up to 16 times."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token."),
    ]
    return lambda function: functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def speculation_changes(context: click.Context, engine: EngineOptions) -> dict[str, Any]:
    """Return the speculation settings that flags, environment and file ask a running engine for.

    Raises UsageError for any other engine option that was given as a flag: it cannot change in a running engine."""
    sources = {name: context.get_parameter_source(name) for name in EngineOptions.__struct_fields__}
    for name, source in sources.items():
        if source is ParameterSource.COMMANDLINE and name not in _SPECULATION:
            raise UsageError(f"--{name.replace('_', '-')} cannot be changed in the running engine of --address")
    unsaid, in_file = (ParameterSource.DEFAULT, None), context.meta.get(_FROM_FILE, ())
    said = [name for name in _SPECULATION if name in in_file or sources[name] not in unsaid]
    changes = {name: getattr(engine, name) for name in said}
    return changes | (fan_out_fields(changes["fan_out"]) if "fan_out" in changes else {})


def engine_options_but(*left_out: str) -> Callable[[_Function], _Command]:
    """Add the engine options to a command, which gets them as `engine`, an `EngineOptions`.

    Fields that are `left_out` keep their defaults, or the values that `config_option` read. The command then has no
    --speculative-config, which could set them."""
    helps = {name: text for name, text in _ENGINE.items() if name not in left_out}

    def decorate(function: _Function) -> _Command:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            if not left_out:
                values |= _speculative(values.pop("speculative_config"))
            given = click.get_current_context().meta.get(_FROM_FILE, {})
            engine = EngineOptions(**given, **{name: values.pop(name) for name in helps})
            return function(engine=engine, **values)

        return with_options(call if left_out else whole(call), helps, EngineOptions())

    whole = click.option(
        "--speculative-config",
        metavar="JSON",
        envvar="SSD_SPECULATIVE_CONFIG",
        help=f"All options of speculation at once: an object with any of {', '.join(_SPECULATION)}.",
    )
    return decorate


def read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Make the options in a TOML file the defaults, and keep its table [replicas] for `ssd serve-ray`.

    A command without the server's options ignores them, so that one file serves `launch`, `generate` and `chat`."""
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
    ctx.meta[REPLICAS] = values.pop("replicas", {})
    given = {key.replace("-", "_"): value for key, value in values.items()}
    if "speculative_config" in given:
        given = _speculation(_as_flag(given.pop("speculative_config"))) | given
    types = field_types(EngineOptions)
    allowed = {*known, *types, *_server_options()} - {"speculative_config"}
    if unknown := sorted(given.keys() - allowed):
        name, names = unknown[0].replace("_", "-"), [each.replace("_", "-") for each in allowed]
        raise click.BadParameter(f"{path}: unknown option {name}{did_you_mean(name, names)}", ctx, param)
    ctx.default_map = {name: _as_flag(value, known[name]) for name, value in given.items() if name in known}
    ctx.meta[_FROM_FILE] = unflagged = {}
    for name in given.keys() & types.keys() - known.keys():
        try:
            unflagged[name] = _kind(name, types)(_as_flag(given[name]), None, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(f"{path}: {name.replace('_', '-')}: {error.message}", ctx, param) from None


config_option = click.option(
    "--config",
    envvar="SSD_CONFIG",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=read_config,
    is_eager=True,
    expose_value=False,
    help="TOML file with options, as in `max-num-seqs = 16`; flags and SSD_* count more.",
)
engine_options = engine_options_but()


def local_engine_options(function: _Function) -> _Command:
    """Add the engine options; the advanced ones can be set only in the file of --config."""
    return engine_options_but(*_ADVANCED)(config_option(function))


_SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def _speculative(text: str | None) -> dict[str, Any]:
    """Return the options in `text`, except those also given by name.

    The name wins if it comes from the same source or a stronger one."""
    if text is None:
        return {}
    ctx = click.get_current_context()
    flags = {option.name: option for option in ctx.command.params}
    source = ctx.get_parameter_source("speculative_config")
    stronger = _SOURCES[: _SOURCES.index(source) + 1] if source in _SOURCES else ()
    return {
        name: flags[name].type_cast_value(ctx, _as_flag(value, flags[name]))
        for name, value in _speculation(text).items()
        if ctx.get_parameter_source(name) not in stronger
    }


def _speculation(text: str) -> dict[str, Any]:
    """Return the options of speculation in `text`, a JSON object; raise click's error for anything else."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"no valid JSON: {error}", param_hint="--speculative-config") from None
    if not isinstance(given, dict) or not given.keys() <= set(_SPECULATION):
        raise click.BadParameter(
            f"give an object with any of {', '.join(_SPECULATION)}", param_hint="--speculative-config"
        )
    return given
