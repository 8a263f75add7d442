"""One open request, and the base class of observers of requests."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Callable, Mapping, Sequence, Set

from ssd.config.params import SamplingParams
from ssd.frontend.detokenization import Detokenizer
from ssd.frontend.output_collector import OutputCollector, by_origin
from ssd.frontend.text_jobs import Broken, Encoded
from ssd.ipc.messages import Emission, Load
from ssd.ipc.public import Metrics


class Observer:
    """Base of classes whose methods the request manager calls for each event; `emitted` before the tokens are added."""

    def opened(self, request: Request) -> None: ...
    def emitted(self, request: Request, emission: Emission) -> None: ...
    def ended(self, request: Request, reason: str) -> None: ...
    def stepped(self, load: Load) -> None: ...
    def dropped_frame(self) -> None: ...
    def target_lost(self) -> None: ...


class Request:
    """One open request; `wake` is called whenever there is news.

    `admitted`: its prompt was accepted. `begun`: the target has sent an emission for it. `stop_token`: its last token
    ended it, and its text does not show it. `losses`: the number of targets that died while they had it. `blamed`: the
    parameter for which it was refused. `by_origin`: its chunks are `Part`s. `owner` is the client's key or its name, or
    "". `trace`: headers that make it part of its client's trace."""

    def __init__(
        self,
        name: int,
        params: SamplingParams,
        wake: Callable[[Request], None],
        shown: Set[int] = frozenset(),
        by_origin: bool = False,
    ) -> None:
        self.output = OutputCollector(name)
        self.params = params
        self.prompt = array.array("I")  # takes a tenth of a list's memory
        self.admitted = self.begun = False
        self.losses = 0
        self.ended = False
        self.number = -1
        self.metrics = Metrics()
        self.embedding: bytes | None = None
        self.completion_tokens = 0
        self.stop_token = False
        self.wake, self.shown, self.by_origin = wake, shown, by_origin
        self.detokenizer: Detokenizer | None = None
        self.encoding: asyncio.Future[Encoded | Broken] | None = None
        self.blamed: str | None = None
        self.owner = ""
        self.trace: Mapping[str, str] = {}
        self.free: Callable[[Sequence[int]], str] | None = None
        self.reserve: Callable[[int], None] | None = None

    def add(self, emission: Emission) -> int:
        """Add a step's tokens and their text to the output, up to a stop; return the number of tokens."""
        assert self.detokenizer is not None, "admitted requests have one"
        self.metrics, self.embedding = emission.metrics or self.metrics, emission.embedding
        used = 0
        for origin, ids in by_origin(emission) if self.by_origin else ((None, emission.token_ids),):
            ended = emission.finish_reason == "stop" and used + len(ids) == len(emission.token_ids)
            text, count = self.detokenizer.feed(ids, ended)
            if count:
                logprobs = None if emission.logprobs is None else emission.logprobs[used : used + count]
                self.output.add(text, ids[:count], logprobs, None if used else emission.prompt_logprobs, origin)
            used += count
            self.stop_token = ended and count == len(ids) > 0 and self.detokenizer.hides_stop(ids[-1])
            if self.detokenizer.stopped:
                break
        self.completion_tokens += used
        return used
