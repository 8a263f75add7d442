"""Make streams of green contexts: parts of a GPU's multiprocessors, which no work outside of them may use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

Work = Callable[[], object]

_RESOURCE_BYTES, _COUNT_AT = 144, 96  # CUdevResource of CUDA 12.4 to 13.0, and its smCount
_SM, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1


def green_streams(count: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, int]:
    """Return a stream on at least `count` multiprocessors, one on all others, and how many the first one has.

    The parts stay for the life of the process. Raises RuntimeError with the driver's function and code."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")

    torch.cuda.current_stream().synchronize()  # there is a context
    whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    groups, device = ctypes.c_uint(1), torch.cuda.current_device()
    call("cuDeviceGetDevResource", device, whole, _SM)
    call("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, 0, count)
    streams = []
    for resource in (part, rest):
        descriptor, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        call("cuDevResourceGenerateDesc", ctypes.byref(descriptor), resource, 1)
        call("cuGreenCtxCreate", ctypes.byref(context), descriptor, device, _DEFAULT_STREAM)
        call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
        streams.append(torch.cuda.ExternalStream(stream.value or 0))
    return streams[0], streams[1], ctypes.c_uint.from_buffer(part, _COUNT_AT).value


def captured_on(work: Work, stream: torch.cuda.Stream) -> Work:
    """Capture on this stream, and return the replay: kernels in a graph keep its priority and its context."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay
