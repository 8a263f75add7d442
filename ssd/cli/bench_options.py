"""Options that the commands of `ssd bench` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click
import msgspec

from ssd.bench import datasets
from ssd.bench.emulated import Emulation
from ssd.bench.outputs import check_plot, check_writable
from ssd.bench.quantities import Real, Times
from ssd.bench.settings import Protocol, Sweep
from ssd.cli.command import headed, main_option
from ssd.cli.option_types import FanOut, Lookahead
from ssd.config.descriptions import MAIN, OTHER, SAMPLING
from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.params import MAX_LOOKAHEAD, MAX_SEED, FanOutChoice, Mode
from ssd.emulation.agreement import PRESETS, Preset, stated_agreement
from ssd.errors import UsageError

if TYPE_CHECKING:
    from ssd.client import Prompt

ROWS: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd", "auto")
"""The modes that are compared if none are named: the reference first, then the candidates of `auto`, then `auto`."""

SWEPT = ("mode", "num_speculative_tokens", "fan_out", "backup", "synthetic_acceptance_length", "synthetic_hit_rate")
"""Engine options that a benchmark replaces by its own: with several values, or for emulated devices too."""

# arXiv 2603.03251 measures decoding alone, like the speed of a turn.
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"chat": False, "ignore_eos": True, "tokens": 512, "batch_sizes": ["1"], "max_concurrency": 1}
}


class Modes(click.ParamType):
    """Modes such as "ar,sd,auto"; the value is a tuple, each mode once."""

    name = "MODE,MODE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Mode, ...]:
        if isinstance(value, tuple):
            return value
        modes = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        for mode in modes:
            if mode not in get_args(Mode):
                self.fail(f"{mode!r} is not a mode: there are {', '.join(get_args(Mode))}", param, ctx)
        return modes


class Emulated(click.ParamType):
    """Times such as "verify=15ms+60us,depth=2.2ms" as `DeviceTimes`, or a pair of the paper ("llama") as `Preset`."""

    name = "PRESET|verify=TIME[+EACH],depth=TIME[+EACH]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DeviceTimes | Preset:
        if isinstance(value, (DeviceTimes, Preset)):
            return value
        if value in PRESETS:
            return PRESETS[value]
        known = DeviceTimes.__struct_fields__
        given: dict[str, ForwardTime] = {}
        for part in value.split(","):
            name, equals, text = (piece.strip() for piece in part.partition("="))
            if not equals:
                self.fail(f"{part!r} is neither a preset ({', '.join(PRESETS)}) nor NAME=TIME", param, ctx)
            if name not in known or name in given:
                what = "given twice" if name in given else f"none of {', '.join(known)}"
                self.fail(f"{name!r} is {what}", param, ctx)
            given[name] = ForwardTime(*Times().convert(text, param, ctx))
        if missing := [name for name in known if name not in given]:
            self.fail(f"{value!r} lacks the time of {missing[0]}", param, ctx)
        try:
            return msgspec.convert(msgspec.to_builtins(given), DeviceTimes)
        except msgspec.ValidationError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class BenchOptions(NamedTuple):
    """The options that all benchmarks share."""

    dataset: str
    prompts: int
    input_len: int
    range_ratio: float
    tokens: int
    modes: tuple[Mode, ...] | None
    lookaheads: tuple[int, ...]
    fan_outs: tuple[FanOutChoice, ...]
    backups: tuple[str, ...]
    temperatures: tuple[float, ...]
    chat: bool | None
    ignore_eos: bool
    seed: int
    preset: str | None
    out: Path | None
    plot: Path | None

    def texts(self) -> list[str] | None:
        """Return the texts of the data set, or None for random ids, which need a vocabulary.

        Raises UsageError for options that can be refused before an engine starts."""
        check_writable("--json", self.out)
        check_plot(self.plot)
        if self.dataset != datasets.RANDOM:
            return datasets.texts(self.dataset, self.prompts)
        if self.chat:
            raise UsageError("--chat is for texts, and random prompts are token ids")
        return None

    def requests(self, texts: list[str] | None, vocabulary: int) -> list[Prompt]:
        if texts is not None:
            return list(texts)
        return list(datasets.random_ids(self.prompts, self.input_len, vocabulary, self.seed, self.range_ratio))

    def sweep(self, modes: tuple[Mode, ...]) -> Sweep:
        """Return the sweep that was asked for, over `modes` if --modes is not given."""
        return Sweep(self.modes or modes, self.lookaheads, self.fan_outs, self.backups)

    def protocol(self, chat: bool) -> Protocol:
        """Return the parameters of all requests. `chat`: True if the model has a chat format."""
        return Protocol(self.tokens, chat if self.chat is None else self.chat, self.ignore_eos, self.seed)

    def workload(self, protocol: Protocol, prompts: int) -> dict[str, Any]:
        """Return the workload as JSON."""
        facts: dict[str, Any] = {"dataset": self.dataset, "prompts": prompts, "preset": self.preset}
        if self.dataset == datasets.RANDOM:
            facts |= {"input_len": self.input_len, "random_range_ratio": self.range_ratio}
        return facts | protocol._asdict() | {"sampling": protocol.sampling.given()}


def _take_preset(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name is not None:
        _set_defaults(ctx, **_PRESETS[name])
    return name


def _set_defaults(ctx: click.Context, **defaults: Any) -> None:
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def bench_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `BenchOptions` to a command, which receives them as `asked`."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        asked = BenchOptions(**{name: values.pop(name) for name in BenchOptions._fields})
        return function(asked=asked, **values)

    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), call)


def _count(*flags: str, default: int, text: str, least: int = 1, heading: str = MAIN) -> Callable[..., Any]:
    return headed(*flags, type=click.IntRange(least), default=default, show_default=True, heading=heading, help=text)


def _several(*flags: str, text: str, **more: Any) -> Callable[..., Any]:
    return headed(*flags, multiple=True, help=f"{text}; may be given several times, for a row each.", **more)


_FILE = click.Path(path_type=Path)
_OPTIONS: list[Callable[..., Any]] = [
    main_option("--dataset", default=datasets.BUILTIN, show_default=True, help=f"Prompts: {datasets.KNOWN}."),
    _count("--prompts", "--num-prompts", "prompts", default=20, text="Prompts of the data set to use."),
    _count(
        "--input-len", "--random-input-len", "input_len", default=256, text="Tokens of a random prompt.", heading=OTHER
    ),
    click.option(
        "--random-range-ratio",
        "range_ratio",
        type=Real(0, 1, max_open=True),
        default=0.0,
        help="Random prompts have --input-len tokens, more or less by up to this share.",
    ),
    _count("--tokens", "--output-len", "--random-output-len", "tokens", default=128, least=2, text="New tokens each."),
    main_option("--modes", type=Modes(), help=f"Modes to compare. Default: {','.join(ROWS)}."),
    _several(
        "-k",
        "--num-speculative-tokens",
        "lookaheads",
        type=Lookahead(1, MAX_LOOKAHEAD),
        envvar="SSD_NUM_SPECULATIVE_TOKENS",
        heading=MAIN,
        text="Tokens the draft proposes per round in sd and ssd (auto)",
    ),
    _several("-f", "--fan-out", "fan_outs", type=FanOut(), envvar="SSD_FAN_OUT", text="Guesses of ssd (auto)"),
    _several("--backup", "backups", envvar="SSD_BACKUP", text="What ssd does on a miss (auto)"),
    _several("--temperature", "temperatures", type=Real(0, 100), default=(0.0,), show_default=True, text="0 is greedy"),
    main_option(
        "--chat/--raw", "chat", default=None, help="Use the model's chat format or not. Default: if it has one."
    ),
    headed(
        "--ignore-eos/--stop-at-eos",
        default=True,
        show_default=True,
        heading=SAMPLING,
        help="Go on after the end of text.",
    ),
    headed(
        "--seed",
        type=click.IntRange(0, MAX_SEED // 2),
        default=0,
        show_default=True,
        heading=SAMPLING,
        help="Of all randomness.",
    ),
    click.option(
        "--preset",
        type=click.Choice(list(_PRESETS)),
        is_eager=True,
        callback=_take_preset,
        help="paper: --raw --ignore-eos --tokens 512, one request at a time.",
    ),
    main_option("--json", "out", type=_FILE, help="Write every figure, and what it was measured on, to a file."),
    click.option("--plot", type=_FILE, help="Draw the figures: FILE.png, .svg or .pdf."),
]


def _take_devices(ctx: click.Context, param: click.Parameter, value: DeviceTimes | Preset | None) -> Any:
    if isinstance(value, Preset):
        _set_defaults(ctx, lookaheads=[str(value.lookahead)], fan_outs=[str(value.fan_out)], dataset=datasets.RANDOM)
    return value


def _take_length(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None:
        _set_defaults(ctx, dataset=datasets.RANDOM)  # a scripted pair reads no texts
    return value


_EMULATION_OPTIONS = [
    click.option(
        "--emulate",
        "devices",
        type=Emulated(),
        is_eager=True,
        callback=_take_devices,
        help=f"Let forwards take these times; {' or '.join(PRESETS)}: those, K, fan-out, and a synthetic pair as right "
        "as the paper's.",
    ),
    click.option(
        "--synthetic-acceptance-length",
        "length",
        type=Real(1),
        is_eager=True,
        callback=_take_length,
        help="With --emulate or --load-format dummy: models that agree so that a round of sd takes so many tokens, by "
        "the first -k.",
    ),
    click.option(
        "--synthetic-hit-rate",
        "hit_rate",
        type=Real(0, 1),
        help="Share of rounds that ssd prepares for, by the first -k and -f. Default: as the paper's Llama pair.",
    ),
]


def emulation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add options of emulation to a command with `BenchOptions`; it receives `emulation` or None."""

    @functools.wraps(function)
    def call(asked: BenchOptions, devices: Any, length: float | None, hit_rate: float | None, **values: Any) -> Any:
        return function(asked=asked, emulation=emulation(asked, devices, length, hit_rate), **values)

    return functools.reduce(lambda decorated, option: option(decorated), reversed(_EMULATION_OPTIONS), call)


def emulation(
    asked: BenchOptions, devices: DeviceTimes | Preset | None, length: float | None, hit_rate: float | None
) -> Emulation | None:
    """Return the emulation, or None if nothing is emulated; raise UsageError for options that contradict."""
    lookahead, fan_out = next(iter(asked.lookaheads), 0), next(iter(asked.fan_outs), ())
    agreement = stated_agreement(length, hit_rate, lookahead, fan_out)
    if devices is None and agreement is None:
        return None
    times = devices.times if isinstance(devices, Preset) else devices
    if agreement is None and isinstance(devices, Preset):
        if len(asked.temperatures) != 1:
            raise UsageError(f"--emulate {devices.name} needs one temperature, on which its acceptance depends")
        agreement = devices.agreement(asked.temperatures[0])
    if agreement is not None and asked.dataset != datasets.RANDOM:
        raise UsageError(f"a scripted pair reads no texts: --dataset {datasets.RANDOM}, not {asked.dataset}")
    return Emulation(times, agreement)
