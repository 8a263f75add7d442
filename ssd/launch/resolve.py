"""Resolves the user's options into an `EngineConfig`. It reads files and /proc only, without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ssd.config import cores, gpus
from ssd.config.engine import ITEM_BYTES, CommonOptions, Cpus, EngineConfig, Features, WeightFormat, check_text
from ssd.config.params import DRAFTED, SamplingDefaults, Speculation
from ssd.errors import UsageError
from ssd.launch import memory, mps
from ssd.launch.memory import GpuPlaces, Sized
from ssd.launch.options import ChosenOptions, EngineOptions, chosen, display_name, within_bounds
from ssd.launch.server import ServerOptions, draft_link, resolve_server
from ssd.models import checkpoint, hub, pairs, registry
from ssd.models.draft_kinds import PLAIN, draft_kind, in_targets, is_in_target, kinds
from ssd.models.gguf.header import GGUF_FORMS
from ssd.models.gguf.tensors import GgufTensor
from ssd.models.pull import BUILTIN
from ssd.models.resident import ROUNDINGS, resident_bytes
from ssd.models.sizes import ModelSizes
from ssd.system import cgroups, registered

log = logging.getLogger("ssd.launch")

_CHOSEN = ("dtype", "max_num_seqs", "max_num_batched_tokens", "draft_device")


def resolve(options: EngineOptions, server: ServerOptions | None = None) -> EngineConfig:
    """Find and check the models, and fit everything into this machine. Raises UsageError.

    A missing built-in model is pulled. Without `server` no HTTP is served. Without weights the mode is `ar`. A draft
    without a given device runs on the CPU if the GPUs have no room."""
    check_text(options)
    registered.check(registered.LOAD_FORMATS, "load_format", options.load_format, (registered.AUTO, registered.DUMMY))
    wanted = chosen(within_bounds(options))
    try:
        return _resolved(wanted, server)
    except memory.NoRoom as error:
        if options.draft_device is not None or wanted.draft_device == "cpu":
            raise
        beside = _resolved(replace(wanted, draft_device="cpu"), server)
        log.warning("the draft runs on the CPU: %s", error)
        return beside


class _ModelPair(NamedTuple):
    """A target, its drafts, their names and, once placed, formats. A draft reads the target's `features`."""

    target: checkpoint.Checkpoint
    names: tuple[str, ...]
    drafts: list[checkpoint.Checkpoint]
    formats: tuple[WeightFormat, ...]
    features: Features | None


class _Room(NamedTuple):
    """The longest sequence that memory has room for, in tokens, and the pages of the KV caches."""

    max_model_len: int
    num_pages: int
    draft_num_pages: int
    inline_num_pages: int


def _resolved(options: ChosenOptions, server: ServerOptions | None) -> EngineConfig:
    """Settle the options in steps, cheap ones first: doors, models, cores, memory."""
    if not options.has_weights:
        options = replace(options, mode="ar")
    asked = server or ServerOptions(http=False)
    speculation, name = options.speculation(), display_name(options.target)
    served, link = resolve_server(asked, name), draft_link(options, asked)
    pair = _pair(options, link is not None)
    target, drafts = pair.target, pair.drafts
    _check_arithmetic(options)
    options = _with_activations(options, target)
    available = cgroups.available_bytes()  # read once, so that all figures that depend on it agree
    inline = _drafts_inline(options, speculation, pair)
    if inline and speculation.mode == "auto":
        options = _with_host_draft(options, pair, available)
    pair = pair._replace(formats=draft_formats(options, drafts))
    apart = bool(drafts) and (not inline or options.draft_device == "cpu")
    target_cpus, draft_cpus, elastic = _cores(options, apart)
    vocab_size = ModelSizes.of(target).vocab_size
    draft_probs = memory.draft_probs_bytes(options, speculation, vocab_size)
    room = _room(options, speculation, pair, draft_probs, available, inline, apart)
    config = EngineConfig(
        target=str(target.directory),
        draft=_draft(pair),
        cascade=tuple(str(draft.directory) for draft in drafts[:-1]),
        target_name=name,
        link=link,
        draft_name="a draft on another machine" if link else ", ".join(map(display_name, pair.names)),
        speculation=speculation,
        sampling=SamplingDefaults() if options.generation_config == "none" else _sampling(target.directory),
        draft_formats=pair.formats,
        target_cpus=target_cpus,
        draft_cpus=draft_cpus,
        elastic_cores=elastic,
        inline_draft=inline,
        digest=target.digest,
        vocab_size=vocab_size,
        features=pair.features,
        synthetic=options.synthetic(),
        server=served,
        page_size=options.page_size,
        **room._asdict(),
        **{name: getattr(options, name) for name in (*CommonOptions.__struct_fields__, *_CHOSEN)},
    )
    memory.check_arenas(config, draft_probs, available)
    log.info("context: %d tokens, for prompt and answer together", room.max_model_len)
    return within_bounds(config)


