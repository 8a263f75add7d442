"""CUDA graphs: a function over fixed tensors, recorded once and then launched as a whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssd.errors import UsageError

# Before it is recorded a function runs so often: kernels are compiled, workspaces made, algorithms chosen.
_WARM_UPS = 2


class Recorder:
    """Records functions of no arguments, whose results are what they leave in tensors; all share one pool of memory,
    so that no two may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: on every stream that has multiplied, cuBLAS keeps a workspace to the end of the process.
        self._aside = torch.cuda.Stream(device)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What runs `function` again, in one launch. It has to wait for nothing and to copy nothing from the host.
        Raises `UsageError` where it does."""
        with torch.cuda.device(self._device):
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._aside):
                    function()
            except RuntimeError as error:
                raise UsageError(
                    f"no CUDA graph can be made ({cause_of(error)}); models that look at values as they go need "
                    "--enforce-eager, with which the kernels of target and draft are launched one by one"
                ) from error
        return graph.replay


def cause_of(error: RuntimeError) -> str:
    """What ended a recording, in a line: that it ended is an error of its own, which hides the first one."""
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return next(iter(str(first).splitlines()), type(first).__name__)


def once(function: Callable[[], None]) -> Callable[[], None]:
    """In place of `Recorder.record` where nothing is recorded: `function`, which has run."""
    function()
    return function
