"""What a GPU would launch, by model and function: `python -m tests.capture [MODEL]...`

Launches, and those for each layer. The estimate of a function: each of its operations takes the time of the bytes that
it reads and writes, and each launch LAUNCH_US to begin and end; keys and values of the text are not counted. The floor
is the time of the bytes of the products alone. Both are a model, not a measurement."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # so that kernels can be counted where there is no GPU

import click
from rich.console import Console
from rich.table import Table

from tests.capture.functions import CONFIGS, functions
from tests.capture.watch import count

# TB/s that kernels read and write: nine tenths of the data sheets' 3.35 and 4.8.
BANDWIDTH = {"H100": 0.9 * 3.35, "H200": 0.9 * 4.8}
# From one kernel of a graph to the next, if that depends on it. No data sheet says it: an assumption.
LAUNCH_US = 2.5


@click.command(help=__doc__)
@click.argument("models", nargs=-1, type=click.Choice(list(CONFIGS)))
def main(models: tuple[str, ...]) -> None:
    table = Table("model", "function", "launches", "a layer", "GB", *(f"ms on {name}, floor" for name in BANDWIDTH))
    for name in models or CONFIGS:
        for function, (run, layers) in functions(name).items():
            found = count(run)
            times = [
                f"{found.milliseconds(LAUNCH_US, rate):.2f}, {found.floor(rate):.2f}" for rate in BANDWIDTH.values()
            ]
            each = f"{found.total / layers:.1f}" if layers else ""
            table.add_row(name, function, str(found.total), each, f"{found.bytes / 1e9:.2f}", *times)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
