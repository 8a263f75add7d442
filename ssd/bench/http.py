"""The endpoint of an OpenAI-compatible server: a connection and thread for each open request."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ssd.bench.load import TimedAnswer
from ssd.client import Prompt
from ssd.config.params import SamplingDefaults, SamplingParams
from ssd.errors import SsdError, UsageError

_PATIENCE_S = 300.0  # without a byte


class Http:
    """The `Endpoint` of a server, with at most `most` open requests. Raises UsageError or SsdError."""

    def __init__(self, url: str, most: int, chat: bool, key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            self._kind = {"http": HTTPConnection, "https": HTTPSConnection}[parts.scheme]
            self._host, self._port, self._base = parts.hostname or "", parts.port, parts.path.rstrip("/")
        except (KeyError, ValueError):
            raise UsageError(f"--url {url}: expected an address such as http://127.0.0.1:8000") from None
        if not self._host:
            raise UsageError(f"--url {url}: it names no host")
        self._url, self._chat = url, chat
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._most, (self.model, self._ours) = most, self._served()
        self._open = set[socket.socket]()
        self._left = False

    async def __aenter__(self) -> Http:
        self._left, self._pool = False, ThreadPoolExecutor(self._most)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cut open requests: the process cannot end before its threads do."""
        self._left = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connected in list(self._open):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    async def __call__(self, prompt: Prompt, params: SamplingParams) -> TimedAnswer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, prompt, params)

    def _served(self) -> tuple[str, bool]:
        """Return the name of the first model, and True if the server is an `ssd serve`."""
        connection = self._kind(self._host, self._port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise SsdError(f"{self._url} answers {response.status} {response.reason} to a question for its models")
            model = json.loads(body)["data"][0]
            return str(model["id"]), model.get("owned_by") == "ssd"
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise SsdError(f"no server with a model at {self._url}: {error}") from None
        finally:
            connection.close()

    def _ask(self, prompt: Prompt, params: SamplingParams) -> TimedAnswer:
        answer = TimedAnswer(time.perf_counter())
        try:
            with self._connected() as connection:
                connection.request("POST", *self._request(prompt, params), self._headers)
                response = connection.getresponse()
                if response.status == 200:
                    _follow(response, answer)
                else:
                    answer.error = str(response.status)
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            answer.error = type(error).__name__
        answer.ended = time.perf_counter()
        return answer

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """Yield a connection, which `__aexit__` may cut."""
        connection = self._kind(self._host, self._port, timeout=_PATIENCE_S)
        connection.connect()
        self._open.add(connected := connection.sock)
        try:
            if self._left:
                raise ConnectionAbortedError
            yield connection
        finally:
            self._open.discard(connected)
            connection.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, bytes]:
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self._ours:  # not every server takes these; ours would read them from generation_config.json
            asked |= {name: getattr(params, name) for name in (*SamplingDefaults.__struct_fields__, "store")}
        chat = self._chat and isinstance(prompt, str)
        asked |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return f"{self._base}/v1/{'chat/' if chat else ''}completions", json.dumps(asked).encode()


def _follow(response: HTTPResponse, answer: TimedAnswer) -> None:
    """Read a stream's events into `answer`; one with text but without token ids counts as one token."""
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"].get("code") or "error")
            return
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            count = bool(text) if ids is None else len(ids)
            answer.token_ids += ids or ()
            if count:
                answer.arrivals.append((time.perf_counter(), count))
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    answer.error = "broken_off"
