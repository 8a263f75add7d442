"""What the engine itself costs, with target and draft on devices that are emulated (docs/performance.md).

    python tools/emulate.py --preset llama --batch 1 --batch 8 --json emulated.json

Every forward takes the time that the preset states, on models that take next to none (`ssd.emulation`), so that two
processes on two cores behave like two devices that share nothing. Modes take turns on one engine, end of text ignored;
the ids of `sd` and `ssd` are compared with those of `ar` in the same run. The machine must be quiet: what else runs on
its cores is counted as the engine's cost.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
from emulating import report
from emulating.cases import MODES, Case, cases, prompts
from emulating.figures import Figures, Turn, figures
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

from ssd.bench.environment import environment
from ssd.cli.emulation import Emulated
from ssd.client import Client
from ssd.emulation.chains import write_pair
from ssd.emulation.devices import PRESETS, DeviceTimes
from ssd.launch_config import EngineOptions, resolve
from ssd.llm import running

_MAX_MODEL_LEN = 2048
_WARM_UP_TOKENS = 48


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
    times: DeviceTimes | None,
    wanted: tuple[str, ...],
    batches: tuple[int, ...],
    temperatures: tuple[float, ...],
    runs: int,
    tokens: int,
    out: Path | None,
) -> None:
    found: list[tuple[Case, int, Figures]] = []
    for name in presets:
        preset = PRESETS[name] if times is None else PRESETS[name]._replace(times=times)
        if missing := [t for t in temperatures if t not in preset.acceptance]:
            raise click.UsageError(f"the preset {name} states no acceptance at temperature {missing[0]:g}")
        for case in cases(name, preset, temperatures):
            if case.name in wanted:
                found += [(case, batch, row) for batch, row in measured(case, batches, runs, tokens)]
    console = Console(width=200)
    console.print(report.table(found))
    console.print(environment())
    if out is not None:
        rows: list[dict[str, Any]] = [report.plain(*row) for row in found]
        out.write_text(json.dumps({"emulated": True, "environment": environment(), "rows": rows}, indent=1))


def measured(case: Case, batches: tuple[int, ...], runs: int, tokens: int) -> list[tuple[int, Figures]]:
    """The figures of a case by batch size, all on one engine."""
    with tempfile.TemporaryDirectory() as folder:
        pair = write_pair(Path(folder) / "pair", case.acceptance, case.temperature)
        options = EngineOptions(
            target=str(pair.target),
            draft=(str(pair.draft),),
            num_speculative_tokens=case.lookahead,
            fan_out=(case.fan_out,),
            backup="jit",
            draft_dtype="float32",  # rounded, the draft would agree less often than stated
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=max(batches),
        )
        with running(replace(resolve(options), emulate=case.times)) as (_, client):
            found = []
            for batch in batches:
                turn(client, case, batch, -1, _WARM_UP_TOKENS)
                what = f"emulated {case.preset}, {case.name}, T = {case.temperature:g}, batch {batch}"
                turns = [turn(client, case, batch, n, tokens) for n in track(range(runs), what, transient=True)]
                found.append((batch, figures(case, batch, turns)))
    return found


def turn(client: Client, case: Case, batch: int, number: int, tokens: int) -> Turn:
    """Every mode once, on the same prompts with the same seeds."""
    asked = prompts(number, batch)
    # Target and draft keep the prompts that they have read: no mode's turn may be the one that reads them.
    client.generate(asked, case.params("ssd", number + 1, 2, batch))
    return {mode: client.generate(asked, case.params(mode, number + 1, tokens, batch)) for mode in MODES}


if __name__ == "__main__":
    main()
