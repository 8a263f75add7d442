"""An engine inside a Python program.

with LLM("smollm2", "smollm2-draft") as llm:
    for chunk in llm.stream("Once upon a time"):
        print(chunk.text, end="", flush=True)"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike, fspath
from typing import Any, Literal, TypeAlias

from ssd.client import Client, Completion, Conversation, Prompt, StreamChunk
from ssd.client.results import conversations
from ssd.config.engine import (
    Activations,
    AttentionName,
    CacheDType,
    DType,
    EngineConfig,
    Executor,
    LoadFormat,
    Quantize,
)
from ssd.config.params import Backup, Mode, Sampler, SamplingParams
from ssd.errors import EngineDeadError, UsageError
from ssd.launch.options import EngineOptions, GenerationConfig
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine

Path: TypeAlias = str | PathLike[str]


@contextmanager
def running(
    config: EngineConfig,
    loading: Callable[[Engine], AbstractContextManager[Any]] = nullcontext,
    stderr: int | None = None,
) -> Iterator[tuple[Engine, Client]]:
    """Run an engine and a client of it while the block lasts. `loading` surrounds the engine's start.

    Its processes write to the descriptor `stderr`, by default to this process's. If the engine dies in the block, the
    cause is raised."""
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
    """Replace the error of a broken connection by the cause of the engine's end, which its supervisor soon knows."""
    try:
        yield
    except EngineDeadError as error:
        engine.wait(2.0)
        raise engine.failure or error from None


class LLM:
    """A target and its draft, running in processes of their own until `close`. The arguments:

    - `target`: a built-in name, a folder, a GGUF file or a hub name. `draft`: one of these, an EAGLE-3 head, or several
      models, smallest first (a cascade). None is the built-in draft, for the built-in target.
    - `mode`: "ar" (plain decoding), "ngram" (with prompt lookup), "sd", "ssd", or "auto": the fastest of them.
      `num_speculative_tokens` is K; `fan_out` is one number, or K + 1 of them. "auto" leaves either to the tuner, with
      at most `budget` outcomes a round; so does the fan-out "theorem", with lists by Theorem 12. `backup`: the policy
      on a miss.
    - `sampler`: "coupled" samples exactly the tokens of "ar", "rejection" other tokens of the same distribution;
      `saguaro_c` is for "rejection".
    - `device`, `draft_device`: "cpu", "cuda" or "cuda:N". With the target on a GPU and no `draft_device`, the draft is
      on a GPU too if there is room. `target_cpus`, `draft_cpus`: the cores of each, as "0-2,5"; None: chosen
      for this machine. `mps`: start CUDA's MPS for target and draft on one GPU. `tensor_parallel_size` splits the
      target, with the `executor` "ray" over the machines of a Ray cluster.
    - `dtype` (None: float32 on a CPU, 16 bits on a GPU), `quantize`, `draft_dtype`, `draft_quantize`: the format of
      weights. `activations`: the rounding of inputs to layers whose weights have few bits. `revision`,
      `draft_revision`: revisions of models from the hub. `generation_config`: "none" ignores the sampling that the
      model's file of that name recommends. `load_format`: "dummy" is random weights, "mock" no model at all; "dummy"
      models agree as `synthetic_acceptance_length` and `synthetic_hit_rate` say.
    - `max_model_len`: longest prompt and answer together. `max_num_seqs`: requests at the same time.
      `max_num_batched_tokens`: tokens of a step. `kv_cache_memory_bytes`, `gpu_memory_utilization`: room for the cache,
      `kv_cache_dtype`: "fp8" stores it in 8 bits on a GPU.
    - `deterministic`: results do not depend on batch shapes. `attention`, `enforce_eager`: kernels and CUDA graphs.
    - `shutdown_timeout`, `step_timeout`: seconds. `telemetry`: record for `ssd top` and `ssd trace`.

    Raises UsageError for what cannot work, and the cause if the engine does not start. Threads take turns on the one
    connection; for requests at the same time give each thread a `Client(llm.engine.address)`."""

    def __init__(
        self,
        target: Path = "smollm2",
        draft: Path | Sequence[Path] | None = None,
        *,
        mode: Mode = "auto",
        num_speculative_tokens: int | Literal["auto"] = "auto",
        fan_out: int | Sequence[int] | Literal["auto", "theorem"] = "auto",
        backup: Backup = "auto",
        sampler: Sampler = "coupled",
        saguaro_c: float = 1.0,
        budget: int = 32,
        dtype: DType | None = None,
        draft_dtype: DType | None = None,
        quantize: Quantize = "none",
        activations: Activations = "int16",
        draft_quantize: Quantize | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        tensor_parallel_size: int = 1,
        executor: Executor = "local",
        target_cpus: str | None = None,
        draft_cpus: str | None = None,
        device: str = "cpu",
        draft_device: str | None = None,
        mps: bool = False,
        deterministic: bool = False,
        attention: AttentionName = "auto",
        kv_cache_dtype: CacheDType = "auto",
        enforce_eager: bool = False,
        load_format: LoadFormat = "auto",
        synthetic_acceptance_length: float | None = None,
        synthetic_hit_rate: float | None = None,
        revision: str | None = None,
        draft_revision: Sequence[str] = (),
        generation_config: GenerationConfig = "auto",
        shutdown_timeout: float = 30.0,
        step_timeout: float = 60.0,
        telemetry: bool = True,
    ) -> None:
        given = locals()
        options: dict[str, Any] = {name: given[name] for name in EngineOptions.__struct_fields__}
        drafts = (draft,) if isinstance(draft, str | PathLike) else draft or ()
        options |= {"target": fspath(target), "draft": tuple(fspath(each) for each in drafts)}
        options["num_speculative_tokens"] = 0 if num_speculative_tokens == "auto" else num_speculative_tokens
        if fan_out != "theorem":
            numbers = () if fan_out == "auto" else fan_out
            options["fan_out"] = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        with ExitStack() as stack:
            self.engine, self.client = stack.enter_context(running(resolve(EngineOptions(**options))))
            # Called by `close`, when this object is collected, and at the interpreter's exit; once.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a stream may be collected, and so closed, while its thread holds it

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        timeout: float | None = None,
    ) -> list[Completion]:
        """Complete one text, or a batch of texts and token id lists. Results come in input order.

        `params` is for all, or one for each; None is `get_default_sampling_params()`. With `chat`, a text is a user's
        message in the model's chat format. Raises RequestError for the first prompt, in input order, that is refused
        or fails, and RequestTimeoutError after `timeout` seconds for all."""
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        with self._turn():
            return self.client.generate(batch, params, chat=chat, timeout=timeout)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling that the model's generation_config.json recommends, with `changes`.

        Without a temperature there, it is 0.

        llm.generate(prompts, llm.get_default_sampling_params(max_tokens=32))"""
        with self._turn():
            return self.client.get_default_sampling_params(**changes)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or a batch of them, through the model's chat template. See `generate`.

        llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}])"""
        batch = conversations(messages)
        with self._turn():
            return self.client.chat(batch, params, timeout=timeout)

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Iterator[StreamChunk]:
        """Yield what each round adds to a text, to token ids or to a conversation. The last chunk has the `completion`.

        The request begins with the first `next`. Closing the iterator early cancels it. Other calls may come in
        between: the stream waits for them, and ends with `slow_reader` if more than 4096 of its tokens are unread.
        """
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
        """Let one thread use the engine. Raises UsageError in a fork, which shares no connection with its parent."""
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
