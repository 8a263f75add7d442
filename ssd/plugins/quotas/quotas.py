"""Quotas of API keys: requests and tokens a minute, and requests at once; see `Exchange`."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ssd.config.engine import Positive
from ssd.errors import UsageError
from ssd.frontend.http.errors import Headers, HttpError
from ssd.system.files import read_bounded

_now = time.monotonic
_MOST_BYTES = 2**20


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The most that one API key may ask for. None: no limit, or the default quota's."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    concurrent_requests: Positive | None = None


class Quotas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quotas of API keys, by their names in the file of keys."""

    default: Quota = Quota()
    keys: dict[str, Quota] = {}

    def of(self, name: str) -> Quota:
        """Return the quota of a key. A limit that its own quota leaves out is the default's."""
        own = self.keys.get(name, self.default)
        fields = Quota.__struct_fields__
        return Quota(**{field: getattr(own, field) or getattr(self.default, field) for field in fields})


def read(path: str, names: Collection[str]) -> dict[str, Any]:
    """Return the quotas in a TOML file, as plain data. Raises UsageError, also for a key not in `names`."""
    try:
        quotas = msgspec.toml.decode(read_bounded(Path(path), _MOST_BYTES), type=Quotas)
    except msgspec.ValidationError as error:
        raise UsageError(f"--limits {path}: {str(error).replace('$.', '')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--limits {path}: {error}") from None
    except UsageError as error:
        raise UsageError(f"--limits: {error}") from None
    for name in quotas.keys:
        if name not in names:
            raise UsageError(f"--limits: no key of --api-key-file has the name {name!r}; write it behind the key")
    found: dict[str, Any] = msgspec.to_builtins(quotas)
    return found


class Bucket:
    """An allowance that flows in evenly, up to that of a minute. It may be overdrawn."""

    def __init__(self, a_minute: int) -> None:
        self.most = a_minute
        self._level, self._then = float(a_minute), _now()

    @property
    def level(self) -> float:
        now = _now()
        self._level = min(self.most, self._level + (now - self._then) * self.most / 60)
        self._then = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> int:
        """Return after how many whole seconds the level is reached; 0 if it is already."""
        return math.ceil(max(0.0, level - self.level) * 60 / self.most)


class QuotaAccount:
    """The use that one API key, or all clients without one, make of a quota."""

    def __init__(self, quota: Quota) -> None:
        self._most_open, self._open, self._reserved = quota.concurrent_requests, 0, 0
        given = {"requests": quota.requests_per_minute, "tokens": quota.tokens_per_minute}
        self._buckets = {name: Bucket(limit) for name, limit in given.items() if limit is not None}

    def begin(self) -> Headers:
        if self._most_open is not None and self._open >= self._most_open:
            raise self._refusal(f"{self._open} requests of this key are open, and no more may be", 1)
        for name in self._buckets:
            self._check(name)
        self._open += 1
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1)
        return self._headers()

    def reserve(self, tokens: int, first: bool) -> None:
        if (bucket := self._buckets.get("tokens")) is not None:
            if first:
                self._check("tokens")
            bucket.take(tokens)
            self._reserved += tokens

    def end(self, reserved: int, used: int) -> None:
        self._open -= 1
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.take(used - reserved)
            self._reserved -= reserved

    def _check(self, name: str) -> None:
        bucket = self._buckets[name]
        if bucket.level < 1:
            message = f"this key has used up its {bucket.most} {name} a minute"
            soon = self._reserved if name == "tokens" else 0  # what open requests may give back at any time
            raise self._refusal(message, bucket.seconds_until(1 - soon))

    def _refusal(self, message: str, seconds: int) -> HttpError:
        headers = {**self._headers(), b"retry-after": b"%d" % max(1, seconds)}
        return HttpError(429, message, "rate_limit_exceeded", headers=headers)

    def _headers(self) -> Headers:
        found = {}
        for name, bucket in self._buckets.items():
            found[b"x-ratelimit-limit-" + name.encode()] = b"%d" % bucket.most
            found[b"x-ratelimit-remaining-" + name.encode()] = b"%d" % max(0, bucket.level)
            found[b"x-ratelimit-reset-" + name.encode()] = b"%ds" % bucket.seconds_until(bucket.most)
        return found


class QuotaAccounts:
    def __init__(self, given: dict[str, Any], keys: Mapping[bytes, str]) -> None:
        """Make the accounts for the data of `read`; `keys` has the name of each key, or ""."""
        quotas = msgspec.convert(given, Quotas)
        self._by_key = {key: QuotaAccount(quotas.of(name)) for key, name in keys.items()}
        self._without_key = QuotaAccount(quotas.default)

    def of(self, key: bytes) -> QuotaAccount:
        return self._by_key.get(key, self._without_key)
