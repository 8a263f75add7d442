"""`ssd trace`: writes the states of target and draft to a file for Perfetto or Chrome."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import click
import msgspec

from ssd.cli.option_types import Real
from ssd.cli.outputs import check_writable
from ssd.cli.session import process_setup
from ssd.errors import SsdError, UsageError
from ssd.monitor.messages import Snapshot
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.subscriber import Subscriber
from ssd.plugins.monitor.trace_events import slowest
from ssd.plugins.monitor.trace_events import trace as document

_SECONDS = Real(0, 600, min_open=True)
_LAST_S = 10.0
_RECORDS = 1 << 22
_PATIENCE_S = 10.0
_STEP_S = 0.2


@click.command()
@click.option("--last", type=_SECONDS, help=f"Seconds before now, as far as known. Default: {_LAST_S:g}.")
@click.option("--next", "following", type=_SECONDS, help="Seconds from now on, instead.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default="trace.json", show_default=True)
@click.option("--address", help="The engine here at this address, URL or pid. Default: the only one.")
def trace(last: float | None, following: float | None, output: Path, address: str | None) -> None:
    """Write what target and draft of a running engine did, state by state, as a trace.

    Open the file at https://ui.perfetto.dev or chrome://tracing. Each process has a track. Arrows lead from a
    verification to its cache lookup, and from there to the draft, which goes on from the outcome. The three slowest
    rounds, why they took long, and the draft's longest steps are printed."""
    if last is not None and following is not None:
        raise UsageError("give --last or --next, not both")
    check_writable("--output", output)
    with process_setup():
        subscriber = Subscriber(address)
        try:
            history, first = _heard(subscriber, following)
        finally:
            subscriber.close()
    begin = first.at if following is not None else history.now - int(1e9 * (last or _LAST_S))
    traces = {role: trace.since(begin, history.now) for role, trace in history.traces.items()}
    if not any(states for states, _ in traces.values()):
        raise SsdError("there is nothing to write: the engine has recorded nothing")
    ended = [end for end in history.ended if end.at >= begin]
    about = {"model": first.model, "draft": first.draft, "speculation": msgspec.to_builtins(first.speculation)}
    begin = min([span.begin for states, _ in traces.values() for span in states[:1]])
    written = document(traces, ended, begin, about)
    try:
        output.write_text(json.dumps(written))
    except OSError as error:
        raise SsdError(f"cannot write {output}: {error.strerror}") from None
    marks = [moment.mark for _, moments in traces.values() for moment in moments if moment.mark.of_look_up]
    counts = "".join(f", {count} {mark.words}" for mark, count in Counter(marks).most_common())
    seconds = (history.now - begin) / 1e9
    click.echo(f"{output}: {seconds:.1f} s, {len(marks)} look-ups{counts}; open it at https://ui.perfetto.dev")
    for line in slowest(written):
        click.echo(line)


def _heard(subscriber: Subscriber, following: float | None) -> tuple[History, Snapshot]:
    """Return history and first snapshot after `following` seconds or the engine's end, or raise SsdError."""
    history, first = History(_RECORDS), None
    deadline = time.monotonic() + _PATIENCE_S
    until: int | None = None
    while until is None or history.now < until:
        snapshot = subscriber.receive(_STEP_S)
        if snapshot is None and time.monotonic() < deadline:
            continue
        if snapshot is None or (first is not None and snapshot.engine != first.engine):
            if first is None:
                raise SsdError(f"nothing comes from the engine at {subscriber.address}")
            click.echo("the engine has gone; this is what came before", err=True)
            break
        deadline = time.monotonic() + _PATIENCE_S
        history.add(snapshot)
        if first is None and snapshot.whole:
            first, until = snapshot, snapshot.at + int(1e9 * (following or 0))
    assert first is not None, "the time began with it"
    return history, first
