"""What one request leaves in memory for others: rows that fail, the prefix cache, preemption; and figures of load."""

from __future__ import annotations

from typing import Any

import pytest

from ssd.ipc.messages import Load
from tests.verifier.scripted import (
    LAWS,
    LONGEST,
    RANDOM,
    SAMPLED,
    SCRIPTS,
    TEXTS,
    VOCAB,
    BrokenOnce,
    Poisoned,
    ScriptedProposer,
    make_engine,
    play,
    submit,
    tiny_llama,
    truth,
)

# -- rows that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_logits_that_are_not_numbers_fail_their_request_alone(law: dict[str, Any], script: str) -> None:
    """The model breaks after a token that the second request alone emits: it ends there as in plain decoding, with
    what it had; the others do not notice."""
    texts = [truth(prompt, law)[:14] for prompt in TEXTS]
    poison = next(token for token in texts[1] if token not in {*RANDOM, *texts[0], *texts[2]})
    healthy = texts[1].index(poison) + 1
    proposer = ScriptedProposer(
        {i: TEXTS[i] + truth(TEXTS[i], law) for i in range(3)}, {i: script for i in range(3)}, "at once"
    )
    engine = make_engine(proposer, model=Poisoned(tiny_llama(), poison))
    answers = play(engine, [submit(i, TEXTS[i], max_tokens=14, **law) for i in range(3)])
    assert (answers[1].ids, answers[1].reason) == (texts[1][:healthy], "error")
    for i in (0, 2):
        assert (answers[i].ids, answers[i].reason) == (texts[i], "length")


def test_a_draft_token_that_the_model_cannot_compute_changes_nothing() -> None:
    """Its keys and values are not numbers, and a masked product with them is none either."""
    texts = {i: truth(TEXTS[i], SAMPLED) for i in range(2)}
    broken = next(token for token in range(VOCAB) if token not in {*RANDOM, *texts[0], *texts[1]})
    expected = {i: [*texts[i][:2], broken, *texts[i][3:]] for i in range(2)}
    proposer = ScriptedProposer({i: TEXTS[i] + expected[i] for i in range(2)}, dict.fromkeys(range(2), "right"))
    engine = make_engine(proposer, model=tiny_llama(broken=broken))
    answers = play(engine, [submit(i, TEXTS[i], max_tokens=9, **SAMPLED) for i in range(2)])
    for i in range(2):
        assert (answers[i].ids, answers[i].reason) == (texts[i][:9], "length")
        assert answers[i].metrics.accepted_tokens > 0


def test_a_prompt_that_breaks_the_model_fails_at_once() -> None:
    poison = next(token for token in range(VOCAB) if token not in {*RANDOM, *truth(TEXTS[0], {})})
    engine = make_engine(model=Poisoned(tiny_llama(), poison))
    asked = [submit(0, TEXTS[0], max_tokens=9), submit(1, [*TEXTS[2], poison], max_tokens=9, logprobs=2)]
    answers = play(engine, asked)
    assert answers[0].ids == truth(TEXTS[0], {})[:9]
    assert (answers[1].ids, answers[1].reason, answers[1].logprobs) == ([], "error", [])


@pytest.mark.parametrize("budget", [64, 8])
def test_a_failed_request_leaves_nothing_for_others_to_find(budget: int) -> None:
    """The same prompt again, after a forward that filled its pages with NaN; a chunk of a prompt is found out too."""
    engine = make_engine(model=BrokenOnce(tiny_llama()), budget=budget)
    failed, again = (play(engine, [submit(i, TEXTS[0], max_tokens=9)])[i] for i in range(2))
    assert (failed.ids, failed.reason) == ([], "error")
    assert (again.ids, again.metrics.cached_tokens) == (truth(TEXTS[0], {})[:9], 0)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
def test_a_cached_prefix_gives_the_same_ids(law: dict[str, Any]) -> None:
    """The same prompt again, then one that goes on from the first answer."""
    engine = make_engine()
    ids = truth(TEXTS[0], law)
    first, again = (play(engine, [submit(i, TEXTS[0], max_tokens=12, **law)])[i] for i in range(2))
    assert first.ids == again.ids == ids[:12]
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 16)
    longer = play(engine, [submit(2, TEXTS[0] + ids[:12], max_tokens=9, **law)])[2]
    assert longer.ids == ids[12:21] and longer.metrics.cached_tokens == 28


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
def test_a_salt_hides_a_prefix_and_changes_no_id(law: dict[str, Any]) -> None:
    engine = make_engine()
    salts = ["", "a", "a", "b", ""]
    asked = [submit(i, TEXTS[0], max_tokens=12, cache_salt=salt, **law) for i, salt in enumerate(salts)]
    answers = [play(engine, [each])[i] for i, each in enumerate(asked)]
    assert all(answer.ids == truth(TEXTS[0], law)[:12] for answer in answers)
    assert [answer.metrics.cached_tokens for answer in answers] == [0, 0, 16, 0, 16]


def test_prompts_of_different_salts_do_not_wait_for_each_other() -> None:
    engine = make_engine()
    answers = play(engine, [submit(i, TEXTS[0], max_tokens=2, cache_salt=str(i)) for i in range(3)])
    assert [answer.steps[0] for answer in answers.values()] == [0, 0, 0]
    assert [answer.metrics.cached_tokens for answer in answers.values()] == [0, 0, 0]


