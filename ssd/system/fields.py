"""Checked access to the fields of a checkpoint's config.json: a wrong type would give silently wrong results.

A field that is null counts as missing. Each function raises `UsageError`, which names the field, if the value is wrong
or if it is missing without a `default`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ssd.errors import UsageError

Config = Mapping[str, Any]

MOST = 2**31 - 1
_LARGEST = 1e30


def flag(config: Config, name: str, default: bool = False) -> bool:
    """Return a boolean field; refuse the text "false"."""
    value = _given(config, name, default)
    if type(value) is not bool:
        raise UsageError(f"{name} must be true or false, is {_shown(value)}")
    return value


def number(config: Config, name: str, default: float | None = None) -> float:
    value = _given(config, name, default)
    if type(value) not in (int, float) or not 0 < value < _LARGEST:
        raise UsageError(f"{name} must be a positive number, is {_shown(value)}")
    return float(value)


def count(config: Config, name: str, default: int | None = None, most: int = MOST) -> int:
    value = _given(config, name, default)
    if type(value) is not int or value <= 0:
        raise UsageError(f"{name} must be a positive number, is {_shown(value)}")
    if value > most:
        raise UsageError(f"{name} must not be above {most}, is {_shown(value)}")
    return value


def mapping(config: Config, name: str) -> Config:
    value = _given(config, name, {})
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be an object, is {_shown(value)}")
    return value


def refuse(config: Config, names: Iterable[str]) -> None:
    """Refuse a config that sets one of these fields, which the family does not support."""
    for name in names:
        if config.get(name):
            raise UsageError(f"{name} is not supported in this family")


def _given(config: Config, name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"
