"""Tensors of two processes: the memory files are real, and of GPUs all but the driver itself."""

from __future__ import annotations

import os

import pytest
import torch

from ssd.ipc import cuda
from ssd.ipc.cuda import CudaError
from ssd.ipc.messages import TARGET_TO_DRAFT, ArenaHandle, Ready, pack, unpack
from ssd.ipc.process import memory_file
from ssd.ipc.shared import Exported, HostTensor, Imported, SharedTensor, settle
from tests.ipc.driver import OUT_OF_MEMORY, Driver, installed

DEVICE = torch.device("cpu")
SIZE = 3 * 2**20 + 8


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return installed(monkeypatch)


def sent(handle: ArenaHandle) -> ArenaHandle:
    """As the other process has it."""
    _, ready = unpack(pack(Ready([handle])), TARGET_TO_DRAFT)
    assert ready.arenas == [handle]
    return ready.arenas[0]


def sides(carrier: str) -> tuple[SharedTensor, SharedTensor]:
    if carrier == "device":
        exported = Exported("laws", SIZE, DEVICE)
        return exported, Imported(sent(exported.handle), DEVICE)
    descriptor = memory_file("laws", 64 + SIZE)
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
    exported = Exported("laws", SIZE, DEVICE)
    (memory,) = driver.allocated.values()
    assert len(memory) % cuda.GRAIN == 0 and len(memory) >= SIZE + len(exported.handle.mark)


@pytest.mark.parametrize(
    "function", ["cuInit", "cuMemAlloc_v2", "cuMemsetD8_v2", "cuMemcpyHtoD_v2", "cuIpcGetMemHandle"]
)
def test_an_export_that_fails_leaves_nothing(function: str, driver: Driver) -> None:
    driver.fails[function] = OUT_OF_MEMORY
    with pytest.raises(CudaError, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY"):
        Exported("laws", SIZE, DEVICE)
    assert not driver.allocated


@pytest.mark.parametrize("function", ["cuDeviceGetUuid_v2", "cuIpcOpenMemHandle_v2", "cuMemcpyDtoH_v2"])
def test_an_import_that_fails_leaves_nothing_open(function: str, driver: Driver) -> None:
    exported = Exported("laws", SIZE, DEVICE)
    driver.fails[function] = 999
    with pytest.raises(CudaError, match=f"{function}: error 999"):
        Imported(exported.handle, DEVICE)
    assert not driver.opened and driver.allocated


def test_memory_that_is_not_what_was_exported_is_not_used(driver: Driver) -> None:
    first, second = Exported("laws", SIZE, DEVICE), Exported("laws", SIZE, DEVICE)
    stale = ArenaHandle("laws", SIZE, second.handle.memory, first.handle.gpu, first.handle.mark)
    with pytest.raises(CudaError, match="not what was exported"):
        Imported(stale, DEVICE)
    assert not driver.opened


@pytest.mark.parametrize(
    ("gpus", "peers", "cause"), [(b"B", True, "hidden"), (b"BA", False, "cuda:0 has no access to .* cuda:1")]
)
def test_a_gpu_out_of_reach_is_not_opened(gpus: bytes, peers: bool, cause: str, driver: Driver) -> None:
    exported = Exported("laws", SIZE, DEVICE)
    driver.gpus, driver.peers = gpus, peers
    with pytest.raises(CudaError, match=cause):
        Imported(exported.handle, DEVICE)
    assert not driver.opened
    driver.gpus, driver.peers = b"BA", True
    Imported(exported.handle, DEVICE).close()


def test_the_device_is_done_before_memory_is_unmapped(driver: Driver) -> None:
    exported = Exported("laws", SIZE, DEVICE)
    imported = Imported(exported.handle, DEVICE)
    driver.calls.clear()
    imported.close()
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuIpcCloseMemHandle")


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LIBRARY", "libcuda-that-is-not-there.so")
    cuda._library.cache_clear()
    with pytest.raises(CudaError, match="no CUDA driver"):
        Exported("laws", SIZE, DEVICE)


def test_a_driver_that_is_too_old_says_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, "_cuDeviceGetUuid_v2")
    with pytest.raises(CudaError, match="too old"):
        Exported("laws", SIZE, DEVICE)
    assert not driver.allocated
