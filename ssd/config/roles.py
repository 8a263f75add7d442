"""The names of an engine's processes; a target's ranks are `target`, `target-1`, ..."""

from __future__ import annotations

from ssd.config.engine import MAX_RANKS, EngineConfig

ROLES = ("target", "frontend", "draft")
FOLLOWERS = tuple(f"target-{rank}" for rank in range(1, MAX_RANKS))


def target_roles(config: EngineConfig) -> tuple[str, ...]:
    return tuple(("target", *FOLLOWERS)[rank] for rank in config.ranks)


def of_target(role: str) -> bool:
    return role == "target" or role in FOLLOWERS


def roles(config: EngineConfig) -> tuple[str, ...]:
    draft = ("draft",) if config.drafts_apart else ()
    return (*target_roles(config), "frontend", *draft)
