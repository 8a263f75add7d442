"""The request manager: every open request from admission to its end, for ZeroMQ and HTTP clients."""

from __future__ import annotations

import array
import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.config.params import Structured
from ssd.errors import RequestError
from ssd.frontend.admission import checked_ids, complete, text_of
from ssd.frontend.detokenization import Detokenizer, Vocabulary
from ssd.frontend.grammars import GrammarChecker
from ssd.frontend.memory_budget import MemoryBudget
from ssd.frontend.output_collector import by_origin
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.frontend.request import Observer, Request
from ssd.frontend.text_jobs import Broken, Compiled, Decode, Encode, Encoded, TextWorker
from ssd.frontend.text_pool import TextPool
from ssd.ipc.messages import Abort, Emission, Load, Step, Submit
from ssd.ipc.public import Done, Failed, FinishReason, Generate, Message, Metrics, Usage

log = logging.getLogger("ssd.frontend")

State = Literal["loading", "ready", "restarting", "draining"]
_LOOKUPS = 16  # concurrent look-ups of texts that belong to no request
_AGAIN_S = 0.005
_LOSSES = 2

_Made = TypeVar("_Made")


class RequestManager:
    """Owns every open request: admits it, submits it to the target, turns its tokens into text and ends it once.

    Lives in one event loop. `send` sends a message to the target and returns False if it could not."""

    def __init__(self, config: EngineConfig, epoch: int, send: Callable[[Message], bool]) -> None:
        self.config = config
        self.vocabulary = Vocabulary()
        self.answer_format = AnswerFormat(config.server, self.vocabulary)
        self.state: State = "loading"
        self.load = Load()
        self.bad_frames = 0
        self.observers: list[Observer] = []
        self.budget = MemoryBudget()
        self._send = send
        self._numbers = epoch << 32
        self._limits = config.server.limits
        self._open: dict[int, Request] = {}
        self._has_target = False
        self._unsent: deque[Request] = deque()  # to be submitted again, to a new target
        # Requests whose prompt is being encoded or grammar compiled. Cancelled ones count: they take memory too.
        self._preparing: set[Request] = set()
        self._texts = TextPool(Path(config.target))
        self._grammars = GrammarChecker(self._texts, config.server.limits)
        self._lookups = 0

    async def load_tokenizer(self) -> None:
        """Load the tokenizer; call it before any other method. Raises UsageError where it cannot be read."""
        self.vocabulary = await self._texts.start()
        self.answer_format = AnswerFormat(self.config.server, self.vocabulary)

    @property
    def open_requests(self) -> int:
        return len(self._open) + len(self._preparing)

    def check(self, count: int = 1) -> None:
        """Raise RequestError if `count` more requests cannot be taken now."""
        limit = self._limits.max_open_requests
        if count > limit:
            raise RequestError("invalid_request", f"{count} requests at once; at most {limit} can be open")
        if self.state == "loading":
            raise RequestError("loading", "the model is still loading")
        if self.state == "restarting":
            raise RequestError("restarting", "the engine is restarting; try again in some seconds")
        if self.state == "draining":
            raise RequestError("shutting_down", "the engine is shutting down")
        if self.open_requests + count > limit:
            raise RequestError("overloaded", f"{self.open_requests} requests are open already")

    def open(
        self,
        message: Generate,
        wake: Callable[[Request], None],
        shown: Set[int] = frozenset(),
        by_origin: bool = False,
        free: Callable[[Sequence[int]], str] | None = None,
        owner: str = "",
        trace: Mapping[str, str] | None = None,
    ) -> Request:
        """Begin a request and return it; `wake` is called whenever it has news.

        Its text has the special tokens in `shown`. With `by_origin`, a chunk's tokens are all of one origin. `free`
        returns, for the prompt's ids, the rules of the text that may come before the structured answer
        (`ssd.grammar.source.serialized`).

        Raises RequestError for an error that is known at once. An error found later, as the prompt is encoded or the
        grammar compiled, ends the request with `Failed` before it is admitted."""
        self.check()
        with _admission():
            request = Request(message.id, complete(message.params, self.config), wake, shown, by_origin)
            request.free, request.owner, request.trace = free, owner, trace or {}
            self._begin(request, message)
        return request

    async def look_up(self, job: Encode | Decode) -> Any:
        """Return the `Encoded` or `Decoded` of a text that belongs to no request.

        Raises RequestError for a text that cannot be handled, and when too many wait already."""
        if self._lookups == _LOOKUPS:
            raise RequestError("overloaded", f"{_LOOKUPS} texts are being looked up already")
        self._lookups += 1
        try:
            reply = await self._texts.do(TextWorker.LOOKUP, job)
        finally:
            self._lookups -= 1
        if isinstance(reply, Broken):
            raise RequestError(reply.code, reply.message)
        return reply

    def cancel(self, request: Request) -> None:
        """End a request without an answer to its client."""
        if not request.ended:
            if request.number in self._open:
                self._abort(request.number)
            self._close(request, "abort")

    def abort(self, request: Request) -> None:
        """End a request with its output so far."""
        if not request.ended:
            if request.number in self._open:
                self._abort(request.number)
            self._finish(request, "abort")

    def abort_all(self) -> None:
        for request in [*self._open.values(), *self._preparing]:
            self.abort(request)

    def drop(self, request: Request) -> None:
        """End a request whose client does not read: discard its unread output and fail it with `slow_reader`."""
        self.cancel(request)
        why = "the client did not read its tokens, so the request was aborted"
        request.output.drop(Failed(request.output.name, "slow_reader", why))
        request.wake(request)

    def dropped_frame(self) -> None:
        """Count a frame on one of the frontend's sockets that was not a valid message."""
        self.bad_frames += 1
        for observer in self.observers:
            observer.dropped_frame()

    def close(self) -> None:
        self._texts.close()

    # -- admission --------------------------------------------------------------------------------------------------

    def _compile(self, request: Request, token_ids: list[int], asked: Structured) -> None:
        """Have a text worker compile the grammar of the answer, then admit the request."""
        self._preparing.add(request)
        compiling = self._grammars.compile(asked, request.free(token_ids) if request.free else "")
        compiling.add_done_callback(lambda done: self._compiled(request, token_ids, done))

    def _compiled(self, request: Request, token_ids: list[int], work: asyncio.Future[Compiled | Broken]) -> None:
        reply = self._reply(request, work)
        if reply is None:
            return
        try:
            with _admission():
                if isinstance(reply, Broken):
                    raise RequestError(reply.code, reply.message, "structured")
                request.params = replace(request.params, structured=reply.grammar)
                self._accept(request, token_ids)
        except RequestError as error:
            self._fail(request, error.code, str(error), error.param)

    def _reply(self, request: Request, work: asyncio.Future[_Made]) -> _Made | None:
        """Return a text worker's reply for a request; None if the request has ended meanwhile."""
        self._preparing.discard(request)
        request.encoding = None
        return None if request.ended or work.cancelled() else work.result()

    def _begin(self, request: Request, message: Generate) -> None:
        """Encode the prompt of a request unless it is ids, then go on with the ids. Raises RequestError."""
        text = text_of(message, self.config, self.vocabulary, self.answer_format.plain_tools)
        if text is None:
            ids = message.token_ids or []
            if request.params.truncate_prompt_tokens is not None:
                ids = ids[-request.params.truncate_prompt_tokens :]
            self._encoded(request, checked_ids(ids, len(ids), message, self.config))
        else:
            self._prepare(request, message, text)

    def _prepare(self, request: Request, message: Generate, text: Encode) -> None:
        """Have a text worker encode the prompt of a request, then go on with the ids."""
        worker = TextWorker.LONG if text.is_long else TextWorker.PROMPT if text.messages is None else TextWorker.CHAT
        work = request.encoding = self._texts.do(worker, text)
        self._preparing.add(request)
        work.add_done_callback(lambda done: self._prepared(request, message, done))

    def _prepared(self, request: Request, message: Generate, work: asyncio.Future[Encoded | Broken]) -> None:
        reply = self._reply(request, work)
        if reply is None:
            return
        try:
            with _admission():
                if isinstance(reply, Broken):
                    raise RequestError(reply.code, reply.message)
                ids = array.array("I", reply.ids).tolist()
                self._encoded(request, checked_ids(ids, reply.count, message, self.config))
        except RequestError as error:
            self._fail(request, error.code, str(error))

    def _encoded(self, request: Request, token_ids: list[int]) -> None:
        if request.params.structured is None:
            self._accept(request, token_ids)
        else:
            self._compile(request, token_ids, request.params.structured)

    def _accept(self, request: Request, token_ids: list[int]) -> None:
        submit = Submit(self._numbers, token_ids, request.params, request.owner)
        if self._has_target and not self._send(submit):
            raise RequestError("overloaded", "the engine takes no more requests at the moment")
        assert request.params.speculation is not None, "complete parameters have one"
        request.number, request.prompt = self._numbers, array.array("I", token_ids)
        request.metrics = Metrics(mode=request.params.speculation.mode)
        params = request.params
        request.detokenizer = Detokenizer(
            self.vocabulary,
            params.stop,
            params.min_tokens,
            params.include_stop_str_in_output,
            request.shown if params.skip_special_tokens else self.vocabulary.silent,
        )
        request.admitted = True
        self._numbers += 1
        self._open[request.number] = request
        for observer in self.observers:
            observer.opened(request)
        request.wake(request)

    # -- the target -------------------------------------------------------------------------------------------------

    def target_lost(self) -> None:
        """Fail the requests that a dead target had begun, and keep the others for the next target.

        A request that two targets had when they died fails too, since it may be the cause. While the engine drains,
        all requests fail."""
        last = self.state == "draining"
        if self.state == "ready":
            self.state = "restarting"
        self.load = Load()
        had = set(self._open.values()).difference(self._unsent) if self._has_target else set()
        for observer in self.observers if self._has_target else ():
            observer.target_lost()
        self._unsent.clear()
        for request in [*self._open.values(), *(self._preparing if last else ())]:
            request.losses += request in had
            if request.begun or last or request.losses == _LOSSES:
                self._fail(request, "engine_restarted", "the engine restarted in the middle of this request; try again")
        self._has_target = False

    def target_back(self) -> None:
        """Submit all open requests to a new target."""
        if self.state != "draining":
            self.state = "ready"
        self._has_target = True
        self._unsent.clear()
        self._unsent.extend(self._open.values())
        self._submit_again()

    def _submit_again(self) -> None:
        while self._unsent:
            request = self._unsent[0]
            submit = Submit(request.number, request.prompt.tolist(), request.params, request.owner)
            if not request.ended and not self._send(submit):
                asyncio.get_running_loop().call_later(_AGAIN_S, self._submit_again)
                return
            self._unsent.popleft()

    def step(self, step: Step) -> None:
        """Pass the output of one target step on to its requests."""
        self.load = step.load
        for observer in self.observers:
            observer.stepped(step.load)
        for emission in step.emissions:
            request = self._open.get(emission.request)
            if request is not None:
                self._pass_on(request, emission)
            elif emission.finish_reason is None:  # the abort was not read yet, or lost in a full queue
                self._abort(emission.request)

    def _pass_on(self, request: Request, emission: Emission) -> None:
        try:
            self._emit(request, emission)
        except Exception:
            log.exception("a bug in passing tokens on:")
            if not request.ended:
                self._abort(request.number)
                self._fail(request, "internal_error", "the tokens could not be passed on")

    def _emit(self, request: Request, emission: Emission) -> None:
        assert request.detokenizer is not None, "admitted requests have one"
        request.begun = True
        for observer in self.observers:
            observer.emitted(request, emission)
        request.metrics = emission.metrics or request.metrics
        unread, used = request.output.tokens, 0
        for origin, ids in by_origin(emission) if request.by_origin else ((None, emission.token_ids),):
            ended = emission.finish_reason == "stop" and used + len(ids) == len(emission.token_ids)
            text, count = request.detokenizer.feed(ids, ended)
            if count:
                logprobs = None if emission.logprobs is None else emission.logprobs[used : used + count]
                request.output.add(text, ids[:count], logprobs, None if used else emission.prompt_logprobs, origin)
            used += count
            if request.detokenizer.stopped:
                break
        request.completion_tokens += used
        if emission.finish_reason == "error":
            self._fail(request, "engine_error", emission.error or "the engine failed")
        elif emission.finish_reason is not None:
            self._finish(request, emission.finish_reason)
        elif request.detokenizer.stopped:
            self._abort(request.number)
            self._finish(request, "stop")
        elif unread > 0 and request.output.tokens > self._limits.slow_reader_tokens:
            self.drop(request)  # only if it had something unread before this step
        elif used:
            request.wake(request)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        text = request.detokenizer.finish() if request.detokenizer else ""
        reason = "stop" if request.detokenizer and request.detokenizer.stopped else reason
        usage = Usage(len(request.prompt), request.completion_tokens)
        request.output.end(Done(request.output.name, reason, text, request.prompt.tolist(), usage, request.metrics))
        self._close(request, reason)
        request.wake(request)

    def _fail(self, request: Request, code: str, message: str, param: str | None = None) -> None:
        request.blamed = param
        request.output.end(Failed(request.output.name, code, message[:512]))
        self._close(request, "error")
        request.wake(request)

    def _close(self, request: Request, reason: str) -> None:
        request.ended = True
        if request.encoding is not None:
            request.encoding.cancel()
        self._open.pop(request.number, None)
        for observer in self.observers if request.admitted else ():
            observer.ended(request, reason)

    def _abort(self, number: int) -> None:
        self._send(Abort(number))


@contextmanager
def _admission() -> Iterator[None]:
    """Turn any error of the block into a RequestError for the client."""
    try:
        yield
    except RequestError:
        raise
    except Exception:
        log.exception("a bug in admission:")
        raise RequestError("internal_error", "the request could not be prepared") from None
