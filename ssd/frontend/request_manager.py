"""The request manager: every open request from admission to its end, for ZeroMQ and HTTP clients."""

from __future__ import annotations

import array
import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal

from ssd.config.engine import EngineConfig
from ssd.errors import RequestError
from ssd.frontend.admission import Preparation, admission, complete
from ssd.frontend.detokenization import Detokenizer
from ssd.frontend.memory_budget import MemoryBudget
from ssd.frontend.request import Observer, Request
from ssd.ipc.messages import Abort, Emission, Load, Step, Submit
from ssd.ipc.public import Done, Failed, FinishReason, Generate, Message, Metrics, Usage

log = logging.getLogger("ssd.frontend")

State = Literal["loading", "ready", "restarting", "draining"]
_AGAIN_S = 0.005
_LOSSES = 2
MAX_UNREAD = 4096
"""Unread tokens of a stream at which its client is cut off; `ssd.client.inboxes` has the same limit."""


class Submissions:
    """The admitted requests, in `open` by number, which the target computes; the next target gets those left open.

    `send` sends a message to the target and returns False if it could not."""

    def __init__(self, epoch: int, send: Callable[[Message], bool]) -> None:
        self.open: dict[int, Request] = {}
        self.send = send
        self._number = epoch << 32  # of the next request
        self._has_target = False
        self._unsent: deque[Request] = deque()  # to be submitted again, to a new target

    def submit(self, request: Request, token_ids: list[int]) -> None:
        """Give a request its number and send it, if there is a target. Raises RequestError if that takes no more."""
        submit = Submit(self._number, token_ids, request.params, request.owner)
        if self._has_target and not self.send(submit):
            raise RequestError("overloaded", "the engine takes no more requests at the moment")
        request.number, request.prompt = self._number, array.array("I", token_ids)
        self._number += 1
        self.open[request.number] = request

    def abort(self, request: Request) -> None:
        if request.number in self.open:
            self.send(Abort(request.number))

    def target_lost(self) -> set[Request] | None:
        """Return the requests that the dead target had; None if there was no target."""
        had = set(self.open.values()).difference(self._unsent) if self._has_target else None
        self._has_target = False
        self._unsent.clear()
        return had

    def target_back(self) -> None:
        self._has_target = True
        self._unsent = deque(self.open.values())
        self._submit_again()

    def _submit_again(self) -> None:
        while self._unsent:
            request = self._unsent[0]
            submit = Submit(request.number, request.prompt.tolist(), request.params, request.owner)
            if not request.ended and not self.send(submit):
                asyncio.get_running_loop().call_later(_AGAIN_S, self._submit_again)
                return
            self._unsent.popleft()


