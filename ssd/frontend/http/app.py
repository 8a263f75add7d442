"""The ASGI application: the table of endpoints, their handlers, API keys, errors as answers.

Starlette would replace `_dispatch` and `cors.py` and nothing else. It bounds each body, but not the memory of all
bodies together (`Exchange.body`), and it runs a task group for each stream."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import socket
import time
from functools import partial
from typing import Any, TypeVar

import msgspec

from ssd import __version__
from ssd.errors import RequestError
from ssd.frontend.admission import no_chat
from ssd.frontend.http import answers, chat, completions, responses
from ssd.frontend.http.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    Sampling,
    TokenizeRequest,
)
from ssd.frontend.http.cors import CrossOrigin
from ssd.frontend.http.decoding import BodyDecoder
from ssd.frontend.http.errors import HttpError, cut, invalid, refusal
from ssd.frontend.http.exchange import Exchange, Gone, Receive, Scope, Send
from ssd.frontend.http.generation import Generation
from ssd.frontend.http.openapi import Route, document
from ssd.frontend.http.page import Page
from ssd.frontend.http.style import ParsingStyle
from ssd.frontend.http.tools import offered
from ssd.frontend.prometheus import PrometheusExporter
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.text_jobs import Decode, Decoded, Encode
from ssd.ipc.listening import api_keys, is_loopback

log = logging.getLogger("ssd.http")

_MODELS = "/v1/models/"
_MOST_TOKENS = 8 << 20  # of `/tokenize`: more than a body has bytes
_KEY = "key"  # the API key of a request, in its state
_Body = TypeVar("_Body", bound=Sampling | TokenizeRequest | DetokenizeRequest)


class App:
    """The answer to every HTTP request: a new endpoint is a method here and a line in `_table`.

    Raises UsageError for a file of API keys that cannot be used."""

    def __init__(self, manager: RequestManager, listening: socket.socket) -> None:
        server = manager.config.server
        self._manager, self._created = manager, int(time.time())
        self._keys = api_keys(server)
        self._cross_origin = CrossOrigin(server.allow_origins)
        self._hosts = {name.lower() for name in (server.host, *server.allowed_hosts)}
        local = listening.family != socket.AF_UNIX and is_loopback(listening.getsockname()[0])
        self._checks_host = local and not self._keys
        self._metrics = PrometheusExporter(manager, server.metrics_compat)
        self._turns = asyncio.Lock()
        self.routes = self._table()
        bodies = [route.body for route in self.routes if route.body is not None]
        self._decoders: dict[type, BodyDecoder[Any]] = {
            kind: BodyDecoder(kind, server.strict_fields) for kind in bodies
        }
        self._by_path: dict[str, dict[str, Route]] = {}
        # The page is no part of the API, and so of no OpenAPI document.
        page = [Route("GET", "/", Page().show, "A chat page.", open=True)] if server.ui else []
        for route in [*self.routes, *page]:
            self._by_path.setdefault(route.path, {})[route.method] = route

    def _table(self) -> list[Route]:
        get, post = partial(Route, "GET"), partial(Route, "POST")
        chat = ChatRequest, answers.Chat, answers.ChatChunk
        raw = CompletionRequest, answers.Completion, answers.Completion
        response = ResponseRequest, answers.Response, answers.Response
        return [
            post("/v1/chat/completions", self._chat, "Continue a conversation.", *chat),
            post("/v1/responses", self._response, "Continue a conversation of items.", *response),
            post("/v1/completions", self._completion, "Continue a text or token ids.", *raw),
            get("/v1/models", self._models, "List what is served.", answer=answers.Models),
            get(_MODELS + "{model}", self._model, "One of them.", answer=answers.Model),
            post("/tokenize", self._tokenize, "Text to token ids.", TokenizeRequest, answers.Tokenized),
            post("/detokenize", self._detokenize, "Ids to text.", DetokenizeRequest, answers.Detokenized),
            get("/health", self._health, "200 when requests are answered, else 503.", open=True),
            get("/health/live", self._live, "200 while this process runs.", open=True),
            get("/health/ready", self._ready, "200 when new requests are taken, else 503.", open=True),
            get("/metrics", self._exposition, "Prometheus metrics, as text."),
            get("/version", self._version, "The engine's version.", answer=answers.Version),
            get("/server_info", self._info, "Configuration and load.", answer=dict),
            get("/openapi.json", self._openapi, "This interface as an OpenAPI document.", answer=dict),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        exchange.more_headers = self._cross_origin.headers(exchange)
        try:
            await self._dispatch(exchange)
        except Gone:
            pass
        except HttpError as error:
            if not exchange.started:
                await exchange.fail(error)
        except RequestError as error:
            await exchange.fail(refusal(error.code, str(error), error.param))
        except Exception:
            log.exception("a bug in answering %s (request %s):", scope["path"], exchange.id)
            if exchange.started:
                raise
            await exchange.fail(HttpError(500, f"internal error (request {exchange.id})", "internal_error"))
        finally:
            exchange.end()

    async def _dispatch(self, exchange: Exchange) -> None:
        if self._checks_host:
            self._check_host(exchange)
        path = exchange.scope["path"]
        # A model's name may have slashes of its own.
        methods = self._by_path.get(_MODELS + "{model}" if path.startswith(_MODELS) else path)
        preflight = None if methods is None else self._cross_origin.preflight(exchange, methods)
        if preflight is not None:  # it never has a key
            await exchange.reply(b"", 204, headers=preflight)
            return
        method = exchange.scope["method"]
        route = None if methods is None else methods.get("GET" if method == "HEAD" else method)
        if self._keys and not (route is not None and route.open):
            self._authenticate(exchange)
        if methods is None:
            raise HttpError(404, f"there is no {cut(path)}", "not_found")
        if route is None:
            allowed = ", ".join(methods)
            message, headers = f"{method} is not for this path; {allowed} is", {b"allow": allowed.encode()}
            raise HttpError(405, message, "method_not_allowed", headers=headers)
        await route.handler(exchange)

    def _check_host(self, exchange: Exchange) -> None:
        """Refuse pages of a site whose name was made to lead to this machine (DNS rebinding).

        Such a page asks by that name. Starlette's TrustedHostMiddleware knows names, and not all addresses of this
        machine."""
        if (header := exchange.header(b"host")) is None:
            return  # HTTP/1.0, which no browser speaks
        given = header.decode("latin-1")
        name = re.sub(r":\d*$", "", given).lower()
        if not (is_loopback(name.strip("[]")) or name.endswith(".localhost") or name in self._hosts):
            message = f"the Host {cut(given)!r} is not one of this server's; --allowed-host NAME adds one"
            raise HttpError(403, message, "host_not_allowed")

    def _authenticate(self, exchange: Exchange) -> None:
        kind, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
        if kind.lower() != b"bearer":
            given = exchange.header(b"x-api-key") or b""
        matches = [secrets.compare_digest(given.strip(), key) for key in self._keys]
        exchange.scope["state"][_KEY] = given.strip()
        if not any(matches):
            message, headers = (
                "give a valid key as Authorization: Bearer KEY, or as X-Api-Key: KEY",
                {b"www-authenticate": b"Bearer"},
            )
            raise HttpError(401, message, "invalid_api_key", headers=headers)

    # -- generation -------------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        body = await self._read(exchange, ChatRequest)
        await self._converse(exchange, body, body, chat.ChatStyle, f"chatcmpl-{exchange.id}")

    async def _response(self, exchange: Exchange) -> None:
        body = await self._read(exchange, ResponseRequest)
        await self._converse(exchange, body, responses.as_chat(body), responses.ResponseStyle, exchange.id)

    async def _converse(
        self, exchange: Exchange, body: Sampling, asked: ChatRequest, kind: type[ParsingStyle], name: str
    ) -> None:
        """Answer a chat in the style of `body`.

        Raises HttpError, which blames the style's prompt where the model has no chat."""
        self._check_ready()
        vocabulary, format = self._manager.texts.vocabulary, self._manager.texts.answer_format
        if not vocabulary.has_chat:
            raise invalid(kind.prompt, f"{no_chat(vocabulary)}; use /v1/completions", "no_chat_template")
        offer = offered(asked, format)
        style = kind(body, name, vocabulary, format, offer)
        requests = chat.generates(asked, self._manager.config, offer)
        await Generation(self._manager, exchange, style, requests, self._turns).run(bool(body.stream))

    async def _completion(self, exchange: Exchange) -> None:
        body = await self._read(exchange, CompletionRequest)
        style = completions.CompletionStyle(body, f"cmpl-{exchange.id}", self._manager.texts.vocabulary)
        requests = completions.generates(body, self._manager.config)
        await Generation(self._manager, exchange, style, requests, self._turns).run(bool(body.stream))

    async def _read(self, exchange: Exchange, kind: type[_Body]) -> _Body:
        """Return the body of a request, with the model's name and its salt filled in.

        If there are several API keys, only requests with the same key share prefix-cached prompts. Raises HttpError,
        RequestError or Gone."""
        content = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if content != b"application/json":
            raise HttpError(415, "the body must have Content-Type: application/json", "unsupported_media_type")
        raw = await exchange.body(self._manager.config.server.limits.max_body_bytes, self._manager.budget)
        body: _Body = self._decoders[kind].decode(raw)
        self._check_model(body.model)
        if isinstance(body, Sampling):
            body.model = body.model or self._manager.config.server.names[0]
            if len(self._keys) > 1:
                owner = hashlib.blake2b(exchange.scope["state"][_KEY], digest_size=16).hexdigest()
                body.cache_salt = f"{owner}/{body.cache_salt or ''}"
        return body

    def _check_ready(self) -> None:
        """Raise HttpError while the tokenizer may not have been loaded."""
        if self._manager.state == "loading":
            raise refusal("loading", "the model is still loading")

    def _check_model(self, name: str | None) -> None:
        names = self._manager.config.server.names
        if name is not None and name not in names:
            message = f"the model {cut(name)!r} is not served here; {', '.join(names)} is"
            raise HttpError(404, message, "model_not_found", "model")

    # -- tokens -----------------------------------------------------------------------------------------------------

    async def _tokenize(self, exchange: Exchange) -> None:
        body = await self._read(exchange, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        messages = None if body.messages is None else chat.conversation(body.messages)
        # The worker encodes the ids as JSON: for millions of them that takes time.
        job = Encode(
            body.prompt,
            messages,
            chat.options(body, body.tools or ()),
            body.add_special_tokens,
            _MOST_TOKENS,
            as_json=True,
            plain_tools=self._manager.texts.answer_format.plain_tools,
        )
        found = await self._look_up(exchange, job, "messages" if body.prompt is None else "prompt")
        if found.count > job.most:
            raise invalid(None, f"this text has {found.count} tokens; at most {job.most} are told")
        ids: Any = msgspec.Raw(found.ids)
        await exchange.reply_json(answers.Tokenized(found.count, self._manager.config.max_model_len, ids))

    async def _detokenize(self, exchange: Exchange) -> None:
        body = await self._read(exchange, DetokenizeRequest)
        beyond = [token for token in body.tokens if token >= self._manager.config.vocab_size]
        if beyond:
            raise invalid("tokens", f"token id {beyond[0]} is outside of the vocabulary")
        found = await self._look_up(exchange, Decode(body.tokens), "tokens")
        await exchange.reply_json(answers.Detokenized(found.text))

    async def _look_up(self, exchange: Exchange, job: Encode | Decode, param: str) -> Any:
        """Return the job's reply, or raise HttpError, or Gone if the client leaves before."""
        self._check_ready()
        work = asyncio.ensure_future(self._manager.texts.look_up(job))

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

    # -- about the engine -------------------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        names = self._manager.config.server.names
        await exchange.reply_json(answers.Models("list", [self._named(name) for name in names]))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.scope["path"].removeprefix(_MODELS)
        self._check_model(name)
        await exchange.reply_json(self._named(name))

    def _named(self, name: str) -> answers.Model:
        config = self._manager.config
        return answers.Model(name, "model", self._created, "ssd", config.target_name, config.max_model_len)

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(b"", 503 if self._manager.state in ("loading", "restarting") else 200)

    async def _live(self, exchange: Exchange) -> None:
        await exchange.reply(b"")

    async def _ready(self, exchange: Exchange) -> None:
        await exchange.reply(b"", 200 if self._manager.state == "ready" else 503)

    async def _exposition(self, exchange: Exchange) -> None:
        await exchange.reply(self._metrics.text(), kind=self._metrics.kind)

    async def _version(self, exchange: Exchange) -> None:
        await exchange.reply_json(answers.Version(__version__))

    async def _info(self, exchange: Exchange) -> None:
        await exchange.reply_json(server_info(self._manager))

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.reply_json(document(self.routes, self._manager.config, bool(self._keys)))


def server_info(manager: RequestManager) -> dict[str, object]:
    """Describe what runs here and how busy it is, without paths.

    `degraded`: it answers, but its draft is lost or given up. A parked draft is neither."""
    config, load = manager.config, manager.load
    degraded = config.has_draft and load.draft_state not in ("up", "parked")
    return {
        "version": __version__,
        "state": "degraded" if manager.state == "ready" and degraded else manager.state,
        "model": config.target_name,
        "names": config.server.names,
        "draft": config.draft_name if config.has_draft else None,
        "draft_state": load.draft_state if config.has_draft else None,
        "speculation": config.speculation,
        "plan": load.plan,
        "dtype": config.dtype,
        "device": config.device,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "limits": config.server.limits,
        "sampling_defaults": config.sampling.given(),
        **manager.texts.answer_format.names,
        "takes_enable_thinking": manager.texts.vocabulary.template.takes_thinking,
        "requests": {"open": manager.open_requests, "running": load.running, "waiting": load.waiting},
        "kv_cache_usage": load.kv_cache_usage,
    }
