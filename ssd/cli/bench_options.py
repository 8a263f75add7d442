"""Options that the commands of `ssd bench` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from ssd.bench import datasets
from ssd.bench.outputs import check_plot, check_writable
from ssd.bench.quantities import Real
from ssd.bench.settings import Protocol, Sweep
from ssd.cli.command import headed, main_option
from ssd.cli.option_types import FanOut, Lookahead
from ssd.config.descriptions import MAIN, OTHER, SAMPLING
from ssd.config.params import MAX_LOOKAHEAD, FanOutChoice, Mode
from ssd.errors import UsageError
from ssd.law import MAX_SEED
from ssd.system import registered
from ssd.system.registered import BENCH_SETUPS

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


class BenchOptions(NamedTuple):
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
        """Return the data set's texts, None for random ids; raise UsageError for options refused at once."""
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
        return Sweep(self.modes or modes, self.lookaheads, self.fan_outs, self.backups)

    def protocol(self, chat: bool) -> Protocol:
        return Protocol(self.tokens, chat if self.chat is None else self.chat, self.ignore_eos, self.seed)

    def workload(self, protocol: Protocol, prompts: int) -> dict[str, Any]:
        facts: dict[str, Any] = {"dataset": self.dataset, "prompts": prompts, "preset": self.preset}
        if self.dataset == datasets.RANDOM:
            facts |= {"input_len": self.input_len, "random_range_ratio": self.range_ratio}
        return facts | protocol._asdict() | {"sampling": protocol.sampling.given()}


def _take_preset(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name is not None:
        set_defaults(ctx, **_PRESETS[name])
    return name


def set_defaults(ctx: click.Context, **defaults: Any) -> None:
    """Let an option decide what others are unless they are given."""
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def bench_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the options of `BenchOptions` to a command as `asked`."""

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


def setup_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of plugins; the command receives `setup`, by default a plain one."""
    return functools.reduce(lambda decorated, add: add(decorated), registered.load_all(BENCH_SETUPS).values(), function)
