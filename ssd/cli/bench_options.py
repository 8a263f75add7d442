"""Options that the commands of `ssd bench` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from ssd.bench import datasets
from ssd.bench.settings import Protocol, Sweep
from ssd.cli import plots
from ssd.cli.options import FanOut, Lookahead
from ssd.cli.outputs import check_writable
from ssd.cli.quantities import Real
from ssd.errors import UsageError
from ssd.params import MAX_LOOKAHEAD, MAX_SEED, Mode
from ssd.params import FanOut as FanOutList

if TYPE_CHECKING:
    from ssd.client import Prompt

SWEPT = ("mode", "num_speculative_tokens", "fan_out", "backup", "synthetic_acceptance_length", "synthetic_hit_rate")
"""Engine options that a measurement has options of its own for: it takes several values, or emulates devices too."""

# arXiv 2603.03251: decoding alone, which is what a turn's speed is of.
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"chat": False, "ignore_eos": True, "tokens": 512, "batch_sizes": ["1"], "max_concurrency": 1}
}


class Modes(click.ParamType):
    """ "ar,sd,ssd" as a tuple, each mode once."""

    name = "MODE,MODE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Mode, ...]:
        if isinstance(value, tuple):
            return value
        modes = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        for mode in modes:
            if mode not in get_args(Mode):
                self.fail(f"{mode!r} is not a mode: there are {', '.join(get_args(Mode))}", param, ctx)
        return modes


class Asked(NamedTuple):
    """What a measurement is asked to do, whatever it measures."""

    dataset: str
    prompts: int
    input_len: int
    tokens: int
    modes: tuple[Mode, ...] | None
    lookaheads: tuple[int, ...]
    fan_outs: tuple[FanOutList, ...]
    backups: tuple[str, ...]
    temperatures: tuple[float, ...]
    chat: bool | None
    ignore_eos: bool
    seed: int
    preset: str | None
    out: Path | None
    plot: Path | None

    def texts(self) -> list[str] | None:
        """The prompts of the dataset; None: random ones, for which a vocabulary has to be known. Checks everything that
        can be known before an engine is started. Raises UsageError."""
        check_writable("--json", self.out)
        if self.plot is not None:
            plots.check(self.plot)
        if self.dataset != datasets.RANDOM:
            return datasets.texts(self.dataset, self.prompts)
        if self.chat:
            raise UsageError("--chat is for texts, and random prompts are token ids")
        return None

    def requests(self, texts: list[str] | None, vocabulary: int) -> list[Prompt]:
        if texts is not None:
            return list(texts)
        return list(datasets.random_ids(self.prompts, self.input_len, vocabulary, self.seed))

    def sweep(self, modes: tuple[Mode, ...] = get_args(Mode)) -> Sweep:
        """`modes` where none are asked for."""
        return Sweep(self.modes or modes, self.lookaheads, self.fan_outs, self.backups)

    def protocol(self, chat: bool) -> Protocol:
        """`chat`: whether the model has a chat format."""
        return Protocol(self.tokens, chat if self.chat is None else self.chat, self.ignore_eos, self.seed)

    def workload(self, protocol: Protocol, prompts: int) -> dict[str, Any]:
        """As JSON."""
        facts: dict[str, Any] = {"dataset": self.dataset, "prompts": prompts, "preset": self.preset}
        if self.dataset == datasets.RANDOM:
            facts["input_len"] = self.input_len
        return facts | protocol._asdict()


def _take_preset(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """Its values are defaults: what is asked for by name counts more."""
    if name is not None:
        ctx.default_map = {**(ctx.default_map or {}), **_PRESETS[name]}
    return name


def measured_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Asked` to a command, which gets them as `asked`."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        asked = Asked(**{name: values.pop(name) for name in Asked._fields})
        return function(asked=asked, **values)

    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), call)


def _several(*flags: str, text: str, **more: Any) -> Callable[..., Any]:
    return click.option(*flags, multiple=True, help=f"{text}; may be given several times, for a row each.", **more)


_FILE = click.Path(path_type=Path)
_OPTIONS: list[Callable[..., Any]] = [
    click.option("--dataset", default="humaneval", show_default=True, help="humaneval, random, or a JSONL file."),
    click.option("--prompts", "--num-prompts", "prompts", type=click.IntRange(1), default=20, show_default=True),
    click.option(
        "--input-len",
        "--random-input-len",
        "input_len",
        type=click.IntRange(1),
        default=256,
        show_default=True,
        help="Tokens of a random prompt.",
    ),
    click.option(
        "--tokens",
        "--output-len",
        "--random-output-len",
        "tokens",
        type=click.IntRange(2),
        default=128,
        show_default=True,
        help="New tokens a prompt.",
    ),
    click.option("--modes", type=Modes(), help="Modes to compare. Default: ar,sd,ssd."),
    _several(
        "-k",
        "--num-speculative-tokens",
        "lookaheads",
        type=Lookahead(1, MAX_LOOKAHEAD),
        envvar="SSD_NUM_SPECULATIVE_TOKENS",
        text="Tokens the draft proposes per round (auto)",
    ),
    _several("-f", "--fan-out", "fan_outs", type=FanOut(), envvar="SSD_FAN_OUT", text="Guesses prepared (auto)"),
    _several("--backup", "backups", envvar="SSD_BACKUP", text="What ssd does on a miss (auto)"),
    _several("--temperature", "temperatures", type=Real(0, 100), default=(0.0,), show_default=True, text="0 is greedy"),
    click.option(
        "--chat/--raw", "chat", default=None, help="Use the model's chat format or not. Default: if it has one."
    ),
    click.option("--ignore-eos/--stop-at-eos", default=True, show_default=True, help="Go on after the end of text."),
    click.option(
        "--seed", type=click.IntRange(0, MAX_SEED // 2), default=0, show_default=True, help="Of all randomness."
    ),
    click.option(
        "--preset",
        type=click.Choice(list(_PRESETS)),
        is_eager=True,
        callback=_take_preset,
        help="paper: --raw --ignore-eos --tokens 512, one request at a time.",
    ),
    click.option("--json", "out", type=_FILE, help="Write every figure, and what it was measured on, to a file."),
    click.option("--plot", type=_FILE, help="Draw the figures: FILE.png, .svg or .pdf."),
]
