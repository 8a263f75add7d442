"""Admission of requests: checks, token ids of texts, grammars. A refusal is a `RequestError` for the client."""

from __future__ import annotations

import array
import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ssd.config.engine import EngineConfig
from ssd.config.params import DRAFTED, Pooling, SamplingParams, Speculation
from ssd.errors import RequestError, UsageError
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.grammars import GrammarChecker
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.frontend.request import Request
from ssd.frontend.text_jobs import Broken, Compiled, Decode, Encode, Encoded, Fill, TextWorker
from ssd.frontend.text_pool import TextPool
from ssd.ipc import sockets
from ssd.ipc.public import Generate
from ssd.law import MAX_SEED
from ssd.speculation import backups as speculators
from ssd.speculation.rules import AcceptanceRule

log = logging.getLogger("ssd.frontend")

_LOOKUPS = 16  # concurrent look-ups of texts that belong to no request
# In bytes. The log-probabilities of a prompt come in one message, and may take half of it.
_LOGPROBS_BYTES = sockets.INTERNAL_BYTES // 2
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 40, 15


class Preparation:
    """Has text workers encode prompts and compile grammars, then gives a request and its token ids to `accept`.

    `accept` may raise RequestError. `fail` ends a request with a code, a message and the parameter to blame.
    `preparing` has the requests that wait for a text worker, and cancelled ones too, since they take memory."""

    def __init__(
        self, config: EngineConfig, accept: Callable[[Request, list[int]], None], fail: Callable[..., None]
    ) -> None:
        self.vocabulary = Vocabulary()
        self.answer_format = AnswerFormat(config.server, self.vocabulary)
        self.preparing: set[Request] = set()
        self._config, self._accept, self._fail = config, accept, fail
        self._pool = TextPool(Path(config.target))
        self._grammars = GrammarChecker(self._pool, config.server.limits)
        self._lookups = 0

    async def load(self) -> None:
        """Load the tokenizer; call it before any other method. Raises UsageError."""
        self.vocabulary = await self._pool.start()
        self.answer_format = AnswerFormat(self._config.server, self.vocabulary)

    def close(self) -> None:
        self._pool.close()

    async def look_up(self, job: Encode | Decode) -> Any:
        """Return the `Encoded` or `Decoded` of a text of no request. Raises RequestError, also if too many wait."""
        if self._lookups == _LOOKUPS:
            raise RequestError("overloaded", f"{_LOOKUPS} texts are being looked up already")
        self._lookups += 1
        try:
            reply = await self._pool.do(TextWorker.LOOKUP, job)
        finally:
            self._lookups -= 1
        if isinstance(reply, Broken):
            raise RequestError(reply.code, reply.message)
        return reply

    async def fill_in(self, job: Fill) -> Encoded:
        reply = await self._pool.do(TextWorker.LONG if job.is_long else TextWorker.PROMPT, job)
        if isinstance(reply, Broken):
            raise RequestError(reply.code, reply.message)
        return reply

    def begin(self, request: Request, message: Generate) -> None:
        """Encode the prompt of a request unless it is ids, then go on. Raises RequestError."""
        text = text_of(message, self._config, self.vocabulary, self.answer_format.plain_tools)
        if text is None:
            ids = message.token_ids or []
            if request.params.truncate_prompt_tokens is not None:
                ids = ids[-request.params.truncate_prompt_tokens :]
            self._encoded(request, message, ids, len(ids))
            return

        def encoded(reply: Encoded) -> None:
            self._encoded(request, message, array.array("I", reply.ids).tolist(), reply.count)

        worker = TextWorker.LONG if text.is_long else TextWorker.PROMPT if text.messages is None else TextWorker.CHAT
        request.encoding = self._pool.do(worker, text)
        self._wait(request, request.encoding, encoded)

    def _encoded(self, request: Request, message: Generate, ids: list[int], count: int) -> None:
        token_ids = checked_ids(ids, count, message, self._config)
        asked = request.params.structured
        if asked is None:
            self._accept(request, token_ids)
            return

        def compiled(reply: Compiled) -> None:
            request.params = msgspec.structs.replace(request.params, structured=reply.grammar)
            if reply.counts_tokens:  # which a matcher does along the text, and not along drafts
                request.params = msgspec.structs.replace(request.params, speculation=Speculation("ar"))
            self._accept(request, token_ids)

        scope = request.owner, request.params.cache_salt
        compiling = self._grammars.compile(asked, scope, request.free(token_ids) if request.free else "")
        self._wait(request, compiling, compiled, "structured")

    def _wait(
        self, request: Request, work: asyncio.Future[Any], go_on: Callable[[Any], None], param: str | None = None
    ) -> None:
        """Call `go_on` with the reply of a text worker. If that is an error, `param` is to blame."""

        def replied(done: asyncio.Future[Any]) -> None:
            self.preparing.discard(request)
            request.encoding = None
            if request.ended or done.cancelled():
                return
            reply = done.result()
            try:
                with admission():
                    if isinstance(reply, Broken):
                        raise RequestError(reply.code, reply.message, param)
                    go_on(reply)
            except RequestError as error:
                self._fail(request, error.code, str(error), error.param)

        self.preparing.add(request)
        work.add_done_callback(replied)


