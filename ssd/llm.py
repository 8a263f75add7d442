"""An engine inside a Python program.

with LLM("smollm2", "smollm2-draft") as llm:
    for chunk in llm.stream("Once upon a time"):
        print(chunk.text, end="", flush=True)"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import Signature, signature
from os import PathLike, fspath
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, get_type_hints

from msgspec import structs

from ssd.client import Client, Completion, Conversation, Prompt, StreamChunk
from ssd.client.results import Params, conversations
from ssd.config.descriptions import described
from ssd.config.engine import EngineConfig
from ssd.config.params import FanOutName, Pooling, SamplingParams
from ssd.errors import EngineDeadError, UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine

Path: TypeAlias = str | PathLike[str]
_Given = ParamSpec("_Given")


@contextmanager
def running(
    config: EngineConfig,
    loading: Callable[[Engine], AbstractContextManager[Any]] = nullcontext,
    stderr: int | None = None,
) -> Iterator[tuple[Engine, Client]]:
    """Run an engine and a client of it while the block lasts; `loading` surrounds the engine's start.

    Its processes write to the descriptor `stderr`. If the engine dies in the block, the cause is raised."""
    engine = Engine(config, stderr=stderr)
    try:
        with loading(engine):
            engine.start()
        with Client(engine.address) as client, telling_cause(engine):
            yield engine, client
    finally:
        engine.stop(drain=0.0)


@contextmanager
def telling_cause(engine: Engine) -> Iterator[None]:
    """Replace the error of a broken connection by the cause of the engine's end."""
    try:
        yield
    except EngineDeadError as error:
        engine.wait(2.0)
        raise engine.failure or error from None


class _Keywords(EngineOptions, frozen=True, kw_only=True):
    num_speculative_tokens: int | Literal["auto"] = "auto"  # type: ignore[assignment]
    fan_out: int | Sequence[int] | Literal["auto"] | FanOutName = "auto"  # type: ignore[assignment]


class _LLMArguments(_Keywords, frozen=True):
    """The engine's options, with `target` and `draft` also by position."""

    target: Path = EngineOptions().target  # type: ignore[assignment]
    draft: Path | Sequence[Path] | None = None  # type: ignore[assignment]

    def options(self) -> EngineOptions:
        drafts = (self.draft,) if isinstance(self.draft, str | PathLike) else self.draft or ()
        values = structs.asdict(self)
        values |= {"target": fspath(self.target), "draft": tuple(fspath(each) for each in drafts)}
        if self.num_speculative_tokens == "auto":
            values["num_speculative_tokens"] = 0
        if self.fan_out == "auto" or not isinstance(self.fan_out, str):
            numbers = () if self.fan_out == "auto" else self.fan_out
            values["fan_out"] = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        return EngineOptions(**values)


def _taking(
    arguments: Callable[_Given, _LLMArguments],
) -> Callable[[Callable[[Any, _LLMArguments], None]], Callable[Concatenate[Any, _Given], None]]:
    """Give a constructor the signature of `arguments`, without a second list of the options."""

    def decorate(construct: Callable[[Any, _LLMArguments], None]) -> Callable[Concatenate[Any, _Given], None]:
        def __init__(self: Any, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
            construct(self, arguments(*args, **kwargs))

        this, *_ = signature(construct).parameters.values()
        types = get_type_hints(_LLMArguments)
        given = [each.replace(annotation=types[each.name]) for each in signature(arguments).parameters.values()]
        __init__.__signature__ = Signature([this, *given])  # type: ignore[attr-defined]
        return __init__

    return decorate


class LLM:
    """A target and its draft, running in processes of their own until `close`.

    Raises UsageError for what cannot work, and the cause if the engine does not start. Threads take turns on the one
    connection; for requests at the same time give each thread a `Client(llm.engine.address)`.

    The arguments are the engine's options. `target` and `draft` are names or paths; None is the built-in draft, for the
    built-in target. `fan_out` is a number, a list, "theorem", "pearl" or "auto"."""

    @_taking(_LLMArguments)
    def __init__(self, given: _LLMArguments) -> None:
        with ExitStack() as stack:
            self.engine, self.client = stack.enter_context(running(resolve(given.options())))
            # Called by `close`, when this object is collected, and at the interpreter's exit; once.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a stream may be collected, and so closed, while its thread holds it

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        chat: bool = False,
        timeout: float | None = None,
    ) -> list[Completion]:
        """Complete one text, or a batch, as `Client.generate`, but always return a list."""
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        with self._turn():
            return self.client.generate(batch, params, chat=chat, timeout=timeout)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling that the model recommends, by default at temperature 0, with `changes`."""
        with self._turn():
            return self.client.get_default_sampling_params(**changes)

    def chat(
        self, messages: Conversation | Sequence[Conversation], params: Params = None, *, timeout: float | None = None
    ) -> list[Completion]:
        """Answer one conversation, or a batch of them, through the model's chat template. See `generate`.

        llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}])"""
        batch = conversations(messages)
        with self._turn():
            return self.client.chat(batch, params, timeout=timeout)

    def embed(
        self, prompts: str | Sequence[Prompt], pooling: Pooling = "auto", *, timeout: float | None = None
    ) -> list[list[float]]:
        """Return a vector of length 1 for each text or token id list: the target's last hidden states, pooled.

        `pooling` is `mean`, `last`, or `auto`: as the checkpoint says, else the mean."""
        done = self.generate(prompts, SamplingParams(pooling=pooling), timeout=timeout)
        scaled = [(each.embedding or [], math.hypot(*(each.embedding or [])) or 1.0) for each in done]
        return [[number / length for number in vector] for vector, length in scaled]

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Iterator[StreamChunk]:
        """Yield what each round adds to a text, to token ids or to a conversation. The last chunk has the `completion`.

        Closing the iterator early cancels the request. Other calls may come in between: the stream waits for them, and
        ends with `slow_reader` if more than 4096 of its tokens are unread."""
        chunks = self.client.stream(prompt, params, timeout=timeout)
        try:
            while True:
                with self._turn():
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            if not self._is_fork:  # a fork may never get the lock
                with self._lock:
                    chunks.close()

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._pid

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one thread use the engine. Raises UsageError in a fork."""
        if self._is_fork:
            raise UsageError(
                f"this LLM belongs to process {self._pid}, and process {os.getpid()} is a fork of it: make the LLM in "
                "the process that uses it"
            )
        with self._lock, telling_cause(self.engine):
            yield

    def close(self) -> None:
        """End the engine. Closing twice is fine. In a fork of the program this does nothing."""
        self._finalizer()

    def __repr__(self) -> str:
        config = self.engine.config
        draft = f", {config.draft_name!r}" if config.has_draft else ""
        state = "" if self._finalizer.alive else ", closed"
        return f"<LLM {config.target_name!r}{draft}, mode {config.speculation.mode!r}{state}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_LINES = (f"    - `{name}`: {option.help}" for name, option in described(EngineOptions).items())
LLM.__doc__ = "\n".join([f"{LLM.__doc__}\n", *_LINES])
