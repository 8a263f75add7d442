"""Write a GGUF file in another type with llama.cpp's quantiser: Q4_K_M, Q6_K, Q8_0, IQ4_XS, ...

    pip install -e '.[peers]'
    python -m tools.quantize smollm2 Q4_K_M /tmp/smollm2-q4_k_m.gguf

SOURCE is a .gguf file, or a built-in target that comes from one. What is quantised already is quantised once more.
llama.cpp takes a neighbouring type for a matrix whose rows are no multiple of 256."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ssd.errors import SsdError, UsageError
from tools.compare_peers.gguf import gguf_of

_PREFIX = "LLAMA_FTYPE_MOSTLY_"


def quantize(source: Path, kind: str, out: Path) -> None:
    """Write `source` to `out` in the mix of types that llama.cpp calls `kind`. Raises UsageError."""
    import llama_cpp

    kinds = {name.removeprefix(_PREFIX): value for name, value in vars(llama_cpp).items() if name.startswith(_PREFIX)}
    if kind not in kinds:
        raise UsageError(f"llama.cpp has no type {kind!r}: it has {', '.join(sorted(kinds))}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = kinds[kind], True, len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        raise UsageError(f"llama.cpp could not write {source} as {kind} to {out}")


@click.command(help=__doc__)
@click.argument("source")
@click.argument("kind")
@click.argument("out", type=click.Path(path_type=Path))
def main(source: str, kind: str, out: Path) -> None:
    try:
        gguf = gguf_of(source)
        if gguf is None:
            raise UsageError(f"{source} does not come from a GGUF file")
        quantize(gguf, kind, out)
    except SsdError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
