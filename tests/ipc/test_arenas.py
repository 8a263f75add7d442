"""Tensors and arenas of two processes: carriers, failures, and who ends first. Only the CUDA driver is a stand-in."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from msgspec.structs import replace

from ssd.config.engine import EngineConfig, Features
from ssd.config.params import Speculation
from ssd.ipc import cuda
from ssd.ipc.arenas import DraftArenas, Exported, HostTensor, Imported, TargetArenas, settle
from ssd.ipc.board import Key
from ssd.ipc.cuda import CudaError
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.features import FeatureArena, FeaturePart, extend_tags
from ssd.ipc.layouts import draft_probs_layout, feature_layout, on_gpus
from ssd.ipc.messages import TARGET_TO_DRAFT, ArenaHandle, Ready
from ssd.ipc.process import Start, memory_file
from ssd.ipc.public import pack, unpack
from tests.ipc.driver import OUT_OF_MEMORY, Driver, installed

DEVICE = torch.device("cpu")
SIZE = 3 * 2**20 + 8
SPECULATION = Speculation("ssd", 2, (1,), "jit", sampler="rejection")
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
    features=Features(kind="", layers=(0, 1, 2), width=3),
)
KEY = Key(epoch=1, request=7, round=2, base=9, accepted=1, token=4)
TAGS: list[int] = []
extend_tags(TAGS, [7, 7, 3])
ROWS = torch.arange(9.0).reshape(3, 3)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return installed(monkeypatch)


# -- tensors of two processes ------------------------------------------------------------------------------------------


def sent(handle: ArenaHandle) -> ArenaHandle:
    """As the other process has it."""
    _, ready = unpack(pack(Ready([handle])), TARGET_TO_DRAFT)
    assert ready.arenas == [handle]
    return ready.arenas[0]


def sides(carrier: str) -> tuple[HostTensor | Exported, HostTensor | Imported]:
    if carrier == "device":
        exported = Exported("draft_probs", SIZE, DEVICE)
        return exported, Imported(sent(exported.handle), DEVICE)
    descriptor = memory_file("draft-probs", 64 + SIZE)
    views = HostTensor(descriptor, SIZE, 64), HostTensor(descriptor, SIZE, 64)
    os.close(descriptor)
    return views


@pytest.mark.parametrize("carrier", ["host", "device"])
def test_what_one_side_writes_the_other_reads(carrier: str, driver: Driver) -> None:
    ours, theirs = sides(carrier)
    assert ours.data.shape == theirs.data.shape == (SIZE,) and not theirs.data.any()
    ours.data.view(torch.int64)[-1] = 2**40
    theirs.data.view(torch.float32)[0] = 0.5
    settle(theirs.data)
    assert theirs.data.view(torch.int64)[-1] == 2**40 and ours.data.view(torch.float32)[0] == 0.5
    theirs.close()
    ours.close()
    assert not driver.opened and not driver.allocated


def test_a_view_that_only_reads_sees_what_is_written() -> None:
    descriptor = memory_file("features", 96)
    theirs, ours = HostTensor(descriptor, 32, 64, writable=False), HostTensor(descriptor, 96)
    os.close(descriptor)
    ours.data[64] = 7
    assert theirs.data.tolist() == [7] + [0] * 31


def test_nothing_else_lies_in_what_is_exported(driver: Driver) -> None:
    exported = Exported("draft_probs", SIZE, DEVICE)
    (memory,) = driver.allocated.values()
    assert len(memory) % cuda.GRAIN == 0 and len(memory) >= SIZE + len(exported.handle.mark)


@pytest.mark.parametrize(
    "function", ["cuInit", "cuMemAlloc_v2", "cuMemsetD8_v2", "cuMemcpyHtoD_v2", "cuIpcGetMemHandle"]
)
def test_an_export_that_fails_leaves_nothing(function: str, driver: Driver) -> None:
    driver.fails[function] = OUT_OF_MEMORY
    with pytest.raises(CudaError, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY"):
        Exported("draft_probs", SIZE, DEVICE)
    assert not driver.allocated


@pytest.mark.parametrize("function", ["cuDeviceGetUuid_v2", "cuIpcOpenMemHandle_v2", "cuMemcpyDtoH_v2"])
def test_an_import_that_fails_leaves_nothing_open(function: str, driver: Driver) -> None:
    exported = Exported("draft_probs", SIZE, DEVICE)
    driver.fails[function] = 999
    with pytest.raises(CudaError, match=f"{function}: error 999"):
        Imported(exported.handle, DEVICE)
    assert not driver.opened and driver.allocated


def test_memory_that_is_not_what_was_exported_is_not_used(driver: Driver) -> None:
    first, second = Exported("draft_probs", SIZE, DEVICE), Exported("draft_probs", SIZE, DEVICE)
    stale = ArenaHandle("draft_probs", SIZE, second.handle.memory, first.handle.gpu, first.handle.mark)
    with pytest.raises(CudaError, match="not what was exported"):
        Imported(stale, DEVICE)
    assert not driver.opened


@pytest.mark.parametrize(
    ("gpus", "peers", "cause"), [(b"B", True, "hidden"), (b"BA", False, "cuda:0 has no access to .* cuda:1")]
)
def test_a_gpu_out_of_reach_is_not_opened(gpus: bytes, peers: bool, cause: str, driver: Driver) -> None:
    exported = Exported("draft_probs", SIZE, DEVICE)
    driver.gpus, driver.peers = gpus, peers
    with pytest.raises(CudaError, match=cause):
        Imported(exported.handle, DEVICE)
    assert not driver.opened
    driver.gpus, driver.peers = b"BA", True
    Imported(exported.handle, DEVICE).close()


def test_the_device_is_done_before_memory_is_unmapped(driver: Driver) -> None:
    exported = Exported("draft_probs", SIZE, DEVICE)
    imported = Imported(exported.handle, DEVICE)
    driver.calls.clear()
    imported.close()
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuIpcCloseMemHandle")


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LIBRARY", "libcuda-that-is-not-there.so")
    cuda._library.cache_clear()
    with pytest.raises(CudaError, match="no CUDA driver"):
        Exported("draft_probs", SIZE, DEVICE)


def test_a_driver_that_is_too_old_says_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, "_cuDeviceGetUuid_v2")
    with pytest.raises(CudaError, match="too old"):
        Exported("draft_probs", SIZE, DEVICE)
    assert not driver.allocated


# -- arenas ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Start]:
    """What both are told at their start."""
    probs = memory_file("draft-probs", draft_probs_layout(2, SPECULATION, 3).size_bytes)
    features = memory_file("features", feature_layout(CONFIG).size_bytes)
    yield Start("target", 1, "", CONFIG, (), -1, -1, draft_probs_fd=probs, features_fd=features)
    os.close(probs)
    os.close(features)


def target_of(start: Start) -> TargetArenas:
    arenas = DraftProbsArena.of(start), FeatureArena.of(start, writable=True)
    return TargetArenas(start.config, arenas, DEVICE)


def draft_of(start: Start) -> DraftArenas:
    return DraftArenas((DraftProbsArena.of(start), FeatureArena.of(start)), DEVICE)


def probs_of(side: TargetArenas | DraftArenas) -> DraftProbsArena:
    return cast(DraftProbsArena, side.arenas["draft_probs"])


def features_of(side: TargetArenas | DraftArenas) -> FeatureArena:
    return cast(FeatureArena, side.arenas["features"])


def flows(target: TargetArenas, draft: DraftArenas) -> bool:
    """Whether what one writes the other reads, both ways."""
    probs_of(draft).write(1, 0, KEY, 0, [2], [ROWS[0] / 3])
    probs_of(draft).show()
    features_of(target).write([FeaturePart(0, [3], 0, TAGS)], ROWS)
    probs, features = probs_of(target).read(1, 0, KEY, [2]), features_of(draft).read(0, 0, TAGS)
    return torch.equal(probs, ROWS[:1] / 3) and torch.equal(features, ROWS)


def on_host(side: TargetArenas | DraftArenas) -> bool:
    """Where its rows are."""
    return all(arena._rows.data_ptr() == arena._host.data.data_ptr() for arena in side.arenas.values())


@pytest.mark.parametrize(
    ("device", "draft_device", "expected"),
    [("cuda", "cuda", True), ("cuda:0", "cuda:3", True), ("cpu", "cuda", False), ("cuda", "cpu", False)],
)
def test_memory_of_a_gpu_is_for_two_on_gpus(device: str, draft_device: str, expected: bool) -> None:
    assert on_gpus(device, draft_device) == expected


def test_with_one_of_them_on_a_cpu_no_driver_is_asked(start: Start, driver: Driver) -> None:
    start = replace(start, config=replace(CONFIG, draft_device="cpu"))
    target, draft = target_of(start), draft_of(start)
    assert draft.open(target.handles) and flows(target, draft) and on_host(target)
    assert not driver.calls


def test_on_gpus_rows_flow_through_memory_of_the_targets(start: Start, driver: Driver) -> None:
    target, draft = target_of(start), draft_of(start)
    assert [handle.name for handle in target.handles] == ["draft_probs", "features"]
    assert draft.open(target.handles) and flows(target, draft) and not on_host(target)
    assert draft.open(target.handles) and sum(driver.opened.values()) == 2  # a second `Ready` changes nothing
    assert not on_host(draft)
    draft.close()
    assert not driver.opened and len(driver.allocated) == 2 and on_host(draft)


def test_the_next_draft_opens_what_the_last_one_left(start: Start, driver: Driver) -> None:
    target, killed = target_of(start), draft_of(start)
    assert killed.open(target.handles) and flows(target, killed)
    allocated = list(driver.allocated)
    restarted = draft_of(start)
    assert restarted.open(target.handles) and flows(target, restarted)
    assert list(driver.allocated) == allocated


def test_with_another_target_everything_is_opened_anew(start: Start, driver: Driver) -> None:
    """And of the one before nothing is left open, nor taken for the new one's: its memory may be gone."""
    old, draft = target_of(start), draft_of(start)
    assert draft.open(old.handles) and flows(old, draft)
    new = target_of(start)
    assert len(features_of(draft).read(0, 0, TAGS)) == 0
    assert draft.open(new.handles) and flows(new, draft)
    assert sum(driver.opened.values()) == 2
    assert not driver.opened.keys() & {exported._address for exported in old._exported}


