"""The chat page as it is served, and where the tokens of a streamed chat come from."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import pytest

from ssd.config.engine import ServerConfig
from ssd.frontend.output_collector import by_origin
from ssd.ipc.messages import Emission, Submit
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_gateway import TOKENIZER
from tests.scripted_engine import following

IDS = TOKENIZER.encode("one two three four five six")
CHATS = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Why?"}]}

# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_may_run_its_own_script_only() -> None:
    with http_engine(ServerConfig(names=("scripted",), port=0, api_keys=("k",))) as engine:
        status, headers, content = engine.ask("GET", "/")
        assert engine.ask("GET", "/v1/models")[0] == engine.ask("GET", "/nonesuch")[0] == 401
        assert engine.ask("POST", "/", {})[0] == 401 and engine.ask("POST", "/", {}, {"x-api-key": "k"})[0] == 405
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert "set-cookie" not in headers and headers["x-content-type-options"] == "nosniff"
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in (b"script", b"style"):
        (inside,) = re.findall(rb"<%b>(.*)</%b>" % (tag, tag), content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        assert policy[f"{tag.decode()}-src"] == f"'sha256-{digest}'"
    assert not re.findall(rb"https?:|//[a-z]+\.|document\.cookie", content)
    makes_html = rb"(inner|outer|insertAdjacent|set)HTML|document\.write|ContextualFragment|DOMParser|srcdoc"
    assert not re.findall(makes_html + rb"|\beval\(|new Function|javascript:", content)
    assert re.findall(rb"localStorage\.setItem\(.*", content) == [b"localStorage.setItem(CHAT + chat.id, text);"]


def test_a_page_of_a_name_that_leads_here_is_not_served() -> None:
    with http_engine() as engine:
        assert engine.ask("GET", "/", headers={"host": "evil.example"})[0] == 403


def test_without_ui_there_is_none() -> None:
    with http_engine(ServerConfig(names=("scripted",), port=0, ui=False)) as engine:
        status, headers, content = engine.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8") and b"<" not in content


# -- origins --------------------------------------------------------------------------------------------------------

ROUNDS = [  # (tokens, drafted, accepted, what was looked up), and the origins of the tokens
    (1, 0, 0, "", ["plain"]),
    (2, 2, 1, "first_round", ["draft", "rejected"]),
    (2, 1, 1, "hit", ["hit", "plain"]),
    (1, 3, 0, "late", ["rejected"]),
    (2, 4, 2, "token_not_covered", ["miss"]),  # the second one ended the request
    (1, 4, 3, "hit", ["hit"]),
]


@pytest.mark.parametrize(("tokens", "drafted", "accepted", "cache", "origins"), ROUNDS)
def test_a_round_has_draft_tokens_and_then_one_of_the_targets_own(
    tokens: int, drafted: int, accepted: int, cache: str, origins: list[str]
) -> None:
    ids = list(range(tokens))
    parts = list(by_origin(Emission(1, ids, drafted=drafted, accepted=accepted, cache=cache)))
    assert [origin for origin, _ in parts] == origins
    assert [token for _, part in parts for token in part] == ids and all(part for _, part in parts)


def rounds(submit: Submit) -> Iterator[Emission]:
    """Six tokens in four rounds: the prefill, a hit, a miss without draft tokens, a rejection at once."""
    yield Emission(submit.request, IDS[:1])
    yield Emission(submit.request, IDS[1:4], drafted=2, accepted=2, cache="hit")
    yield Emission(submit.request, IDS[4:5], cache="late")
    yield Emission(submit.request, IDS[5:6], drafted=2, cache="hit", finish_reason="length")


@pytest.fixture(scope="module")
def engine() -> Iterator[HttpEngine]:
    with http_engine() as engine, following(engine.engine, rounds):
        yield engine


def test_events_have_one_origin_if_that_is_asked_for(engine: HttpEngine) -> None:
    plain = [event["choices"][0] for event in engine.events(CHATS, **ASKED)]
    assert not [choice for choice in plain if "origin" in choice]
    told = [event["choices"][0] for event in engine.events(CHATS, **ASKED, return_origins=True, return_token_ids=True)]
    found = [(choice["origin"], choice["token_ids"]) for choice in told if "origin" in choice]
    merged = "".join(origin[0] * len(ids) for origin, ids in found)
    assert merged == "phhppr" and [token for _, ids in found for token in ids] == IDS
    texts = ["".join(choice["delta"].get("content") or "" for choice in each) for each in (plain, told)]
    assert texts[0] == texts[1] == TOKENIZER.decode(IDS)
    assert told[-1]["finish_reason"] == "length"


def test_a_stop_string_ends_the_parts_too(engine: HttpEngine) -> None:
    for stop in ("two", "one two", "three f"):
        found = [
            "".join(event["choices"][0]["delta"].get("content") or "" for event in engine.events(CHATS, **asked))
            for asked in ({**ASKED, "stop": stop}, {**ASKED, "stop": stop, "return_origins": True})
        ]
        assert found[0] == found[1] == TOKENIZER.decode(IDS).split(stop)[0]


def test_origins_are_for_streams(engine: HttpEngine) -> None:
    status, answer = engine.post(CHATS, **ASKED, return_origins=True)
    assert (status, answer["error"]["param"]) == (400, "return_origins")


def test_the_page_is_told_whether_thoughts_can_be_switched(engine: HttpEngine) -> None:
    assert b'"takes_enable_thinking":false' in engine.ask("GET", "/server_info")[2]
