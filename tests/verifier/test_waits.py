"""While a verification runs, the next one is launched without waiting for it.

A stand-in for CUDA's events counts forwards: an event is over when the host has waited for something as late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ssd.config.params import SamplingParams, Speculation
from ssd.draft import chain_cache
from ssd.draft.chain_cache import ChainCache
from ssd.execution import adjustments
from ssd.execution.adjustments import AdjustmentTable
from ssd.execution.kv_cache import KVCache
from ssd.execution.static import StaticForward, StaticRunner
from ssd.execution.tables import Tables, Upload, uploaded
from ssd.models.interface import Shape
from ssd.speculation.adjustment import Adjustment, Text
from ssd.verifier.overlap import DeviceScheduler
from tests.draft.audit import World
from tests.draft.pair import PAGE_SIZE, Draft, Pair, config
from tests.models import tiny

PAGES, ROWS = 200, 4
_VALUES = (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__)


class Stream:
    """Counts how many forwards are `launched`, how many the host knows to be `over`, and what it `waited` for while it
    launched the next one."""

    def __init__(self) -> None:
        self.launched = self.over = 0
        self.launches, self.launching = 0, False
        self.waited: list[str] = []

    def wait(self, until: int, what: str) -> None:
        if self.launching and until > self.over:
            self.waited.append(what)
        self.over = max(self.over, until)


class Event:
    def __init__(self, stream: Stream, what: str) -> None:
        self._stream, self._what, self._after = stream, what, 0

    def record(self) -> None:
        self._after = self._stream.launched

    def synchronize(self) -> None:
        self._stream.wait(self._after, self._what)


class Reads(TorchFunctionMode):
    """A value that the host reads, and a list that it sends, wait for all that is launched."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VALUES or func is torch.tensor:
            self._stream.wait(self._stream.launched, func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    upload, scheduler, forward, launch = (
        Upload.__init__,
        DeviceScheduler.__init__,
        StaticForward._forward,
        DeviceScheduler.launch_next,
    )

    def upload_made(self: Any, *given: Any) -> None:
        upload(self, *given)
        self._copied = Event(found, "upload")

    def scheduler_made(self: Any, *given: Any) -> None:
        scheduler(self, *given)
        self._arrived = Event(found, "report")

    def run(self: StaticForward) -> None:
        forward(self)
        found.launched += 1

    def launch_next(self: Any, *given: Any) -> None:
        found.launching, found.launches = True, found.launches + 1
        launch(self, *given)
        found.launching = False

    monkeypatch.setattr(Upload, "__init__", upload_made)
    monkeypatch.setattr(DeviceScheduler, "__init__", scheduler_made)
    monkeypatch.setattr(DeviceScheduler, "launch_next", launch_next)
    monkeypatch.setattr(StaticForward, "_forward", run)
    return found


def play(world: World, stream: Stream) -> None:
    """Requests whose tables grow by a page in every other round, and whose texts are adjusted."""
    settings = config(Speculation("ssd", 4, (3,), backup="none"), max_num_seqs=ROWS, num_pages=PAGES)
    target = StaticRunner(world.target.model, PAGES, PAGE_SIZE, most_rows=ROWS, longest=9)
    wishes: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"frequency_penalty": 0.3}, {"logit_bias": {7: 2.0}}]
    laws = [SamplingParams(seed=n, max_tokens=30, **wish) for n, wish in enumerate(wishes)]
    pair = Pair(settings, target, Draft(settings, world.draft), overlap=True)
    with Reads(stream):
        pair.run([tiny.token_ids(n, n) for n in (3, 9, 6, 2)], laws)


def test_nothing_that_runs_is_waited_for_before_the_next_launch(world: World, stream: Stream) -> None:
    play(world, stream)
    assert stream.launches > 10 and not stream.waited


def test_what_is_uploaded_comes_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def pin_memory(numbers: Tensor) -> Tensor:
        calls.append("pinned")
        return numbers

    def to(numbers: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        calls.append((device.type, non_blocking))
        return numbers

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    uploaded(torch.zeros(3), torch.device("cuda"))
    assert calls == ["pinned", ("cuda", True)]


def test_texts_that_begin_and_chains_that_win_are_uploaded_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that begins, with its biases, but not one that goes on; and the places of a winning chain."""
    sent: list[Tensor] = []

    def counted(numbers: Tensor, device: torch.device) -> Tensor:
        sent.append(numbers)
        return uploaded(numbers, device)

    monkeypatch.setattr(adjustments, "uploaded", counted)
    monkeypatch.setattr(chain_cache, "uploaded", counted)
    table, text = AdjustmentTable(2, 50, tiny.CPU), [3, 9, 3]
    wish = Adjustment(1.2, bias={4: 1.0}, allowed=torch.arange(9))
    for count in (2, 2):
        table.tell([(1, Text(text, 2, wish))])
        assert len(sent) == count
        text += [7, 8]
    shape = Shape(50, 50, 1, 1, 1, 2, 50)
    cache = KVCache(shape, 2, 4, torch.float32, tiny.CPU)
    chains = ChainCache.new(shape, 3, 2, torch.float32, tiny.CPU)
    chains.promote(0, 2, cache, [3, 4])
    assert sent[-1].tolist() == [3, 4]


# -- planted ----------------------------------------------------------------------------------------------------------


def each_slot(patch: pytest.MonkeyPatch) -> None:
    """A table waits for the one before it, which is sent behind the forward."""
    tell = Tables.tell

    def one_by_one(self: Tables, found: Any) -> None:
        for each in list(found):
            tell(self, [each])

    patch.setattr(Tables, "tell", one_by_one)


def looks(patch: pytest.MonkeyPatch) -> None:
    fill = DeviceScheduler._fill

    def reads(self: Any, rows: Any) -> None:
        fill(self, rows)
        assert self._running.max().item() >= -1

    patch.setattr(DeviceScheduler, "_fill", reads)


@pytest.mark.parametrize("plant", [each_slot, looks])
def test_a_planted_wait_is_counted(
    world: World, stream: Stream, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    play(world, stream)
    assert stream.waited
