"""The engine's options, for the command line and `ssd.LLM`, with the checks that need no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ssd.config.emulation import Agreement
from ssd.config.engine import (
    CommonOptions,
    DType,
    Positive,
    Quantize,
    SequenceCount,
    TokenCount,
)
from ssd.config.params import (
    MAX_LOOKAHEAD,
    Backup,
    Budget,
    FanOutChoice,
    Lookahead,
    Mode,
    Sampler,
    Share,
    Speculation,
    fan_out_fields,
    in_words,
)
from ssd.emulation.agreement import agreement_of
from ssd.errors import RequestError, UsageError
from ssd.speculation import backups as speculators

_PAGE_SIZE = 16
_FLASH_PAGE_SIZE = 256  # flash-attn takes no smaller pages

_Values = TypeVar("_Values", bound=msgspec.Struct)
GenerationConfig = Literal["auto", "none"]
_Texts = Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=8)]


class EngineOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's options. None means: choose for this device (`ssd.launch.defaults`), machine and model.

    `draft` lists the models that draft, smallest first. An empty list is the built-in draft for the built-in target.
    `draft_revision` is empty or has one entry for each draft. `num_speculative_tokens` 0 and an empty `fan_out` mean
    auto. Lists of cores are written as "0-2,5". `ssd launch --help` describes every option."""

    dtype: DType | None = None
    max_num_seqs: SequenceCount | None = None
    max_num_batched_tokens: TokenCount | None = None
    draft_device: str | None = None
    target: str = "smollm2"
    draft: _Texts = ()
    mode: Mode = "auto"
    num_speculative_tokens: Lookahead = 0
    fan_out: FanOutChoice = ()
    backup: Backup = "auto"
    sampler: Sampler = "coupled"
    saguaro_c: Share = 1.0
    budget: Budget = 32
    draft_dtype: DType | None = None
    draft_quantize: Quantize | None = None
    max_model_len: Positive | None = None
    kv_cache_memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    target_cpus: str | None = None
    draft_cpus: str | None = None
    synthetic_acceptance_length: Annotated[float, Meta(ge=1, le=MAX_LOOKAHEAD + 1)] | None = None
    synthetic_hit_rate: Share | None = None
    revision: str | None = None
    draft_revision: _Texts = ()
    generation_config: GenerationConfig = "auto"

    @property
    def drafts(self) -> tuple[str, ...]:
        """Return the names of the drafts: the given ones without empty names, or the built-in draft."""
        asked = tuple(name for name in self.draft if name)
        return asked or (("smollm2-draft",) if self.target == "smollm2" else ())

    @property
    def ranks_here(self) -> int:
        """Return the number of the target's ranks that are certainly on this machine."""
        return 1 if self.executor == "ray" else self.tensor_parallel_size

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page of the KV caches."""
        return _FLASH_PAGE_SIZE if self.attention == "flash-attn" else _PAGE_SIZE

    def speculation(self) -> Speculation:
        """Return the default speculation of requests. Raises UsageError."""
        names = set(Speculation.__struct_fields__) - {"fan_out", "allocation"}
        speculation = Speculation(**{name: getattr(self, name) for name in names}, **fan_out_fields(self.fan_out))
        if self.backup not in speculators.names():
            raise UsageError(f"no backup {self.backup!r}; there are {', '.join(speculators.names())}")
        try:
            speculation.check()
        except RequestError as error:
            raise UsageError(str(error)) from None
        return within_bounds(speculation)

    def synthetic(self) -> Agreement | None:
        """Return the wanted agreement of models of random weights; None if not asked for. Raises UsageError."""
        length, hit_rate = self.synthetic_acceptance_length, self.synthetic_hit_rate
        if length is None:
            if hit_rate is not None:
                raise UsageError("--synthetic-hit-rate needs --synthetic-acceptance-length")
            return None
        if self.load_format != "dummy":
            raise UsageError(
                "--synthetic-acceptance-length needs --load-format dummy: models agree as often as they do"
            )
        if not self.num_speculative_tokens or isinstance(self.fan_out, str) or len(self.fan_out) != 1:
            raise UsageError("--synthetic-acceptance-length needs -k and -f, a number each, which it is stated for")
        return agreement_of(length, hit_rate, self.num_speculative_tokens, self.fan_out[0])

    def draft_revisions(self, drafts: int) -> list[str | None]:
        """Return a revision for each of this number of `drafts`. Raises UsageError."""
        asked = self.draft_revision if drafts else ()
        if asked and len(asked) != drafts:
            raise UsageError(f"--draft-revision: {len(asked)} given for {drafts} drafts; give one each, empty for none")
        return [revision or None for revision in asked] or [None] * drafts


class ChosenOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options in which every default that depends on the device is filled in."""

    dtype: DType
    max_num_seqs: SequenceCount
    max_num_batched_tokens: TokenCount
    draft_device: str


def within_bounds(values: _Values) -> _Values:
    """Return the values after checking types and bounds, as a plain constructor does not. Raises UsageError."""
    try:
        return msgspec.convert(msgspec.to_builtins(values), type(values))
    except msgspec.ValidationError as error:
        raise UsageError(in_words(error, values)) from None


def display_name(name: str) -> str:
    """Return a model's name for people: the last part of a path."""
    return Path(name).resolve().name if Path(name).exists() else name
