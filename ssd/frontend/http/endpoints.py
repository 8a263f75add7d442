"""The endpoints of HTTP: their handlers and the table of routes."""

from __future__ import annotations

from typing import Any

import msgspec

from ssd import __version__
from ssd.frontend.http import answers, bodies, chat, completions
from ssd.frontend.http.asked import check_tools_are_told
from ssd.frontend.http.errors import invalid
from ssd.frontend.http.exchange import Exchange
from ssd.frontend.http.openapi import Route, document
from ssd.frontend.http.service import Service
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.text_jobs import Decode, Encode

_MOST_TOKENS = 8 << 20  # of `/tokenize`: more than a body has bytes


async def _chat(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, bodies.ChatRequest)
    await service.converse(exchange, body, chat.ChatStyle)


async def _completion(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, bodies.CompletionRequest)
    service.own(exchange, body)
    style = completions.CompletionStyle(body, f"cmpl-{exchange.id}", service.manager.texts.vocabulary)
    await completions.complete(service, exchange, body, style)


async def _tokenize(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, bodies.TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    service.check_ready()
    if body.tools:
        check_tools_are_told(service.manager.texts.answer_format)
    messages = None if body.messages is None else chat.conversation(body.messages)
    # The worker encodes the ids as JSON: for millions of them that takes time.
    job = Encode(
        body.prompt,
        messages,
        chat.options(body, body.tools or ()),
        body.add_special_tokens,
        _MOST_TOKENS,
        as_json=True,
        plain_tools=service.manager.texts.answer_format.plain_tools,
    )
    found = await service.look_up(exchange, job, "messages" if body.prompt is None else "prompt")
    if found.count > job.most:
        raise invalid(None, f"this text has {found.count} tokens; at most {job.most} are told")
    ids: Any = msgspec.Raw(found.ids)
    await exchange.reply_json(answers.Tokenized(found.count, service.manager.config.max_model_len, ids))


async def _detokenize(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, bodies.DetokenizeRequest)
    beyond = [token for token in body.tokens if token >= service.manager.config.vocab_size]
    if beyond:
        raise invalid("tokens", f"token id {beyond[0]} is outside of the vocabulary")
    found = await service.look_up(exchange, Decode(body.tokens), "tokens")
    await exchange.reply_json(answers.Detokenized(found.text))


async def _models(service: Service, exchange: Exchange) -> None:
    names = service.manager.config.server.names
    await exchange.reply_json(answers.Models("list", [_named(service, name) for name in names]))


async def _model(service: Service, exchange: Exchange) -> None:
    name = exchange.path["model"]
    service.check_model(name)
    await exchange.reply_json(_named(service, name))


def _named(service: Service, name: str) -> answers.Model:
    config = service.manager.config
    return answers.Model(name, "model", service.created, "ssd", config.target_name, config.max_model_len)


async def _health(service: Service, exchange: Exchange) -> None:
    await exchange.reply(b"", 503 if service.manager.state in ("loading", "restarting") else 200)


async def _ready(service: Service, exchange: Exchange) -> None:
    await exchange.reply(b"", 200 if service.manager.state == "ready" else 503)


async def _exposition(service: Service, exchange: Exchange) -> None:
    await exchange.reply(service.metrics.text(), kind=service.metrics.kind)


async def _version(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json(answers.Version(__version__))


async def _info(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json(server_info(service.manager))


async def _openapi(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json(document(service.routes, service.manager.config, bool(service.keys)))


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
        "compiled_kernels": manager.kernels,
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


_CHAT = bodies.ChatRequest, answers.Chat, answers.ChatChunk
_COMPLETION = bodies.CompletionRequest, answers.Completion, answers.Completion
ROUTES = [
    Route("POST", "/v1/chat/completions", _chat, "Continue a conversation.", *_CHAT),
    Route("POST", "/v1/completions", _completion, "Continue a text or token ids.", *_COMPLETION),
    Route("GET", "/v1/models", _models, "List what is served.", answer=answers.Models),
    Route("GET", "/v1/models/{model}", _model, "One of them.", answer=answers.Model),
    Route("POST", "/tokenize", _tokenize, "Text to token ids.", bodies.TokenizeRequest, answers.Tokenized),
    Route("POST", "/detokenize", _detokenize, "Ids to text.", bodies.DetokenizeRequest, answers.Detokenized),
    Route("GET", "/health", _health, "200 when requests are answered, else 503.", open=True),
    Route("GET", "/health/live", lambda _, exchange: exchange.reply(b""), "200 while this process runs.", open=True),
    Route("GET", "/health/ready", _ready, "200 when new requests are taken, else 503.", open=True),
    Route("GET", "/metrics", _exposition, "Prometheus metrics, as text."),
    Route("GET", "/version", _version, "The engine's version.", answer=answers.Version),
    Route("GET", "/server_info", _info, "Configuration and load.", answer=dict),
    Route("GET", "/openapi.json", _openapi, "This interface as an OpenAPI document.", answer=dict),
]
