"""What a GPU would capture, on tensors without numbers: nothing illegal, and no more launches than these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.capture.functions import CONFIGS, functions
from tests.capture.watch import META, Fault, count

# Launches: for each layer, and besides.
CEILINGS = {
    ("llama", "verify"): (10, 10),
    ("llama", "verify, FP8 cache"): (10, 10),
    ("llama", "tree step"): (11, 29),
    ("llama", "warm tree step"): (11, 31),
    ("llama", "filtered tree step"): (11, 34),
    ("llama", "next depth"): (11, 37),
    ("qwen3", "verify"): (10, 10),
    ("qwen3", "verify, FP8 cache"): (10, 10),
    ("qwen3", "tree step"): (11, 29),
    ("qwen3", "warm tree step"): (11, 31),
    ("qwen3", "filtered tree step"): (11, 34),
    ("qwen3", "next depth"): (11, 37),
    ("eagle3", "tree step"): (14, 29),
    ("eagle3", "warm tree step"): (14, 31),
    ("eagle3", "filtered tree step"): (14, 34),
    ("eagle3", "next depth"): (14, 40),
}
BETWEEN = {"draw": 6, "filtered draw": 9, "adjusted draw": 10, "decide": 1, "note outcomes": 1, "build": 1}


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_functions_are_legal_and_launch_no_more_than_this(name: str) -> None:
    check_launches(name, CEILINGS)


def check_launches(name: str, ceilings: dict[tuple[str, str], tuple[int, int]]) -> None:
    """Of two layers, as all are alike but for their windows; `python -m tests.capture` runs all of them."""
    kind = CONFIGS[name]["model_type"]
    for function, (run, layers) in functions(name, 2).items():
        launched = count(run).total
        each, besides = ceilings.get((kind, function), (0, BETWEEN.get(function, 0)))
        assert launched <= layers * each + besides, f"{function}: {launched} launches"


def numbers() -> Tensor:
    return torch.empty(4, 8, device=META)


# What must not be captured, as it creeps in.
FAULTS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "condition": lambda x: 1 if x.any() else 2,
    "length of a tensor": lambda x: range(int(x[0, 0])),
    "list": lambda x: x[0].tolist(),
    "mask as index": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.__setitem__(x > 0, x[0, 0]),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where without values": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[0].long()),
    "equal": lambda x: torch.equal(x, x),
    "to the host": lambda x: x.cpu(),
    "to the host later": lambda x: x.to("cpu", non_blocking=True),
    "copy to the host": lambda x: torch.empty(4, 8).copy_(x),
    "copy from the host": lambda x: x.copy_(torch.empty(4, 8)),
    "scalar of the host": lambda x: x * torch.tensor(2.0),
    "index of the host": lambda x: x[torch.tensor([1, 2])],
    "list as index": lambda x: x[:, [1, 2]],
    "numbers of the host": lambda x: x + torch.tensor([1.0] * 8, device=META),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found_with_its_line(name: str) -> None:
    with pytest.raises(Fault, match=r"test_capture.py:\d+: ") as found:
        count(lambda: FAULTS[name](numbers()))
    assert "lambda x" in str(found.value)


def test_views_and_memory_are_no_launches() -> None:
    def function() -> None:
        x = numbers()
        x.view(8, 4)[:, 1:].transpose(0, 1).unsqueeze(0).expand(3, -1, -1)
        x.new_empty(3, 3)
        x.to(x.dtype)
        x.float()

    assert count(function).total == 0


def test_casts_are_launches() -> None:
    assert count(lambda: numbers().half()).total == 1
    assert count(lambda: numbers().to(torch.int64)).total == 1


def test_bytes_are_those_that_a_product_reads_and_writes() -> None:
    x, weight = torch.empty(8, 64, device=META), torch.empty(32, 64, device=META)
    found = count(lambda: torch.nn.functional.linear(x, weight))
    assert (found.total, found.bytes) == (1, 4 * (8 * 64 + 32 * 64 + 8 * 32))
    table = count(lambda: torch.nn.functional.embedding(torch.empty(5, dtype=torch.long, device=META), weight))
    assert table.bytes == 2 * 4 * 5 * 64
    assert found.milliseconds(2.0, 1.0) == pytest.approx(0.002 + found.bytes / 1e9)
