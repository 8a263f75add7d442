"""A part of a trace is a trace, and can be drawn."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from draw_trace import main, part

from ssd.monitor.trace import trace
from tests.monitor.test_trace import DRAFT, TARGET, check_shape, events

DOCUMENT = trace({"target": TARGET, "draft": DRAFT}, [], 0, {"model": "m"})


def test_slices_are_cut_and_arrows_whole() -> None:
    found = {"traceEvents": list(part(DOCUMENT["traceEvents"], 20_000, 40_000))}
    check_shape(found)
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events(found, "X")] == [
        (2, "verify", 0, 10_000),
        (2, "other", 10_000, 2_000),
        (2, "verify", 12_000, 8_000),
        (3, "depth 2", 0, 12_000),
        (3, "promote", 12_000, 1_000),
        (3, "depth 1", 13_000, 7_000),
    ]
    assert [(e["name"], e["ts"]) for e in events(found, "i")] == [("hit", 11_000)]
    assert [e["ts"] for e in found["traceEvents"] if e.get("cat") == "round"] == [1_000, 11_000, 12_000]
    assert events(found, "M") == events(DOCUMENT, "M")
    begun_before = part(DOCUMENT["traceEvents"], 22_000, 40_000)
    assert not [event for event in begun_before if event.get("cat") == "round"]


def test_it_is_written_and_drawn(tmp_path: Path) -> None:
    source, found, svg = tmp_path / "trace.json", tmp_path / "part.json", tmp_path / "lanes.svg"
    source.write_text(json.dumps(DOCUMENT))
    asked = [str(source), "--begin", "5", "--end", "45", "--part", str(found), "--svg", str(svg), "--note", "A 12 30"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    written = json.loads(found.read_text())
    assert written["otherData"] == {"model": "m"} and written["displayTimeUnit"] == "ms"
    assert events(written, "X")[0] | {"args": {}} == events(DOCUMENT, "X")[0] | {"ts": 0, "dur": 5_000, "args": {}}
    assert "</svg>" in svg.read_text()
