"""Which weights are asked for, and when, with a stand-in for streams."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ssd.layers import read_ahead
from ssd.layers.read_ahead import ReadAhead


class Stream:
    """Notes what happens, as all streams here do."""

    def __init__(self, said: list[Any], name: str) -> None:
        self.said, self.name, self.device = said, name, None

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits")

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What streams and the kernel were told."""
    found: list[Any] = []
    main = Stream(found, "main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda weight, **_: found.append((grid[0], weight.shape[0]))

    monkeypatch.setattr(read_ahead, "ask_kernel", Kernel())
    return found


def test_the_next_weight_is_the_one_that_followed_before(said: list[Any]) -> None:
    tile = 32 * 4096
    small, middle, large = (torch.zeros(size, dtype=torch.uint8) for size in (tile - 1, 3 * tile + 5, 200 * tile))
    ahead = ReadAhead()
    for weight in (small, middle, large):
        ahead.ran(weight)
    ahead.join()
    assert said == []  # nothing is known yet, and nothing forked
    for weight in (small, middle, large):
        ahead.ran(weight)
    # After the large one comes a weight that is too small to ask for.
    assert said == ["side waits", (3, len(middle)), "side waits", (128, len(large))]
    ahead.join()
    ahead.join()
    assert said[4:] == ["main waits"]
    freed = weakref.ref(large)
    del large, weight
    assert freed() is None
