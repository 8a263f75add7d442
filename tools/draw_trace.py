"""A part of a trace of `ssd trace` as a picture of its two lanes, and as a trace of its own (docs/monitoring.md).

    python tools/draw_trace.py trace.json --begin 1200 --end 1900 --svg lanes.svg --part part.json \\
        --note "A 1312 1340"                      # needs matplotlib; times in ms since the trace began

Signs above the target are look-ups: a circle for a hit, a cross for a miss. A note is a letter over a span of time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import click

Event: TypeAlias = dict[str, Any]
_LANES = {2: 1.0, 3: 0.0}  # heights of the processes target and draft
_COLOURS = {
    "verify": "#4477aa",
    "prefill": "#66ccee",
    "sample": "#aa3377",
    "wait for draft": "#cc3311",
    "other": "#ddaa33",
    "promote": "#aa3377",
    "wait for target": "#dddddd",
}
_SHALLOW, _DEEP = (0.80, 0.93, 0.77), (0.10, 0.42, 0.20)  # a tree grows darker with every depth
_DEEPEST = 8


@click.command(help=__doc__)
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option("--begin", default=0.0, show_default=True)
@click.option("--end", default=float("inf"), help="Default: the end of the trace.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw it into this file.")
@click.option("--part", "part_path", type=click.Path(path_type=Path), help="Write this part as a trace.")
@click.option("--note", "notes", multiple=True, help="A letter, and from when to when.")
def main(
    trace: Path, begin: float, end: float, svg: Path | None, part_path: Path | None, notes: tuple[str, ...]
) -> None:
    document = json.loads(trace.read_text())
    events = list(part(document["traceEvents"], 1e3 * begin, 1e3 * end))
    if part_path is not None:
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        rest = {key: value for key, value in document.items() if key != "traceEvents"}
        part_path.write_text(json.dumps(rest)[:-1] + f', "traceEvents": [\n{lines}\n]}}\n')
    if svg is not None:
        draw(events, svg, [(name, float(a) - begin, float(b) - begin) for name, a, b in map(str.split, notes)])


def part(events: list[Event], begin: float, end: float) -> Iterator[Event]:
    """What happens from `begin` to `end` (µs), in time since `begin`: slices are cut there, flows are whole or left
    out, and so are requests."""
    tied: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stfbe":
            tied[event["cat"], event["id"]].append(event)
    whole = {key for key, group in tied.items() if all(begin <= event["ts"] < end for event in group)}
    for event in events:
        if event["ph"] == "M":
            yield event
        elif event["ph"] == "X":
            first, last = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
            if first < last:
                yield event | {"ts": _us(first - begin), "dur": _us(last - first)}
        elif begin <= event["ts"] < end and (event["ph"] == "i" or (event["cat"], event["id"]) in whole):
            yield event | {"ts": _us(event["ts"] - begin)}


def draw(events: list[Event], file: Path, notes: list[tuple[str, float, float]]) -> None:
    """Two lanes over time; `notes` (ms) are letters above what they are about."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    matplotlib.rcParams.update({"svg.hashsalt": "ssd", "font.size": 8})  # the same bytes every time
    figure, axis = plt.subplots(figsize=(10, 2.4))
    for event in events:
        if event["ph"] == "X":
            left, length, lane = event["ts"] / 1e3, event["dur"] / 1e3, _LANES[event["pid"]]
            axis.barh(lane, length, left=left, height=0.7, color=_colour(event["name"]), linewidth=0)
            if event["name"].startswith("depth") and length > 4:
                axis.annotate(event["name"][6:], (left + length / 2, lane), ha="center", va="center")
    for hit, sign, colour in ((True, "o", "#228833"), (False, "x", "#cc3311")):
        moments = [e["ts"] / 1e3 for e in events if e["ph"] == "i" and (e["name"] == "hit") == hit]
        axis.plot(moments, [1.5] * len(moments), sign, color=colour, markersize=5)
    for name, begin, end in notes:
        axis.annotate("", (begin, 1.75), (end, 1.75), arrowprops={"arrowstyle": "|-|,widthA=.3,widthB=.3"})
        axis.annotate(name, ((begin + end) / 2, 1.85), ha="center", fontweight="bold")
    axis.set_yticks([1.0, 0.0], ["target", "draft"])
    axis.set_ylim(-0.45, 2.15)
    axis.set_xlabel("ms")
    axis.margins(x=0.005)
    axis.spines[["top", "right"]].set_visible(False)
    found = {event["name"] for event in events if event["ph"] == "X"}
    patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in found]
    patches.append(Patch(color=_colour("depth 2"), label="draft's tree, by depth"))
    axis.legend(handles=patches, ncols=len(patches), loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def _colour(name: str) -> Any:
    if not name.startswith("depth "):
        return _COLOURS.get(name, "#ffffff")
    share = min(int(name[6:]) - 1, _DEEPEST - 1) / (_DEEPEST - 1)
    return tuple(one + share * (other - one) for one, other in zip(_SHALLOW, _DEEP, strict=True))


def _us(value: float) -> float:
    return round(value, 3)


if __name__ == "__main__":
    main()
