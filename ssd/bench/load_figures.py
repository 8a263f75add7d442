"""A load's figures by the names that `vllm bench serve` gives them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from ssd.bench.figures import Row
from ssd.bench.load import Answer, Load


def load_figures(passes: Sequence[Load]) -> Row:
    """Of all passes together. `itl`: per token, a chunk's gap divided over its tokens; `chunk_gap`: the gaps; `e2el`:
    from sending to the end; `tpot`: (e2el - ttft) / (tokens - 1), of each request."""
    answers = [answer for each in passes for answer in each.answers]
    completed = [answer for answer in answers if answer.error is None and answer.arrivals]
    errors = Counter(answer.error or "no tokens" for answer in answers if answer.error or not answer.arrivals)
    seconds = sum(each.seconds for each in passes)
    read = sum(answer.prompt_tokens for answer in completed)
    written = sum(answer.completion_tokens for answer in completed)
    row: Row = {
        "duration": seconds,
        "num_prompts": len(answers),
        "completed": len(completed),
        "failed": errors.total(),
        "errors": dict(errors),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "cached_input_tokens": sum(answer.cached_tokens for answer in completed),
        "request_throughput": len(completed) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        "max_concurrent_requests": max(most_open(each.answers) for each in passes),
    }
    for name, times in {
        "ttft": [_ttft(answer) for answer in completed],
        "tpot": [tpot for answer in completed for tpot in _tpot(answer)],
        "itl": [gap / count for answer in completed for gap, count in _gaps(answer) for _ in range(count)],
        "chunk_gap": [gap for answer in completed for gap, _ in _gaps(answer)],
        "e2el": [answer.ended - answer.sent for answer in completed],
    }.items():
        row |= _spread(name, times)
    return row | _speculation(completed)


def equal_answers(passes: Sequence[Load], reference: Sequence[Load]) -> Row:
    """How many answers have the ids of the reference's, among those that both have completed."""
    ours, theirs = ([answer for each in some for answer in each.answers] for some in (passes, reference))
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.error is None and b.error is None]
    return {"answers": len(both), "equal_to_ar": sum(a.token_ids == b.token_ids for a, b in both)}


def most_open(answers: Sequence[Answer]) -> int:
    """The most requests that were open at once."""
    changes = sorted([(answer.ended, -1) for answer in answers] + [(answer.sent, 1) for answer in answers])
    return max(accumulate(change for _, change in changes), default=0)


def _ttft(answer: Answer) -> float:
    return answer.arrivals[0][0] - answer.sent


def _tpot(answer: Answer) -> Iterator[float]:
    """None for a single token, which has no successor."""
    if answer.completion_tokens > 1:
        yield (answer.ended - answer.sent - _ttft(answer)) / (answer.completion_tokens - 1)


def _gaps(answer: Answer) -> Iterator[tuple[float, int]]:
    """Seconds before each chunk but the first, and its tokens."""
    for (before, _), (after, count) in pairwise(answer.arrivals):
        yield after - before, count


def _spread(name: str, seconds: Sequence[float]) -> Row:
    """In milliseconds; nothing where there is nothing."""
    if not seconds:
        return {}
    times = sorted(1e3 * value for value in seconds)
    return {
        f"mean_{name}_ms": statistics.fmean(times),
        f"median_{name}_ms": statistics.median(times),
        f"std_{name}_ms": statistics.pstdev(times),
        f"p99_{name}_ms": percentile(times, 0.99),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two values next to it, in proportion."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _speculation(answers: Sequence[Answer]) -> Row:
    """What the engine tells of its rounds, where it does."""
    metrics = [answer.metrics for answer in answers if answer.metrics is not None]
    rounds = sum(m.rounds for m in metrics)
    if not rounds:
        return {}
    looked_up = sum(m.hits + m.misses for m in metrics)
    return {
        "acceptance_length": 1 + sum(m.accepted_tokens for m in metrics) / rounds,
        "hit_rate": sum(m.hits for m in metrics) / looked_up if looked_up else None,
    }
