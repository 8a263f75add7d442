"""From what a person asks for (names, sizes, cores) to the one `EngineConfig`, or a message that says what is wrong.

Reads files and /proc only: nothing is loaded or started, and torch is not imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ssd import cores, gpu_memory, gpus, model_sizes, mps
from ssd.config import (
    ITEM_BYTES,
    MAX_RANKS,
    AttentionName,
    DType,
    EngineConfig,
    Features,
    LoadFormat,
    Nodes,
    Positive,
    Quantize,
    RankCount,
    check_text,
)
from ssd.emulation.agreement import Stated, stated
from ssd.errors import RequestError, UsageError
from ssd.execution.rooms import rooms_of_draft, rooms_of_target
from ssd.ipc.listening import is_loopback
from ssd.model_sizes import ModelSizes
from ssd.models import checkpoint, heads, hub, registry
from ssd.params import MAX_LOOKAHEAD, Backup, FanOut, Mode, Sampler, Speculation
from ssd.server_config import ServerOptions, resolve_server
from ssd.speculation import speculators

_Values = TypeVar("_Values", bound=msgspec.Struct)

log = logging.getLogger("ssd.launch")

PAGE_SIZE = 16
_FLASH_PAGE_SIZE = 256  # flash-attn takes no smaller pages
_CPU_CONTEXT = 2048  # default limit of the context without a GPU


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
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    tensor_parallel_size: RankCount = 1
    nnodes: RankCount = 1
    node_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    rdzv_endpoint: str | None = None
    target_cpus: str | None = None
    draft_cpus: str | None = None
    device: str = "cpu"
    draft_device: str = "cpu"
    deterministic: bool = False
    attention: AttentionName = "auto"
    enforce_eager: bool = False
    load_format: LoadFormat = "auto"
    synthetic_acceptance_length: float | None = None
    synthetic_hit_rate: float | None = None
    revision: str | None = None
    draft_revision: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=8)] = ()
    shutdown_timeout: float = 30.0
    step_timeout: float = 60.0
    telemetry: bool = True


def resolve(options: EngineOptions, server: ServerOptions | None = None) -> EngineConfig:
    """Find and check the models and fit everything into this machine. Raises UsageError for what cannot work.

    A built-in model that is missing is pulled first, with progress on stderr. Without `server` options no HTTP is
    served.
    """
    check_text(options)
    options = _within_bounds(options)
    nodes = _nodes(options, server)
    if options.load_format == "mock" or options.node_rank:  # all but the target's part is node 0's
        options = replace(options, mode="ar")
    speculation = _speculation(options)
    name = _display_name(options.target)
    served = resolve_server(server or ServerOptions(http=False), name)  # before anything is fetched
    target, drafts = _models(options)
    shape = ModelSizes.of(target)
    length = _max_model_len(options, shape)
    page_size = _page_size(options)
    wanted = options.max_num_seqs * (-(-length // page_size) + 1)  # one page a sequence for tokens not yet accepted
    if options.deterministic and options.device == "cpu" and options.dtype != "float32":
        raise UsageError(f"--deterministic works in float32 on a CPU, where {options.dtype} rounds by batch size")
    draft_quantize = _draft_quantize(options, drafts)
    features = _features(drafts, target)
    laws = _laws_bytes(options, speculation, shape)
    draft_dtype: DType = "float32" if draft_quantize == "int8" else options.draft_dtype or _draft_dtype(options)
    num_pages, draft_num_pages = _pages(
        options,
        speculation,
        (target, options.dtype),
        [(d, draft_dtype) for d in drafts],
        wanted,
        (laws, 0 if features is None else features.width),
    )
    _check_memory(options, target, drafts, draft_dtype, draft_quantize)
    asked = options.target_cpus, options.draft_cpus
    on_gpu = options.device != "cpu" and options.draft_device == "cpu"
    target_cpus, draft_cpus = cores.placement(*asked, _ranks_here(options), bool(drafts), on_gpu)
    config = EngineConfig(
        target=str(target.directory),
        draft=str(drafts[-1].directory) if drafts else None,
        cascade=tuple(str(draft.directory) for draft in drafts[:-1]),
        target_name=name,
        draft_name=", ".join(map(_display_name, _names(options))),
        speculation=speculation,
        device=options.device,
        draft_device=options.draft_device,
        dtype=options.dtype,
        draft_dtype=draft_dtype,
        quantize=options.quantize,
        draft_quantize=draft_quantize,
        load_format=options.load_format,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        page_size=page_size,
        num_pages=num_pages,
        draft_num_pages=draft_num_pages,
        tensor_parallel_size=options.tensor_parallel_size,
        nodes=nodes,
        target_cpus=target_cpus,
        draft_cpus=draft_cpus,
        deterministic=options.deterministic,
        attention=options.attention,
        enforce_eager=options.enforce_eager,
        digest=target.digest,
        vocab_size=shape.vocab_size,
        shutdown_timeout=options.shutdown_timeout,
        step_timeout=options.step_timeout,
        telemetry=options.telemetry,
        features=features,
        synthetic=_synthetic(options),
        server=served,
    )
    _check_arenas(config, laws)
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


def _nodes(options: EngineOptions, server: ServerOptions | None) -> Nodes | None:
    """The machines that the target is split over, None for this one alone."""
    if options.nnodes == 1:
        if options.node_rank or options.rdzv_endpoint is not None:
            raise UsageError("--node-rank and --rdzv-endpoint are for several nodes: give --nnodes")
        return None
    endpoint = options.rdzv_endpoint
    if endpoint is None:
        raise UsageError(f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT, an address of node 0")
    try:
        found = msgspec.convert({"count": options.nnodes, "rank": options.node_rank, "endpoint": endpoint}, Nodes)
    except msgspec.ValidationError:
        raise UsageError(f"--rdzv-endpoint {endpoint}: give HOST:PORT, as 10.0.0.1:29400") from None
    if not is_loopback(found.address[0]) and not (server is not None and server.insecure):
        raise UsageError(
            f"--rdzv-endpoint {endpoint} lets other machines in, and what the nodes tell each other is neither "
            "encrypted nor signed: give --insecure if that network is yours alone"
        )
    return found


def _ranks_here(options: EngineOptions) -> int:
    """How many of the target's ranks run on this machine."""
    return -(-options.tensor_parallel_size // options.nnodes)


def _gpus(options: EngineOptions, has_draft: bool) -> tuple[range, int | None, list[gpus.Gpu] | None]:
    """Those of the target's ranks, the draft's, and all that there are, None where nobody tells. Raises UsageError for
    those that this machine has not."""
    target = gpus.of_ranks(options.device, _ranks_here(options))
    draft = gpus.number(options.draft_device)
    draft = draft if has_draft else None
    present = gpus.present() if target or draft is not None else None
    if present is not None:
        there = f"there {'is' if len(present) == 1 else 'are'} {len(present)} here" if present else "there is none here"
        if draft is not None and draft >= len(present):
            raise UsageError(f"--draft-device {options.draft_device}: no such GPU, {there}; cpu is always there")
        if target and target[-1] >= len(present):
            ranks = f" and --tensor-parallel-size {len(target)}" if len(target) > 1 else ""
            raise UsageError(f"--device {options.device}{ranks} needs cuda:{target[-1]}: no such GPU, {there}")
    if draft in target:
        if (service := mps.state()) == "running":
            log.info("target and draft share cuda:%d under CUDA's MPS", draft)
        else:
            log.warning("target and draft take turns on cuda:%d: %s", draft, mps.advice(service))
    return target, draft, present


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


def _names(options: EngineOptions) -> tuple[str, ...]:
    """The drafts asked for, or the built-in one; an empty name is none."""
    asked = tuple(name for name in options.draft if name)
    return asked or (("smollm2-draft",) if options.target == "smollm2" else ())


def _max_model_len(options: EngineOptions, shape: ModelSizes) -> int:
    length = options.max_model_len
    if length is None:
        length = min(shape.context, _CPU_CONTEXT) if options.device == "cpu" else shape.context
    if length > shape.context:
        raise UsageError(f"--max-model-len {length} is more than the {shape.context} tokens of {options.target}")
    if length < 2:
        raise UsageError(f"a context of {length} token holds no prompt with an answer: --max-model-len is at least 2")
    if options.mode != "ar" and options.num_speculative_tokens >= length:
        raise UsageError(
            f"--num-speculative-tokens {options.num_speculative_tokens} does not fit into a context of {length} tokens"
        )
    return length


_Typed = tuple[checkpoint.Checkpoint, DType]


def _page_size(options: EngineOptions) -> int:
    return _FLASH_PAGE_SIZE if options.attention == "flash-attn" else PAGE_SIZE


def _pages(
    options: EngineOptions,
    speculation: Speculation,
    target: _Typed,
    drafts: list[_Typed],
    wanted: int,
    shared: tuple[int, int],
) -> tuple[int, int]:
    """Pages of the caches of target and draft, `wanted` of which can be used if every sequence is as long as can be:
    as many as asked for, on a CPU within a quarter of the memory, on GPUs within their budget (`ssd.gpu_memory`).
    `shared` with the draft are so many bytes of laws, and so many numbers of hidden states for each token; on GPUs they
    lie beside the target."""
    on, draft_on, present = _gpus(options, bool(drafts))
    page_bytes = _page_size(options) * ModelSizes.of(target[0]).kv_values_per_token * ITEM_BYTES[target[1]]
    given = options.kv_cache_memory_bytes
    found = given // page_bytes if given is not None else min(wanted, _available_bytes() // 4 // page_bytes)
    if present is None:
        if on and given is None:
            raise UsageError(
                f"nobody here tells the memory of {options.device} (no nvidia-smi): if there is a GPU all the same, "
                "give --kv-cache-memory-bytes"
            )
        return found, wanted
    rows = options.max_num_seqs * (1 + speculation.longest)
    size = _page_size(options)
    tokens, ranks, seqs = options.max_num_batched_tokens, options.tensor_parallel_size, options.max_num_seqs
    # Of the target the logits of every shape stay, of a draft those of the largest.
    found_rooms = rooms_of_target(seqs, 1 + speculation.longest, options.deterministic) if ranks == 1 else []
    need = _need(target, size, tokens, rows, ranks, [room.tokens for room in found_rooms])
    laws, width = shared if draft_on is not None else (0, 0)
    states = size * width * ITEM_BYTES[target[1]]
    need = need._replace(working=need.working + laws, page=need.page + states)
    if given is not None:
        need = need._replace(working=need.working + given // ranks + found * states, page=0)
    chains = seqs * speculation.chains
    most = max(room.tokens for room in rooms_of_draft(seqs, chains))
    draft_need = gpu_memory.Need(0, 0, 0)
    for draft, dtype in drafts:  # all of a cascade run in one process
        whole = checkpoint.borrowed(draft, target[0]) if draft.tensors else draft
        own = _need((whole, dtype), size, tokens, rows + chains, 1, [] if heads.is_head(draft) else [most])
        branches = own.page // size * chains * (MAX_LOOKAHEAD + 1)
        own = own._replace(working=own.working + branches)
        draft_need = gpu_memory.Need(*map(sum, zip(draft_need, own, strict=True)))
    budget = gpu_memory.Budget(present, options.gpu_memory_utilization)
    on_gpus, drafts_pages = gpu_memory.pages(
        budget, need, on, draft_need, draft_on, wanted, wanted // options.max_num_seqs
    )
    return found if given is not None or not on else on_gpus, drafts_pages


def _need(model: _Typed, page_size: int, tokens: int, rows: int, ranks: int, kept: Sequence[int]) -> gpu_memory.Need:
    """What one of so many ranks of a model keeps on its GPU; `rows` of the `tokens` of a forward have logits. Beside
    that work static shapes, in memory of their own, whose logits are `kept`: so many rows each."""
    sizes, item, largest = ModelSizes.of(model[0]), ITEM_BYTES[model[1]], max(kept, default=0)
    working = sum(
        gpu_memory.working(count, outputs, sizes.width, sizes.inner, sizes.vocab_size)
        for count, outputs in ((tokens, rows), (largest, largest))
    )
    return gpu_memory.Need(
        weights=item * model_sizes.weights(model[0]) // ranks,
        working=working + item * (rows + sum(kept)) * sizes.vocab_size,
        page=page_size * sizes.kv_values_per_token * item // min(ranks, sizes.kv_heads),
    )


def _laws_bytes(options: EngineOptions, speculation: Speculation, shape: ModelSizes) -> int:
    """What the laws of drafted tokens take, where the sampler looks at them."""
    from ssd.ipc.layouts import law_layout

    if speculation.mode == "ar" or speculation.sampler != "rejection":
        return 0
    return law_layout(options.max_num_seqs, speculation, shape.vocab_size).size_bytes


def _check_memory(
    options: EngineOptions,
    target: checkpoint.Checkpoint,
    drafts: Sequence[checkpoint.Checkpoint],
    draft_dtype: DType,
    draft_quantize: Quantize,
) -> None:
    """Raise UsageError where random weights, which no file bounds, cannot fit into the memory of the host."""
    if options.load_format != "dummy":
        return
    size = 0
    if options.device == "cpu":
        whole = model_sizes.weights(target) * (1 if options.quantize == "int8" else ITEM_BYTES[options.dtype])
        size += whole * _ranks_here(options) // options.tensor_parallel_size
    if options.draft_device == "cpu":
        item = 1 if draft_quantize == "int8" else ITEM_BYTES[draft_dtype]
        size += sum(map(model_sizes.weights, drafts)) * item
    if size > _available_bytes():
        raise UsageError(
            f"random weights of {options.target} need {size / 2**30:.1f} GiB, more than the memory that is free"
        )


def _check_arenas(config: EngineConfig, laws: int) -> None:
    """What target and draft share has room in the memory of the host, unless it will lie on a GPU."""
    from ssd.ipc.layouts import feature_layout, on_gpus

    if on_gpus(config.device, config.draft_device):
        return
    _check_arena("--sampler rejection", laws, "the laws of drafted tokens", "--max-num-seqs, --budget or -k")
    if config.features is not None:
        lower = "--max-num-seqs, --max-model-len or --kv-cache-memory-bytes"
        size = feature_layout(config).size_bytes
        _check_arena("an EAGLE-3 head", size, "the target's hidden states", lower)


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


def _display_name(name: str) -> str:
    """A model's name for people: no paths."""
    return Path(name).resolve().name if Path(name).exists() else name
