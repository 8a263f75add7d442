"""What a device computes, against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.speculation.noise import gumbels_of, keys_of, lanes_of
from tests.models import tiny

PAGE = 4


def runner(directory: Path, device: torch.device, dtype: torch.dtype) -> Runner:
    return Runner(registry.load(inspect(directory), dtype, device, 256), 256, PAGE)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 4e-2)])
def test_logits_are_those_of_the_cpu(
    kind: str, dtype: torch.dtype, bound: float, device: torch.device, tmp_path: Path
) -> None:
    """Prompts, single steps and verifications in one batch, over pages that do not follow each other."""
    model = tiny.model(kind, tmp_path, **({"head_dim": 16} if kind == "qwen3" else {"hidden_size": 64}))
    batches = [
        [
            Row(tiny.token_ids(30, 1), 0, [9, 3, 5, 7, 11, 13, 15, 17]),
            Row(tiny.token_ids(9, 2), 0, range(20, 24), 1, 1),
        ],
        [Row([5], 30, [9, 3, 5, 7, 11, 13, 15, 17]), Row(tiny.token_ids(5, 3), 9, range(20, 24), 5, 1)],
    ]
    ours, reference = runner(model, device, dtype), runner(model, torch.device("cpu"), torch.float32)
    for rows in batches:
        found, expected = ours.forward(rows).float().cpu(), reference.forward(rows)
        assert (found - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_verification_has_the_bits_of_single_steps(
    dtype: torch.dtype, device: torch.device, pair: tuple[Path, Path]
) -> None:
    """All of them run in the one shape of a deterministic engine: a GPU then takes the same kernels."""
    if device.type == "cpu":
        dtype = torch.float32  # a CPU is deterministic in no other
    model = registry.load(inspect(pair[0]), dtype, device, 256)
    static = StaticRunner(model, 256, PAGE, True, most_rows=2, longest=8)
    static.warm_up(8)
    ids, prompt = tiny.token_ids(16, 4), tiny.token_ids(10, 5)
    once, again = range(8), range(8, 16)
    static.forward([Row(prompt, 0, once, slot=0), Row(prompt, 0, again, slot=1)])
    alone = [static.forward([Row([token], 10 + at, once, slot=0)]).clone() for at, token in enumerate(ids)]
    rows = [static.forward([Row(ids[at : at + 8], 10 + at, again, 8, slot=1)]).clone() for at in (0, 8)]
    assert torch.equal(torch.cat(rows), torch.cat(alone))


def test_noise_has_the_same_bits_everywhere(device: torch.device) -> None:
    """Target and draft may stand on different devices."""
    for seed, position in ((0, 0), (2**63 - 1, 4095)):
        keys, ids = keys_of([(seed, position)]), torch.arange(50_001, dtype=torch.int32)
        assert torch.equal(lanes_of(keys.to(device), ids.to(device)).cpu(), lanes_of(keys, ids))
    places = [(7, position) for position in range(4)]
    there, here = gumbels_of(keys_of(places, device), 50_001), gumbels_of(keys_of(places), 50_001)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-5)
