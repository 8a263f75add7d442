"""The pipeline panel: strips of target and draft. A column shows the state that filled most of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

from ssd.ipc.trace_ring import Mark, Moment, Span, State
from ssd.plugins.monitor.formats import named_style, share, state_style
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.stalls import Pipeline

_ROUNDS, _STRIPS = 6, 3
_LOOK_BACK_S = (2.0, 30.0)  # the longer one only if the shorter is not enough
_PAUSES, _PAUSE_NS = (State.IDLE, State.DOWN, State.LOADING), 20_000_000
_LABEL = 8


class Strip(NamedTuple):
    """A part of the traces, from `begin` to `until` (ns)."""

    begin: int
    until: int
    traces: Mapping[str, tuple[list[Span], list[Moment]]]


def strips(history: History) -> list[Strip]:
    """Return up to three strips of the last rounds without a pause between them, the oldest first."""
    for seconds in _LOOK_BACK_S:
        begin = history.now - int(seconds * 1e9)
        traces = {role: trace.since(begin, history.now) for role, trace in history.traces.items()}
        stretch = _busy(traces["target"][0])
        starts = [span.begin for span in stretch if span.state is State.VERIFY]
        if len(starts) > _ROUNDS * _STRIPS:
            break
    if not starts:
        return []
    cuts = starts[::-1][_ROUNDS - 1 :: _ROUNDS][::-1] or [stretch[0].begin]
    pairs = pairwise([*cuts[-_STRIPS:], stretch[-1].end])
    return [Strip(one, end, {role: _within(trace, one, end) for role, trace in traces.items()}) for one, end in pairs]


def _busy(spans: Sequence[Span]) -> Sequence[Span]:
    end, verified = len(spans), False
    for index in reversed(range(len(spans))):
        span = spans[index]
        verified |= span.state is State.VERIFY
        if span.state in _PAUSES and span.end - span.begin > _PAUSE_NS:
            if verified:
                return spans[index + 1 : end]
            end = index
    return spans[:end]


def _within(trace: tuple[list[Span], list[Moment]], begin: int, until: int) -> tuple[list[Span], list[Moment]]:
    spans = [span for span in trace[0] if span.begin < until and span.end > begin]
    return spans, [moment for moment in trace[1] if begin <= moment.at < until]


def drawn(strip: Strip, width: int) -> list[Text]:
    columns = max(1, width - _LABEL)
    step = (strip.until - strip.begin) / columns
    lines = [_look_ups(strip, columns, step)]
    for role, (spans, _) in strip.traces.items():
        if not spans and role == "draft":
            continue
        line = Text(f"{role:<{_LABEL}}", no_wrap=True)
        for state, detail in _filled(spans, strip.begin, step, columns):
            line.append(*state_style(state, detail))
        lines.append(line)
    axis = f"{(strip.until - strip.begin) / 1e6:.1f} ms"
    lines.append(Text(f"{'':<{_LABEL}}0{axis:>{columns - 1}}", "bright_black", no_wrap=True))
    return lines


def _look_ups(strip: Strip, columns: int, step: float) -> Text:
    """Draw a sign for each look-up: + for a hit, - for a miss. In one column a miss hides hits."""
    signs = [" "] * columns
    for moment in (moment for moment in strip.traces["target"][1] if moment.mark.of_look_up):
        column = min(columns - 1, int((moment.at - strip.begin) / step))
        if moment.mark is not Mark.HIT:
            signs[column] = "-"
        elif signs[column] == " ":
            signs[column] = "+"
    line = Text(f"{'cache':<{_LABEL}}", no_wrap=True)
    for sign in signs:
        line.append(sign, {"+": "bold green", "-": "bold red"}.get(sign, ""))
    return line


def _filled(spans: Sequence[Span], begin: int, step: float, columns: int) -> list[tuple[State, int]]:
    """Return, for each column, the (state, detail) that filled most of it; LOST where no state is known."""
    found, index = list[tuple[State, int]](), 0
    for column in range(columns):
        left, right = begin + column * step, begin + (column + 1) * step
        while index < len(spans) and spans[index].end <= left:
            index += 1
        best, most = (State.LOST, 0), 0.0
        for span in spans[index:]:
            if span.begin >= right:
                break
            overlap = min(span.end, right) - max(span.begin, left)
            if overlap > most:
                best, most = (span.state, span.detail), overlap
        found.append(best)
    return found


def legend(pipeline: Pipeline) -> list[Text]:
    lines = []
    for role, shares in pipeline.shares.items():
        line = Text(f"{role:<{_LABEL}}", no_wrap=True, overflow="ellipsis")
        depths = sorted((name for name in shares if name.startswith("depth")), key=lambda name: int(name.split()[-1]))
        for name in sorted(shares.keys() - set(depths), key=lambda name: -shares[name]):
            letter, style = named_style(name)
            line.append(f" {letter} ", style)
            line.append(f" {name.replace('_', ' ')} {share(shares[name])}  ")
        if depths:
            line.append("depth")
        for name in depths:
            line.append(f" {name.split()[-1]} ", named_style(name).style)
            line.append(share(shares[name]))
        lines.append(line)
    return lines
