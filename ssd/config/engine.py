"""The engine's configuration: frozen, validated before any process starts, sent to every process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ssd.config import gpus
from ssd.config.descriptions import ADVANCED, LIMITS, MAIN, MEMORY, PROCESSORS, WEIGHTS
from ssd.config.emulation import DeviceTimes, StatedAgreement
from ssd.config.params import DRAFTED, MAX_GRAMMAR, SamplingDefaults, Speculation
from ssd.errors import UsageError
from ssd.system.registered import AUTO, DUMMY

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Cpus = tuple[Annotated[int, Meta(ge=0, le=4095)], ...]
DType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
Quantize = Literal["none", "int8"]
DraftWeights = Literal["auto", "as-is", "int8", "light"]
CacheDType = Literal["auto", "fp8", "int8"]
Activations = Literal["float32", "int16", "int8"]
InlineDraft = Literal["auto", "on", "off"]
AttentionName = Literal["auto", "torch", "triton", "flash-attn"]
MAX_RANKS = 64
MIN_SUFFIX_MEMORY = 2**16
NEVER_S = 1e9
"""The `idle_draft_s` of a draft that never ends. JSON has no infinity."""
SequenceCount = Annotated[int, Meta(ge=1, le=1024)]
TokenCount = Annotated[int, Meta(ge=1, le=65536)]
RankCount = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Port = Annotated[int, Meta(ge=0, le=65535)]
PlainTools = Literal["auto", "refuse"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that clients may ask for; the error of a refused request names the limit.

    A grammar of tools may have four times `max_grammar_bytes`."""

    heading: ClassVar[str] = LIMITS
    max_open_requests: Annotated[int, Meta(ge=1, le=65536), "Most requests that run or wait; more get a 429."] = 2048
    max_n: Annotated[int, Meta(ge=1, le=1024), "Most choices of one prompt."] = 8
    max_prompts: Annotated[int, Meta(ge=1, le=65536), "Most prompts of one HTTP request."] = 64
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30), "Largest HTTP body."] = 4 * 2**20
    slow_reader_seconds: Annotated[float, Meta(gt=0, le=86400), "Seconds a client may leave tokens unread."] = 30.0
    max_grammar_bytes: Annotated[
        int, Meta(ge=256, le=MAX_GRAMMAR), "Longest JSON schema, regular expression or grammar of a request."
    ] = 64 * 2**10


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ways for clients to reach an engine beside its own ipc socket, and the `names` of its model.

    Fields are those of `ssd.launch.server.ServerOptions`. Lines of `api_key_file` are keys, like `api_keys`; without
    keys, requests must name this machine or one of `allowed_hosts`. `quotas` are those of `--limits`."""

    names: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=64)] = ()
    http: bool = False
    host: str = "127.0.0.1"
    port: Port = 8000
    uds: str | None = None
    api_key_file: str | None = None
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    zmq_bind: str | None = None
    zmq_keys: str | None = None
    otlp_traces_endpoint: str | None = None
    ui: bool = True
    tools: PlainTools = "auto"
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    limits: Limits = Limits()
    quotas: dict[str, Any] | None = None


class Features(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hidden states that a draft of a `kind` (`ssd.drafts`) reads: after `layers`, `width` numbers a token."""

    kind: str
    layers: tuple[Annotated[int, Meta(ge=0, le=10_000)], ...]
    width: Positive


class DraftLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address for a remote draft, and the folder with the `keys` of permitted drafts.

    `own`: a draft reads only requests of the client whose key has the same name."""

    bind: str
    keys: str | None = None
    own: bool = False


class Upstream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The remote engine that verifies: addresses, and folders of our keys, for requests and for the draft.

    `ssd draft` sends no requests: its `connect` is ""."""

    draft_connect: str
    connect: str = ""
    keys: str | None = None
    draft_keys: str | None = None


class WeightFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dtype, or linear layers of few bits; `light`: 4, and `ssd.models.pairs.short_list`."""

    dtype: DType = "float32"
    quantize: Literal[Quantize, "light"] = "none"

    def __str__(self) -> str:
        return self.dtype if self.quantize == "none" else self.quantize


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that the configuration takes over unchanged (others: `ssd.launch.options`)."""

    quantize: Annotated[
        Quantize, "int8: round weights of 16 bits or more to 8, on a CPU: half the bytes to read, less exact.", WEIGHTS
    ] = "none"
    activations: Annotated[
        Literal["auto", Activations],
        "Inputs of layers whose weights have few bits; int8: fast, float32: exact. auto: int8 for GGUF on a CPU.",
        WEIGHTS,
    ] = "auto"
    tensor_parallel_size: Annotated[
        RankCount, "Split the target over this many GPUs, or equal groups of cores.", PROCESSORS, "-tp"
    ] = 1
    executor: Annotated[
        str, "local: all parts are on this machine. ray, a plugin: on any of its Ray cluster.", PROCESSORS, ADVANCED
    ] = "local"
    device: Annotated[str, "Where the target runs: cpu, cuda or cuda:N.", MAIN] = "cpu"
    mps: Annotated[bool, "Run CUDA's MPS, for a target and a draft on one GPU.", PROCESSORS, ADVANCED] = False
    deterministic: Annotated[
        bool, "Make results independent of batch shapes. Slower, but for our kernels on CPUs.", PROCESSORS
    ] = False
    attention: Annotated[
        AttentionName, "Backend on a GPU. auto: triton, and for prompts flash-attn, if installed.", PROCESSORS, ADVANCED
    ] = "auto"
    kv_cache_dtype: Annotated[
        CacheDType,
        "The target's keys and values in 8 bits: fp8 on a GPU, int8 on a CPU. auto: in the type of the model.",
        MEMORY,
    ] = "auto"
    suffix_memory: Annotated[
        int,
        Meta(ge=0, le=2**40),
        "Bytes for texts of earlier requests, from which answers are guessed; 0: none.",
        MEMORY,
    ] = 64 * 2**20
    enforce_eager: Annotated[bool, "No CUDA graphs: slower, less memory, quick to start.", PROCESSORS, ADVANCED] = False
    load_format: Annotated[str, "dummy: random weights.", WEIGHTS] = "auto"
    shutdown_timeout: Annotated[
        float, Meta(ge=0, le=86400), "Seconds that open requests get at the end.", LIMITS, ADVANCED
    ] = 30.0

    @property
    def has_weights(self) -> bool:
        """Return True if the target is a model, and no plugin's process in a model's place."""
        return self.load_format in (AUTO, DUMMY)


