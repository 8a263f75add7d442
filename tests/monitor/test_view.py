"""What of the figures is drawn, where a picture alone would not tell."""

from __future__ import annotations

from ssd.monitor.stalls import Pipeline
from ssd.monitor.view.pipeline import legend


def test_depths_are_told_in_their_order() -> None:
    shares = {f"depth {depth}": 0.1 for depth in (1, 10, 11, 2, 9)} | {"promote": 0.5}
    (line,) = legend(Pipeline(10.0, {"draft": shares}))
    assert " ".join(line.plain.split()) == "draft p promote 50% depth 1 10% 2 10% 9 10% 10 10% 11 10%"
