"""Settings side by side on one engine, turn by turn (docs/performance.md).

\b
    python tools/sweep.py auto ../shared/data/gsm8k.jsonl --batch 1      # what `auto` reaches of the best fixed setting
    python tools/sweep.py samplers ../shared/data/gsm8k.jsonl            # hits and speed by temperature and sampler

Groups of prompts are run with every setting, in turns, before the next group is: what is compared has seen the same
minutes of the machine. Chat format, end of text ignored, one seed a prompt. The ids of `coupled` are compared with
those of `ar`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import track

from ssd import LLM, SamplingParams
from ssd.bench.datasets import from_jsonl
from ssd.cli.tables import grid
from ssd.client import Completion
from ssd.params import Speculation
from ssd.speculation.fan_out import optimal_fan_out
from ssd.speculation.theory import acceptance_for

_GROUPS = click.option("--groups", default=8, show_default=True, help="groups of prompts")
_TOKENS = click.option("--tokens", default=64, show_default=True, help="new tokens a prompt")
_OUT = click.option("--json", "out", type=click.Path(path_type=Path), help="write the figures here")
_PROMPTS = click.argument("prompts_file", type=click.Path(exists=True, path_type=Path))
_WARM_UP_TOKENS = 64


class Figures(NamedTuple):
    """One setting over all groups: medians of the groups, speeds per sequence; `equal` counts the texts of `ar`."""

    name: str
    temperature: float
    tok_s: float
    over_ar: float
    acceptance_length: float
    hit_rate: float
    wait_ms: float
    equal: int


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@_PROMPTS
@click.option("--batch", default=1, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("-k", "lookaheads", multiple=True, type=int, default=(1, 2, 4, 8), show_default=True)
@click.option("-f", "fan_outs", multiple=True, type=int, default=(1, 3, 5), show_default=True)
@click.option("--backup", "backups", multiple=True, default=("auto", "jit", "none"), show_default=True)
@_GROUPS
@click.option("--finalists", default=5, show_default=True, help="settings that are measured again")
@click.option("--final-groups", default=8, show_default=True, help="groups of prompts for those")
@_TOKENS
@_OUT
def auto(
    prompts_file: Path,
    batch: int,
    temperature: float,
    lookaheads: tuple[int, ...],
    fan_outs: tuple[int, ...],
    backups: tuple[str, ...],
    groups: int,
    finalists: int,
    final_groups: int,
    tokens: int,
    out: Path | None,
) -> None:
    """Every fixed setting of a grid, beside the automatic one and `ar`.

    The best of a grid is also its luckiest: the best ones are run again on other prompts, and those figures count.
    """
    settings = {"ar": Speculation("ar"), "auto": Speculation("ssd", 0, (), "auto")}
    settings |= {
        f"K {k} F {f} {backup}": Speculation("ssd", k, (f,), backup)
        for k in lookaheads
        for f in fan_outs
        for backup in backups
    }
    prompts = _groups(prompts_file, groups + final_groups, batch)
    # The arena has room for the largest setting; `auto` keeps to its own budget.
    chains = max(setting.chains for setting in settings.values())
    with LLM(max_num_seqs=batch, budget=chains) as llm:
        _warm_up(llm, settings, prompts[0])
        swept = _measure(llm, prompts[:groups], settings, temperature, tokens)
        _report(f"batch {batch}, T = {temperature}", swept, None)
        chosen = _best(swept, finalists)
        finals = _measure(llm, prompts[groups:], {name: settings[name] for name in chosen}, temperature, tokens)
    _report("the best of them again, other prompts", finals, None)
    if out is not None:
        out.write_text(json.dumps({"grid": _plain(swept), "finals": _plain(finals)}, indent=1))
    _, automatic, *fixed = finals
    best = max(fixed, key=lambda row: row.over_ar)
    reached = automatic.over_ar / best.over_ar
    click.echo(f"auto reaches {reached:.3f} of the best fixed setting ({best.name}) and {automatic.over_ar:.2f} x ar")


def _best(figures: Sequence[Figures], count: int) -> list[str]:
    """`ar`, `auto`, and the `count` fastest of the others."""
    plain, automatic, *fixed = figures
    leaders = sorted(fixed, key=lambda row: -row.over_ar)[:count]
    return [plain.name, automatic.name, *(row.name for row in leaders)]


@main.command()
@_PROMPTS
@click.option("-k", "lookahead", default=4, show_default=True)
@click.option("--budget", default=15, show_default=True, help="chains")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.3, 0.7, 1.0))
@click.option("--saguaro-c", "cs", multiple=True, type=float, default=(1.0, 0.7, 0.4, 0.1), show_default=True)
@click.option("--exponent", default=0.6, show_default=True, help="r of the misses c F^-r, for Theorem 12")
@_GROUPS
@_TOKENS
@_OUT
def samplers(
    prompts_file: Path,
    lookahead: int,
    budget: int,
    temperatures: tuple[float, ...],
    cs: tuple[float, ...],
    exponent: float,
    groups: int,
    tokens: int,
    out: Path | None,
) -> None:
    """`coupled` and `rejection` by temperature, with a uniform fan-out and that of Theorem 12, of one budget."""
    prompts = _groups(prompts_file, groups, 1)
    uniform = (budget // (lookahead + 1),)
    launched = {"num_speculative_tokens": lookahead, "fan_out": (), "budget": 2 * budget, "sampler": "rejection"}
    figures = []
    with LLM(max_num_seqs=1, **launched) as llm:
        for temperature in temperatures:
            rate = _acceptance(llm, prompts[:2], lookahead, temperature, tokens)
            _warm_up(llm, {"": Speculation("ssd", lookahead, uniform)}, prompts[0])
            optimal = optimal_fan_out(rate, exponent, lookahead, uniform[0] * (lookahead + 1))
            settings = {"ar": Speculation("ar")}
            for name, fan_out in (("uniform", uniform), (f"Theorem 12 {optimal}", optimal)):
                settings[f"coupled {name}"] = Speculation("ssd", lookahead, fan_out)
                for c in cs if temperature > 0 else ():
                    settings[f"rejection C {c} {name}"] = Speculation(
                        "ssd", lookahead, fan_out, sampler="rejection", saguaro_c=c
                    )
            figures += _measure(llm, prompts, settings, temperature, tokens)
            _report(f"K {lookahead}, {budget} chains", figures, out)


def _acceptance(llm: LLM, prompts: Sequence[list[str]], lookahead: int, temperature: float, tokens: int) -> float:
    """The rate at which single draft tokens are accepted: the one that gives `sd` its tokens per round."""
    settings = {"ar": Speculation("ar"), "sd": Speculation("sd", lookahead)}
    return acceptance_for(_measure(llm, prompts, settings, temperature, tokens)[1].acceptance_length, lookahead)


def _groups(path: Path, groups: int, batch: int) -> list[list[str]]:
    prompts = from_jsonl(path, groups * batch)
    if len(prompts) < groups * batch:
        raise click.UsageError(f"{path} has {len(prompts)} prompts, {groups * batch} are needed")
    return [prompts[i : i + batch] for i in range(0, len(prompts), batch)]


def _warm_up(llm: LLM, settings: Mapping[str, Speculation], prompts: list[str]) -> None:
    """A few rounds of every setting; of the automatic one as many as it takes to learn, as in an engine that serves."""
    for setting in settings.values():
        for _ in range(4 if setting.auto else 1):
            llm.generate(prompts, _params(setting, 0.0, _WARM_UP_TOKENS, len(prompts)), chat=True)


def _measure(
    llm: LLM,
    groups: Sequence[list[str]],
    settings: Mapping[str, Speculation],
    temperature: float,
    tokens: int,
) -> list[Figures]:
    runs: dict[str, list[list[Completion]]] = {name: [] for name in settings}
    for turn, group in enumerate(track(groups, description=f"T = {temperature}", transient=True)):
        # Target and draft keep the prompts that they have read: nobody's turn may be the one that reads them.
        llm.generate(group, _params(Speculation("ssd"), temperature, 2, len(group)), chat=True)
        for name in _rotated(list(settings), turn):
            runs[name].append(llm.generate(group, _params(settings[name], temperature, tokens, len(group)), chat=True))
    return [_figures(name, temperature, found, runs["ar"]) for name, found in runs.items()]


def _rotated(names: list[str], turn: int) -> list[str]:
    """Each one is first as often as the others."""
    start = turn % len(names)
    return names[start:] + names[:start]


def _params(setting: Speculation, temperature: float, tokens: int, count: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, speculation=setting)
        for seed in range(count)
    ]


def _figures(name: str, temperature: float, runs: list[list[Completion]], reference: list[list[Completion]]) -> Figures:
    every = [run.metrics for group in runs for run in group]
    pairs = [_speed(group) / _speed(other) for group, other in zip(runs, reference, strict=True)]
    texts = zip(runs, reference, strict=True)
    return Figures(
        name=name,
        temperature=temperature,
        tok_s=statistics.median(map(_speed, runs)),
        over_ar=statistics.median(pairs),
        acceptance_length=1 + sum(m.accepted_tokens for m in every) / sum(m.rounds for m in every),
        hit_rate=sum(m.hits for m in every) / max(1, sum(m.hits + m.misses for m in every)),
        wait_ms=statistics.fmean(m.draft_wait_ms for m in every),
        equal=sum(a.token_ids == b.token_ids for mine, theirs in texts for a, b in zip(mine, theirs, strict=True)),
    )


def _speed(group: list[Completion]) -> float:
    return statistics.fmean(run.metrics.tokens_per_second for run in group)


def _report(title: str, figures: Sequence[Figures], out: Path | None) -> None:
    columns = [column.replace("_", " ") for column in Figures._fields]
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in figures]
    Console(width=140).print(grid(title, columns, cells))
    if out is not None:
        out.write_text(json.dumps(_plain(figures), indent=1))


def _plain(figures: Sequence[Figures]) -> list[dict[str, object]]:
    return [row._asdict() for row in figures]


if __name__ == "__main__":
    main()