class EngineConfig(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a child process needs to know. Facts found at run time never come back into it.

    - `target` and `draft` are checkpoint directories; `cascade` has the drafts below `draft`, smallest first. With a
      `link` the draft is on another machine. With an `upstream` the target is, and `target` has only its tokenizer.
      `digest` names the target's files. Unless the target `has_weights`, a plugin's process takes its place. The
      draft's process takes the fastest of `draft_formats`.
    - `inline_draft`: a draft works in turn with the target, in its process. With `inline_num_pages` another one, in a
      process of its own, drafts ahead for requests in mode `ssd`.
    - All ranks of the target are here, or only rank 0 if the `executor` is not "local". The system places a process
      without cores. With `elastic_cores` each model also computes on the other's cores while that rests.
    - `idle_draft_s`: seconds without use after which the draft's process ends, if `parks_draft`.
    - For tests: `emulate` gives forwards these times, `synthetic` says how often random models agree, `failpoints`
      permits injected faults."""

    dtype: DType = "float32"
    activations: Activations = "int16"
    max_num_seqs: SequenceCount = 8
    max_num_batched_tokens: TokenCount = 256
    draft_device: str = "cpu"
    target: str
    draft: str | None = None
    cascade: tuple[str, ...] = ()
    link: DraftLink | None = None
    upstream: Upstream | None = None
    target_name: str = "target"
    draft_name: str = "draft"
    speculation: Speculation = Speculation()
    sampling: SamplingDefaults = SamplingDefaults()
    draft_formats: Annotated[tuple[WeightFormat, ...], Meta(min_length=1)] = (WeightFormat(),)
    max_model_len: Positive = 2048
    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    num_pages: Positive = 1024
    draft_num_pages: Positive = 1024
    inline_num_pages: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    target_cpus: Cpus = ()
    draft_cpus: Cpus = ()
    elastic_cores: bool = False
    inline_draft: bool = False
    digest: str = ""
    vocab_size: Positive = 1
    features: Features | None = None
    server: ServerConfig = ServerConfig()
    emulate: DeviceTimes | None = None
    synthetic: StatedAgreement | None = None
    failpoints: bool = False
    idle_draft_s: Annotated[float, Meta(ge=0)] = 300.0

    def __post_init__(self) -> None:
        if self.speculation.mode in DRAFTED and not self.has_draft:
            raise UsageError(f"mode {self.speculation.mode} needs a draft; give --draft or use --mode auto")
        if self.num_pages * self.page_size < self.max_model_len:
            raise UsageError(
                f"no room for the KV cache: {self.num_pages} pages of {self.page_size} tokens hold fewer than one "
                f"sequence of {self.max_model_len}; raise --kv-cache-memory-bytes or lower --max-model-len"
            )
        if self.tensor_parallel_size > 1 or self.executor != "local":
            self._check_ranks()
        if 0 < self.suffix_memory < MIN_SUFFIX_MEMORY:
            raise UsageError(f"--suffix-memory is 0, or at least {MIN_SUFFIX_MEMORY} bytes, not {self.suffix_memory}")
        if self.emulate is not None and self.kv_cache_dtype != "auto":
            raise UsageError("emulated times are those of a KV cache in the model's own type")
        if self.emulate is not None and (self.cascade or not self.has_weights):
            raise UsageError(
                "emulated times are those of a target and one draft: no cascade, no engine without weights"
            )
        if self.synthetic is not None and (self.load_format != "dummy" or self.cascade):
            raise UsageError("synthetic acceptance is that of a target and one draft with --load-format dummy")

    @property
    def has_draft(self) -> bool:
        return self.draft is not None or self.link is not None

    @property
    def drafts_apart(self) -> bool:
        """Return True if a draft has a process of its own."""
        return self.has_draft and (not self.inline_draft or self.inline_num_pages > 0)

    @property
    def parks_draft(self) -> bool:
        """Return True if an unused draft's process may end; on a GPU a new one would capture graphs anew."""
        return self.draft is not None and gpus.number(self.draft_device) is None and self.speculation.mode == "auto"

    @property
    def ranks(self) -> range:
        """Return the ranks that the supervisor starts here; the executor starts the others."""
        return range(self.tensor_parallel_size if self.executor == "local" else 1)

    def cpus_of(self, role: str, rank: int = 0) -> Cpus:
        """Return the cores of a process, its own before those that it may borrow; ranks have equally many."""
        if role == "draft":
            return self.draft_cpus + self.target_cpus * self.elastic_cores
        if self.elastic_cores:
            return self.target_cpus + self.draft_cpus
        each = len(self.target_cpus) // len(self.ranks)
        return self.target_cpus[rank * each : (rank + 1) * each]

    def core_counts(self, role: str) -> tuple[int, int]:
        """Return the number of a process's own cores, and of all that it may use."""
        own = self.draft_cpus if role == "draft" else self.target_cpus
        return len(own), len(self.cpus_of(role))

    def _check_ranks(self) -> None:
        ranks = f"--tensor-parallel-size {self.tensor_parallel_size}"
        if not self.has_weights or self.emulate is not None:
            raise UsageError(f"{ranks}: neither an engine without weights nor emulated times are split over ranks")
        if self.tensor_parallel_size == 1:
            raise UsageError(
                f"--executor {self.executor} places the ranks of a target: give --tensor-parallel-size 2 or more"
            )
        numbers = gpus.number(self.device), gpus.number(self.draft_device)
        if self.executor != "local" and (numbers[0] or (numbers[1] or 0) > 1):
            raise UsageError(
                f"--device {self.device}, --draft-device {self.draft_device}: with --executor {self.executor} the GPUs "
                f"are those that {self.executor.capitalize()} gives: cuda for the target, cuda or cuda:1 for the draft"
            )
        if 0 < len(self.target_cpus) < len(self.ranks):
            raise UsageError(f"{ranks} needs as many cores for the target, which may use {len(self.target_cpus)}")


def check_text(options: msgspec.Struct) -> None:
    """Raise UsageError, naming the option, for a text with a NUL or surrogates (bytes not in UTF-8).

    No child can be sent such a text, and no file has such a name."""
    for name in options.__struct_fields__:
        value = getattr(options, name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):
                raise UsageError(f"--{name.replace('_', '-')}: {text!r} is not UTF-8 text without NUL")
