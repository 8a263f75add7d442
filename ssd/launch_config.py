"""From what a person asks for (names, sizes, cores) to the one `EngineConfig`, or a message that says what is wrong.

Reads files and /proc only: nothing is loaded or started, and torch is not imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ssd.config import Cpus, DType, EngineConfig, Features, LoadFormat, Positive, Quantize, RankCount
from ssd.emulation.agreement import Stated, stated
from ssd.errors import RequestError, UsageError
from ssd.models import checkpoint, heads, hub, registry
from ssd.params import Backup, FanOut, Mode, Sampler, Speculation
from ssd.server_config import ServerOptions, resolve_server
from ssd.speculation import speculators

_Values = TypeVar("_Values", bound=msgspec.Struct)

PAGE_SIZE = 16
_CPU_CONTEXT = 2048  # default limit of the context without a GPU
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine options of the command line and of `ssd.LLM`; None means: choose for this machine and model.

    `draft` lists the models that speculate, smallest first; none means the built-in draft for the built-in target.
    `draft_revision` has one for each of them, or none. Cpu lists are written as "0-2,5". The `load_format` mock implies
    mode `ar`.
    """

    target: str = "smollm2"
    draft: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=8)] = ()
    mode: Mode = "ssd"
    num_speculative_tokens: int = 0
    fan_out: FanOut = ()
    backup: Backup = "auto"
    sampler: Sampler = "coupled"
    saguaro_c: float = 1.0
    budget: int = 32
    dtype: DType = "float32"
    draft_dtype: DType | None = None
    quantize: Quantize = "none"
    draft_quantize: Quantize | None = None
    max_model_len: Positive | None = None
    max_num_seqs: Positive = 8
    max_num_batched_tokens: Positive = 256
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: RankCount = 1
    target_cpus: str | None = None
    draft_cpus: str | None = None
    device: str = "cpu"
    draft_device: str = "cpu"
    deterministic: bool = False
    load_format: LoadFormat = "auto"
    synthetic_acceptance_length: float | None = None
    synthetic_hit_rate: float | None = None
    revision: str | None = None
    draft_revision: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=8)] = ()
    shutdown_timeout: float = 30.0
    step_timeout: float = 60.0
    telemetry: bool = True