class RequestManager:
    """Owns every open request: admits it, submits it to the target, turns its tokens into text and ends it once.

    Lives in one event loop."""

    def __init__(self, config: EngineConfig, epoch: int, send: Callable[[Message], bool]) -> None:
        self.config = config
        self.texts = Preparation(config, self._accept, self._fail)
        self.state: State = "loading"
        self.load = Load()
        self.kernels = True
        self.bad_frames = 0
        self.observers: list[Observer] = []
        self.budget = MemoryBudget()
        self._submissions = Submissions(epoch, send)

    @property
    def open_requests(self) -> int:
        return len(self._submissions.open) + len(self.texts.preparing)

    def check(self, count: int = 1) -> None:
        """Raise RequestError if `count` more requests cannot be taken now."""
        limit = self.config.server.limits.max_open_requests
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
        reserve: Callable[[int], None] | None = None,
    ) -> Request:
        """Begin a request and return it; `wake` is called whenever it has news.

        Its text has the special tokens in `shown`. With `by_origin`, a chunk's tokens are all of one origin. `free`
        returns, for the prompt's ids, the rules of the text that may come before the structured answer. `reserve` gets
        the most tokens of prompt and answer, or raises RequestError.

        Raises RequestError for an error that is known at once. A later one ends the request with `Failed` before it is
        admitted."""
        self.check()
        with admission():
            request = Request(message.id, complete(message.params, self.config), wake, shown, by_origin)
            request.free, request.owner, request.trace, request.reserve = free, owner, trace or {}, reserve
            self.texts.begin(request, message)
        return request

    def cancel(self, request: Request) -> None:
        """End a request without an answer to its client."""
        if not request.ended:
            self._submissions.abort(request)
            self._close(request, "abort")

    def abort(self, request: Request) -> None:
        """End a request with its output so far."""
        if not request.ended:
            self._submissions.abort(request)
            self._finish(request, "abort")

    def abort_all(self) -> None:
        for request in [*self._submissions.open.values(), *self.texts.preparing]:
            self.abort(request)

    def drop(self, request: Request) -> None:
        """End a request whose client does not read: discard its unread output and fail it with `slow_reader`."""
        self.cancel(request)
        why = "the client did not read its tokens, so the request was aborted"
        request.output.drop(Failed(request.output.name, "slow_reader", why))
        request.wake(request)

    def dropped_frame(self) -> None:
        self.bad_frames += 1
        for observer in self.observers:
            observer.dropped_frame()

    def _accept(self, request: Request, token_ids: list[int]) -> None:
        params = request.params
        if request.reserve is not None:
            request.reserve(min(len(token_ids) + params.max_tokens, self.config.max_model_len))
        self._submissions.submit(request, token_ids)
        request.detokenizer = Detokenizer(
            self.texts.vocabulary,
            params.stop,
            params.min_tokens,
            params.include_stop_str_in_output,
            request.shown if params.skip_special_tokens else self.texts.vocabulary.silent,
        )
        assert params.speculation is not None, "complete parameters have one"
        request.metrics = Metrics(mode=params.speculation.mode)
        request.admitted = True
        for observer in self.observers:
            observer.opened(request)
        request.wake(request)

    # -- the target -------------------------------------------------------------------------------------------------

    def target_lost(self) -> None:
        """Fail the requests that a dead target had begun, and keep the others for the next target.

        A request that two targets had when they died fails too, since it may be the cause. While the engine drains, all
        fail."""
        last = self.state == "draining"
        if self.state == "ready":
            self.state = "restarting"
        self.load = Load()
        had = self._submissions.target_lost()
        for observer in () if had is None else self.observers:
            observer.target_lost()
        for request in [*self._submissions.open.values(), *(self.texts.preparing if last else ())]:
            request.losses += request in (had or ())
            if request.begun or last or request.losses == _LOSSES:
                self._fail(request, "engine_restarted", "the engine restarted in the middle of this request; try again")

    def target_back(self) -> None:
        if self.state != "draining":
            self.state = "ready"
        self._submissions.target_back()

    def step(self, step: Step) -> None:
        self.load = step.load
        for observer in self.observers:
            observer.stepped(step.load)
        for emission in step.emissions:
            request = self._submissions.open.get(emission.request)
            if request is not None:
                try:
                    self._emit(request, emission)
                except Exception:
                    log.exception("a bug in passing tokens on:")
                    if not request.ended:
                        self._submissions.abort(request)
                        self._fail(request, "internal_error", "the tokens could not be passed on")
            elif emission.finish_reason is None:  # the abort was not read yet, or lost in a full queue
                self._submissions.send(Abort(emission.request))

    def _emit(self, request: Request, emission: Emission) -> None:
        request.begun = True
        for observer in self.observers:
            observer.emitted(request, emission)
        unread, used = request.output.tokens, request.add(emission)
        assert request.detokenizer is not None, "admitted requests have one"
        if emission.finish_reason == "error":
            self._fail(request, "engine_error", emission.error or "the engine failed")
        elif emission.finish_reason is not None:
            self._finish(request, emission.finish_reason)
        elif request.detokenizer.stopped:
            self._submissions.abort(request)
            self._finish(request, "stop")
        elif unread > 0 and request.output.tokens > MAX_UNREAD:
            self.drop(request)  # only if it had something unread before this step
        elif used:
            request.wake(request)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        text = request.detokenizer.finish() if request.detokenizer else ""
        reason = "stop" if request.detokenizer and request.detokenizer.stopped else reason
        usage = Usage(len(request.prompt), request.completion_tokens)
        prompt = request.prompt.tolist()
        done = Done(request.output.name, reason, text, prompt, usage, request.metrics, request.embedding)
        request.output.end(done)
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
        self._submissions.open.pop(request.number, None)
        for observer in self.observers if request.admitted else ():
            observer.ended(request, reason)
