"""Which memory target and draft share, what happens where a GPU's cannot be shared, and who ends first. The driver is
a stand-in, all else is real."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from ssd.config import EngineConfig, Features
from ssd.ipc.arenas import DraftArenas, TargetArenas
from ssd.ipc.board import Key
from ssd.ipc.features import Part, extend_tags
from ssd.ipc.layouts import feature_layout, law_layout, on_gpus
from ssd.ipc.process import Start, memory_file
from ssd.params import Speculation
from tests.ipc.driver import OUT_OF_MEMORY, Driver, installed

DEVICE = torch.device("cpu")
SPECULATION = Speculation("ssd", 2, (1,), sampler="rejection")
CONFIG = EngineConfig(
    target="target",
    draft="draft",
    speculation=SPECULATION,
    device="cuda:0",
    draft_device="cuda:1",
    max_num_seqs=2,
    max_model_len=12,
    page_size=4,
    num_pages=6,
    vocab_size=3,
    features=Features(layers=(0, 1, 2), width=3),
)
KEY = Key(epoch=1, request=7, round=2, base=9, accepted=1, token=4)
TAGS: list[int] = []
extend_tags(TAGS, [7, 7, 3])
ROWS = torch.arange(9.0).reshape(3, 3)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return installed(monkeypatch)


@pytest.fixture
def start() -> Iterator[Start]:
    """What both are told at their start."""
    laws = memory_file("laws", law_layout(2, SPECULATION, 3).size_bytes)
    features = memory_file("features", feature_layout(CONFIG).size_bytes)
    yield Start("target", 1, "", CONFIG, (), -1, -1, laws_fd=laws, features_fd=features)
    os.close(laws)
    os.close(features)


def flows(target: TargetArenas, draft: DraftArenas) -> bool:
    """Whether what one writes the other reads, both ways."""
    assert target.laws and target.features and draft.laws and draft.features
    draft.laws.write(1, 0, KEY, 0, [2], [ROWS[0] / 3])
    draft.laws.show()
    target.features.write([Part(0, [3], 0, TAGS)], ROWS)
    laws, features = target.laws.read(1, 0, KEY, [2]), draft.features.read(0, 0, TAGS)
    return torch.equal(laws, ROWS[:1] / 3) and torch.equal(features, ROWS)


def on_host(side: TargetArenas | DraftArenas) -> bool:
    """Where its rows are."""
    return all(arena._rows.data_ptr() == arena._host.data.data_ptr() for arena in side._named.values())


@pytest.mark.parametrize(
    ("device", "draft_device", "expected"),
    [("cuda", "cuda", True), ("cuda:0", "cuda:3", True), ("cpu", "cuda", False), ("cuda", "cpu", False)],
)
def test_memory_of_a_gpu_is_for_two_on_gpus(device: str, draft_device: str, expected: bool) -> None:
    assert on_gpus(device, draft_device) == expected


def test_with_one_of_them_on_a_cpu_no_driver_is_asked(start: Start, driver: Driver) -> None:
    start = replace(start, config=replace(CONFIG, draft_device="cpu"))
    target, draft = TargetArenas(start, DEVICE), DraftArenas(start, DEVICE)
    assert draft.open(target.handles) and flows(target, draft) and on_host(target)
    assert not driver.calls


def test_on_gpus_rows_flow_through_memory_of_the_targets(start: Start, driver: Driver) -> None:
    target, draft = TargetArenas(start, DEVICE), DraftArenas(start, DEVICE)
    assert [handle.name for handle in target.handles] == ["laws", "features"]
    assert draft.open(target.handles) and flows(target, draft) and not on_host(target)
    assert draft.open(target.handles) and sum(driver.opened.values()) == 2  # a second `Ready` changes nothing
    assert not on_host(draft)
    draft.close()
    assert not driver.opened and len(driver.allocated) == 2 and on_host(draft)


def test_the_next_draft_opens_what_the_last_one_left(start: Start, driver: Driver) -> None:
    target, killed = TargetArenas(start, DEVICE), DraftArenas(start, DEVICE)
    assert killed.open(target.handles) and flows(target, killed)
    allocated = list(driver.allocated)
    restarted = DraftArenas(start, DEVICE)
    assert restarted.open(target.handles) and flows(target, restarted)
    assert list(driver.allocated) == allocated


def test_with_another_target_everything_is_opened_anew(start: Start, driver: Driver) -> None:
    """And of the one before nothing is left open, nor taken for the new one's: its memory may be gone."""
    old, draft = TargetArenas(start, DEVICE), DraftArenas(start, DEVICE)
    assert draft.open(old.handles) and flows(old, draft)
    new = TargetArenas(start, DEVICE)
    assert draft.features is not None and len(draft.features.read(0, 0, TAGS)) == 0
    assert draft.open(new.handles) and flows(new, draft)
    assert sum(driver.opened.values()) == 2
    assert not driver.opened.keys() & {exported._address for exported in old._exported}


@pytest.mark.parametrize("function", ["cuMemAlloc_v2", "cuIpcGetMemHandle"])
def test_a_target_that_cannot_export_uses_the_host(
    function: str, start: Start, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    before = TargetArenas(start, DEVICE)
    assert before.features is not None
    before.features.write([Part(0, [3], 0, TAGS)], ROWS)
    allocated = len(driver.allocated)
    driver.fails[function] = OUT_OF_MEMORY
    with caplog.at_level(logging.WARNING):
        target, draft = TargetArenas(start, DEVICE), DraftArenas(start, DEVICE)
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert f"memory of the host with the draft, which costs copies: {function}: CUDA_ERROR_OUT" in caplog.text
    assert target.handles == [] and len(driver.allocated) == allocated
    assert draft.features is not None and len(draft.features.read(0, 0, TAGS)) == 0
    assert draft.open(target.handles) and flows(target, draft) and on_host(target)


def test_a_target_that_can_export_only_one_exports_none(
    start: Start, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, codes = Driver._cuIpcGetMemHandle, iter((0, OUT_OF_MEMORY))
    monkeypatch.setattr(Driver, "_cuIpcGetMemHandle", lambda *arguments: next(codes) or works(*arguments))
    target = TargetArenas(start, DEVICE)
    assert target.handles == [] and not driver.allocated and on_host(target)


@pytest.mark.parametrize("gpus", [b"A", b"B"], ids=["refused", "hidden"])
def test_a_draft_that_cannot_open_them_says_so_and_both_use_the_host(
    gpus: bytes, start: Start, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = TargetArenas(start, DEVICE), DraftArenas(start, DEVICE)
    driver.gpus = gpus
    driver.fails["cuIpcOpenMemHandle_v2"] = 101
    with caplog.at_level(logging.WARNING):
        assert not draft.open(target.handles)
    assert len(caplog.records) == 1 and "memory of the host with the target" in caplog.text
    assert not driver.opened
    target.withdraw()
    assert draft.open(target.handles) and flows(target, draft) and on_host(target)
    assert len(driver.allocated) == 2  # an older draft may have them open