def _with_activations(options: ChosenOptions, target: checkpoint.Checkpoint) -> ChosenOptions:
    if options.activations != "auto":
        return options
    if few := rounds_to_8_bits(target, options.device, options.dtype):
        log.info("inputs of products have 8 bits, as in llama.cpp; --activations int16 is closer to float32 and slower")
    return replace(options, activations="int8" if few else "int16")


def rounds_to_8_bits(target: checkpoint.Checkpoint, device: str, dtype: str) -> bool:
    """Return True if inputs of products have 8 bits, as llama.cpp's: GGUF's blocks, float32 on a CPU."""
    blocks = any(isinstance(one, GgufTensor) and one.dtype in GGUF_FORMS for one in target.tensors.values())
    return blocks and device == "cpu" and dtype == "float32"


def _check_arithmetic(options: ChosenOptions) -> None:
    if options.deterministic and options.device == "cpu" and options.dtype != "float32":
        raise UsageError(f"--deterministic works in float32 on a CPU, where {options.dtype} rounds by batch size")
    place = {"fp8": "a GPU", "int8": "a CPU"}.get(options.kv_cache_dtype)
    if place is not None and (options.device == "cpu") != (place == "a CPU"):
        raise UsageError(f"--kv-cache-dtype {options.kv_cache_dtype} needs a target on {place}")
    if options.kv_cache_dtype == "int8" and options.dtype != "float32":
        raise UsageError(f"--kv-cache-dtype int8 works in float32, not in {options.dtype}")


def _cores(options: ChosenOptions, has_draft: bool) -> tuple[Cpus, Cpus, bool]:
    """Return the cores of target and draft, and if each may borrow the other's. Raises UsageError."""
    alone_on_gpu = options.device != "cpu" and options.draft_device == "cpu"
    target, draft = cores.placement(
        options.target_cpus, options.draft_cpus, options.ranks_here, has_draft, alone_on_gpu
    )
    asked = options.target_cpus is not None or options.draft_cpus is not None
    apart = options.ranks_here == 1 and not asked and not {*target} & {*draft}
    return target, draft, has_draft and options.device == options.draft_device == "cpu" and apart


def _drafts_inline(options: ChosenOptions, speculation: Speculation, pair: _ModelPair) -> bool:
    """Return True if the draft runs in the target's process. Raises UsageError if it should and cannot."""
    asked = options.inline_draft
    cause = "--inline-draft off" if asked == "off" else _why_not_inline(options, speculation, pair)
    if asked == "on" and cause is not None:
        raise UsageError(f"--inline-draft on: {cause}")
    return cause is None


def _with_host_draft(options: ChosenOptions, pair: _ModelPair, available: int) -> ChosenOptions:
    beside = replace(options, draft_device="cpu")
    need = _on_host(beside, pair._replace(formats=draft_formats(beside, pair.drafts)), True)
    if not memory.has_room_beside(beside, need.drafts, need.weights + need.processes, available):
        log.warning("mode ssd is not served: the host has no room for a draft beside the one on %s", options.device)
        return options
    log.info("mode sd drafts on %s in the target's process, mode ssd on the host's cores", options.device)
    return beside


