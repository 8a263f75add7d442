"""`--limits`: what each API key may ask for a minute and at once, at every door that generates."""

from __future__ import annotations

import json
import select
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.ipc.messages import Emission
from ssd.launch.server import ServerOptions, resolve_server
from ssd.plugins.quotas import quotas
from ssd.plugins.quotas.quotas import Quota, Quotas
from tests.frontend.http_engine import HttpEngine, answering, http_engine, key_file

IDS = [5, 6, 7]
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3}
TURNS: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that quotas see, in the hands of the test."""
    made = Clock()
    monkeypatch.setattr(quotas, "_now", made)
    return made


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return key_file(tmp_path, "sesame alice", "other")


def server(file: str | None = None, **limits: Any) -> ServerConfig:
    return ServerConfig(names=("scripted",), port=0, api_key_file=file, quotas=msgspec.to_builtins(Quotas(**limits)))


def ask(
    engine: HttpEngine, key: str = "", path: str = COMPLETIONS, body: object = BODY
) -> tuple[int, dict[str, str], Any]:
    status, headers, content = engine.ask("POST", path, body, {"x-api-key": key})
    return status, headers, json.loads(content)


def ratelimits(headers: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("x-ratelimit-"): value for name, value in headers.items() if "ratelimit" in name}


def test_requests_a_minute_are_each_keys_own(clock: Clock, keys: str) -> None:
    limits = {"default": Quota(requests_per_minute=2), "keys": {"alice": Quota(requests_per_minute=3)}}
    with http_engine(server(keys, **limits)) as engine, answering(engine, IDS):
        for key, most in (("sesame", 3), ("other", 2)):
            for left in reversed(range(most)):
                status, headers, _ = ask(engine, key)
                assert status == 200
                assert ratelimits(headers) == {
                    "limit-requests": str(most),
                    "remaining-requests": str(left),
                    "reset-requests": f"{60 * (most - left) // most}s",
                }
            status, headers, answer = ask(engine, key)
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            assert answer["error"]["type"] == "rate_limit_error"
            assert headers["retry-after"] == str(60 // most)
            assert ratelimits(headers)["remaining-requests"] == "0"
        clock.now += 29
        assert ask(engine, "sesame")[0] == 200  # one each 20 seconds
        assert ask(engine, "sesame")[1]["retry-after"] == "11"
        assert ask(engine, "other")[1]["retry-after"] == "1"
        clock.now += 1
        assert ask(engine, "other")[0] == 200
        clock.now += 3600  # no more than a minute's are kept
        assert [ask(engine, "other")[0] for _ in range(3)] == [200, 200, 429]


def test_tokens_a_minute_are_those_of_prompts_and_answers(clock: Clock) -> None:
    with http_engine(server(default=Quota(tokens_per_minute=60))) as engine, answering(engine, IDS):
        assert ratelimits(ask(engine)[1])["remaining-tokens"] == "60"
        assert ratelimits(ask(engine)[1])["remaining-tokens"] == "55"  # 2 and 3
        assert ask(engine, body={**BODY, "prompt": [1] * 40, "n": 3})[0] == 200
        status, headers, answer = ask(engine)  # 60 - 5 - 5 - 40 - 9
        assert status == 200 and ratelimits(headers)["remaining-tokens"] == "1"
        status, headers, answer = ask(engine)  # 1 - 5
        assert (status, headers["retry-after"]) == (429, "5")
        assert ratelimits(headers) == {"limit-tokens": "60", "remaining-tokens": "0", "reset-tokens": "64s"}
        assert "60 tokens a minute" in answer["error"]["message"]
        clock.now += 5
        assert ask(engine)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_requests_at_once(keys: str, stream: bool) -> None:
    """A place is free again when a request has ended, or its client has left."""
    limits = {"default": Quota(concurrent_requests=1)}
    with http_engine(server(keys, **limits)) as engine:
        target = engine.engine.target
        for leaves in (False, True):
            held = engine.begin(COMPLETIONS, {"x-api-key": "other"}, **BODY, stream=stream)
            request = target.next_submit().request
            status, refused, answer = ask(engine, "other")
            assert (status, refused["retry-after"], ratelimits(refused)) == (429, "1", {})
            assert answer["error"]["code"] == "rate_limit_exceeded"
            if leaves:
                held.close()
                target.wait_abort(request)
            else:
                target.step(Emission(request, IDS, finish_reason="stop"))
                assert held.getresponse().read()
        with answering(engine, IDS):
            assert ask(engine, "other")[0] == ask(engine, "sesame")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[1] * 10, "a text"])
def test_the_limits_hold_for_thirty_at_once(clock: Clock, prompt: Any, stream: bool) -> None:
    """Each that is let in takes its prompt and all that it may say."""
    quota = Quota(tokens_per_minute=100, requests_per_minute=40)
    with http_engine(server(default=quota)) as engine:
        target = engine.engine.target
        asked = {"prompt": prompt, "max_tokens": 50, "stream": stream}
        held = [engine.begin(COMPLETIONS, **asked, seed=seed) for seed in range(30)]
        sockets = [connection.sock for connection in held]
        while len(target.open) + len(select.select(sockets, [], [], 0)[0]) < len(held):
            target.pump(10)
        assert len(target.open) == 2
        admitted = [target.next_submit() for _ in range(2)]
        seeds = {submit.params.seed for submit in admitted}
        for answer in [connection.getresponse() for seed, connection in enumerate(held) if seed not in seeds]:
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (429, "rate_limit_exceeded")
            (seconds,) = answer.headers.get_all("retry-after") or ()
            assert int(seconds) >= 1
        for submit in admitted:
            target.step(Emission(submit.request, IDS, finish_reason="stop"))
        assert all(held[seed or 0].getresponse().read() for seed in seeds)
        used = sum(len(submit.token_ids) + len(IDS) for submit in admitted)
        with answering(engine, IDS):
            assert ratelimits(ask(engine)[1])["remaining-tokens"] == str(100 - used), "the rest is given back"


def test_embeddings_that_a_client_cuts_count(clock: Clock) -> None:
    with http_engine(server(default=Quota(tokens_per_minute=100))) as engine:
        target = engine.engine.target
        connection = engine.begin("/v1/embeddings", input=[[1] * 10] * 8)
        for request in [target.next_submit().request for _ in range(8)]:
            connection.close()
            target.wait_abort(request)
        with answering(engine, IDS):
            assert ratelimits(ask(engine)[1])["remaining-tokens"] == "20"


def test_every_door_that_generates_counts_and_no_other(clock: Clock) -> None:
    with http_engine(server(default=Quota(requests_per_minute=3))) as engine, answering(engine, IDS):
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            (f"{MESSAGES}/count_tokens", TURNS),
            (COMPLETIONS, {"prompt": 5}),
            (CHAT, {**TURNS, "model": "gpt-9"}),
        ):
            assert not ratelimits(ask(engine, path=path, body=body)[1]), path
        for path in (CHAT, "/v1/responses", MESSAGES):
            assert ask(engine, path=path, body=TURNS if path != "/v1/responses" else {"input": "a"})[0] == 200
        assert ask(engine, path=CHAT, body={**TURNS, "stream": True})[0] == 429
        status, headers, answer = ask(engine, path=MESSAGES, body=TURNS)
        assert (status, headers["retry-after"]) == (429, "20")
        assert (answer["type"], answer["error"]["type"]) == ("error", "rate_limit_error")


def test_a_stream_has_the_headers_and_counts_its_tokens(clock: Clock) -> None:
    with http_engine(server(default=Quota(tokens_per_minute=6))) as engine, answering(engine, IDS):
        _, headers, _ = engine.ask("POST", COMPLETIONS, {**BODY, "stream": True})
        assert ratelimits(headers)["remaining-tokens"] == "6"
        assert ratelimits(ask(engine)[1])["remaining-tokens"] == "1"


# -- the file -------------------------------------------------------------------------------------------------------


def test_a_limit_that_a_key_leaves_out_is_the_defaults(tmp_path: Path, keys: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        "[default]\nrequests-per-minute = 60\nconcurrent-requests = 4\n[keys.alice]\nrequests-per-minute = 9"
    )
    given = resolve_server(ServerOptions(limits=str(file), api_key_file=keys), "model").quotas
    found = msgspec.convert(given, Quotas)
    assert found.of("alice") == Quota(requests_per_minute=9, concurrent_requests=4)
    assert found.of("") == Quota(requests_per_minute=60, concurrent_requests=4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[default]\na = x", "line 2"),
        ("[default]\nrequests-per-minute = 0", "default.requests-per-minute"),
        ("[default]\nrequests = 5", "`requests`"),
        ("[keys.alice]\ntokens-per-minute = 'many'", "keys"),
        ("[keys.bob]\ntokens-per-minute = 5", "'bob'"),
    ],
)
def test_a_wrong_file_is_refused_before_the_start(tmp_path: Path, keys: str, content: str, said: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match="--limits") as caught:
        resolve_server(ServerOptions(limits=str(file), api_key_file=keys), "model")
    assert said in str(caught.value)


def test_a_key_has_one_name(tmp_path: Path) -> None:
    file = key_file(tmp_path, "sesame alice", "sesame bob")
    with pytest.raises(UsageError, match="line 2 gives a key of an earlier line another name"):
        resolve_server(ServerOptions(api_key_file=file), "model")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in (tmp_path, tmp_path / "none", tmp_path / "bytes"):
        with pytest.raises(UsageError, match="--limits"):
            quotas.read(str(path), ())
