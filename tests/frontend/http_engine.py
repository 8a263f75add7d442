"""The real frontend with HTTP, and a scripted target behind it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd.config.engine import EngineConfig, ServerConfig
from ssd.ipc.listening import listen
from ssd.ipc.messages import Emission, Submit
from ssd.ipc.public import Metrics, TokenLogprob
from tests.scripted_engine import ScriptedEngine, engine_config, following, gateway_thread, scripted_engine


@dataclass
class HttpEngine:
    """Where it listens, and its target in the hands of the test (or following a script)."""

    port: int
    engine: ScriptedEngine

    def connection(self) -> http.client.HTTPConnection:
        """Return a new connection without a time limit: the engine limits how long an answer takes, pytest a test."""
        return http.client.HTTPConnection("127.0.0.1", self.port)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request; a `body` that is no bytes is sent as JSON."""
        connection = self.connection()
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content

    def post(self, path: str, headers: dict[str, str] | None = None, **body: object) -> tuple[int, Any]:
        status, _, content = self.ask("POST", path, body, headers)
        return status, json.loads(content)

    def begin(self, path: str, headers: dict[str, str] | None = None, **body: object) -> http.client.HTTPConnection:
        """Send a request whose answer is not read."""
        connection = self.connection()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
        return connection

    def submitted(self, path: str, headers: dict[str, str] | None = None, **body: object) -> Submit:
        """Return what the target gets of a request, which it ends without a token."""
        connection = self.begin(path, headers, **body)
        submit = self.engine.target.next_submit()
        self.engine.target.step(Emission(submit.request, [], finish_reason="stop"))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()
        return submit

    def typed_events(self, path: str, **body: object) -> list[Any]:
        """The events of a stream in which each has its type twice."""
        status, headers, content = self.ask("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), content
        *parts, rest = content.decode().split("\n\n")
        assert rest == ""
        typed = [re.fullmatch("event: (.*)\ndata: (.*)", part).groups() for part in parts]  # type: ignore[union-attr]
        found = [json.loads(data) for _, data in typed]
        assert [event["type"] for event in found] == [kind for kind, _ in typed]
        return found

    def events(self, path: str, **body: object) -> list[Any]:
        """The events of a stream, which must end as streams end."""
        status, headers, content = self.ask("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), content
        *events, end, rest = content.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


def key_file(folder: Path, *lines: str) -> str:
    """A file with these keys, which only its owner may read."""
    file = folder / "keys"
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(0o600)
    return str(file)


@contextmanager
def http_engine(server: ServerConfig | None = None, **changes: Any) -> Iterator[HttpEngine]:
    """A frontend that serves HTTP on any free port."""
    server = server or ServerConfig(names=("scripted", "alias"), port=0)
    config: EngineConfig = engine_config(server=server, **changes)
    with ExitStack() as stack:
        listening = listen(server)
        port = listening.getsockname()[1] if server.uds is None else 0
        engine = stack.enter_context(scripted_engine())
        stack.enter_context(gateway_thread(engine, config, listening.detach()))
        yield HttpEngine(port, engine)


@contextmanager
def answering(engine: HttpEngine, tokens: Iterable[int], each: int = 2) -> Iterator[None]:
    """Answer every request with these tokens, `each` a round, then its own reason: stop for all of them, length for
    fewer. Asked for, each has the log-probability -1/2 and the alternative 28120 at -3/2."""
    ids = list(tokens)

    def script(submit: Submit) -> Iterator[Emission]:
        given = ids[: submit.params.max_tokens]
        reason = "stop" if len(given) == len(ids) else "length"
        metrics = Metrics(
            rounds=2,
            drafted_tokens=6,
            accepted_tokens=4,
            accepted_by_source={"draft": 3, "lookup": 1},
            hits=1,
            misses=1,
            cached_tokens=1,
        )
        for start in range(0, len(given), each):
            part = given[start : start + each]
            last = start + each >= len(given)
            yield Emission(
                submit.request,
                part,
                _logprobs(part) if submit.params.logprobs is not None else None,
                reason if last else None,  # type: ignore[arg-type]
                metrics if last else None,
                prompt_logprobs=_logprobs(submit.token_ids[1:])
                if start == 0 and submit.params.prompt_logprobs is not None
                else None,
            )

    with following(engine.engine, script):
        yield


def _logprobs(tokens: Iterable[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -0.5, [(28120, -1.5)]) for token in tokens]