@dataclass(frozen=True)
class _Shape:
    """What of a model's config.json decides sizes here."""

    vocab_size: int
    context: int
    kv_values_per_token: int

    @classmethod
    def of(cls, model: checkpoint.Checkpoint) -> _Shape:
        heads = _positive(model, "num_attention_heads")
        kv_heads = _positive(model, "num_key_value_heads", heads)
        head_dim = _positive(model, "head_dim", _positive(model, "hidden_size", heads) // heads)
        return cls(
            vocab_size=_positive(model, "vocab_size"),
            context=_positive(model, "max_position_embeddings"),
            kv_values_per_token=2 * _positive(model, "num_hidden_layers") * kv_heads * head_dim,
        )


def resolve(options: EngineOptions, server: ServerOptions | None = None) -> EngineConfig:
    """Find and check the models and fit everything into this machine. Raises UsageError for what cannot work.

    A built-in model that is missing is pulled first, with progress on stderr. Without `server` options no HTTP is
    served.
    """
    options = _within_bounds(options)
    if options.load_format == "mock":
        options = replace(options, mode="ar")
    speculation = _speculation(options)
    name = _display_name(options.target)
    served = resolve_server(server or ServerOptions(http=False), name)  # before anything is fetched
    target, drafts = _models(options)
    shape = _Shape.of(target)
    length = _max_model_len(options, shape)
    wanted = options.max_num_seqs * (-(-length // PAGE_SIZE) + 1)  # one page a sequence for tokens not yet accepted
    if options.deterministic and options.device == "cpu" and options.dtype != "float32":
        raise UsageError(f"--deterministic works in float32 on a CPU, where {options.dtype} rounds by batch size")
    draft_quantize = _draft_quantize(options, drafts)
    _check_laws(options, speculation, shape)
    target_cpus, draft_cpus = _placement(options, bool(drafts))
    config = EngineConfig(
        target=str(target.directory),
        draft=str(drafts[-1].directory) if drafts else None,
        cascade=tuple(str(draft.directory) for draft in drafts[:-1]),
        target_name=name,
        draft_name=", ".join(map(_display_name, _names(options))),
        speculation=speculation,
        device=_device(options.device),
        draft_device=_device(options.draft_device),
        dtype=options.dtype,
        draft_dtype="float32" if draft_quantize == "int8" else options.draft_dtype or _draft_dtype(options),
        quantize=options.quantize,
        draft_quantize=draft_quantize,
        load_format=options.load_format,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        page_size=PAGE_SIZE,
        num_pages=_num_pages(options, shape, wanted),
        draft_num_pages=wanted,
        tensor_parallel_size=options.tensor_parallel_size,
        target_cpus=target_cpus,
        draft_cpus=draft_cpus,
        deterministic=options.deterministic,
        digest=target.digest,
        vocab_size=shape.vocab_size,
        shutdown_timeout=options.shutdown_timeout,
        step_timeout=options.step_timeout,
        telemetry=options.telemetry,
        features=_features(drafts, target),
        synthetic=_synthetic(options),
        server=served,
    )
    _check_features(config)
    return _within_bounds(config)


def _within_bounds(values: _Values) -> _Values:
    """The same, once its types and bounds are checked, which a plain constructor does not do."""
    try:
        return msgspec.convert(msgspec.to_builtins(values), type(values))
    except msgspec.ValidationError as error:
        raise UsageError(f"engine options: {error}") from None


def _speculation(options: EngineOptions) -> Speculation:
    speculation = Speculation(**{name: getattr(options, name) for name in Speculation.__struct_fields__})
    if options.backup not in speculators.names():
        raise UsageError(f"no backup {options.backup!r}; there are {', '.join(speculators.names())}")
    try:
        speculation.check()
    except RequestError as error:
        raise UsageError(str(error)) from None
    return _within_bounds(speculation)


def _synthetic(options: EngineOptions) -> Stated | None:
    """How often models of random weights agree."""
    length, hit_rate = options.synthetic_acceptance_length, options.synthetic_hit_rate
    if length is None:
        if hit_rate is not None:
            raise UsageError("--synthetic-hit-rate needs --synthetic-acceptance-length")
        return None
    if options.load_format != "dummy":
        raise UsageError("--synthetic-acceptance-length needs --load-format dummy: models agree as often as they do")
    if not options.num_speculative_tokens or len(options.fan_out) != 1:
        raise UsageError("--synthetic-acceptance-length needs -k and -f, a number each, which it is stated for")
    return stated(length, hit_rate, options.num_speculative_tokens, options.fan_out[0])


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"no device {name!r}; give cpu, cuda or cuda:N")
    return name


def _models(options: EngineOptions) -> tuple[checkpoint.Checkpoint, list[checkpoint.Checkpoint]]:
    """Target and drafts, checked, also against each other. In mode `ar` there is no draft."""
    names = _names(options)
    if options.mode == "ar":
        names = ()
    weights = options.load_format == "auto"
    target = checkpoint.inspect(hub.ensure(options.target, options.revision), weights)
    if target.config.get(checkpoint.SHARED) or target.config.get(checkpoint.DRAFT_VOCAB) or heads.is_head(target):
        raise UsageError(
            f"{target.directory} can only be a draft: its config.json leaves part of the model to a target"
        )
    if not names and options.mode != "ar":
        raise UsageError(f"mode {options.mode} needs a draft for target {options.target}: give --draft, or --mode ar")
    named = zip(names, _draft_revisions(options, len(names)), strict=True)
    drafts = [checkpoint.inspect(hub.ensure(name, revision), weights) for name, revision in named]
    for draft in drafts:
        checkpoint.check_pair(target, draft)
        if weights:
            checkpoint.borrowed(draft, target)
    return target, drafts


def _draft_revisions(options: EngineOptions, drafts: int) -> list[str | None]:
    """One for each draft; those of the command line that are empty are none."""
    asked = options.draft_revision if drafts else ()
    if asked and len(asked) != drafts:
        raise UsageError(f"--draft-revision: {len(asked)} given for {drafts} drafts; give one each, empty for none")
    return [revision or None for revision in asked] or [None] * drafts


def _features(drafts: list[checkpoint.Checkpoint], target: checkpoint.Checkpoint) -> Features | None:
    """What an EAGLE-3 head among the drafts reads of the target."""
    found = [draft for draft in drafts if heads.is_head(draft)]
    if not found:
        return None
    if len(drafts) > 1:
        raise UsageError(f"{found[0].directory} is an EAGLE-3 head, which speculates alone: give one --draft")
    layers = heads.check(found[0], target)
    return Features(layers=layers, width=heads.FUSED * heads.target_width(found[0].config))


def _check_features(config: EngineConfig) -> None:
    from ssd.ipc.features import FeatureArena

    if config.features is not None:
        size = FeatureArena.size_bytes(config)
        lower = "--max-num-seqs, --max-model-len or --kv-cache-memory-bytes"
        _check_arena("an EAGLE-3 head", size, "the target's hidden states", lower)


def _names(options: EngineOptions) -> tuple[str, ...]:
    """The drafts asked for, or the built-in one; an empty name is none."""
    asked = tuple(name for name in options.draft if name)
    return asked or (("smollm2-draft",) if options.target == "smollm2" else ())


def _max_model_len(options: EngineOptions, shape: _Shape) -> int:
    length = options.max_model_len
    if length is None:
        length = min(shape.context, _CPU_CONTEXT) if options.device == "cpu" else shape.context
    if length > shape.context:
        raise UsageError(f"--max-model-len {length} is more than the {shape.context} tokens of {options.target}")
    if options.mode != "ar" and options.num_speculative_tokens >= length:
        raise UsageError(
            f"--num-speculative-tokens {options.num_speculative_tokens} does not fit into a context of {length} tokens"
        )
    return length


def _num_pages(options: EngineOptions, shape: _Shape, wanted: int) -> int:
    """Pages of the target's KV cache: as many as asked for, else as can be used, within a quarter of the memory."""
    page_bytes = PAGE_SIZE * shape.kv_values_per_token * _ITEM_BYTES[options.dtype]
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes // page_bytes
    return min(wanted, _available_bytes() // 4 // page_bytes)


def _check_laws(options: EngineOptions, speculation: Speculation, shape: _Shape) -> None:
    from ssd.ipc.laws import LawArena

    if speculation.mode == "ar" or speculation.sampler != "rejection":
        return
    size = LawArena.size_bytes(options.max_num_seqs, speculation, shape.vocab_size)
    _check_arena("--sampler rejection", size, "the laws of drafted tokens", "--max-num-seqs, --budget or -k")


def _check_arena(who: str, size: int, what: str, lower: str) -> None:
    """Shared memory of `size` bytes for `what` must leave room for everything else. Raises UsageError."""
    if size > _available_bytes() // 4:
        raise UsageError(
            f"{who} needs {size / 2**30:.1f} GiB for {what}, more than a quarter of the memory that is free; "
            f"lower {lower}"
        )


def _draft_dtype(options: EngineOptions) -> DType:
    """The target's, or half of its bytes where the draft's processor multiplies bfloat16: advice may be rounded."""
    if options.deterministic or options.dtype != "float32" or options.draft_device != "cpu":
        return options.dtype
    return "bfloat16" if _cpu_flags() & {"amx_bf16", "avx512_bf16"} else options.dtype


def _draft_quantize(options: EngineOptions, drafts: Sequence[checkpoint.Checkpoint]) -> Quantize:
    """The target's, or 8 bits where the draft's processor multiplies them best, where its type and device allow it.
    UsageError where what was asked for cannot be."""
    draft = options.draft_quantize
    if draft is None:
        fits = options.draft_dtype in (None, "float32") and options.draft_device == "cpu"
        rounded = options.dtype == "float32" and not options.deterministic and _best_in_8_bits()
        rounded = rounded and all(registry.has_file(draft) for draft in drafts)
        draft = "int8" if fits and (options.quantize == "int8" or rounded) else "none"
    for flag, quantize, dtype, device in (
        ("--quantize", options.quantize, options.dtype, options.device),
        ("--draft-quantize", draft, options.draft_dtype or "float32", options.draft_device),
    ):
        if quantize == "int8" and (dtype, device) != ("float32", "cpu"):
            raise UsageError(f"{flag} int8 works in float32 on a CPU, not in {dtype} on device {device}")
    return draft


def _best_in_8_bits() -> bool:
    """Whether the processor sums products of 8 bits in one instruction and has no matrices of bfloat16."""
    flags = _cpu_flags()
    return "avx512_vnni" in flags and "amx_bf16" not in flags


def _cpu_flags() -> set[str]:
    """Names of the processor's features, where the system tells them (x86)."""
    found = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def _available_bytes() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None, "/proc/meminfo tells MemAvailable since Linux 3.14"
    return int(found[1]) * 1024


def _placement(options: EngineOptions, has_draft: bool) -> tuple[Cpus, Cpus]:
    """Cores of target and draft: disjoint unless asked for otherwise, or where every core is needed for a rank: then
    the draft shares the last one. Empty: wherever the system likes."""
    allowed, ranks = tuple(sorted(os.sched_getaffinity(0))), options.tensor_parallel_size
    if ranks > len(allowed):
        raise UsageError(f"--tensor-parallel-size {ranks} needs as many cores; this process may use {len(allowed)}")
    target = _parse_cpus("--target-cpus", options.target_cpus, allowed)
    draft = _parse_cpus("--draft-cpus", options.draft_cpus, allowed)
    if len(allowed) == 1:
        return target or (), draft or ()
    if not has_draft:
        return target or allowed, ()
    if target is None and draft is None:
        cut = max(ranks, len(allowed) - max(1, len(allowed) // 4))
        return allowed[:cut], allowed[cut:] or allowed[-1:]
    return (
        tuple(cpu for cpu in allowed if cpu not in (draft or ())) if target is None else target,
        tuple(cpu for cpu in allowed if cpu not in (target or ())) if draft is None else draft,
    )


def _parse_cpus(flag: str, text: str | None, allowed: Cpus) -> Cpus | None:
    """ "0-2,5" as (0, 1, 2, 5)."""
    if text is None:
        return None
    cpus: set[int] = set()
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if bounds is None:
            raise UsageError(f"{flag} {text!r}: expected core numbers such as 0-2,5")
        cpus.update(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    if not cpus or not cpus <= set(allowed):
        raise UsageError(f"{flag} {text!r}: this process may use the cores {', '.join(map(str, allowed))}")
    return tuple(sorted(cpus))


def _display_name(name: str) -> str:
    """A model's name for people: no paths."""
    return Path(name).resolve().name if Path(name).exists() else name


def _positive(model: checkpoint.Checkpoint, key: str, default: int | None = None) -> int:
    value = model.config.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise UsageError(f"{model.directory / 'config.json'}: {key} must be a positive number, is {value!r}")
    return value