@pytest.mark.parametrize("function", ["cuMemAlloc_v2", "cuIpcGetMemHandle"])
def test_a_target_that_cannot_export_uses_the_host(
    function: str, start: Start, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    before = target_of(start)
    features_of(before).write([FeaturePart(0, [3], 0, TAGS)], ROWS)
    allocated = len(driver.allocated)
    driver.fails[function] = OUT_OF_MEMORY
    with caplog.at_level(logging.WARNING):
        target, draft = target_of(start), draft_of(start)
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert f"memory of the host with the draft, which costs copies: {function}: CUDA_ERROR_OUT" in caplog.text
    assert target.handles == [] and len(driver.allocated) == allocated
    assert len(features_of(draft).read(0, 0, TAGS)) == 0
    assert draft.open(target.handles) and flows(target, draft) and on_host(target)


def test_a_target_with_one_export_exports_none(start: Start, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    works, codes = Driver._cuIpcGetMemHandle, iter((0, OUT_OF_MEMORY))
    monkeypatch.setattr(Driver, "_cuIpcGetMemHandle", lambda *arguments: next(codes) or works(*arguments))
    target = target_of(start)
    assert target.handles == [] and not driver.allocated and on_host(target)


@pytest.mark.parametrize("gpus", [b"A", b"B"], ids=["refused", "hidden"])
def test_a_draft_that_cannot_open_them_says_so_and_both_use_the_host(
    gpus: bytes, start: Start, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = target_of(start), draft_of(start)
    driver.gpus = gpus
    driver.fails["cuIpcOpenMemHandle_v2"] = 101
    with caplog.at_level(logging.WARNING):
        assert not draft.open(target.handles)
    assert len(caplog.records) == 1 and "memory of the host with the target" in caplog.text
    assert not driver.opened
    target.withdraw()
    assert draft.open(target.handles) and flows(target, draft) and on_host(target)
    assert len(driver.allocated) == 2  # an older draft may have them open
