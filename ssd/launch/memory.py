"""Plans an engine's memory by adding up bytes: pages of KV caches, weights and buffers beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssd.config.engine import ITEM_BYTES, DType, EngineConfig, WeightFormat
from ssd.config.gpus import Gpu
from ssd.config.params import DRAFT_REACH, MAX_LOOKAHEAD, Speculation
from ssd.errors import UsageError
from ssd.execution.graph_shapes import draft_shapes, target_shapes
from ssd.ipc.layouts import draft_probs_layout, feature_layout, on_gpus
from ssd.launch.options import ChosenOptions
from ssd.models import pairs
from ssd.models.checkpoint import Checkpoint
from ssd.models.draft_kinds import StepRoom, draft_kind
from ssd.models.resident import device_bytes, resident_bytes
from ssd.models.sizes import STEP_BYTES, ModelSizes
from ssd.system import cgroups

# A process's memory before its first tensor: CUDA's context, the workspaces of its libraries, graphs.
CONTEXT = 2**30
# Pages beyond those in use at once keep prefixes for later requests. Each costs the host some hundred bytes.
_SPARE_PAGES = 2**18
# The caches of target and draft take at most a quarter and an eighth of the host's memory that the weights leave.
_TARGET_SHARE, _DRAFT_SHARE = 4, 8
# By default a cache on a CPU has pages for this number of tokens per sequence, and for one sequence of any length.
_USUAL_TOKENS = 2048
# Memory of the processes beside weights and caches, as measured under load (docs/reliability.md, "Memory limits"): one
# process with a model, and all others together (supervisor, frontend, text workers, a grammar being compiled).
_MODEL_PROCESS, _OTHER_PROCESSES = 320 * 2**20, 256 * 2**20
_LEAST_CONTEXT = 512  # tokens, below which a start by default is refused
# Bytes that a target on one GPU keeps for each sequence and id of the vocabulary: the id's count in the text, a bias.
ADJUSTED = 8


class NoRoom(UsageError):
    """A model has no room on its GPU, alone or beside the other model."""


class GpuPlaces(NamedTuple):
    """GPUs of target and draft (`inline`: in the target's process), and of the machine (None: unknown)."""

    target: range
    draft: int | None
    present: list[Gpu] | None
    inline: bool = False


class Sized(NamedTuple):
    """A model and the type of its weights and its cache."""

    model: Checkpoint
    dtype: DType


def cache_pages(
    options: ChosenOptions,
    speculation: Speculation,
    target: Sized,
    drafts: Sequence[Sized],
    wanted: int,
    free: int,
    places: GpuPlaces,
    shared: tuple[int, int],
) -> tuple[int, int, int]:
    """Return the pages of the caches of target, draft, and a second draft in the target's process.

    `wanted`: pages if every sequence has the greatest length. `free`: bytes of the host beside the weights. The target
    gets `--kv-cache-memory-bytes`, or on a CPU at most a quarter of `free`, on GPUs the rest (`pages_on_gpus`). A draft
    on a CPU gets at most an eighth of `free`, but always one sequence's pages. `shared`: (bytes of draft probabilities,
    hidden state numbers per token) on the target's GPU if the draft is on a GPU too. Raises UsageError if there is no
    room."""
    size, seqs, given = options.page_size, options.max_num_seqs, options.kv_cache_memory_bytes
    token = token_bytes(options, target)
    page = size * token
    usual = _usual_pages(options, wanted)
    found = given // page if given is not None else min(usual, free // _TARGET_SHARE // page)
    most_of_draft = wanted
    if options.draft_device == "cpu" and drafts:
        most_of_draft = min(usual, max(wanted // seqs, _draft_tokens(drafts, free) // size))
    beside = places.inline and options.draft_device == "cpu"
    if places.present is None:
        return found, most_of_draft, wanted * beside
    ranks, row = options.tensor_parallel_size, 1 + speculation.longest
    shapes = target_shapes(seqs, row, options.deterministic)
    need = _need(target, options, seqs * row, ranks, [shape.tokens for shape in shapes], token)
    draft_probs, width = shared if places.draft is not None else (0, 0)
    states = size * width * ITEM_BYTES[target.dtype]
    texts = ADJUSTED * (seqs + 1) * ModelSizes.of(target.model).vocab_size if ranks == 1 else 0
    more = draft_probs + texts + state_bytes(options, target.model)
    need = need._replace(working=need.working + more, page=need.page + states)
    if given is not None:
        need = need._replace(working=need.working + given // ranks + found * states, page=0)
    if places.inline:
        draft_need = _inline_need(options, target, drafts[0])
    else:
        draft_need = _drafts_need(options, speculation, target, drafts)
    budget = Budget(places.present, options.gpu_memory_utilization)
    on_gpu, of_draft = pages_on_gpus(budget, need, places.target, draft_need, places.draft, wanted, wanted // seqs)
    found = found if given is not None or not places.target else on_gpu
    return (found, most_of_draft, of_draft) if beside else (found, min(of_draft, most_of_draft), 0)


def token_bytes(options: ChosenOptions, target: Sized) -> int:
    sizes = ModelSizes.of(target.model)
    values = sizes.kv_values_per_token
    match options.kv_cache_dtype:
        case "fp8":
            return values
        case "int8":
            return values + STEP_BYTES * sizes.kv_cells_per_token
    return values * ITEM_BYTES[target.dtype]


def _usual_pages(options: ChosenOptions, wanted: int) -> int:
    asked = options.max_model_len is not None or options.kv_cache_memory_bytes is not None
    if asked or options.device != "cpu":
        return wanted
    seqs = options.max_num_seqs
    return min(wanted, max(wanted // seqs, seqs * (-(-_USUAL_TOKENS // options.page_size) + 1)))


def context_room(options: ChosenOptions, target: Sized, drafts: Sequence[Sized], free: int) -> int:
    """Return the tokens of the longest sequence for which the caches in the host's memory have pages.

    `free`: bytes beside the weights. A model on a GPU does not limit the result."""
    tokens = []
    if options.device == "cpu":
        given = options.kv_cache_memory_bytes
        room = free // _TARGET_SHARE if given is None else given
        tokens.append(room // token_bytes(options, target))
    if options.draft_device == "cpu" and drafts:
        tokens.append(_draft_tokens(drafts, free))
    # One page stays free for tokens that are not yet accepted.
    return max(0, min(tokens, default=2**31) // options.page_size - 1) * options.page_size


def host_processes(options: ChosenOptions, has_draft: bool) -> int:
    """Return the host's bytes that the engine's processes take beside weights and caches."""
    return _MODEL_PROCESS * (options.ranks_here + has_draft) + _OTHER_PROCESSES + options.suffix_memory


def has_room_beside(options: ChosenOptions, drafts: Sequence[Sized], taken: int, available: int) -> bool:
    """Return True if `available` bytes hold the `taken` ones and a draft's cache for its longest text."""
    longest = min(options.max_model_len or 2**31, *(ModelSizes.of(draft.model).context for draft in drafts))
    return taken + _draft_token_bytes(drafts) * (longest + options.page_size) <= available


def check_room(
    options: ChosenOptions, target: Sized, drafts: Sequence[Sized], weights: int, processes: int, available: int
) -> None:
    """Raise UsageError, with the memory needed, if the host cannot hold the engine's least context."""
    if "cpu" not in (options.device, options.draft_device if drafts else ""):
        return
    tokens = min(options.max_model_len or _LEAST_CONTEXT, ModelSizes.of(target.model).context)
    stored, given = tokens + options.page_size, options.kv_cache_memory_bytes
    of_target = token_bytes(options, target) * stored if options.device == "cpu" else 0
    of_draft = _draft_token_bytes(drafts) * stored if options.draft_device == "cpu" else 0
    if given is None:
        share = _DRAFT_SHARE if options.max_model_len is None else 1
        caches = max(_TARGET_SHARE * of_target, share * of_draft)
    else:
        caches = of_draft + (given if of_target else 0)
    if weights + processes + caches > available:
        where = "" if cgroups.memory_left() is None else " below the limit of this container"
        raise UsageError(
            f"{options.target} needs {_mib(weights + processes + caches)} of memory: {_mib(weights)} for weights, "
            f"{_mib(processes)} for its processes, {_mib(caches)} to work with {tokens} tokens of context; "
            f"{_mib(available)} are free{where}"
        )


def _draft_tokens(drafts: Sequence[Sized], free: int) -> int:
    return free // _DRAFT_SHARE // _draft_token_bytes(drafts)


def _draft_token_bytes(models: Sequence[Sized]) -> int:
    return sum(ModelSizes.of(one.model).kv_values_per_token * ITEM_BYTES[one.dtype] for one in models)


def _drafts_need(options: ChosenOptions, speculation: Speculation, target: Sized, drafts: Sequence[Sized]) -> Need:
    """Return the memory that all drafts, which run in one process, keep on its GPU."""
    chains, rows = options.max_num_seqs * speculation.chains, options.max_num_seqs * (1 + speculation.longest)
    largest = max(shape.tokens for shape in draft_shapes(options.max_num_seqs, chains))
    total = Need(0, 0, 0, CONTEXT)
    for draft in drafts:
        whole = _whole(draft.model, target.model)
        plain = StepRoom(rows + chains, chains, MAX_LOOKAHEAD + 1)
        room = draft_kind(draft.model).room(draft.model, plain, options.max_num_seqs, speculation.longest)
        # A draft keeps the logits of its largest shape only.
        own = _need(Sized(whole, draft.dtype), options, room.logits, 1, [largest])
        branches = own.page // options.page_size * room.cells * room.depth
        own = own._replace(working=own.working + branches + state_bytes(options, whole, room.cells), context=0)
        total = Need(*map(sum, zip(total, own, strict=True)))
    return total


def _inline_need(options: ChosenOptions, target: Sized, draft: Sized) -> Need:
    """Return the memory of a draft in the target's process, which reads one or two tokens a sequence."""
    seqs, dtype = options.max_num_seqs, target.dtype if options.draft_device == "cpu" else draft.dtype
    kept = [shape.tokens for shape in target_shapes(seqs, 2, options.deterministic)]
    loops = [3 * seqs] * 3  # rows of two tokens, then of one, for each kind of drawing (`_Loop`)
    sized = Sized(_whole(draft.model, target.model), dtype)
    return _need(sized, options, 2 * seqs, 1, kept + loops)._replace(context=0)


def _need(
    sized: Sized, options: ChosenOptions, rows: int, ranks: int, kept: Sequence[int], token: int | None = None
) -> Need:
    """Return the memory that one of a model's `ranks` keeps on its GPU.

    A forward has logits for `rows` tokens, a static shape for as many as `kept` lists. `token`: bytes of a token in the
    KV cache."""
    sizes, item, largest = ModelSizes.of(sized.model), ITEM_BYTES[sized.dtype], max(kept, default=0)
    return Need(
        weights=device_bytes(sized.model, item) // ranks,
        working=sum(
            working(tokens, outputs, sizes.width, sizes.inner, sizes.vocab_size)
            for tokens, outputs in ((options.max_num_batched_tokens, rows), (largest, largest))
        )
        + item * (rows + sum(kept)) * sizes.vocab_size,
        page=options.page_size * (token or sizes.kv_values_per_token * item) // min(ranks, sizes.kv_heads),
    )


class Need(NamedTuple):
    """The memory of a model on a GPU, in bytes: its weights, buffers of a forward, each page, process."""

    weights: int
    working: int
    page: int
    context: int = CONTEXT

    @property
    def fixed(self) -> int:
        return self.weights + self.working + self.context


def working(tokens: int, rows: int, width: int, inner: int, vocab_size: int) -> int:
    """Return the bytes of the buffers of a forward over `tokens`, with logits for `rows` of them.

    A logit takes four 32-bit numbers to sample: itself, its noise, and two for making the noise or the sum."""
    return 4 * tokens * (6 * width + 2 * inner) + 16 * rows * vocab_size


class Budget:
    """The usable memory of each GPU: a share of its memory, `utilization`, and no more than is free."""

    def __init__(self, gpus: Sequence[Gpu], utilization: float) -> None:
        self._gpus, self._utilization = gpus, utilization

    def of(self, gpu: int) -> int:
        found = self._gpus[gpu]
        return min(found.free, int(found.total * self._utilization))

    def words(self, gpu: int) -> str:
        found = self._gpus[gpu]
        return (
            f"{_gib(self.of(gpu))} of cuda:{gpu} may be used (--gpu-memory-utilization {self._utilization:g} of "
            f"{_gib(found.total)}, {_gib(found.free)} free)"
        )


def pages_on_gpus(
    budget: Budget,
    target: Need,
    target_gpus: Sequence[int],
    draft: Need,
    draft_gpu: int | None,
    wanted: int,
    least: int,
) -> tuple[int, int]:
    """Return the pages of target and draft: the draft gets the `wanted` pages, the target the rest.

    On a shared GPU that is too small both get equally many. Raises NoRoom for fewer pages than the `least` for a
    sequence."""
    drafts = wanted
    if draft_gpu is not None:
        room = budget.of(draft_gpu) - draft.fixed
        each = draft.page
        if draft_gpu in target_gpus:
            room, each = room - target.fixed, each + target.page
        drafts = min(wanted, room // each)
        if drafts < least:
            raise NoRoom(_no_room("the draft", draft, target, draft_gpu, target_gpus, least, budget))
    taken: Mapping[int, int] = {} if draft_gpu is None else {draft_gpu: draft.fixed + drafts * draft.page}
    found = max(wanted, _SPARE_PAGES)
    for gpu in target_gpus:
        room = budget.of(gpu) - target.fixed - taken.get(gpu, 0)
        if room < least * target.page:
            raise NoRoom(_no_room("the target", target, draft, gpu, [draft_gpu], least, budget))
        found = min(found, room // target.page if target.page else found)
    return found, drafts


def _no_room(
    who: str, need: Need, other: Need, gpu: int, others: Sequence[int | None], least: int, budget: Budget
) -> str:
    parts = f"{_gib(need.weights)} of weights, {_gib(need.working + need.context)} to work in, "
    parts += f"{_gib(least * need.page)} for the keys and values of one sequence"
    beside = ""
    if gpu in others:
        name = "target" if who == "the draft" else "draft"
        beside = f" beside the {name}'s {_gib(other.fixed + least * other.page)}"
    help = "lower --max-model-len or --max-num-batched-tokens"
    help += ", or give another --draft-device" if who == "the draft" or beside else ""
    return f"{who} has no room on cuda:{gpu}: it needs {parts}{beside}, and {budget.words(gpu)}; {help}"


def draft_probs_bytes(options: ChosenOptions, speculation: Speculation, vocab_size: int) -> int:
    if speculation.mode in ("ar", "ngram") or not speculation.rule().needs_draft_probs:
        return 0
    return draft_probs_layout(options.max_num_seqs, speculation, vocab_size).size_bytes


def host_weights(
    options: ChosenOptions, target: Sized, drafts: Sequence[Checkpoint], formats: Sequence[WeightFormat]
) -> int:
    """Return the bytes of the weights in the host's memory, the drafts' in the largest of `formats`."""
    size = 0
    if options.device == "cpu" and options.has_weights:
        whole = resident_bytes(target.model, target.dtype, options.quantize)
        size += whole * options.ranks_here // options.tensor_parallel_size
    if options.draft_device == "cpu":
        whole_drafts = [_whole(draft, target.model) for draft in drafts]
        size += max(sum(resident_bytes(draft, one.dtype, one.quantize) for draft in whole_drafts) for one in formats)
    return size


def host_states(options: ChosenOptions, target: Sized, drafts: Sequence[Checkpoint]) -> int:
    models = [target.model] if options.device == "cpu" else []
    return sum(state_bytes(options, one) for one in [*models, *(drafts if options.draft_device == "cpu" else ())])


def state_bytes(options: ChosenOptions, model: Checkpoint, cells: int = 0) -> int:
    """Return the bytes of a model's recurrent states and changes; `cells`: of a draft's chains."""
    seqs = options.max_num_seqs
    changes = DRAFT_REACH * seqs + (MAX_LOOKAHEAD + 1) * cells  # a target has half of the former
    return ModelSizes.of(model).recurrent.nbytes(seqs, changes)


def _whole(draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    return pairs.borrowed(draft, target) if draft.tensors else draft


def check_arenas(config: EngineConfig, draft_probs: int, available: int) -> None:
    """Raise UsageError if the arenas of target and draft are too large for the host, unless on a GPU.

    `draft_probs`: size of the draft probabilities, `available`: the host's free memory, in bytes."""
    if on_gpus(config.device, config.draft_device):
        return
    sampler = f"--sampler {config.speculation.sampler}"
    arenas = [(sampler, draft_probs, "the draft's probabilities", "--max-num-seqs, --budget or -k")]
    if config.features is not None:
        size, lower = feature_layout(config).size_bytes, "--max-num-seqs, --max-model-len or --kv-cache-memory-bytes"
        arenas.append(("a draft that reads hidden states", size, "the target's hidden states", lower))
    for who, size, what, lower in arenas:
        if size > available // 4:
            raise UsageError(
                f"{who} needs {_gib(size)} for {what}, more than a quarter of the memory that is free; lower {lower}"
            )


def _mib(size: int) -> str:
    return f"{-(-size // 2**20)} MiB"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
