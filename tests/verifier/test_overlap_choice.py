"""Overlap scheduling pays where little is lost by it."""

from __future__ import annotations

from ssd.verifier.overlap_choice import OverlapPolicy


def after(
    hits: float, on_hit: int, on_miss: int, verify_ms: float, between_ms: float, rounds: int = 200
) -> OverlapPolicy:
    """Rounds of one row that did not overlap."""
    policy = OverlapPolicy()
    for number in range(rounds):
        hit = (number * hits) % 1 + hits >= 1
        policy.note_row(hit, on_hit if hit else on_miss, overlapped=False)
        policy.note_round(verify_ms / 1e3, between_ms / 1e3)
    return policy


def test_nothing_is_known_at_first() -> None:
    assert not OverlapPolicy().pays and not after(1.0, 5, 1, 10, 1, rounds=7).pays and after(1.0, 5, 1, 10, 1).pays


def test_what_a_miss_brings_is_weighed_against_the_time_between_verifications() -> None:
    """With a backup, a miss brings 4 tokens: a target of 15 ms waits for them, one of 1 ms does not."""
    assert not after(0.8, 6, 4, 15, 0.3).pays
    assert after(0.8, 6, 4, 1, 0.3).pays
    assert after(0.98, 6, 4, 15, 0.3).pays


def test_without_a_backup_there_is_nothing_to_lose() -> None:
    for hits in (0.0, 0.3, 1.0):
        assert after(hits, 6, 1, 15, 0.01).pays


def test_misses_of_overlapped_rows_do_not_say_what_one_brings() -> None:
    """But they count as misses: where too many come, outcomes are waited for again."""
    policy = after(0.98, 6, 4, 15, 0.3)
    for _ in range(200):
        policy.note_row(hit=False, tokens=1, overlapped=True)
    assert not policy.pays


def test_a_batch_without_draft_tokens_always_may_overlap() -> None:
    unfed, losing = OverlapPolicy(), after(0.8, 6, 4, 15, 0.3)
    for policy in (unfed, losing):
        assert policy.allows(["ar"]) and policy.allows(["ar", "ar"])
        assert not policy.allows(["ar", "ssd"]) and not policy.allows(["ngram"])
    assert after(0.98, 6, 4, 15, 0.3).allows(["ar", "ssd"])
