"""The client for ordinary, blocking code."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, overload

from ssd.client.results import Completion, Conversation, Params, Prompt, StreamChunk, conversations, is_conversation
from ssd.client.steps import ClientSteps, Steps, Wait
from ssd.config.params import SamplingParams
from ssd.ipc.public import Description

_Result = TypeVar("_Result")


class Client(ClientSteps):
    """A connection to an engine. For one thread at a time: give each thread a client of its own.

    `address` is the address that `ssd launch` prints. For an engine on this machine it may also be the URL of HTTP,
    host:port or a pid. Over TCP, `keys` is the folder that `ssd keys` has made for this client. `timeout` (s) limits
    connecting. `request_timeout` (s) limits each request that names no `timeout` of its own.

    Raises RequestError for a request that is refused or fails, RequestTimeoutError for one that takes too long,
    UsageError for a wrong `address` or `keys`, and EngineDeadError when no connection comes up, the peer is no engine,
    or the connection breaks or is closed. After a lost connection the next call connects again; no request is sent
    twice.

    The socket is read only while a call waits. If no call waits for 30 s, the engine aborts the open streams (code
    `slow_reader`). A stream with more than 4096 unread tokens ends so too; `generate` keeps everything."""

    def __init__(
        self,
        address: str,
        timeout: float = 10.0,
        *,
        request_timeout: float | None = None,
        keys: str | Path | None = None,
    ) -> None:
        super().__init__(address, timeout, request_timeout, keys)
        try:
            self.describe()
        except BaseException:
            self.close()
            raise

    def describe(self) -> Description:
        """Return the description of the engine, after at most `timeout` seconds."""
        (description,) = self._drive(self._describing())
        return description

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the engine's sampling for requests without `params`, with `changes` applied."""
        return self.describe().sampling.params(**changes)

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Yield each round's output for a text, token ids or a conversation.

        The request, and its `timeout`, begins with the first step. Closing the generator early cancels the request."""
        return self._drive(self._streaming(self._request(prompt, params), timeout))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too: the first signature wins
        self, prompts: str, params: SamplingParams | None = None, *, chat: bool = False, timeout: float | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: Params = None, *, chat: bool = False, timeout: float | None = None
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        chat: bool = False,
        timeout: float | None = None,
    ) -> Completion | list[Completion]:
        """Complete one text, or a list of texts and token id lists as a batch. Results come in input order.

        `params` is for all, or a list with one for each; None is the model's own sampling. With `chat`, each text is a
        user's message in the model's chat format. `timeout` (s) is for the whole batch. The first failure in input
        order is raised, with the `index` of its prompt, and cancels the rest."""
        completions = list(self._drive(self._completing(self._requests(prompts, params, chat), timeout)))
        return completions[0] if isinstance(prompts, str) else completions

    @overload
    def chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Conversation], params: Params = None, *, timeout: float | None = None
    ) -> list[Completion]: ...
    def chat(
        self, messages: Conversation | Sequence[Conversation], params: Params = None, *, timeout: float | None = None
    ) -> Completion | list[Completion]:
        """Answer one conversation, or a batch of them, through the model's chat template. See `generate`."""
        steps = self._completing(self._requests(conversations(messages), params), timeout)
        completions = list(self._drive(steps))
        return completions[0] if is_conversation(messages) else completions

    def close(self) -> None:
        """Close the client; the engine aborts its open requests. Closing twice is fine."""
        self._leave()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drive(self, steps: Steps[_Result]) -> Generator[_Result, None, None]:
        with closing(steps):
            for step in steps:
                if isinstance(step, Wait):
                    if not self._take_in():
                        self._connection.wait(step.inbox is None, step.deadline)
                else:
                    yield step