def test_rejected_drafts_are_in_nobodys_prefix() -> None:
    """Pages that held wrong drafts are shared with the right keys and values only."""
    ids = truth(TEXTS[0], SAMPLED)
    engine = make_engine(ScriptedProposer({i: TEXTS[0] + ids for i in range(3)}, dict.fromkeys(range(3), "wrong")))
    play(engine, [submit(0, TEXTS[0], max_tokens=16, **SAMPLED)])
    longer = play(engine, [submit(1, TEXTS[0] + ids[:16], max_tokens=9, **SAMPLED)])[1]
    assert longer.ids == ids[16:25] and longer.metrics.cached_tokens == 32


def test_preempted_sequences_go_on_where_they_were() -> None:
    """Four sequences in pages for two: they take turns, and nobody is told a token twice or another one."""
    prompts = [[*TEXTS[i % 3][:9], i] for i in range(4)]
    texts = {i: prompt + truth(prompt, SAMPLED) for i, prompt in enumerate(prompts)}
    proposer = ScriptedProposer(texts, dict.fromkeys(texts, "changing"))
    engine = make_engine(proposer, pages=12, page_size=4)
    answers = play(engine, [submit(i, prompt, max_tokens=20, **SAMPLED) for i, prompt in enumerate(prompts)])
    assert {i: answer.ids for i, answer in answers.items()} == {i: text[10:30] for i, text in texts.items()}
    assert engine.load().preemptions == proposer.admissions.total() - 4 > 0


def test_a_prompt_longer_than_the_budget_leaves_the_queue() -> None:
    """While another one decodes; it is read in chunks that leave the other its tokens."""
    engine = make_engine(budget=3)
    answers = play(engine, [submit(0, TEXTS[0][:2], max_tokens=20), submit(1, TEXTS[2], max_tokens=4)], {1: 2})
    assert answers[0].ids == truth(TEXTS[0][:2], {})[:20] and answers[1].ids == truth(TEXTS[2], {})[:4]
    assert answers[0].steps == list(range(20)) and answers[1].steps[0] == 2 + 9  # 20 tokens, 2 a step


@pytest.mark.parametrize("script", ["right", "wrong"])
def test_the_context_may_be_filled_to_its_last_token(script: str) -> None:
    """No live-lock and no page too many at the limit: a cache of exactly one sequence. A proposal leaves a place for
    the bonus token, so it is cut at the last positions."""
    prompt = TEXTS[0]
    proposer = ScriptedProposer({0: prompt + truth(prompt, {})}, {0: script})
    answer = play(make_engine(proposer, pages=LONGEST // 4), [submit(0, prompt, k=6, max_tokens=1000)])[0]
    assert answer.ids == truth(prompt, {}) and len(prompt) + len(answer.ids) == LONGEST
    length = len(prompt) + 1
    for drafted, accepted, _ in answer.rounds[1:]:
        assert drafted == min(6, LONGEST - length - 1)
        length += accepted + 1
    assert length == LONGEST and answer.rounds[-1][0] < 6


def test_prompts_that_are_alike_are_computed_once() -> None:
    """Four choices of one prompt: whole pages are taken from the first, and each has a text of its own."""
    engine = make_engine(budget=12)
    laws = [SAMPLED | {"seed": seed} for seed in range(4)]
    answers = play(engine, [submit(i, TEXTS[0], max_tokens=9, **law) for i, law in enumerate(laws)])
    assert [answers[i].ids for i in range(4)] == [truth(TEXTS[0], law)[:9] for law in laws]
    assert [answers[i].metrics.cached_tokens for i in range(4)] == [0, 16, 16, 16]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_load_says_how_busy_the_engine_is() -> None:
    engine = make_engine(budget=24, sequences=2, pages=20)
    assert engine.load() == Load(kv_cache_usage=0.0)
    for i in (0, 2, 1):
        engine.submit(submit(i, TEXTS[i], max_tokens=5))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.batched_tokens) == (2, 1, 24)
    assert load.kv_cache_usage == (5 + 1) / 20 and load.verify_seconds > 0 and load.draft_state == "down"
    for i in range(3):
        engine.abort(i)
    assert (engine.load().running, engine.load().waiting, engine.load().kv_cache_usage) == (0, 0, 0.0)
    assert engine.step() == [] and engine.load() == Load()


def test_the_time_in_the_queue_ends_with_the_first_place() -> None:
    """Two requests for one place; then one that loses its place after it had it."""
    answers = play(make_engine(sequences=1), [submit(i, TEXTS[i], max_tokens=6) for i in range(2)])
    first, second = answers[0].metrics, answers[1].metrics
    assert 0 <= first.queue_time_ms < first.time_to_first_token_ms
    assert first.generation_time_ms < second.queue_time_ms < second.time_to_first_token_ms
    proposer = ScriptedProposer({i: TEXTS[i] for i in range(2)}, dict.fromkeys(range(2), "absent"))
    answers = play(make_engine(proposer, pages=12), [submit(i, TEXTS[i], max_tokens=26) for i in range(2)])
    assert proposer.admissions[1] > 1
    assert answers[1].metrics.queue_time_ms < answers[0].metrics.generation_time_ms


def test_more_requests_than_places_wait_their_turn() -> None:
    engine = make_engine(sequences=2)
    answers = play(engine, [submit(i, TEXTS[i % 3], max_tokens=5) for i in range(7)])
    assert [answers[i].ids for i in range(7)] == [truth(TEXTS[i % 3], {})[:5] for i in range(7)]
    assert [answers[i].steps[0] for i in range(7)] == sorted(answers[i].steps[0] for i in range(7))
