"""The engines that are compared: each opens a model, then answers one prompt at a time, greedily.

Heavy imports are inside functions: each engine runs in a process of its own (`serving.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from ssd.config.engine import Activations, CacheDType

_CONTEXT = 2048  # tokens: what this engine makes room for by default

Tell: TypeAlias = Callable[[list[int]], None]
"""Called with the next tokens as soon as they are there."""
Answering: TypeAlias = Callable[[list[int], int, Tell], None]
"""(token ids of a prompt, how many tokens, where they go): end of text is a token like any other."""


@dataclass(frozen=True)
class Files:
    """The models: two checkpoint folders, and the GGUF file that the target's weights come from."""

    target: Path
    draft: Path | None
    gguf: Path | None = None


@dataclass(frozen=True)
class Answer:
    """An answer: its tokens, and (seconds since it was asked for, tokens so far) for each time that some came."""

    token_ids: list[int]
    arrivals: list[tuple[float, int]]

    @property
    def tokens_per_second(self) -> float:
        """Return the speed after the first tokens: the prompt's time is left out. NaN if all tokens came at once."""
        (began, first), (ended, last) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (ended - began) if ended > began else math.nan


@dataclass(frozen=True)
class Begin:
    """Which contestant to be, with which models, on which cores."""

    name: str
    files: Files
    cores: Sequence[int]


@dataclass(frozen=True)
class Contestant:
    """An engine and how it is asked: `opened(files, threads)` answers as long as its block lasts.

    `package` must be installed. `reads` says what it reads for each token and how it computes; "{blocks}" stands for
    the weights in the GGUF file."""

    opened: Callable[[Files, int], AbstractContextManager[Answering]]
    reads: str
    package: str = "ssd"
    drafts: bool = False

    @property
    def needs_gguf(self) -> bool:
        return self.package == "llama_cpp"


@contextmanager
def _transformers(files: Files, threads: int, *, drafts: bool = False, **options: Any) -> Iterator[Answering]:
    """`generate`, with the draft as its assistant, or with other `options` of it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    class Told(BaseStreamer):  # type: ignore[misc]  # of a library without types
        """Passes tokens on, but not the prompt, which comes first."""

        def __init__(self, tell: Tell) -> None:
            self._tell: Tell | None = None
            self._next = tell

        def put(self, value: torch.Tensor) -> None:
            if self._tell is not None:
                self._tell(value.flatten().tolist())
            self._tell = self._next

        def end(self) -> None:
            pass

    def loaded(directory: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    target = loaded(files.target)
    if drafts:
        options["assistant_model"] = _with_shared(loaded(_draft(files)), target)

    def answer(prompt: list[int], tokens: int, tell: Tell) -> None:
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        target.generate(ids, attention_mask=torch.ones_like(ids), streamer=Told(tell), **length, **options)

    yield answer


def _draft(files: Files) -> Path:
    assert files.draft is not None, "contestants that draft are left out without a draft"
    return files.draft


def _with_shared(draft: Any, target: Any) -> Any:
    """Return the draft with the tensors that its config leaves to the target."""
    from ssd.models.pairs import SHARED

    for name in getattr(draft.config, SHARED, ()):
        draft.get_parameter(name).data = target.get_parameter(name).data
    return draft


@contextmanager
def _llama_cpp(files: Files, threads: int, *, lookup: int = 0, cache: str = "F16") -> Iterator[Answering]:
    """The low-level `generate`, which takes and gives ids; with prompt lookup of `lookup` tokens if not 0."""
    import llama_cpp
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    speculating = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=lookup)} if lookup else {}
    given = dict.fromkeys(("n_threads", "n_threads_batch"), threads)
    given |= dict.fromkeys(("type_k", "type_v"), getattr(llama_cpp, f"GGML_TYPE_{cache}"))
    model = Llama(str(files.gguf), n_ctx=_CONTEXT, flash_attn=True, verbose=False, **given, **speculating)

    def answer(prompt: list[int], tokens: int, tell: Tell) -> None:
        for token in islice(model.generate(prompt, temp=0.0), tokens):
            tell([token])

    yield answer
    model.close()


@contextmanager
def _ssd(files: Files, threads: int, **options: Any) -> Iterator[Answering]:
    """This engine, asked through its client. It finds its cores by itself."""
    from ssd import LLM, SamplingParams

    draft = str(files.draft) if files.draft else None
    with LLM(str(files.target), draft, **options) as llm:

        def answer(prompt: list[int], tokens: int, tell: Tell) -> None:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            for chunk in llm.client.stream(prompt, params):
                if chunk.token_ids:
                    tell(chunk.token_ids)

        yield answer


def _plain(lookup: int = 0, **options: Any) -> Contestant:
    if lookup:
        options["prompt_lookup_num_tokens"] = lookup
    reads = "32-bit floats, fp32 arithmetic"
    return Contestant(partial(_transformers, **options), reads, "transformers", options.get("drafts", False))


def _gguf(lookup: int = 0, cache: str = "F16") -> Contestant:
    opened = partial(_llama_cpp, lookup=lookup, cache=cache)
    return Contestant(opened, f"{{blocks}}, 8-bit activations, {cache} cache", "llama_cpp")


def _ours(
    mode: str, quantize: str = "none", activations: Activations = "int8", cache: CacheDType = "auto"
) -> Contestant:
    weights = "{blocks}" if quantize == "none" else "8-bit integers"
    inputs = "fp32 arithmetic" if activations == "float32" else f"{activations.removeprefix('int')}-bit activations"
    options = {"mode": mode, "quantize": quantize, "activations": activations, "kv_cache_dtype": cache}
    reads = f"{weights}, {inputs}" if cache == "auto" else f"{weights}, {inputs}, {cache} cache"
    return Contestant(partial(_ssd, **options), reads, drafts=mode not in ("ar", "ngram"))


REFERENCE = "transformers"
# llama-cpp-python's own advice is to look 2 tokens ahead on a CPU, and 10, its default, on a GPU.
CONTESTANTS: Mapping[str, Contestant] = {
    REFERENCE: _plain(),
    "transformers-draft": _plain(drafts=True),
    "transformers-lookup": _plain(lookup=10),
    "llama.cpp": _gguf(),
    "llama.cpp-int8-cache": _gguf(cache="Q8_0"),
    "llama.cpp-lookup": _gguf(lookup=2),
    "llama.cpp-lookup10": _gguf(lookup=10),
    **{mode: _ours(mode) for mode in ("ar", "ngram", "sd", "ssd", "auto")},
    **{f"{mode}-int8": _ours(mode, "int8") for mode in ("ar", "sd", "ssd")},
    "ar-float32-activations": _ours("ar", activations="float32"),
    "ar-int16-activations": _ours("ar", activations="int16"),
    "ar-int8-cache": _ours("ar", cache="int8"),
}
