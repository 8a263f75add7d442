"""The panels, each drawn from figures alone."""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ssd.plugins.monitor.formats import UP, bar, seconds, share, size, sparkline
from ssd.plugins.monitor.stalls import reason
from ssd.plugins.monitor.statistics import Figures

_BAR = 10


def processes(figures: Figures) -> Panel:
    table = _grid(5, padding=1)
    for process in figures.processes:
        pid = str(process.pid) if process.pid else "-"
        state = Text(process.state, UP[process.state])
        table.add_row(process.role, state, pid, size(process.rss_bytes), f"{process.beat_age:.1f} s")
    return Panel(table, title="processes (pid, memory, last beat)")


def speed(figures: Figures, width: int) -> Panel:
    line = Text(f"{figures.tokens_per_second:.1f}", "bold")
    line.append(" tok/s now, ", "")
    line.append(f"{figures.ended_per_second:.2f} requests/s")
    spark = Text(sparkline(figures.per_second[:-1], width - 4), "green", no_wrap=True)
    most = max(figures.per_second[:-1], default=0.0)
    return Panel(Group(line, spark, Text(f"the last minute, at most {most:.0f}", "bright_black")), title="speed")


def latency(figures: Figures) -> Panel:
    table = _grid(4, padding=1)
    table.add_row(*(Text(name, "bright_black") for name in ("", "P50", "P95", "P99")))
    for name, found in (
        ("first token", figures.time_to_first_token),
        ("per token", figures.inter_token_latency),
        ("request", figures.end_to_end),
    ):
        table.add_row(name, *(seconds(value) for value in (found.p50, found.p95, found.p99)))
    return Panel(table, title=f"latency, {figures.window:g} s")


def speculation(figures: Figures) -> Panel:
    found = figures.speculating
    if not found.rounds:
        return Panel(Text("no rounds", "bright_black"), title="speculation")
    table = _grid(2)
    table.add_row("acceptance length", Text(f"{found.acceptance_length:.2f}", "bold"))
    lengths = (f"{length:.2f}" if length else "-" for length in (found.length_on_hit, found.length_on_miss))
    table.add_row("on hit / on miss", " / ".join(lengths))
    table.add_row("hit rate", Text(share(found.hit_rate), "bold"))
    for verdict, count in list(found.misses.items())[:5]:
        table.add_row(Text(f"  {verdict.replace('_', ' ')}", "bright_black"), share(count / found.rounds))
    positions = Text()
    for index, part in enumerate(found.per_position[:9]):
        positions.append(f"{index + 1} ", "bright_black")
        positions.append(bar(part, _BAR), "green")
        positions.append(f" {part:.0%}\n")
    columns = Table.grid(padding=(0, 3))
    columns.add_row(table, positions)
    by_source = ", ".join(f"{source} {count / found.rounds:.2f}" for source, count in found.accepted_by_source.items())
    return Panel(
        columns,
        title=f"speculation, {found.rounds} rounds in {figures.window:g} s; accepted by position",
        subtitle=f"accepted a round: {by_source}" if by_source else None,
    )


def queue(figures: Figures) -> Panel:
    table = _grid(2)
    table.add_row("running", str(figures.running))
    table.add_row("waiting", str(figures.waiting))
    table.add_row("KV cache", f"{bar(figures.kv_cache_usage, 10)} {share(figures.kv_cache_usage)}")
    if figures.dropped:
        table.add_row("not reported", str(figures.dropped))
    return Panel(table, title="queue")


def requests(figures: Figures) -> Panel:
    table = Table(box=None, expand=True, pad_edge=False)
    for name in ("request", "ended", "reason", "prompt", "tokens", "first token", "tok/s", "accepted", "hits"):
        table.add_column(name, justify="left" if name in ("request", "reason") else "right", no_wrap=True)
    for found in figures.requests:
        told = found.time_to_first_token > 0
        table.add_row(
            str(found.request),
            f"{found.age:.0f} s ago",
            found.reason,
            str(found.prompt_tokens),
            str(found.completion_tokens),
            seconds(found.time_to_first_token),
            f"{found.tokens_per_second:.1f}" if told else "-",
            f"{found.acceptance_length:.2f}" if told else "-",
            share(found.hit_rate) if told else "-",
        )
    return Panel(table, title="last requests")


def stalls(figures: Figures) -> Panel:
    lines = [Text(f"- {cause}") for cause in figures.stalls] or [Text("nothing to speak of", "green")]
    for verdict, count in figures.speculating.misses.items():
        about = f"{count} of {figures.speculating.rounds} rounds: {reason(verdict)}"
        lines.append(Text(f"  {verdict.replace('_', ' ')}: {about}", "bright_black"))
    return Panel(Group(*lines), title="what holds it up")


def decisions(figures: Figures) -> Panel:
    lines = [Text(f"{age:4.1f} s  {line}") for age, line in figures.decisions] or [Text("none", "bright_black")]
    return Panel(Group(*lines), title="misses, waits and plans, the newest first")


def _grid(columns: int, padding: int = 2) -> Table:
    table = Table.grid(padding=(0, padding))
    table.add_column(no_wrap=True)
    for _ in range(columns - 1):
        table.add_column(justify="right", no_wrap=True)
    return table
