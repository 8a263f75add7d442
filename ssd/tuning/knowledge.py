"""What is known of a pair on a machine, as a file: what forwards take, how often the models agree, how plans erred.

One file in the cache folder for each pair, type, placement, kernels and version, so that a second start measures
nothing. A draft's folder may carry what is known of the pair anywhere (`speculation.json`): how often they agree."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ssd import __version__
from ssd.config.engine import EngineConfig
from ssd.errors import UsageError
from ssd.system.files import cache_dir, read_bounded
from ssd.tuning.costs import SITUATIONS

log = logging.getLogger("ssd.target")

PRIOR_FILE = "speculation.json"
_MOST_BYTES = 2**20
MOST_ERROR = 3.0
Rate = tuple[Annotated[float, Meta(ge=0, le=1)], Annotated[int, Meta(ge=0, le=2**31)]]
"""A rate, and how many samples it counts as."""
Rates = Annotated[tuple[Rate, ...], Meta(max_length=64)]
Size = Annotated[int, Meta(ge=1, le=2**20)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Table = Annotated[dict[Size, Seconds], Meta(max_length=512)]


Kept = TypeVar("Kept", bound=msgspec.Struct)


class Agreement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often target and draft agree under one kind of sampling law (`ssd.tuning.tuner.kind_of`).

    `acceptance[i]` is that of the (i + 1)-th draft token where all before it were accepted. `hits[i]` is the chance
    that the bonus token is the (i + 1)-th candidate if it is none before. `lookup` are the tokens that prompt lookup
    brings a row in a round, and those that are verified for them."""

    acceptance: Rates = ()
    hits: Rates = ()
    lookup: tuple[Annotated[float, Meta(ge=0, le=64)], Annotated[float, Meta(ge=0, le=64)]] | None = None

    @property
    def sampled(self) -> bool:
        """Whether anything is known of acceptance."""
        return any(samples for _, samples in self.acceptance)


class Knowledge(msgspec.Struct, frozen=True):
    """`tables` has seconds by size for each situation (`ssd.tuning.costs`), `laws` an agreement for each kind of law,
    `errors` by batch and mode the logarithm of measured over predicted speed. A prior has `laws` alone. `rough` are
    tables that other work disturbed: no engine begins with them."""

    laws: Annotated[tuple[Agreement, ...], Meta(max_length=16)] = ()
    tables: Annotated[dict[str, Table], Meta(max_length=len(SITUATIONS))] = {}
    errors: Annotated[dict[str, Annotated[float, Meta(ge=-MOST_ERROR, le=MOST_ERROR)]], Meta(max_length=256)] = {}
    rough: Annotated[dict[str, Table], Meta(max_length=len(SITUATIONS))] = {}

    def law(self, kind: int) -> Agreement:
        """The agreement under a kind of law; an empty one if nothing is known."""
        return self.laws[kind] if kind < len(self.laws) else Agreement()


def file_of(config: EngineConfig, kernels: str) -> Path:
    """Where what is known of this pair, on this machine, placed like this and with these kernels, is kept."""
    drafts = [(file.name, file.stat().st_mtime_ns) for name in (config.draft, *config.cascade) for file in _files(name)]
    draft = config.draft if config.link is None else "another machine"
    pair = [config.digest, draft, drafts, config.emulate, config.synthetic, config.load_format]
    types = [config.dtype, config.quantize, *map(str, config.draft_formats), config.activations]
    stored = [] if config.kv_cache_dtype == "auto" else [config.kv_cache_dtype]  # older files keep their names
    places = [config.device, config.draft_device, config.target_cpus, config.draft_cpus, config.elastic_cores]
    ways = [config.deterministic, config.tensor_parallel_size, config.attention, config.enforce_eager]
    processor = re.search(r"^model name.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    described = repr(
        (pair, types, *stored, places, ways, kernels, __version__, processor and processor[0], os.cpu_count())
    )
    return cache_dir() / "tables" / f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"


def _files(model: str | None) -> list[Path]:
    """The weights of a model: a draft may be trained anew in the same place."""
    place = Path(model or "")
    files = sorted(place.iterdir()) if model and place.is_dir() else [place]
    return [file for file in files if file.suffix in (".safetensors", ".gguf") and file.is_file()]


def read(file: Path, kind: type[Kept]) -> Kept | None:
    """Return what a file says; None, after a warning unless it is missing, if it says nothing sound."""
    try:
        if not file.exists():
            return None
        return msgspec.json.decode(read_bounded(file, _MOST_BYTES), type=kind, strict=False)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, UsageError, OSError) as error:
        log.warning("%s is not used: %s", file, error)
        return None


def write(file: Path, knowledge: msgspec.Struct) -> None:
    """Replace a file; where that fails, it is measured again at the next start."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(knowledge) + b"\n")
        fresh.replace(file)
    except OSError as error:
        log.info("%s was not written: %s", file, error)
