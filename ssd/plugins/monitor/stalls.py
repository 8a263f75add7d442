"""Explains in words why target and draft stall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

# Shares of a trace, or of the look-ups, that are worth reporting.
_WAIT, _OTHER, _PREFILL, _SPARE, _LATE, _MISSED = 0.02, 0.05, 0.2, 0.3, 0.05, 0.3


class Pipeline(msgspec.Struct, frozen=True):
    """The shares of the last `seconds`, by role and state.

    `round_seconds`: the median from one verification to the next. `longest_wait`: of the target for the draft, in
    seconds."""

    seconds: float
    shares: dict[str, dict[str, float]]
    round_seconds: float = 0.0
    longest_wait: float = 0.0


_REASONS = {
    "k_not_covered": "the accepted length was not prepared for (budget)",
    "token_not_covered": "the bonus token was not among the guesses (fan-out)",
    "late": "the draft had no token yet (draft too slow)",
    "draft_down": "there was no draft",
    "first_round": "first round of a request",
}


def reason(verdict: str) -> str:
    return _REASONS.get(verdict, verdict)


def causes(
    pipeline: Pipeline, misses: Mapping[str, int], rounds: int, states: Mapping[str, str], kernels: bool = True
) -> list[str]:
    """Return sentences that say what holds the engine up; `misses` of `rounds` are by reason, `states` by role."""
    slow = [] if kernels else ["no compiled kernels: the CPU is two to four times slower; the log says why"]
    return [*_absent(states), *slow, *_of_target(pipeline, misses), *_of_cache(misses, rounds), *_of_draft(pipeline)]


def _absent(states: Mapping[str, str]) -> Iterator[str]:
    for role, state in states.items():
        if state == "DOWN":
            cost = "; decoding goes on without it" if role == "draft" else ""
            yield f"the {role} is down{cost}"
        elif state == "STALE":
            yield f"the {role} shows no sign of life"


def _of_target(pipeline: Pipeline, misses: Mapping[str, int]) -> Iterator[str]:
    target = pipeline.shares.get("target", {})
    if (wait := target.get("wait_for_draft", 0.0)) >= _WAIT:
        most = max(misses, key=lambda name: misses[name], default="")
        why = f", mostly because {reason(most)}" if most else ""
        longest = f"longest {1e3 * pipeline.longest_wait:.1f} ms"
        yield f"the target waited {wait:.0%} of the time for the draft ({longest}) after misses{why}"
    if (prefill := target.get("prefill", 0.0)) >= _PREFILL:
        yield f"the target spent {prefill:.0%} on prompts, without a row that decodes"
    busy = 1 - target.get("idle", 0.0)
    if target and busy > 0 and (other := target.get("other", 0.0) / busy) >= _OTHER:
        yield f"the target spent {other:.0%} of its busy time between forwards (scheduling, messages)"


def _of_cache(misses: Mapping[str, int], rounds: int) -> Iterator[str]:
    if not rounds:
        return
    if (late := misses.get("late", 0) / rounds) >= _LATE:
        yield f"{late:.0%} of the look-ups came before the draft had a token: its steps are too slow"
    if (missed := misses.get("token_not_covered", 0) / rounds) >= _MISSED:
        yield f"{missed:.0%} of the bonus tokens were not among the guesses: a larger fan-out may help"


def _of_draft(pipeline: Pipeline) -> Iterator[str]:
    draft, target = pipeline.shares.get("draft", {}), pipeline.shares.get("target", {})
    if (spare := draft.get("wait_for_target", 0.0)) >= _SPARE and target.get("idle", 0.0) < _SPARE:
        yield f"the draft waited {spare:.0%} of the time for the target: there is room for a larger K or fan-out"