def _why_not_inline(options: ChosenOptions, speculation: Speculation, pair: _ModelPair) -> str | None:
    models = [pair.target, *pair.drafts]
    kind = draft_kind(pair.drafts[-1]) if pair.drafts else PLAIN
    causes = {
        "mode ssd drafts ahead, in another process; give --mode sd or auto": speculation.mode == "ssd",
        f"the sampler {speculation.sampler} needs a draft's probabilities": speculation.rule().needs_draft_probs,
        f"the target is on {options.device}, the draft on {options.draft_device}; both must be on one GPU": (
            options.device == "cpu" or gpus.number(options.device) != gpus.number(options.draft_device)
        ),
        "the target has several ranks": options.tensor_parallel_size > 1,
        "there must be one draft on this machine": len(pair.drafts) != 1,
        f"the draft is {kind.name}": kind is not PLAIN,
        "the draft has another tokenizer": any(draft.translation is not None for draft in pair.drafts),
        "layers have states": any(ModelSizes.of(model).recurrent.change for model in models),
        "--mps is for two processes": options.mps,
    }
    return next((cause for cause, holds in causes.items() if holds), None)


def _room(
    options: ChosenOptions,
    speculation: Speculation,
    pair: _ModelPair,
    draft_probs: int,
    available: int,
    inline: bool,
    apart: bool,
) -> _Room:
    """Fit weights, processes and caches into the host's `available` bytes and the GPUs. Raises UsageError.

    `draft_probs`: bytes of draft probabilities. `inline`, `apart`: a draft is in the target's process, in its own."""
    sized, sized_drafts, weights, processes = _on_host(options, pair, apart)
    needed = [] if inline else sized_drafts  # a draft beside the one in the target's process limits nothing
    memory.check_room(options, sized, needed, weights, processes, available)
    free = max(0, available - weights - processes)
    length = _max_model_len(options, ModelSizes.of(pair.target), memory.context_room(options, sized, needed, free))
    pages = memory.cache_pages(
        options,
        speculation,
        sized,
        sized_drafts,
        options.max_num_seqs * (-(-length // options.page_size) + 1),  # one more page each, for tokens not yet accepted
        free,
        _gpu_places(options, bool(pair.drafts), inline),
        (draft_probs, 0 if pair.features is None else pair.features.width),
    )
    return _Room(length, *pages)


class _OnHost(NamedTuple):
    """Target and drafts with the types they are sized by, and the host's bytes for weights and for processes."""

    target: Sized
    drafts: list[Sized]
    weights: int
    processes: int


def _on_host(options: ChosenOptions, pair: _ModelPair, apart: bool) -> _OnHost:
    widest = max((one.dtype for one in pair.formats), key=ITEM_BYTES.__getitem__)
    target, drafts = Sized(pair.target, options.dtype), [Sized(draft, widest) for draft in pair.drafts]
    weights = memory.host_weights(options, target, pair.drafts, pair.formats)
    states = memory.host_states(options, target, pair.drafts)
    return _OnHost(target, drafts, weights + states, memory.host_processes(options, apart))


def _gpu_places(options: ChosenOptions, has_draft: bool, inline: bool) -> GpuPlaces:
    """Return the GPUs of target and draft; log a shared one. Raises UsageError for a missing GPU."""
    target = gpus.of_ranks(options.device, options.ranks_here)
    draft = gpus.number(options.device if inline else options.draft_device) if has_draft else None
    present = gpus.present() if target or draft is not None else None
    if target and present is None and options.kv_cache_memory_bytes is None:
        raise UsageError(
            f"--device {options.device}: no GPU is found here (nvidia-smi is missing or fails); --device cpu is always "
            "there. For a GPU without nvidia-smi give --kv-cache-memory-bytes"
        )
    if present is not None:
        there = f"there {'is' if len(present) == 1 else 'are'} {len(present)} here" if present else "there is none here"
        if draft is not None and draft >= len(present):
            raise UsageError(f"--draft-device {options.draft_device}: no such GPU, {there}; cpu is always there")
        if target and target[-1] >= len(present):
            ranks = f" and --tensor-parallel-size {len(target)}" if len(target) > 1 else ""
            raise UsageError(f"--device {options.device}{ranks} needs cuda:{target[-1]}: no such GPU, {there}")
    if options.mps and draft not in target:
        raise UsageError("--mps is for a target and a draft on the same GPU, which these are not")
    if draft in target and present is not None and not options.mps and not inline:
        if (service := mps.state()) == "running":
            log.info("target and draft share cuda:%d under CUDA's MPS", draft)
        else:
            log.warning("target and draft take turns on cuda:%d: %s", draft, mps.advice(service))
    return GpuPlaces(target, draft, present, inline)


def _pair(options: ChosenOptions, remote: bool) -> _ModelPair:
    """Find the models, without a `remote` draft, and check them. Raises UsageError."""
    names = () if remote or options.mode in ("ar", "ngram") else options.drafts
    weights = options.load_format == "auto"
    target = checkpoint.inspect(hub.ensure(options.target, options.revision), weights)
    if target.config.get(pairs.SHARED) or target.config.get(pairs.DRAFT_VOCAB) or draft_kind(target) is not PLAIN:
        raise UsageError(
            f"{target.directory} can only be a draft: its config.json leaves part of the model to a target"
        )
    if not names and not remote:
        names = _own_draft(options, target)
    if not names and not remote and options.mode in DRAFTED:
        raise UsageError(f"mode {options.mode} needs a draft for target {options.target}: give --draft, or --mode auto")
    named = zip(names, options.draft_revisions(len(names)), strict=True)
    drafts = [
        registry.own_draft(target, name)
        if is_in_target(name)
        else checkpoint.inspect(hub.ensure(name, revision), weights)
        for name, revision in named
    ]
    for draft in drafts if weights else ():
        pairs.borrowed(draft, target)
    drafts = [pairs.check_pair(target, draft) for draft in drafts]
    return _ModelPair(target, names, drafts, (), _features(options, drafts, target))


def _draft(pair: _ModelPair) -> str | None:
    """Return the draft of a configuration: a directory, or the name of a kind that is in the target's checkpoint."""
    if not pair.drafts:
        return None
    return pair.names[-1] if is_in_target(pair.names[-1]) else str(pair.drafts[-1].directory)


def _own_draft(options: ChosenOptions, target: checkpoint.Checkpoint) -> tuple[str, ...]:
    """Return the name of the draft in the target's checkpoint if it can draft, and none was asked for."""
    if options.mode in ("ar", "ngram") or any(options.draft) or options.load_format != "auto":
        return ()
    for name, kind in in_targets().items():
        try:
            if kind.of_target(target) is None:
                continue
            registry.own_draft(target, name)
        except UsageError as error:
            log.warning("no draft: %s", error)
            continue
        log.info("the %s of %s drafts; --draft none leaves it out", kind.offer[0], target.directory)
        return (name,)
    return ()


def _sampling(directory: Path) -> SamplingDefaults:
    """Return the valid part of the sampling that a target's generation_config.json recommends.

    The built-in target's own file may be an older version. `do_sample` false is temperature 0, as in transformers."""
    if directory == BUILTIN["smollm2"].directory:
        directory = BUILTIN["smollm2-draft"].directory
    said, found = checkpoint.generation_config(directory), SamplingDefaults()
    if said.get("do_sample") is False:
        said["temperature"] = 0.0
    for name in SamplingDefaults.__struct_fields__:
        try:
            found = msgspec.convert({**found.given(), name: said.get(name)}, SamplingDefaults)
        except msgspec.ValidationError:
            log.warning("generation_config.json of %s: %s %.40r is ignored", directory, name, said[name])
    if given := found.given():
        log.info(
            "sampling by generation_config.json: %s", ", ".join(f"{name} {value}" for name, value in given.items())
        )
    return found


def _features(
    options: ChosenOptions, drafts: list[checkpoint.Checkpoint], target: checkpoint.Checkpoint
) -> Features | None:
    """Return the hidden states that a draft reads of the target, or None. Raises UsageError."""
    found = next(((draft, kind) for draft in drafts if (kind := draft_kind(draft)) is not PLAIN), None)
    if found is None:
        return None
    draft, kind = found
    if len(drafts) > 1:
        raise UsageError(f"{draft.directory} is {kind.name}, which speculates alone: give one --draft")
    if options.synthetic_acceptance_length is not None:
        raise UsageError(
            f"{draft.directory} is {kind.name}, which goes on from hidden states: --synthetic-acceptance-length needs "
            "another --draft"
        )
    layers = kind.layers(draft, target)
    name = next(name for name, one in kinds().items() if one is kind)
    return Features(kind=name, layers=layers, width=len(layers) * target.count("hidden_size"))


def _max_model_len(options: ChosenOptions, shape: ModelSizes, room: int) -> int:
    """Return the longest sequence: as given, or the model's own if there is `room`. Raises UsageError."""
    length = options.max_model_len
    if length is None:
        # With no room for two tokens, EngineConfig refuses the model's own length: the message names what is missing.
        length = min(shape.context, room) if room >= 2 else shape.context
        if length < shape.context:
            log.warning("memory for a context of %d tokens; the model's own has %d", length, shape.context)
    if length > shape.context:
        raise UsageError(f"--max-model-len {length} is more than the {shape.context} tokens of {options.target}")
    if length < 2:
        raise UsageError(f"a context of {length} token holds no prompt with an answer: --max-model-len is at least 2")
    if options.mode != "ar" and options.num_speculative_tokens >= length:
        raise UsageError(
            f"--num-speculative-tokens {options.num_speculative_tokens} does not fit into a context of {length} tokens"
        )
    return length


def draft_formats(options: ChosenOptions, drafts: Sequence[checkpoint.Checkpoint]) -> tuple[WeightFormat, ...]:
    """Return the draft's possible formats: the requested one, the target's, or several, to be timed.

    Rounding a draft changes no token. Raises UsageError for an impossible format."""
    asked, on_cpu = options.draft_weights, options.draft_device == "cpu"
    independent = all(draft_kind(draft) is PLAIN for draft in drafts)
    on_host = on_cpu and options.device != "cpu" and independent
    dtype, usual = options.draft_dtype, "float32" if on_host else options.dtype
    if options.quantize == "int8" and asked == "auto" and dtype in (None, "float32") and on_cpu:
        asked = "int8"
    for flag, value, of, device in (
        ("--quantize", options.quantize, options.dtype, options.device),
        ("--draft-weights", asked, dtype or "float32", options.draft_device),
    ):
        if value in ("int8", "light") and (of, device) != ("float32", "cpu"):
            raise UsageError(f"{flag} {value} works in float32 on a CPU, not in {of} on device {device}")
    if asked == "int8" or asked == "light":
        return (WeightFormat(quantize=asked),)
    if dtype is not None or options.deterministic or usual != "float32" or not on_cpu:
        return (WeightFormat(dtype or usual),)
    formats = [WeightFormat("float32")]
    if asked == "auto" and all(registry.has_file(draft) for draft in drafts):
        whole, in_8_bits, light = (sum(resident_bytes(draft, "float32", how) for draft in drafts) for how in ROUNDINGS)
        formats += [WeightFormat(quantize="int8")] if in_8_bits != whole else []
        formats += [WeightFormat(quantize="light")] if independent and light != in_8_bits else []
    return tuple(formats)
