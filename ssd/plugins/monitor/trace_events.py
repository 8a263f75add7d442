"""Makes traces for Perfetto and Chrome: JSON in the Trace Event Format, times in µs since the trace begins."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from ssd.ipc.messages import EndEvent
from ssd.ipc.trace_ring import FIGURES, Mark, Moment, Span, State

_ROLES = ("frontend", "target", "draft")
_STATES, _MARKS, _ROUNDS = 1, 2, 3  # threads of each process

_OF_TOKENS = (State.VERIFY, State.PREFILL, State.WAIT_FOR_DRAFT)  # states whose detail is a number of tokens

_FORWARDS, _PAUSES = (State.VERIFY, State.PREFILL), (State.IDLE, State.DOWN, State.LOADING, State.LOST)
_WORDS = {
    State.VERIFY: "the target's verification",
    State.PREFILL: "reading a prompt",
    State.WAIT_FOR_DRAFT: "waiting for the draft",
    State.OTHER: "scheduling and messages",
    State.SAMPLE: "sampling",
}
_SLOW, _LONG = 1.5, 5  # times the median
_STEPS = (State.DEPTH.words, State.PROMOTE.words, State.OTHER.words)  # how long a prefill takes depends on its tokens
_STOPPED = "It was stopped, descheduled or short of cores, or had more to do."

Event = dict[str, Any]
Traces = Mapping[str, tuple[list[Span], list[Moment]]]


def trace(traces: Traces, ended: Iterable[EndEvent], begin: int, about: Mapping[str, Any]) -> Event:
    """Return the trace as a document for JSON, with `about` stored in it; `begin` is the time 0, in ns."""
    events = [*_names()]
    for role, (states, moments) in traces.items():
        process = 1 + _ROLES.index(role)
        events += [_slice(process, span, begin) for span in states if span.state != State.IDLE]
        events += [_instant(process, moment, begin) for moment in moments]
    events += _rounds(traces, begin)
    events += _flows(traces, begin)
    for end in ended:
        events += _request(end, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _names() -> Iterator[Event]:
    for process, role in enumerate(_ROLES, 1):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": role}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for thread, name in ((_STATES, "states"), (_MARKS, "look-ups and reasons"), (_ROUNDS, "rounds, and why")):
        yield {"ph": "M", "name": "thread_name", "pid": 2, "tid": thread, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": 3, "tid": _STATES, "args": {"name": "states"}}


def title(span: Span) -> str:
    return f"depth {span.detail}" if span.state is State.DEPTH else span.state.words


def _rounds(traces: Traces, begin: int) -> Iterator[Event]:
    """Yield the target's rounds: from an outcome over its look-up, perhaps a wait, to the end of the next forward.

    The cause names the parts that took longer than their median, and the marks that explain a wait."""
    (states, moments), (draft, _) = (traces.get(role, ([], [])) for role in _ROLES[1:])
    cut, present = list[list[Span]](), list[Span]()
    for span in states:
        present = [] if span.state in _PAUSES else [*present, span]
        if present and span.state in _FORWARDS:
            cut.append(present)
            present = []
    if not cut:
        return
    parts = [_sums(spans, lambda span: span.state, 0, spans[-1].end) for spans in cut]
    usual = {state: median(part[state] for part in parts) for state in _WORDS}
    most, tokens = median(sum(part.values()) for part in parts), median(spans[-1].detail for spans in cut)
    times = [moment.at for moment in moments]
    starts, ends = [span.begin for span in draft], [span.end for span in draft]
    for spans, part in zip(cut, parts, strict=True):
        first, last = spans[0].begin, spans[-1].end
        lasted = (last - first) / 1e6
        marks = moments[bisect_left(times, first) : bisect_left(times, last)]
        beside = draft[bisect_left(ends, first + 1) : bisect_left(starts, last)]
        longer = sorted((usual[state] - part[state], state) for state in _WORDS if part[state] > usual[state])
        said = []
        for excess, state in longer:
            if 4 * excess <= sum(each for each, _ in longer):
                about = f" (tokens: {spans[-1].detail}, usually {tokens:.0f})" if state in _FORWARDS else ""
                said.append(f"{_WORDS[state]} took {part[state]:.1f} ms, usually {usual[state]:.1f}{about}")
                if state is State.WAIT_FOR_DRAFT:
                    said += [moment.line for moment in marks if moment.mark not in (Mark.HIT, Mark.PLAN)]
        yield {
            **_slice(2, Span(State.OTHER, first, last, 0), begin),
            "name": "slow round" if sum(part.values()) > _SLOW * most else "round",
            "cat": "rounds",
            "tid": _ROUNDS,
            "args": {
                "cause": "; ".join(said),
                "marks": [moment.line for moment in marks],
                "usually, ms": round(most, 2),
                "target, ms": {state.words: round(ms, 2) for state, ms in part.items() if ms},
                "draft, ms": {name: round(ms, 2) for name, ms in _sums(beside, title, first, last).items()},
                "draft, whole ms": {
                    title(span): round(ms, 2) for span in beside if (ms := (span.end - span.begin) / 1e6) > lasted
                },
            },
        }


def _sums(spans: Iterable[Span], name: Callable[[Span], Any], begin: int, end: int) -> Mapping[Any, float]:
    found = defaultdict[Any, float](float)
    for span in spans:
        found[name(span)] += (min(end, span.end) - max(begin, span.begin)) / 1e6
    return found


def slowest(document: Event) -> Iterator[str]:
    """Yield a line for each of the three slowest rounds that decode, the longest wait, and the draft's slow steps."""
    found = [event for event in document["traceEvents"] if "verify" in event.get("args", {}).get("target, ms", ())]
    slow = sorted(found, key=lambda event: -event["dur"])[:3]
    waited = [event for event in found if State.WAIT_FOR_DRAFT.words in event["args"]["target, ms"]]
    waited.sort(key=lambda event: -event["args"]["target, ms"][State.WAIT_FOR_DRAFT.words])
    for event in slow + [event for event in waited[:1] if event not in slow]:
        about = event["args"]
        most = sorted(about["draft, ms"].items(), key=lambda part: -part[1])[:3]
        whole = {name: f" (of {ms:.1f})" for name, ms in about["draft, whole ms"].items()}
        draft = ", ".join(f"{name} {ms:.1f} ms{whole.get(name, '')}" for name, ms in most)
        when = f"{event['dur'] / 1e3:.1f} ms at {event['ts'] / 1e6:.3f} s, usually {about['usually, ms']:.1f}"
        kind = "slow round" if event in slow else "round with the longest wait"
        yield f"{kind}: {when}. Cause: {about['cause']}. Meanwhile the draft: {draft or 'nothing'}."
    steps = [event for event in document["traceEvents"] if event["pid"] == 3 and event["name"].startswith(_STEPS)]
    steps = [event for event in steps if found and event["ts"] >= found[0]["ts"]]  # before, the engine measures itself
    names = {event["name"] for event in steps}
    usual = {name: median(event["dur"] for event in steps if event["name"] == name) for name in names}
    long = [event for event in steps if event["dur"] > _LONG * usual[event["name"]]]
    if long := sorted(long, key=lambda event: -event["dur"])[:3]:
        times = (
            f"{event['dur'] / 1e3:.1f} ms at {event['ts'] / 1e6:.3f} s ({event['name']}, usually "
            f"{usual[event['name']] / 1e3:.1f})"
            for event in long
        )
        yield f"longest steps of the draft: {', '.join(times)}. {_STOPPED}"


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
    name, category = mark.words if mark is Mark.HIT or mark.of_rows else kind, "cache" if mark.of_look_up else "wait"
    event = {"ph": "i", "s": "t", "name": name, "cat": category, "pid": process, "tid": _MARKS}
    figures = dict(zip(FIGURES[mark], moment.figures, strict=False))
    args = {"rows" if mark.of_rows else "request": moment.detail, "line": moment.line, **figures}
    return event | {"ts": _us(moment.at - begin), "args": args}


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
    metrics = end.metrics
    lasted = int(1e6 * (metrics.time_to_first_token_ms + metrics.generation_time_ms))
    about = {"prompt": end.prompt_tokens, "completion": end.completion_tokens, "reason": end.reason}
    shared = {"name": f"request {end.request}", "cat": "request", "id": end.request, "pid": 1, "tid": _STATES}
    yield shared | {"ph": "b", "ts": _us(max(0, end.at - lasted - begin)), "args": about}
    yield shared | {"ph": "e", "ts": _us(end.at - begin)}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1e3
