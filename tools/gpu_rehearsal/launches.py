"""Reads the log of the stand-in: rules that were broken, graphs that were captured, launches in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
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

    def exceeds(self, forwards: int) -> bool:
        most = self.most(forwards)
        return most is not None and self.launches > most

    def most(self, forwards: int = 1) -> int | None:
        """Return the most launches that tests/capture allows a graph of this kind in any family."""
        if not self.layers:
            return max(BETWEEN.values()) if self.rounds else None
        if not self.attentions:
            return None
        verify = self.kind == "verify"
        found = [most for (_, name), most in CEILINGS.items() if name.startswith("verify") is verify]
        return max(self.layers * each + forwards * besides for each, besides in found)


def over(found: Collection[Graph]) -> dict[Graph, int]:
    """Return the graphs with too many launches, and how many they may have.

    Forwards of a draft may follow each other in one graph: it has n times the layers of a step that is there, too. One
    in the target's process has the attention of a verification."""
    steps = {(graph.kind, graph.layers) for graph in found if graph.attentions and not graph.exceeds(1)}
    wrong = {}
    for graph in set(found):
        several = [graph.layers // each for kind, each in steps if kind == graph.kind and graph.layers % each == 0]
        if all(graph.exceeds(forwards) for forwards in (1, *several)):
            wrong[graph] = graph.most(max((1, *several))) or 0
    return wrong


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
        lines.append(f"{len(same):>6} {layers:>6} {most.launches:>8} {most.most() or '-':>7}  {kind}")
    return lines
