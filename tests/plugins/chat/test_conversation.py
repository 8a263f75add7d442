"""What a chat remembers, how its parameters are set, and what it counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.params import SamplingParams, Speculation
from ssd.errors import RequestError, UsageError
from ssd.ipc.public import ChatMessage, Metrics
from ssd.plugins.chat.chat import Conversation


def conversation(system: str | None = None, **params: Any) -> Conversation:
    return Conversation(SamplingParams(**params), system)


def roles(messages: list[ChatMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_what_was_said_is_asked_again_with_every_question() -> None:
    chat = conversation("Be brief.")
    chat.keep("hi", "hello")
    assert roles(chat.question("why?")) == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "why?"),
    ]
    assert roles(chat.question("how?"))[3:] == [("user", "how?")], "a question is remembered with its answer only"


def test_a_question_without_any_answer_is_forgotten() -> None:
    chat = conversation()
    chat.keep("hi", "")
    assert chat.messages == []


def test_clear_forgets_what_was_said_but_not_the_system_message_or_parameters() -> None:
    chat = conversation("Be brief.", seed=3)
    chat.keep("hi", "hello")
    chat.clear()
    assert roles(chat.messages) == [("system", "Be brief.")]
    assert chat.params.seed == 3


def test_the_system_message_can_change_and_go() -> None:
    chat = conversation()
    assert chat.tell("") == "no system message"
    chat.keep("hi", "hello")
    assert chat.tell("Be brief.") == chat.tell("") == "system: Be brief."
    assert roles(chat.question("why?"))[:2] == [("system", "Be brief."), ("user", "hi")]
    assert chat.tell('""') == "no system message" and roles(chat.messages)[0] == ("user", "hi")


def test_a_retry_forgets_the_last_exchange_only() -> None:
    chat = conversation("Be brief.")
    chat.keep("hi", "hello")
    chat.keep("why?", "so")
    chat.tell("Be long.")
    assert chat.retract() == "why?" and roles(chat.messages)[1:] == [("user", "hi"), ("assistant", "hello")]
    chat.keep("why?", "")
    assert chat.retract() == "why?" and len(chat.messages) == 3
    chat.keep("why?", "thus")
    chat.keep("how?", "")
    assert chat.retract() == "how?" and len(chat.messages) == 5, "one without an answer has nothing to forget"
    chat.clear()
    with pytest.raises(UsageError, match="no question"):
        chat.retract()


def test_a_retry_without_an_answer_keeps_the_old_one() -> None:
    chat = conversation()
    chat.keep("hi", "hello")
    chat.keep("why?", "so")
    for _ in range(2):
        assert chat.retract() == "why?"
        chat.keep("why?", "")
        assert [message.content for message in chat.messages] == ["hi", "hello", "why?", "so"]
    chat.keep("how?", "")
    assert len(chat.messages) == 4 and chat.retract() == "how?"


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("temperature 0.7", "temperature", 0.7),
        ("temperature=1", "temperature", 1.0),
        ("  max_tokens   5 ", "max_tokens", 5),
        ("seed 9", "seed", 9),
        ("seed none", "seed", None),
        ("ignore_eos True", "ignore_eos", True),
        ("stop END", "stop", ("END",)),
        ('stop "two words"', "stop", ("two words",)),
        ('stop ["a", "b"]', "stop", ("a", "b")),
        ("stop []", "stop", ()),
        ("stop none", "stop", ()),
        ("stop [x", "stop", ("[x",)),
        ("stop_token_ids [1, 2]", "stop_token_ids", (1, 2)),
        ("stop_token_ids 7", "stop_token_ids", (7,)),
        ('logit_bias {"5": -100, "6": 1.5}', "logit_bias", {5: -100.0, 6: 1.5}),
        ('speculation {"mode": "sd"}', "speculation", Speculation("sd")),
    ],
)
def test_set_takes_every_kind_of_parameter(argument: str, name: str, value: object) -> None:
    chat = conversation(max_tokens=50, seed=1, stop=("x",))
    shown = chat.set(argument)
    assert getattr(chat.params, name) == value
    assert shown.startswith(f"{name} ")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("temprature 1", ["no parameter 'temprature'", "temperature", "top_k"]),
        ("temperature warm", ["temperature warm", "float"]),
        ("temperature -1", ["temperature -1", ">= 0"]),
        ("temperature nan", ["temperature nan", "float"]),
        ("top_p 0", ["top_p 0", "> 0"]),
        ("max_tokens 1.5", ["max_tokens 1.5", "int"]),
        ("seed -1", ["seed -1", ">= 0"]),
        (f"stop {['a'] * 65}".replace("'", '"'), ["stop", "<= 64"]),
        ("stop_token_ids many", ["stop_token_ids many", "int"]),
        ('logit_bias {"five": 1}', ["logit_bias"]),
        ("ignore_eos maybe", ["ignore_eos maybe", "bool"]),
        ('speculation {"mode": "fast"}', ["speculation", "fast"]),
        ("min_tokens 200", ["min_tokens 200", "max_tokens 128"]),
        ("[" * 5000, ["no parameter"]),
    ],
)
def test_set_refuses_with_the_cause_and_changes_nothing(argument: str, words: list[str]) -> None:
    chat = conversation()
    before = chat.params
    with pytest.raises((UsageError, RequestError)) as caught:
        chat.set(argument)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value) and "$" not in str(caught.value)
    assert chat.params == before


def test_set_shows_one_parameter_or_all() -> None:
    chat = conversation(temperature=0.5, stop=("END",))
    assert chat.set("temperature") == "temperature 0.5"
    shown = chat.set("").splitlines()
    assert [line.split()[0] for line in shown] == list(SamplingParams.__struct_fields__)
    assert 'stop ["END"]' in shown and "seed null" in shown


def test_what_is_shown_can_be_typed_again() -> None:
    chat = conversation(
        temperature=0.5, stop=("END",), logit_bias={3: 1.0}, speculation=Speculation("sd", 2, (3,), "jit")
    )
    again = conversation()
    for line in chat.set("").splitlines():
        again.set(line)
    assert again.params == chat.params


def test_figures_of_a_session_are_weighted_by_what_they_are_means_over() -> None:
    chat = conversation()
    first = Metrics("ssd", 10, 40, 20, 6, 3, tokens_per_second=10.0, generation_time_ms=3000.0, verify_ms=10.0)
    second = Metrics("ssd", 30, 120, 0, 0, 29, tokens_per_second=30.0, generation_time_ms=1000.0, verify_ms=20.0)
    second = replace(second, plan="sd, K 3")
    chat.count(31, replace(first, plan="ssd, K 2"))
    chat.count(31, second)
    assert (chat.answers, chat.tokens) == (2, 62)
    found = chat.metrics
    assert (found.rounds, found.hits, found.misses, found.mode) == (40, 6, 32, "ssd")
    assert found.mean_acceptance_length == pytest.approx(1.5)
    assert found.hit_rate == pytest.approx(6 / 38)
    assert found.tokens_per_second == pytest.approx(60 / 4)
    assert found.verify_ms == pytest.approx(17.5)
    assert found.plan == "sd, K 3"  # the present one


def test_nothing_counted_is_nothing() -> None:
    assert (conversation().answers, conversation().metrics) == (0, Metrics())


def test_a_conversation_is_saved_as_json_and_as_markdown() -> None:
    chat = conversation("Be brief.", temperature=0.5)
    chat.keep("hi", "# hello\n\nthere — ")
    saved = json.loads(chat.as_json("smollm2"))
    assert (saved["model"], saved["params"]["temperature"]) == ("smollm2", 0.5)
    assert saved["messages"][1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "# hello\n\nthere — "},
    ]
    written = chat.as_markdown("smollm2")
    assert written.startswith("# A conversation with smollm2\n\n**system**\n\nBe brief.\n\n**user**\n\nhi\n\n")
    assert written.endswith("**assistant**\n\n# hello\n\nthere — \n")
