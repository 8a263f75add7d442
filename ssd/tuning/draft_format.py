"""Chooses the draft's fastest weight format that drafts alike, and keeps it in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ssd.config.engine import EngineConfig, WeightFormat
from ssd.tuning import knowledge
from ssd.tuning.knowledge import Seconds

log = logging.getLogger("ssd.draft")

LEAST_AGREEMENT = 0.8
"""Share of the likeliest tokens that a format must have in common with the draft's own form to be chosen."""


class FormatTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Least seconds of the same forwards in each format, and share of the first's likeliest tokens.

    `agreed`: two starts in a row found the same format best."""

    seconds: Annotated[dict[str, Seconds], Meta(max_length=8)]
    agreement: Annotated[dict[str, Annotated[float, Meta(ge=0, le=1)]], Meta(max_length=8)]
    agreed: bool = False


def choose(config: EngineConfig, kernels: str, tried: Callable[[WeightFormat], tuple[float, float]]) -> WeightFormat:
    """Return the fastest of the formats whose likeliest tokens agree with those of the first.

    `tried` loads the draft in a format and returns seconds and agreement; not called after two starts that agreed."""
    if (only := _only(config)) is not None:
        return only
    file = _file_of(config, kernels)
    before = knowledge.read(file, FormatTimes)
    if before is not None and before.agreed and (known := _fastest(config, before)) is not None:
        return known
    # Other work only adds time, so the lesser time of a format counts.
    least = {} if before is None else before.seconds
    found = {str(one): tried(one) for one in config.draft_formats}
    seconds = {name: max(1e-9, min(took, least.get(name, inf))) for name, (took, _) in found.items()}
    times = FormatTimes(seconds, {name: agreement for name, (_, agreement) in found.items()})
    fastest = _fastest(config, times)
    assert fastest is not None
    said = ", ".join(f"{name} {1e3 * took:.2f} and {times.agreement[name]:.0%}" for name, took in seconds.items())
    log.info("the draft computes in %s, the fastest here (ms, and tokens as in the first: %s)", fastest, said)
    agreed = before is not None and _fastest(config, before) == fastest
    knowledge.write(file, msgspec.structs.replace(times, agreed=agreed))
    return fastest


def chosen(config: EngineConfig, kernels: str) -> WeightFormat | None:
    """Return the format that the last start chose; None: unknown."""
    if (only := _only(config)) is not None:
        return only
    times = knowledge.read(_file_of(config, kernels), FormatTimes)
    return None if times is None else _fastest(config, times)


def _only(config: EngineConfig) -> WeightFormat | None:
    formats = config.draft_formats
    return formats[0] if len(formats) == 1 or config.emulate is not None else None


def _fastest(config: EngineConfig, times: FormatTimes) -> WeightFormat | None:
    if not {*times.seconds} == {*times.agreement} == {*map(str, config.draft_formats)}:
        return None
    first, *others = config.draft_formats
    alike = [one for one in others if times.agreement[str(one)] >= LEAST_AGREEMENT]
    return min((first, *alike), key=lambda one: times.seconds[str(one)])


def _file_of(config: EngineConfig, kernels: str) -> Path:
    return knowledge.file_of(config, kernels).with_suffix(".draft.json")
