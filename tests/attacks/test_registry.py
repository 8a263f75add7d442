"""Which answers to an attack are right, and which innocent clients find to be wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.corpus import ATTACKS
from tests.attacks.http_client import reason
from tests.attacks.registry import NONE, Answer, Attack, Site

SITE = Site(1, "ipc:///nowhere", "mock")


@pytest.mark.parametrize(
    ("answer", "also", "right"),
    [
        (Answer("400", "no"), (), True),
        (Answer("503", "busy"), (), True),
        (Answer("429", "busy"), (), True),
        (Answer("overloaded", "busy"), (), True),
        (Answer("400", ""), (), False),
        (Answer("overloaded", ""), (), False),
        (Answer("500", "a bug"), (), False),
        (Answer("502", "a bug"), (), False),
        (Answer("internal_error", "a bug"), (), False),
        (Answer("engine_restarted", "try again"), (), False),
        (Answer(NONE, "closed without an answer"), (), False),
        (Answer("200", "tokens"), (), False),
        (Answer("200", ""), ("200",), True),
        (Answer("length", ""), (), False),
        (Answer("length", ""), ("length",), True),
    ],
)
def test_a_refusal_has_a_reason_and_is_no_breakdown(answer: Answer, also: tuple[str, ...], right: bool) -> None:
    outcome = Attack("x", "y", lambda site: [answer], frozenset(also)).run(SITE)
    assert outcome.codes == {answer.code: 1}
    assert (not outcome.problems) is right


def test_what_an_attack_asserts_is_a_problem_and_its_answers_count() -> None:
    def function(site: Site) -> Iterator[Answer]:
        yield Answer("400", "no")
        raise AssertionError("cut")

    outcome = Attack("x", "y", function).run(SITE)
    assert (outcome.problems, outcome.codes) == (["AssertionError: cut"], {"400": 1})


def test_the_reason_is_the_message_of_an_error() -> None:
    assert reason(b'{"error": {"message": "no", "code": "x"}}') == "no"
    assert reason(b'{"error": {"code": "x"}}') == ""
    assert reason(b"data: [DONE]\n\n") == "data: [DONE]\n\n"


def test_attacks_have_names_of_their_own_and_say_what_they_do() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert all(attack.function.__doc__ for attack in ATTACKS)