def complete(params: SamplingParams | None, config: EngineConfig) -> SamplingParams:
    """Fill in seed and speculation; None is the model's own sampling.

    Raises RequestError for parameters that are invalid or that this engine cannot serve."""
    params = config.sampling.params() if params is None else params
    params.check()
    if params.pooling is not None:
        params = SamplingParams(
            max_tokens=1,
            seed=0,
            speculation=Speculation("ar"),
            store=False,
            pooling=_pooling(config) if params.pooling == "auto" else params.pooling,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            cache_salt=params.cache_salt,
        )
    speculation = params.speculation or config.speculation
    cause = _unable(speculation, speculation.rule(params.temperature), config)
    if cause is not None:
        raise RequestError("invalid_request", cause, "speculation")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        tokens = getattr(params, name)
        if tokens and max(tokens) >= config.vocab_size:
            raise RequestError("invalid_request", _outside(max(tokens), config), name)
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    return msgspec.structs.replace(params, seed=seed, speculation=speculation)


def _pooling(config: EngineConfig) -> Pooling:
    from ssd.models.checkpoint import pooling_of  # a MiB that few frontends need

    try:
        return pooling_of(Path(config.target))
    except UsageError as error:
        raise RequestError("invalid_request", str(error), "pooling") from None


def text_of(
    message: Generate, config: EngineConfig, vocabulary: Vocabulary, plain_tools: bool = False
) -> Encode | None:
    """Return the text to encode, or None where the prompt is token ids.

    Raises RequestError for an ambiguous or empty prompt, and for one too long for the context in any encoding."""
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request", f"give exactly one of prompt, token_ids and messages; got {', '.join(given) or 'none'}"
        )
    length = len(message.prompt or "") + sum(len(said.content) for said in message.messages or ())
    keep = message.params.truncate_prompt_tokens if message.params else None
    if keep is None and length > config.max_model_len * vocabulary.longest_token:
        raise RequestError(
            "context_length_exceeded",
            f"a prompt of {length} characters; the context of {config.max_model_len} tokens cannot hold it",
        )
    if message.token_ids is not None:
        return None
    # A tokenizer may turn an empty text into its special tokens.
    if not message.prompt and not message.messages:
        raise RequestError("invalid_request", "the prompt is empty")
    if message.messages is not None and not vocabulary.has_chat:
        raise RequestError("invalid_request", no_chat(vocabulary))
    # Only the count of a prompt that is too long is needed.
    most = config.max_model_len
    return Encode(message.prompt, message.messages, message.chat, most=most, keep=keep, plain_tools=plain_tools)


def no_chat(vocabulary: Vocabulary) -> str:
    return vocabulary.no_chat or "this model has no chat template; give a raw prompt"


def checked_ids(token_ids: list[int], count: int, message: Generate, config: EngineConfig) -> list[int]:
    """Check the ids of a prompt; `count` is their number, also where they were left out.

    Raises RequestError for a prompt that is empty, outside of the vocabulary, or too long for the context or for the
    log-probabilities that it asks for."""
    if not count:
        raise RequestError("invalid_request", "the prompt is empty")
    if token_ids and max(token_ids) >= config.vocab_size:
        cause = _outside(max(token_ids), config)
        if message.token_ids is None:
            cause = f"{cause}: the tokenizer beside the model does not match it"
        raise RequestError("invalid_request", cause)
    if count >= config.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {count} tokens{' with its tools' if message.chat.tools != '[]' else ''}; the context of "
            f"{config.max_model_len} tokens must hold it and at least one more",
        )
    wanted = message.params.prompt_logprobs if message.params else None
    if wanted is not None and count > most_scored(wanted):
        raise RequestError(
            "invalid_request",
            f"the prompt has {count} tokens; log-probabilities with {wanted} alternatives are given for "
            f"prompts of at most {most_scored(wanted)}",
        )
    return token_ids


def most_scored(alternatives: int) -> int:
    """Return the longest prompt, in tokens, that can get log-probabilities with `alternatives` each."""
    return _LOGPROBS_BYTES // (_TOKEN_BYTES + _ALTERNATIVE_BYTES * alternatives)


def _unable(speculation: Speculation, rule: AcceptanceRule, config: EngineConfig) -> str | None:
    """Return why this engine cannot use `speculation`, or None."""
    if speculation.mode in DRAFTED and not config.has_draft:
        return f"mode {speculation.mode} needs a draft, and this engine runs without one"
    if config.inline_draft and not config.drafts_apart and speculation.mode in ("ngram", "ssd"):
        return (
            f"mode {speculation.mode} is not served where the draft has no process of its own: sd, ar and auto are; "
            "start the engine with --mode auto or --inline-draft off"
        )
    if speculation.backup not in speculators.names():
        return f"no backup {speculation.backup!r}; there are {', '.join(speculators.names())}"
    if speculation.mode in ("ar", "ngram") or not rule.needs_draft_probs:
        return None
    provided = config.speculation
    name = speculation.sampler
    if not provided.rule().needs_draft_probs:
        return f"sampler {name}: this engine was started without it; start it with --sampler {name}"
    if speculation.longest > provided.longest or speculation.chains > provided.chains:
        return f"sampler {name}: K and chains must not be more than those that the engine was started with"
    return None


def _outside(token: int, config: EngineConfig) -> str:
    return f"token id {token} is outside of the vocabulary of {config.vocab_size} tokens"


@contextmanager
def admission() -> Iterator[None]:
    """Turn any error of the block into a RequestError for the client."""
    try:
        yield
    except RequestError:
        raise
    except Exception:
        log.exception("a bug in admission:")
        raise RequestError("internal_error", "the request could not be prepared") from None
