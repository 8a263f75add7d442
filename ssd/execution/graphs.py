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

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What runs `function` again, in one launch. It has to wait for nothing and to copy nothing from the host."""
        with torch.cuda.device(self._device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    function()
            except RuntimeError as error:
                raise UsageError(f"no CUDA graph of the model can be made, use --enforce-eager: {error}") from None
        return graph.replay


def once(function: Callable[[], None]) -> Callable[[], None]:
    """In place of `Recorder.record` where nothing is recorded: `function`, which has run."""
    function()
    return function
