"""Where requests go among replicas."""

from __future__ import annotations

from random import Random

from ssd.plugins.ray import affinity
from ssd.plugins.ray.affinity import Affinity

LONG = "The same beginning of many prompts. " * 20


def test_a_beginning_goes_where_it_went_and_the_longest_counts() -> None:
    known = Affinity(slack=4)
    idle = {"a": 0, "b": 2, "c": 3}
    known.sent(LONG + "one", "b")
    assert known.ranked(LONG + "two", idle) == ["b", "a", "c"]
    known.sent(LONG[:200] + "other" * 100, "c")
    assert known.ranked(LONG + "three", idle)[0] == "b"
    assert known.ranked(LONG[:200] + "other" * 90, idle)[0] == "c"
    assert known.ranked("short", {"a": 2, "b": 1}) == ["b", "a"]


def test_who_is_too_busy_or_gone_is_passed_over() -> None:
    known = Affinity(slack=4)
    known.sent(LONG, "b")
    assert known.ranked(LONG, {"a": 1, "b": 5})[0] == "b"
    assert known.ranked(LONG, {"a": 1, "b": 6}) == ["a", "b"]
    assert known.ranked(LONG, {"a": 1, "c": 0}) == ["c", "a"]
    assert known.ranked(LONG, {}) == []


def test_what_is_remembered_is_bounded_and_the_oldest_is_forgotten(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(affinity, "_MOST", 30)
    dice, known = Random(1), Affinity(slack=0)
    prompts = [f"{dice.random()} " + LONG[:100] for _ in range(100)]
    for number, prompt in enumerate(prompts):
        known.sent(prompt, number)
    busy = {**dict.fromkeys(range(100), 1), -1: 1}
    found = [known.ranked(prompt, busy)[0] == number for number, prompt in enumerate(prompts)]
    assert all(found[70:]) and sum(found[:70]) < 10


def test_new_beginnings_are_spread() -> None:
    known = Affinity(slack=4)
    assert {known.ranked(f"{number} {LONG}", {"a": 0, "b": 0})[0] for number in range(40)} == {"a", "b"}
