"""The whole screen: the panels of a page, as far as they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.text import Text

from ssd.config.params import DRAFTED
from ssd.ipc.messages import LinkLoad
from ssd.plugins.monitor import panels
from ssd.plugins.monitor.formats import share
from ssd.plugins.monitor.pipeline import Strip, drawn, legend
from ssd.plugins.monitor.statistics import Figures

PAGES = {"1": "overview", "2": "pipeline", "3": "requests"}
_WIDE = 100
_KEYS = "q leave  h help  p pause  +/- speed  1 overview  2 pipeline  3 requests"
_HELP = """\
q  leave        1  overview
p  pause        2  pipeline: more rounds, what holds them up, and why
+  faster       3  requests and latencies
-  slower       h  this help

Pipeline: a column is the state that took most of its time. Above the
target: + the cache had the outcome, - it had not. Numbers in the draft's
row are depths of its tree, + is one beyond 9."""


class Look(NamedTuple):
    page: str = "1"
    help: bool = False
    note: str = ""


class _ScreenRow(NamedTuple):
    """Panels beside each other. Without a `height` the row takes the lines that are left, if at least `least` are."""

    parts: tuple[RenderableType, ...]
    height: int | None
    least: int = 3


def screen(figures: Figures, pipeline: Sequence[Strip], look: Look, width: int, height: int) -> RenderableType:
    """Draw the page that `look` names, as far as it fits into `width` x `height`."""
    if height < 6:
        return Text(line(figures), no_wrap=True, overflow="ellipsis")
    help_ = _ScreenRow((Panel(_HELP, title="help"),), 3 + _HELP.count("\n"))
    rows = [help_] if look.help else _rows(figures, pipeline, look.page, width)
    parts = [Layout(_head(figures, look), size=1)]
    if figures.plan:
        parts.append(Layout(Text(f"now: {figures.plan}", "green", no_wrap=True, overflow="ellipsis"), size=1))
    if figures.link is not None:
        parts.append(Layout(Text(link(figures.link), "cyan", no_wrap=True, overflow="ellipsis"), size=1))
    left = height - 1 - len(parts)
    for row in rows:
        if (row.height or row.least) <= left:
            part = Layout(size=row.height or left)
            part.split_row(*(Layout(panel) for panel in row.parts))
            parts.append(part)
            left -= row.height or left
    if left:
        parts.append(Layout(Text(" "), size=left))
    layout = Layout()
    layout.split_column(*parts, Layout(Text(_KEYS, "bright_black", no_wrap=True), size=1))
    return layout


def _rows(figures: Figures, pipeline: Sequence[Strip], page: str, width: int) -> list[_ScreenRow]:
    """Return the rows of a page, the most important first."""
    strip_lines = max(1, len(figures.pipeline.shares))
    pipeline_height = 4 + 2 * strip_lines + min(2, len(figures.stalls))
    overview = _pipeline(figures, pipeline[-1:], width, figures.stalls[:2])
    processes, latency = panels.processes(figures), panels.latency(figures)
    if page == "2":
        height = 2 + max(1, len(pipeline)) * (2 + strip_lines) + strip_lines
        below = Group(panels.stalls(figures), panels.decisions(figures))
        return [_ScreenRow((_pipeline(figures, pipeline, width),), height), _ScreenRow((below,), None, 4)]
    if page == "3":
        return [_ScreenRow((latency, panels.queue(figures)), 6), _ScreenRow((panels.requests(figures),), None, 4)]
    beside = 2 + len(figures.processes)
    if width >= _WIDE:
        top = _ScreenRow((processes, panels.speed(figures, width // 3), latency), max(6, beside))
        return [
            top,
            _ScreenRow((overview,), pipeline_height),
            _ScreenRow((panels.speculation(figures), panels.queue(figures)), 10),
            _ScreenRow((panels.requests(figures),), None, 4),
        ]
    return [
        _ScreenRow((panels.speed(figures, width),), 5),
        _ScreenRow((overview,), pipeline_height),
        _ScreenRow((panels.speculation(figures),), 10),
        _ScreenRow((processes,), beside),
        _ScreenRow((latency, panels.queue(figures)), 6),
        _ScreenRow((panels.requests(figures),), None, 4),
    ]


def _head(figures: Figures, look: Look) -> Text:
    speculation = figures.speculation
    how: str = speculation.mode
    if speculation.mode in DRAFTED:
        choice = speculation.fan_out_choice
        fan_out = choice if isinstance(choice, str) else ",".join(map(str, choice)) or "auto"
        how += f" K {speculation.num_speculative_tokens or 'auto'} F {fan_out} backup {speculation.backup}"
    head = Text("ssd top  ", "bold", no_wrap=True, overflow="ellipsis")
    head.append(f"{figures.model}{' + ' + figures.draft if figures.draft else ''}  {how}  {figures.state}", "")
    if look.note:
        head.append(f"  {look.note}", "bold yellow")
    return head


def _pipeline(figures: Figures, strips: Sequence[Strip], width: int, causes: Sequence[str] = ()) -> Panel:
    lines = [line for strip in strips for line in drawn(strip, width - 4)]
    lines += legend(figures.pipeline)
    lines += [Text(f"- {cause}", no_wrap=True, overflow="ellipsis") for cause in causes]
    if not figures.pipeline.shares:
        lines = [Text("nothing is recorded yet", "bright_black")]
    about = f"round {1e3 * figures.pipeline.round_seconds:.1f} ms" if figures.pipeline.round_seconds else "idle"
    return Panel(Group(*lines), title=f"pipeline, shares of {figures.pipeline.seconds:g} s, {about}")


def link(found: LinkLoad) -> str:
    late = f"{share(found.late / found.entries)} of speculations late" if found.entries else "no speculations yet"
    each = f"{found.bytes / found.tokens:.0f} bytes a token" if found.tokens else "no tokens yet"
    trip = f"round trip {1e3 * found.rtt:.1f} ms, give or take {1e3 * found.jitter:.1f}"
    return f"link: {trip}, {late}, {each}, the draft {found.ahead} tokens behind"


def line(figures: Figures) -> str:
    found = figures.speculating
    parts = [f"{figures.tokens_per_second:.1f} tok/s", f"{figures.running} running", f"{figures.waiting} waiting"]
    if found.rounds:
        parts.append(f"acceptance length {found.acceptance_length:.2f}")
    if found.hit_rate:
        parts.append(f"hit rate {share(found.hit_rate)}")
    parts.append(f"KV cache {share(figures.kv_cache_usage)}")
    if figures.plan:
        parts.append(f"plan: {figures.plan.partition(':')[0]}")
    if figures.link is not None:
        parts.append(link(figures.link))
    parts += [f"{process.role} {process.state}" for process in figures.processes if process.state != "UP"]
    return ", ".join([*parts, *figures.stalls[:1]])
