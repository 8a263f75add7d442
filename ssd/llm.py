"""An engine inside a Python program: `LLM().generate(prompts)`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike, fspath
from typing import Any, Literal

from ssd.client import Client, Completion, Prompt
from ssd.config import EngineConfig
from ssd.errors import EngineDeadError, SsdError
from ssd.launch_config import EngineOptions, resolve
from ssd.params import Backup, Mode, SamplingParams
from ssd.supervisor import Engine


@contextmanager
def running(
    config: EngineConfig, loading: Callable[[Engine], AbstractContextManager[Any]] = nullcontext
) -> Iterator[tuple[Engine, Client]]:
    """An engine for as long as the block lasts, and a client of it. `loading` surrounds its start."""
    engine = Engine(config)
    try:
        with loading(engine):
            engine.start()
        with Client(engine.address) as client:
            yield engine, client
    finally:
        engine.stop(drain=0.0)


def cause(engine: Engine, error: EngineDeadError) -> SsdError:
    """Why the engine of a broken connection ended; the supervisor knows it within moments."""
    engine.wait(2.0)
    return engine.failure or error


class LLM:
    """A target and its draft, loaded and running in processes of their own until `close`.

    `target` and `draft` are built-in names, folders or hub names; no `draft` is the built-in one for the built-in
    target, several are a cascade, smallest first. `fan_out` is one number, or K + 1 of them; "auto" leaves it, or K, to
    the tuner. Other options are those of `ssd launch`, with underscores (`EngineOptions`). Raises UsageError for what
    cannot work, and the cause when the engine does not start.
    """

    def __init__(
        self,
        target: str | PathLike[str] = "smollm2",
        draft: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
        *,
        mode: Mode = "ssd",
        num_speculative_tokens: int | Literal["auto"] = "auto",
        fan_out: int | Sequence[int] | Literal["auto"] = "auto",
        backup: Backup = "auto",
        **options: Any,
    ) -> None:
        config = resolve(
            EngineOptions(
                target=fspath(target),
                draft=tuple(fspath(one) for one in ((draft,) if isinstance(draft, str | PathLike) else draft or ())),
                mode=mode,
                num_speculative_tokens=0 if num_speculative_tokens == "auto" else num_speculative_tokens,
                fan_out=() if fan_out == "auto" else (fan_out,) if isinstance(fan_out, int) else tuple(fan_out),
                backup=backup,
                **options,
            )
        )
        with ExitStack() as stack:
            self.engine, self.client = stack.enter_context(running(config))
            # Called by `close`, when this object is collected, and at the interpreter's exit; once.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)
        self._turn = threading.Lock()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or a batch; results come in input order. See `Client.generate`. Of several threads each
        waits for its turn: those that want to be served at once need clients of their own (`engine.address`)."""
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        try:
            with self._turn:
                return self.client.generate(batch, params, chat=chat)
        except EngineDeadError as error:
            raise cause(self.engine, error) from None

    def close(self) -> None:
        """End the engine. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
