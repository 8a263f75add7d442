"""The options of `ssd bench`: tables, as the engine's are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import click
import msgspec
from msgspec import Meta

from ssd.cli.option_types import SPECIAL
from ssd.cli.outputs import check_writable
from ssd.config.descriptions import MAIN, OTHER, SAMPLING
from ssd.config.engine import Positive
from ssd.config.params import DRAFTED, FanOutChoice, Lookahead, Mode
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.law import MAX_SEED
from ssd.plugins.bench import datasets
from ssd.plugins.bench.settings import ROWS, Protocol, Setting, Sweep

if TYPE_CHECKING:
    from ssd.client import Prompt

SWEPT = ("mode", "num_speculative_tokens", "fan_out", "backup", "synthetic_acceptance_length", "synthetic_hit_rate")
"""Engine options that a benchmark replaces by its own: with several values, or for emulated devices too."""

_EACH = "; may be given several times, for a row each."
_Concurrency = Annotated[int, Meta(ge=1, le=1024)]


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


KINDS: Mapping[str, click.ParamType] = {**SPECIAL, "modes": Modes()}


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a benchmark, and the settings that it compares."""

    dataset: Annotated[str, f"Prompts: {datasets.KNOWN}.", MAIN] = datasets.BUILTIN
    prompts: Annotated[Positive, "Prompts of the data set to use.", MAIN, "--num-prompts"] = 20
    input_len: Annotated[Positive, "Tokens of a random prompt.", OTHER, "--random-input-len"] = 256
    tokens: Annotated[Annotated[int, Meta(ge=2)], "New tokens each.", MAIN, "--output-len", "--random-output-len"] = 128
    modes: Annotated[tuple[Mode, ...] | None, f"Modes to compare. Default: {','.join(ROWS)}.", MAIN] = None
    num_speculative_tokens: Annotated[
        tuple[Lookahead, ...], f"Tokens the draft proposes per round in sd and ssd (auto){_EACH}", MAIN, "-k"
    ] = ()
    fan_out: Annotated[tuple[FanOutChoice, ...], f"Guesses of ssd (auto){_EACH}", "-f"] = ()
    backup: Annotated[tuple[str, ...], f"What ssd does on a miss (auto){_EACH}"] = ()
    temperature: Annotated[tuple[Annotated[float, Meta(ge=0, le=100)], ...], f"0 is greedy{_EACH}"] = (0.0,)
    chat: Annotated[bool | None, "Use the model's chat format or not. Default: if it has one.", MAIN, "--raw"] = None
    ignore_eos: Annotated[bool, "Go on after the end of text.", SAMPLING, "--stop-at-eos"] = True
    seed: Annotated[Annotated[int, Meta(ge=0, le=MAX_SEED // 2)], "Of all randomness.", SAMPLING] = 0
    repeats: Annotated[Positive, "Times that all prompts are run."] = 1
    json: Annotated[str | None, "Write every figure, and what it was measured on, to a file.", MAIN] = None

    def texts(self) -> list[str] | None:
        """Return the data set's texts, None for random ids; raise UsageError for options refused at once."""
        check_writable("--json", self.out)
        if self.dataset != datasets.RANDOM:
            return datasets.texts(self.dataset, self.prompts)
        if self.chat:
            raise UsageError("--chat is for texts, and random prompts are token ids")
        return None

    def requests(self, texts: list[str] | None, vocabulary: int) -> list[Prompt]:
        if texts is not None:
            return list(texts)
        return list(datasets.random_ids(self.prompts, self.input_len, vocabulary, self.seed))

    @property
    def out(self) -> Path | None:
        return None if self.json is None else Path(self.json)

    def sweep(self, modes: tuple[Mode, ...]) -> Sweep:
        return Sweep(self.modes or modes, self.num_speculative_tokens, self.fan_out, self.backup)

    def tell_left_out(self, engine: EngineOptions, settings: Sequence[Setting]) -> None:
        if self.modes is None and not any(setting.speculation.mode in DRAFTED for setting in settings):
            click.echo(f"{engine.target} has no draft: sd and ssd are left out; give --draft to compare them", err=True)

    def protocol(self, chat: bool) -> Protocol:
        return Protocol(self.tokens, chat if self.chat is None else self.chat, self.ignore_eos, self.seed)

    def workload(self, protocol: Protocol, prompts: int) -> dict[str, Any]:
        facts: dict[str, Any] = {"dataset": self.dataset, "prompts": prompts, "repeats": self.repeats}
        if self.dataset == datasets.RANDOM:
            facts["input_len"] = self.input_len
        return facts | protocol._asdict() | {"sampling": protocol.sampling.given()}


class BatchOptions(BenchOptions, frozen=True, kw_only=True):
    """Batches in one process, as `ssd bench latency` and `ssd bench throughput` measure them."""

    batch_size: Annotated[
        tuple[_Concurrency, ...],
        "Requests at the same time; may be given several times, for a table each. More than --max-num-seqs wait.",
        MAIN,
    ] = (1,)
    perplexity: Annotated[bool, "How likely the target finds what each mode said."] = False


class ServeOptions(BenchOptions, frozen=True, kw_only=True):
    """Arrivals of requests: `request_rate` a second, at most `max_concurrency` open."""

    request_rate: Annotated[
        Annotated[float, Meta(gt=0)], "Requests a second, at random moments (Poisson); inf: all at once.", MAIN
    ] = math.inf
    max_concurrency: Annotated[_Concurrency | None, "Most requests open at once. Default: all."] = None

    def traffic(self) -> dict[str, Any]:
        rate: float | str = "inf" if math.isinf(self.request_rate) else self.request_rate
        return {"request_rate": rate, "max_concurrency": self.max_concurrency, "repeats": self.repeats}
