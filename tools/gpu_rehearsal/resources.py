"""Stack, registers and shared memory of the kernels in Triton's cache: `python -m tools.gpu_rehearsal.resources CACHE`.

Prints a line for each kernel, types of its pointers, and shapes that it multiplies. A stack means registers that were
spilled to memory. Some 20 ms a variant."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import triton

_MOST_STACK = 16  # bytes a thread
# Attention in 16 bits with heads of 256 and tiles of 64 queries: half as many queries would miss wgmma. And over FP8
# keys with tiles of 32.
_MOST_STACK_WIDE = 48
_MOST_SHARED = 232448  # bytes of a program on sm_90
_OURS = re.compile(r"_kernel$")  # others are made by torch's compiler


class Group(NamedTuple):
    """Variants that are shown in one line."""

    kernel: str
    types: str
    product: str
    unit: str

    @property
    def most_stack(self) -> int:
        wide = "x256 ." in self.product or "i8" in self.types.split(",")
        return _MOST_STACK_WIDE if self.kernel == "attend_kernel" and wide else _MOST_STACK


class Use(NamedTuple):
    """The resources of a variant: bytes of stack a thread, registers, bytes of shared memory."""

    stack: int
    registers: int
    shared: int


def read(cubin: Path) -> tuple[Group, Use]:
    """Read a variant's resources; types and shapes are known where its .ttir is beside it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(_only(rf"{name}:(\d+)", said)) for name in ("REG", "STACK"))
    shared = json.loads(cubin.with_suffix(".json").read_text())["shared"]
    code, ptx = (cubin.with_suffix(suffix) for suffix in (".ttir", ".ptx"))
    text, assembly = (file.read_text() if file.exists() else "" for file in (code, ptx))
    pointers = set(re.findall(r"!tt\.ptr<(\w+)>", text))
    product = re.search(r"tt\.dot .*?: tensor<(\d+x\d+)x\w+> \* tensor<(\d+x\d+)x", text)
    unit = next((name for name in ("wgmma", "mma") if f"{name}." in assembly), "")
    sizes = " . ".join(product.groups()) if product else ""
    return Group(cubin.stem, ",".join(sorted(pointers)), sizes, unit), Use(stack, registers, shared)


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


def table(cache: Path) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and a line for each variant of ours over its ceiling."""
    groups: dict[Group, list[Use]] = defaultdict(list)
    over = []
    for cubin in sorted(cache.glob("*/*.cubin")):
        group, use = read(cubin)
        groups[group].append(use)
        if _OURS.search(group.kernel) and (use.stack > group.most_stack or use.shared > _MOST_SHARED):
            over.append(
                f"{group.kernel} [{group.types}] {group.product}: {use.stack} bytes of stack, {use.shared} shared"
            )
    lines = [f"{'stack':>6} {'registers':>9} {'shared':>7} {'variants':>8}  kernel, types of pointers, product"]
    for group, uses in sorted(groups.items(), key=lambda item: (-max(use.stack for use in item[1]), item[0])):
        most = Use(*map(max, zip(*uses, strict=True)))
        told = " ".join(filter(None, (group.kernel, f"[{group.types}]", group.product, group.unit)))
        lines.append(f"{most.stack:>6} {most.registers:>9} {most.shared:>7} {len(uses):>8}  {told}")
    spilled = sum(use.stack > 0 for uses in groups.values() for use in uses)
    lines.append(f"{sum(map(len, groups.values()))} variants in {len(groups)} groups; {spilled} with a stack")
    return lines, over


if __name__ == "__main__":
    print(*table(Path(sys.argv[1]))[0], sep="\n")
