"""CUDA graphs: a function over fixed tensors, captured once and replayed in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssd.errors import UsageError

# Runs before the capture, which compile kernels, make workspaces and choose algorithms.
_WARM_UPS = 2


class GraphPool:
    """Captures graphs that share memory: no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a workspace for every stream that has multiplied.
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `function`, which leaves its results in tensors.

        Raises UsageError if `function` waits for the device or copies from the host."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # NCCL's watchdog, another thread, may ask for its events meanwhile.
                mode = "thread_local"
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                    function()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise UsageError(
                    f"no CUDA graph can be made ({cause_of(error)}); models that look at values as they go need "
                    "--enforce-eager, with which the kernels of target and draft are launched one by one"
                ) from error
        return graph.replay


def cause_of(error: RuntimeError) -> str:
    """Return the first line of the error that broke a capture; torch's later error hides it."""
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return next(iter(str(first).splitlines()), type(first).__name__)


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Run `function` and return it: `GraphPool.capture` without a capture."""
    function()
    return function
