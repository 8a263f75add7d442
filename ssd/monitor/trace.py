"""Makes traces for Perfetto and Chrome: JSON in the Trace Event Format, times in µs since the trace begins. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ssd.ipc.messages import EndEvent
from ssd.ipc.trace_ring import Mark, Moment, Span, State

_ROLES = ("frontend", "target", "draft")
_STATES, _MARKS = 1, 2  # threads of each process

_OF_TOKENS = (State.VERIFY, State.PREFILL, State.WAIT_FOR_DRAFT)  # states whose detail is a number of tokens

Event = dict[str, Any]
Traces = Mapping[str, tuple[list[Span], list[Moment]]]


def trace(traces: Traces, ended: Iterable[EndEvent], begin: int, about: Mapping[str, Any]) -> Event:
    """Return the trace as a document for JSON.

    `traces` are by role, `ended` are the known requests; `about` is stored with them. `begin` is the time 0, in ns."""
    events = [*_names()]
    for role, (states, moments) in traces.items():
        process = 1 + _ROLES.index(role)
        events += [_slice(process, span, begin) for span in states if span.state != State.IDLE]
        events += [_instant(process, moment, begin) for moment in moments]
    events += _flows(traces, begin)
    for end in ended:
        events += _request(end, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _names() -> Iterator[Event]:
    for process, role in enumerate(_ROLES, 1):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": role}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for thread, name in ((_STATES, "states"), (_MARKS, "look-ups and reasons")):
        yield {"ph": "M", "name": "thread_name", "pid": 2, "tid": thread, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": 3, "tid": _STATES, "args": {"name": "states"}}


def title(span: Span) -> str:
    """Return the name of a state in words; for DEPTH, with the depth of the draft's tree."""
    return f"depth {span.detail}" if span.state is State.DEPTH else span.state.words


def _slice(process: int, span: Span, begin: int) -> Event:
    event = {
        "ph": "X",
        "name": title(span),
        "cat": "state",
        "pid": process,
        "tid": _STATES,
        "ts": _us(span.begin - begin),
        "dur": _us(span.end - span.begin),
    }
    label = "request" if span.state is State.PROMOTE else "tokens" if span.state in _OF_TOKENS else None
    return event if label is None else event | {"args": {label: span.detail}}


def _instant(process: int, moment: Moment, begin: int) -> Event:
    mark = moment.mark
    kind = f"miss: {mark.words}" if mark.of_look_up else f"does not wait: {mark.words}"
    name, category = "hit" if mark is Mark.HIT else kind, "cache" if mark.of_look_up else "wait"
    event = {"ph": "i", "s": "t", "name": name, "cat": category, "pid": process, "tid": _MARKS}
    return event | {"ts": _us(moment.at - begin), "args": {"request": moment.detail}}


def _flows(traces: Traces, begin: int) -> Iterator[Event]:
    """Yield each round as arrows: verification -> look-up of each outcome -> the draft's promotion of it.

    An arrow begins and ends in the slice around its time."""
    states, moments = traces.get("target", ([], []))
    verified = [span for span in states if span.state in (State.VERIFY, State.PREFILL)]
    ends = [span.end for span in verified]
    promoted: dict[int, list[Span]] = {}
    for span in traces.get("draft", ([], []))[0]:
        if span.state is State.PROMOTE:
            promoted.setdefault(span.detail, []).append(span)
    starts = {request: [span.begin for span in found] for request, found in promoted.items()}
    for number, moment in enumerate(moment for moment in moments if moment.mark.of_look_up):
        index = bisect_left(ends, moment.at + 1) - 1
        if index < 0:
            continue
        flow = {"name": "round", "cat": "round", "id": number}
        source = verified[index]
        yield flow | {"ph": "s", "pid": 2, "tid": _STATES, "ts": _us((source.begin + source.end) // 2 - begin)}
        after = bisect_left(starts.get(moment.detail, []), moment.at)
        limit = ends[index + 1] if index + 1 < len(ends) else states[-1].end
        told = [span for span in promoted.get(moment.detail, [])[after : after + 1] if span.begin < limit]
        yield flow | {"ph": "t" if told else "f", "bp": "e", "pid": 2, "tid": _STATES, "ts": _us(moment.at - begin)}
        for span in told:
            yield flow | {"ph": "f", "bp": "e", "pid": 3, "tid": _STATES, "ts": _us(span.begin - begin)}


def _request(end: EndEvent, begin: int) -> Iterator[Event]:
    """Yield the begin of a request, its arrival at the target, and its end."""
    metrics = end.metrics
    lasted = int(1e6 * (metrics.time_to_first_token_ms + metrics.generation_time_ms))
    about = {"prompt": end.prompt_tokens, "completion": end.completion_tokens, "reason": end.reason}
    shared = {"name": f"request {end.request}", "cat": "request", "id": end.request, "pid": 1, "tid": _STATES}
    yield shared | {"ph": "b", "ts": _us(max(0, end.at - lasted - begin)), "args": about}
    yield shared | {"ph": "e", "ts": _us(end.at - begin)}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1e3
