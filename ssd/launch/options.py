"""The engine's options: checks that need no model, defaults by device."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ssd.config import gpus
from ssd.config.descriptions import ADVANCED, MAIN, MEMORY, OTHER, PROCESSORS, SAMPLING, SPECULATION, WEIGHTS
from ssd.config.emulation import StatedAgreement
from ssd.config.engine import CommonOptions, DraftWeights, DType, InlineDraft, Positive, SequenceCount, TokenCount
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
from ssd.errors import RequestError, UsageError
from ssd.models.pull import BUILTIN
from ssd.speculation import backups as speculators
from ssd.system import registered

_SPECULATION = Speculation()  # the defaults of requests are those of the options
_PAGE_SIZE = 16
_FLASH_PAGE_SIZE = 256  # flash-attn takes no smaller pages
# From this compute capability on a GPU multiplies bfloat16 (Ampere).
_BFLOAT16 = (8, 0)
# A GPU with this much memory takes more requests and longer steps. vLLM draws the line at 70 GiB.
_LARGE_BYTES = 64 * 2**30
_OF_CPU = {"dtype": "float32", "draft_device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 256}
_OF_GPU = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
_OF_LARGE_GPU = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}

_Values = TypeVar("_Values", bound=msgspec.Struct)
GenerationConfig = Literal["auto", "none"]
_Texts = Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=8)]


class EngineOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's options, for the command line, its file, the environment and `LLM`.

    None: chosen by device or model. `draft`: smallest first; an empty list is the built-in draft for a built-in target.
    `num_speculative_tokens` 0 and an empty `fan_out` mean auto. Lists of cores: "0-2,5"."""

    target: Annotated[
        str, "Model to run: a built-in name, a folder, a GGUF file or a hub name.", MAIN, "--model", "-m"
    ] = "smollm2"
    draft: Annotated[
        _Texts, "Model or head that drafts; several: a cascade. mtp: the target's own head, the default if any.", MAIN
    ] = ()
    mode: Annotated[
        Mode, "ar: plain. ngram: prompt lookup. sd, ssd: a draft, in turn or ahead. auto: the fastest.", MAIN
    ] = _SPECULATION.mode
    num_speculative_tokens: Annotated[
        Lookahead, "K: tokens the draft proposes per round. auto, in sd: as many as it is sure of.", MAIN, "-k"
    ] = _SPECULATION.num_speculative_tokens
    max_model_len: Annotated[
        Positive | None, "Longest prompt and answer together, in tokens. Default: the model's, or what fits.", MAIN
    ] = None
    max_num_seqs: Annotated[
        SequenceCount | None, "Most requests at the same time. Default: 8; on a GPU 32, or 64 from 64 GiB on.", MAIN
    ] = None
    fan_out: Annotated[
        FanOutChoice,
        "Outcomes prepared per accepted length: one number, or K + 1. theorem: by Theorem 12. pearl: one chain.",
        SPECULATION,
        ADVANCED,
        "-f",
    ] = _SPECULATION.fan_out
    budget: Annotated[Budget, "Most outcomes prepared per round when the fan-out is auto.", SPECULATION, ADVANCED] = (
        _SPECULATION.budget
    )
    backup: Annotated[
        Backup, "On a miss: auto, jit (wait for the draft), ngram, none, or a plugin's name.", SPECULATION, ADVANCED
    ] = _SPECULATION.backup
    sampler: Annotated[
        Sampler, "At temperature > 0. coupled: the tokens of ar. rejection: others, equally distributed.", SPECULATION
    ] = _SPECULATION.sampler
    saguaro_c: Annotated[
        Share, "With --sampler rejection: weight of prepared tokens in the draft's law.", SPECULATION, ADVANCED
    ] = _SPECULATION.saguaro_c
    generation_config: Annotated[
        GenerationConfig, "auto: sampling is by the model's generation_config.json unless a request says.", SAMPLING
    ] = "auto"
    dtype: Annotated[
        DType | None,
        "Of weights and activations. Default: float32, which on a CPU keeps weights of few bits; on a GPU bfloat16.",
        WEIGHTS,
    ] = None
    draft_dtype: Annotated[DType | None, "The draft's type. Default: the one that is fast here.", WEIGHTS] = None
    draft_weights: Annotated[
        DraftWeights, "light: 4 bits and few ids. as-is: those of its files. auto: the fastest here.", WEIGHTS
    ] = "auto"
    revision: Annotated[str | None, "Branch, tag or commit of a target from the hub.", WEIGHTS] = None
    draft_revision: Annotated[_Texts, "The draft's. Of several drafts one each, empty for none.", WEIGHTS] = ()
    max_num_batched_tokens: Annotated[
        TokenCount | None, "Most tokens of a step. Default: 256; on a GPU 2048, or 8192 from 64 GiB on.", MEMORY
    ] = None
    kv_cache_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        "The target's KV cache. Default: at most a quarter of memory, or the rest of a GPU.",
        MEMORY,
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1), "Share of a GPU's memory for target and draft together.", MEMORY
    ] = 0.9
    draft_device: Annotated[
        str | None, "Where the draft runs. Default: cpu; beside a GPU target a free GPU or the same.", PROCESSORS
    ] = None
    inline_draft: Annotated[
        InlineDraft,
        "Draft for sd in the target's process. auto: where both models are on one GPU.",
        PROCESSORS,
        ADVANCED,
    ] = "auto"
    target_cpus: Annotated[
        str | None, "The target's own cores, as 0-2,5. Default: all; in ssd all but the draft's.", PROCESSORS
    ] = None
    draft_cpus: Annotated[
        str | None, "The draft's own cores. Default: those that ssd leaves it; in mode sd all.", PROCESSORS
    ] = None
    synthetic_acceptance_length: Annotated[
        Annotated[float, Meta(ge=1, le=MAX_LOOKAHEAD + 1)] | None,
        "With --load-format dummy: tokens that a round of sd commits at this -k, -f.",
        OTHER,
        ADVANCED,
    ] = None
    synthetic_hit_rate: Annotated[
        Share | None, "Its hit rate. Default: that of the paper's Llama pair.", OTHER, ADVANCED
    ] = None

    @property
    def drafts(self) -> tuple[str, ...]:
        """Return the drafts' names: the given ones without empty names, none, or that of a built-in target."""
        asked = tuple(name for name in self.draft if name)
        if asked == ("none",):
            return ()
        own = BUILTIN[self.target].draft if self.target in BUILTIN else None
        return asked or ((own,) if own else ())

    @property
    def ranks_here(self) -> int:
        return self.tensor_parallel_size if self.executor == "local" else 1

    @property
    def page_size(self) -> int:
        return _FLASH_PAGE_SIZE if self.attention == "flash-attn" else _PAGE_SIZE

    def speculation(self) -> Speculation:
        names = set(Speculation.__struct_fields__) - {"fan_out", "allocation"}
        speculation = Speculation(**{name: getattr(self, name) for name in names}, **fan_out_fields(self.fan_out))
        if self.backup not in speculators.names():
            raise UsageError(f"no backup {self.backup!r}; there are {', '.join(speculators.names())}")
        try:
            speculation.check()
        except RequestError as error:
            raise UsageError(str(error)) from None
        return within_bounds(speculation)

    def synthetic(self) -> StatedAgreement | None:
        """Return the wanted agreement of models of random weights; None if not asked for. Raises UsageError."""
        length, hit_rate = self.synthetic_acceptance_length, self.synthetic_hit_rate
        if length is None and hit_rate is None:
            return None
        if length is not None and self.load_format != "dummy":
            raise UsageError(
                "--synthetic-acceptance-length needs --load-format dummy: models agree as often as they do"
            )
        stated: StatedAgreement = registered.emulation("agreement")(
            length, hit_rate, self.num_speculative_tokens, self.fan_out
        )
        return stated

    def draft_revisions(self, drafts: int) -> list[str | None]:
        asked = self.draft_revision if drafts else ()
        if asked and len(asked) != drafts:
            raise UsageError(f"--draft-revision: {len(asked)} given for {drafts} drafts; give one each, empty for none")
        return [revision or None for revision in asked] or [None] * drafts


class ChosenOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: DType
    max_num_seqs: SequenceCount
    max_num_batched_tokens: TokenCount
    draft_device: str


def within_bounds(values: _Values) -> _Values:
    """Return the values after checking types and bounds, as constructors do not. Raises UsageError."""
    try:
        return msgspec.convert(msgspec.to_builtins(values), type(values))
    except msgspec.ValidationError as error:
        raise UsageError(in_words(error, values)) from None


def chosen(options: EngineOptions) -> ChosenOptions:
    """Return the options with a default for each missing one; raise UsageError for a value out of bounds.

    On a GPU weights are in bfloat16, and prompts use flash-attn if it is installed; the draft gets the first GPU that
    the target leaves free, else the target's."""
    registered.check(registered.EXECUTORS, "--executor", options.executor, ("local",))
    ranks = gpus.of_ranks(options.device, options.ranks_here)
    found: dict[str, Any] = dict(_OF_CPU)
    if ranks:
        present = gpus.present() or []
        mine = present[ranks[0]] if ranks[0] < len(present) else None
        free = [number for number in range(len(present)) if number not in ranks]
        found = dict(_OF_LARGE_GPU if mine is not None and mine.total >= _LARGE_BYTES else _OF_GPU)
        is_old = mine is not None and mine.capability < _BFLOAT16
        found |= {"dtype": "float16" if is_old else "bfloat16", "draft_device": f"cuda:{(free or ranks)[0]}"}
    asked = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    wanted = within_bounds(ChosenOptions(**(found | asked)))
    flash = ranks and wanted.attention == "auto" and wanted.dtype != "float32" and not wanted.deterministic
    if flash and find_spec("flash_attn") is not None and find_spec("triton") is not None:
        return msgspec.structs.replace(wanted, attention="flash-attn")
    return wanted


def display_name(name: str) -> str:
    return Path(name).resolve().name if Path(name).exists() else name
