"""Write a GGUF file in another type with llama.cpp's quantiser: Q4_K_M, Q6_K, Q8_0, IQ4_XS, ...

    pip install -e '.[peers]'
    python -m tools.quantize smollm2 Q4_K_M /tmp/smollm2-q4_k_m.gguf
    python -m tools.quantize smollm2 Q4_K_S /tmp/q4_k.gguf --widen --pure

SOURCE is a .gguf file, or a built-in target that comes from one. What is quantised already is quantised once more.
llama.cpp takes a neighbouring type for a matrix whose rows are no multiple of 256."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from ssd.errors import SsdError, UsageError
from tools.compare_peers.gguf import gguf_of

_PREFIX = "LLAMA_FTYPE_MOSTLY_"
_BLOCK = 256


def quantize(source: Path, kind: str, out: Path, pure: bool = False) -> None:
    """Write `source` to `out` in the mix of types that llama.cpp calls `kind`; if `pure`, all matrices in its main one.

    Raises UsageError."""
    import llama_cpp

    kinds = {name.removeprefix(_PREFIX): value for name, value in vars(llama_cpp).items() if name.startswith(_PREFIX)}
    if kind not in kinds:
        raise UsageError(f"llama.cpp has no type {kind!r}: it has {', '.join(sorted(kinds))}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = kinds[kind], True, len(os.sched_getaffinity(0))
    params.pure = pure
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        raise UsageError(f"llama.cpp could not write {source} as {kind} to {out}")


def widen(source: Path, out: Path) -> None:
    """Write a `llama` to `out` in float32, with zeros added until its width and its heads fill blocks of 256.

    It computes the same: what is added is zero all along, and the norms' weights make up for the longer rows. Raises
    UsageError for another architecture."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    known = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if known.get("general.architecture") != "llama":
        raise UsageError(f"{source} is no llama but {known.get('general.architecture')!r}")
    width, heads, kv_heads = (
        known[f"llama.{name}"] for name in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    dim, wide = width // heads, -(-width // _BLOCK) * _BLOCK
    more = next(count for count in range(kv_heads, 99 * kv_heads) if count * (heads // kv_heads) * dim % _BLOCK == 0)
    size = more * (heads // kv_heads) * dim
    changed = {
        "embedding_length": wide,
        "attention.head_count": more * (heads // kv_heads),
        "attention.head_count_kv": more,
        "attention.layer_norm_rms_epsilon": known["llama.attention.layer_norm_rms_epsilon"] * width / wide,
        "attention.key_length": dim,
        "attention.value_length": dim,
    }
    known |= {f"llama.{name}": value for name, value in changed.items()}
    # Rows and columns of each part; 0: as they are.
    shapes = {"attn_q": (size, wide), "attn_k": (more * dim, wide), "attn_v": (more * dim, wide)}
    shapes |= {"attn_output": (wide, size), "ffn_down": (wide, 0)}
    writer = gguf.GGUFWriter(out, "llama")
    for name, value in known.items():
        if name not in ("general.architecture", "general.file_type", "general.quantization_version"):
            _add(writer, name, value, reader.fields.get(name))
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        if numbers.ndim == 1:
            numbers = np.pad(numbers * np.float32((width / wide) ** 0.5), (0, wide - width))
        else:
            least = shapes.get(tensor.name.split(".")[-2], (0, wide))
            numbers = np.pad(numbers, [(0, max(0, to - at)) for at, to in zip(numbers.shape, least, strict=True)])
        writer.add_tensor(tensor.name, np.ascontiguousarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, value: Any, field: Any) -> None:
    """Add a value to a file, in the type that the `field` of another file has; without one, as a whole number."""
    import gguf

    kinds = [gguf.GGUFValueType.UINT32] if field is None else field.types
    writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)


@click.command(help=__doc__)
@click.argument("source")
@click.argument("kind")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--pure", is_flag=True, help="All matrices in the main type of KIND.")
@click.option("--widen", "wider", is_flag=True, help="Add zeros to a llama first, so that blocks of 256 fit every row.")
def main(source: str, kind: str, out: Path, pure: bool, wider: bool) -> None:
    try:
        gguf = gguf_of(source)
        if gguf is None:
            raise UsageError(f"{source} does not come from a GGUF file")
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            wide = Path(folder) / "wide.gguf"
            if wider:
                widen(gguf, wide)
            quantize(wide if wider else gguf, kind, out, pure)
    except SsdError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
