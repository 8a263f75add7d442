"""Reads the log of the stand-in: rules that were broken, graphs that were captured, launches in them."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tests.capture.test_capture import BETWEEN, CEILINGS

_BROKEN = re.compile(r"ERROR|WARNING|UNIMPLEMENTED")
_PROCESS = re.compile(r"^FAKECUDA\[\d+\] ")
_GRAPH = re.compile(r"GRAPH launches (\d+) attentions (\d+) layers (\d+) rounds (\d+)")


class Graph(NamedTuple):
    """A captured graph: its kernels, copies and sets; attentions over pages; layers; draws and other work of a round.

    A graph that has neither is none of the engine's: the report times products and launches in such."""

    launches: int
    attentions: int
    layers: int
    rounds: int

    @property
    def kind(self) -> str:
        """A tree step attends twice a layer: to the pages and to its own keys. Torch's attention is the reference's."""
        if not self.layers:
            return "between" if self.rounds else "of the report"
        if not self.attentions:
            return "torch's attention"
        return "verify" if self.attentions == self.layers else "tree step"

    @property
    def ceiling(self) -> int | None:
        """Return the most launches that tests/capture allows a graph of this kind in any family."""
        if not self.layers:
            return max(BETWEEN.values()) if self.rounds else None
        if not self.attentions:
            return None
        verify = self.kind == "verify"
        found = [most for (_, name), most in CEILINGS.items() if name.startswith("verify") is verify]
        return max(self.layers * each + besides for each, besides in found)


def broken_rules(log: str) -> Counter[str]:
    """Return each line of the log that says that a rule was broken, and how often it was."""
    return Counter(_PROCESS.sub("", line) for line in log.splitlines() if _BROKEN.search(line))


def graphs(log: str) -> list[Graph]:
    return [Graph(*map(int, found)) for found in _GRAPH.findall(log)]


def counted(found: list[Graph]) -> list[str]:
    """Return a line for each kind of graph and number of layers: how many, most launches, ceiling."""
    lines = [f"{'graphs':>6} {'layers':>6} {'launches':>8} {'ceiling':>7}  kind"]
    for kind, layers in sorted({(graph.kind, graph.layers) for graph in found}):
        same = [graph for graph in found if (graph.kind, graph.layers) == (kind, layers)]
        most = max(same)
        lines.append(f"{len(same):>6} {layers:>6} {most.launches:>8} {most.ceiling or '-':>7}  {kind}")
    return lines
