"""Tokens in one pass over the logits, against `argmax` of `perturbed` with torch alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ssd.kernels import cpu
from ssd.law import Law
from ssd.speculation.sampling import best, perturbed, read_ids, sound

pytestmark = pytest.mark.skipif(not cpu.serve(torch.empty(0)), reason="no C compiler: there are no kernels")


def coarse(*shape: int) -> Tensor:
    """Numbers of so few values that ties, and ties but for rounding, are everywhere."""
    return torch.randint(-12, 13, shape, generator=torch.Generator().manual_seed(sum(shape))) / 8


def plain(scores: Tensor) -> list[int]:
    found: list[int] = read_ids(sound(*best(scores)), scores.shape[1])
    return found


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 128, 1024, 1537])
def test_the_lowest_id_on_a_tie(size: int) -> None:
    scores = coarse(40, size)
    assert cpu.draw(scores) == plain(scores) == [row.index(max(row)) for row in scores.tolist()]
    wide = torch.cat((scores, scores + 9), dim=1)
    assert cpu.draw(wide[:, :size]) == plain(scores)


@pytest.mark.parametrize("size", [1, 16, 33, 1024])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_at_a_temperature(size: int, temperature: float) -> None:
    """Bit by bit what torch computes: all scores are 0, and one that rounded otherwise would not be."""
    logits = coarse(60, size) / 3
    noise = -logits / temperature
    scores = perturbed(logits, Law(temperature), range(60), lambda _, position: noise[position])
    assert cpu.draw(logits, [(temperature, row) for row in noise]) == plain(scores)


def test_rows_of_a_batch_keep_their_laws() -> None:
    logits, noise = coarse(3, 50), coarse(4, 50)
    drawn = cpu.draw(logits, [None, (0.5, noise[1]), (2.0, noise[2])])
    assert drawn == plain(torch.stack([logits[0], logits[1] / 0.5 + noise[1], logits[2] / 2.0 + noise[2]]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 20, 36])
def test_what_has_no_sample(value: float, place: int) -> None:
    logits = coarse(3, 37)
    logits[1, place] = value
    expected = plain(logits)
    assert cpu.draw(logits) == expected and expected[1] == -1 and expected[0] >= 0
    logits[1] = -torch.inf
    assert cpu.draw(logits)[1] == -1
    logits[1, place] = -1e30
    assert cpu.draw(logits)[1] == place


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 300, 1024])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_largest_few(size: int, count: int) -> None:
    """Of equals the first one comes first."""
    count, logits = min(count, size), coarse(40, size)
    logits[1] = -torch.inf
    logits[2, size // 2] = torch.nan
    logits[3, 1:] = -torch.inf
    noise = coarse(41, size)[1:] / 3
    scores = logits / 0.7 + noise
    scores[::2] = logits[::2]
    warmth = [None if row % 2 == 0 else (0.7, noise[row]) for row in range(40)]
    expected = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).sort(dim=1, descending=True, stable=True)
    found = cpu.rank(logits, count, warmth)
    assert found.ids == expected.indices[:, :count].tolist()
    assert found.scores == expected.values[:, :count].tolist()


@pytest.mark.parametrize("noise", [[torch.zeros(9)], [torch.zeros(9), torch.zeros(7)]])
def test_too_little_noise_is_refused(noise: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="rows of noise"):
        cpu.draw(coarse(2, 8), [(1.0, row) for row in noise])
