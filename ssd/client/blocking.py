"""The client for ordinary, blocking code."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar, overload

from ssd.client.results import Completion, Prompt, StreamChunk
from ssd.client.steps import ClientSteps, Steps, Wait
from ssd.ipc.messages import ChatMessage, Description
from ssd.params import SamplingParams

_Result = TypeVar("_Result")


class Client(ClientSteps):
    """A connection to an engine. For one thread at a time: give each thread a client of its own.

    `address` is what `ssd launch` prints. Over TCP, `keys` is the folder that `ssd keys` has made for this client. A
    request that is refused or fails raises RequestError, and RequestTimeoutError when it has taken more than its
    `timeout` seconds (`request_timeout` is for requests that name none; None is no limit). EngineDeadError says that no
    connection came up within `timeout` seconds, that what is there does not answer as an engine, or that the connection
    broke under a request or was closed; UsageError that `address` or `keys` are none. A slow engine is waited for.

    After a loss the next call connects again. What the connection held is forgotten: no request is sent twice.

    The socket is read only while a call waits, and a thread that does other things for 30 s while its streams go on
    finds them aborted by the engine (code `slow_reader`). What arrives for one stream while another one is read is
    kept, up to 4096 tokens: then that stream ends with `slow_reader` too. `generate` keeps everything.
    """

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
        """What the engine serves. A busy engine answers too, so this waits for `timeout` seconds at most."""
        (description,) = self._drive(self._describing())
        return description

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Yield what each round adds. Give one of `prompt`, `messages` (a chat) and `token_ids`.

        The request, and its time, begins with the first `next`; closing the generator before its end cancels it.
        """
        return self._drive(self._streaming(self._request(prompt, params, messages, token_ids), timeout))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too: the first signature wins
        self, prompts: str, params: SamplingParams | None = None, *, chat: bool = False, timeout: float | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        timeout: float | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        timeout: float | None = None,
    ) -> Completion | list[Completion]:
        """Complete one text, or a list of texts and token id lists as one batch; results come in input order.

        `params` is for all, or one for each. With `chat`, a text is what a user says in the model's chat format.
        `timeout` is for the whole batch. The first failure in input order is raised, with the `index` of its prompt,
        and cancels the rest.
        """
        completions = list(self._drive(self._completing(self._requests(prompts, params, chat), timeout)))
        return completions[0] if isinstance(prompts, str) else completions

    def close(self) -> None:
        """Leave; the engine aborts what is still open. Closing twice is fine."""
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
