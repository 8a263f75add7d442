"""The state that HTTP endpoints share: what reads a body, and what answers a chat in the style of a door.

A door is a plugin's interface of its own, such as `/v1/responses`: structs, a `Style` and a function of its routes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from ssd.errors import RequestError
from ssd.frontend.admission import no_chat
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.http import bodies, chat
from ssd.frontend.http.asked import AskedAnswer, asked_answer
from ssd.frontend.http.decoding import BodyDecoder
from ssd.frontend.http.errors import HttpError, cut, invalid, refusal
from ssd.frontend.http.exchange import Accounts, Exchange, Gone
from ssd.frontend.http.generation import Generation
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.style import ParsingStyle
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.frontend.prometheus import PrometheusExporter
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.text_jobs import Decode, Decoded, Encode, Encoded, Fill
from ssd.ipc.listening import api_keys
from ssd.system import registered

_Body = TypeVar("_Body", bound=msgspec.Struct)
_State = TypeVar("_State")
_OF_CURL = (b"", b"application/x-www-form-urlencoded")  # content types of `curl -d` and of programs that set none


class Service:
    """The state that handlers share, and the reading of bodies. Raises UsageError for keys that cannot be used."""

    def __init__(self, manager: RequestManager, routes: Sequence[Route]) -> None:
        server = manager.config.server
        self.manager, self.routes, self.created = manager, routes, int(time.time())
        self.keys = api_keys(server)
        self.accounts: Accounts | None = None
        if server.quotas is not None:
            self.accounts = registered.load(registered.QUOTAS, "accounts")(server.quotas, self.keys)
        self.metrics = PrometheusExporter(manager)
        self.turns = asyncio.Lock()
        self._of_doors: dict[Callable[[Service], Any], Any] = {}
        self._decoder: Callable[[Any], BodyDecoder[Any]] = cache(BodyDecoder)

    def of_door(self, kind: Callable[[Service], _State]) -> _State:
        """Return the state that a door keeps between requests, made at its first one."""
        if kind not in self._of_doors:
            self._of_doors[kind] = kind(self)
        state: _State = self._of_doors[kind]
        return state

    async def read(self, exchange: Exchange, kind: type[_Body]) -> _Body:
        """Return the body of a request. Raises HttpError, RequestError or Gone."""
        content = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if content != b"application/json" and not (content in _OF_CURL and exchange.is_local_program()):
            raise HttpError(415, "the body must have Content-Type: application/json", "unsupported_media_type")
        raw = await exchange.body(self.manager.config.server.limits.max_body_bytes, self.manager.budget)
        body: _Body = self._decoder(kind).decode(raw)
        self.check_model(getattr(body, "model", None))
        return body

    def own(self, exchange: Exchange, asked: bodies.Sampling) -> None:
        """Fill in the model's name and the salt of a request.

        If there are several API keys, only requests with the same key share prefix-cached prompts."""
        asked.model = asked.model or self.manager.config.server.names[0]
        if len(self.keys) > 1:
            owner = hashlib.blake2b(exchange.key, digest_size=16).hexdigest()
            asked.cache_salt = f"{owner}/{asked.cache_salt or ''}"

    async def converse(
        self,
        exchange: Exchange,
        body: bodies.ChatRequest,
        kind: type[ParsingStyle],
        style: Callable[[bodies.ChatRequest, str, Vocabulary, AnswerFormat, AskedAnswer], ParsingStyle] | None = None,
    ) -> None:
        """Answer a chat in the style of a door: of `kind`, made by `style` if it needs more than the chat.

        Raises HttpError, which blames the style's prompt where the model has no chat."""
        self.own(exchange, body)
        self.check_ready()
        vocabulary, format = self.manager.texts.vocabulary, self.manager.texts.answer_format
        if not vocabulary.has_chat:
            raise invalid(kind.prompt, f"{no_chat(vocabulary)}; use /v1/completions", "no_chat_template")
        asked = asked_answer(body, format)
        made = (style or kind)(body, f"{kind.prefix}{exchange.id}", vocabulary, format, asked)
        requests = chat.generates(body, self.manager.config, asked)
        await Generation(self.manager, exchange, made, requests, self.turns).run(bool(body.stream))

    async def count_tokens(self, exchange: Exchange, asked: bodies.ChatRequest, param: str) -> int:
        """Count the tokens of a chat's prompt. Raises HttpError, which blames `param`, or Gone."""
        self.check_ready()
        format = self.manager.texts.answer_format
        options = chat.options(asked, asked_answer(asked, format).tools)
        job = Encode(None, chat.conversation(asked.messages), options, plain_tools=format.plain_tools)
        found: Encoded = await self.look_up(exchange, job, param)
        return found.count

    async def look_up(self, exchange: Exchange, job: Encode | Decode | Fill, param: str) -> Any:
        """Return the job's reply, or raise HttpError, or Gone if the client leaves before."""
        self.check_ready()
        texts = self.manager.texts
        work = asyncio.ensure_future(texts.fill_in(job) if isinstance(job, Fill) else texts.look_up(job))
        exchange.when_gone(work.cancel)
        try:
            found = await work
            exchange.hold(len(found.text if isinstance(found, Decoded) else found.ids))
            return found
        except RequestError as error:
            raise refusal(error.code, str(error), param) from None
        except asyncio.CancelledError:
            raise Gone from None
        finally:
            exchange.when_gone(None)

    def check_model(self, name: str | None) -> None:
        """Raise HttpError for a model that is not served; a name may have a tag, as Ollama's lists show it."""
        names = self.manager.config.server.names
        if name is not None and name not in names and name.rpartition(":")[0] not in names:
            message = f"the model {cut(name)!r} is not served here; {', '.join(names)} is"
            raise HttpError(404, message, "model_not_found", "model")

    def check_ready(self) -> None:
        """Raise HttpError while the tokenizer may not have been loaded."""
        if self.manager.state == "loading":
            raise refusal("loading", "the model is still loading")
