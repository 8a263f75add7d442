"""Stores what the tuner learned of a pair on a machine, so that a second start measures nothing.

A draft's folder may carry a prior, `speculation.json`: the agreement, which holds on every machine."""

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
"""A rate, and the number of samples that it counts as."""
Rates = Annotated[tuple[Rate, ...], Meta(max_length=64)]
Size = Annotated[int, Meta(ge=1, le=2**20)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Table = Annotated[dict[Size, Seconds], Meta(max_length=512)]

Kept = TypeVar("Kept", bound=msgspec.Struct)


class Agreement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agreement of target and draft under one kind of sampling law (`ssd.tuning.estimates.kind_of`).

    `acceptance[i]` is the rate of the (i + 1)-th draft token if all before it were accepted, `hits[i]` the chance that
    the bonus token is the (i + 1)-th candidate if it is none before. `lookup`: as `LookupGain`."""

    acceptance: Rates = ()
    hits: Rates = ()
    lookup: tuple[Annotated[float, Meta(ge=0, le=64)], Annotated[float, Meta(ge=0, le=64)]] | None = None

    @property
    def sampled(self) -> bool:
        return any(samples for _, samples in self.acceptance)


class Knowledge(msgspec.Struct, frozen=True):
    """The contents of a pair's file; a prior has `laws` alone.

    `laws`: by kind. `tables`, `text`: of `ssd.tuning.costs.Costs`. `errors`: of a `Chooser`, by batch and name. No
    engine begins with `rough` tables, which other work disturbed."""

    laws: Annotated[tuple[Agreement, ...], Meta(max_length=16)] = ()
    tables: Annotated[dict[str, Table], Meta(max_length=len(SITUATIONS))] = {}
    errors: Annotated[dict[str, Annotated[float, Meta(ge=-MOST_ERROR, le=MOST_ERROR)]], Meta(max_length=256)] = {}
    rough: Annotated[dict[str, Table], Meta(max_length=len(SITUATIONS))] = {}
    text: Annotated[dict[str, Annotated[float, Meta(ge=0, le=1)]], Meta(max_length=len(SITUATIONS))] = {}

    def law(self, kind: int) -> Agreement:
        return self.laws[kind] if kind < len(self.laws) else Agreement()


def file_of(config: EngineConfig, kernels: str) -> Path:
    """Return the file of the pair, this machine, configuration and kernels."""
    drafts = [(file.name, file.stat().st_mtime_ns) for name in (config.draft, *config.cascade) for file in _files(name)]
    draft = config.draft if config.link is None else "another machine"
    pair = [config.digest, draft, drafts, config.emulate, config.synthetic, config.load_format]
    types = [config.dtype, config.quantize, *map(str, config.draft_formats), config.activations]
    stored = [] if config.kv_cache_dtype == "auto" else [config.kv_cache_dtype]  # no part of older files' names
    places = [config.device, config.draft_device, config.target_cpus, config.draft_cpus, config.elastic_cores]
    ways = [config.deterministic, config.tensor_parallel_size, config.attention, config.enforce_eager]
    processor = re.search(r"^model name.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    described = repr(
        (pair, types, *stored, places, ways, kernels, __version__, processor and processor[0], os.cpu_count())
    )
    return cache_dir() / "tables" / f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"


def _files(model: str | None) -> list[Path]:
    place = Path(model or "")
    files = sorted(place.iterdir()) if model and place.is_dir() else [place]
    return [file for file in files if file.suffix in (".safetensors", ".gguf") and file.is_file()]


def read(file: Path, kind: type[Kept]) -> Kept | None:
    """Return the contents of a file; None if missing, or with a warning if not valid."""
    try:
        if not file.exists():
            return None
        return msgspec.json.decode(read_bounded(file, _MOST_BYTES), type=kind, strict=False)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, UsageError, OSError) as error:
        log.warning("%s is not used: %s", file, error)
        return None


def write(file: Path, knowledge: msgspec.Struct) -> None:
    """Replace a file. A failure is logged: the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(knowledge) + b"\n")
        fresh.replace(file)
    except OSError as error:
        log.info("%s was not written: %s", file, error)
