"""What the engine itself costs, with target and draft on devices that are emulated (docs/performance.md).

    python tools/emulate.py --preset llama --batch 1 --batch 8 --json emulated.json

Every forward takes the time that the preset states, on models that take next to none (`ssd.emulation`), so that two
processes on two cores behave like two devices that share nothing. Modes take turns on one engine, end of text ignored;
the ids of `sd` and `ssd` are compared with those of `ar` in the same run. What `ssd bench --emulate` measures of any
pair, this sets against what theory and the simulator say of the same times. The machine must be quiet: what else runs
on its cores is counted as the engine's cost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from emulating import report
from emulating.cases import Case, cases
from emulating.figures import Figures, Turn, figures
from msgspec.structs import replace
from rich.console import Console

from ssd.bench.datasets import random_ids
from ssd.bench.emulated import scripted
from ssd.bench.environment import environment
from ssd.bench.runs import throughput
from ssd.bench.settings import Protocol
from ssd.cli.emulation import Emulated
from ssd.client import Client
from ssd.emulation.chains import VOCABULARY
from ssd.emulation.devices import PRESETS, DeviceTimes, Preset
from ssd.errors import UsageError
from ssd.launch_config import EngineOptions, resolve
from ssd.llm import running

_MAX_MODEL_LEN = 2048
_PROMPT_TOKENS = 16


@click.command(help=__doc__)
@click.option("--preset", "presets", type=click.Choice(sorted(PRESETS)), multiple=True, default=("llama",))
@click.option("--emulate", "times", type=Emulated(), help="Other times than the preset's.")
@click.option("--case", "wanted", type=click.Choice(report.CASES), multiple=True, default=report.CASES)
@click.option("--batch", "batches", type=click.IntRange(1, 64), multiple=True, default=(1, 8), show_default=True)
@click.option("--temperature", "temperatures", type=float, multiple=True, default=(0.0, 1.0), show_default=True)
@click.option("--runs", default=5, show_default=True, help="turns of every mode")
@click.option("--tokens", default=192, show_default=True, help="new tokens a prompt")
@click.option("--json", "out", type=click.Path(path_type=Path), help="write every figure here")
def main(
    presets: tuple[str, ...],
    times: DeviceTimes | Preset | None,
    wanted: tuple[str, ...],
    batches: tuple[int, ...],
    temperatures: tuple[float, ...],
    runs: int,
    tokens: int,
    out: Path | None,
) -> None:
    asked: list[Case] = []
    for name in presets:
        preset = PRESETS[name]
        if times is not None:
            preset = preset._replace(times=times.times if isinstance(times, Preset) else times)
        try:
            asked += [case for case in cases(preset, temperatures) if case.name in wanted]
        except UsageError as error:
            raise click.UsageError(str(error)) from None
    found = [(case, *row) for case in asked for row in measured(case, batches, runs, tokens)]
    console = Console(width=200)
    console.print(report.table(found))
    console.print(environment())
    if out is not None:
        rows: list[dict[str, Any]] = [report.plain(*row) for row in found]
        out.write_text(json.dumps({"emulated": True, "environment": environment(), "rows": rows}, indent=1))


def measured(case: Case, batches: tuple[int, ...], runs: int, tokens: int) -> list[tuple[int, Figures]]:
    """The figures of a case by batch size, all on one engine."""
    lookahead = case.stated.lookahead
    options = EngineOptions(num_speculative_tokens=lookahead, max_model_len=_MAX_MODEL_LEN, max_num_seqs=max(batches))
    with (
        scripted(options, case.emulation) as paired,
        running(replace(resolve(paired), emulate=case.times)) as (_, client),
    ):
        return [(batch, figures(case, batch, turns(client, case, batch, runs, tokens))) for batch in batches]


def turns(client: Client, case: Case, batch: int, runs: int, tokens: int) -> list[Turn]:
    """Every mode by turns, each turn with prompts that no other has and the same seeds in all modes."""
    prompts = random_ids(runs * batch, _PROMPT_TOKENS, VOCABULARY, seed=batch)
    settings, protocol = case.settings(), Protocol(tokens, chat=False)
    found = throughput({False: client}, prompts, settings, case.temperature, protocol, batch, repeats=1)
    answers = {setting.speculation.mode: found[setting.name][0].completions for setting in settings}
    return [{mode: each[n * batch : (n + 1) * batch] for mode, each in answers.items()} for n in range(runs)]


if __name__ == "__main__":
    main()
