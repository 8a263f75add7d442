"""Quotas of API keys: requests and tokens a minute, and requests at once.

A request counts when it begins (`Exchange.begin_use`). It takes the tokens that it may need when a prompt is admitted
(`reserve`), and gives back at its end what it did not use (`end_use`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from ssd.config.engine import Quota, Quotas
from ssd.frontend.http.errors import Headers, HttpError

_now = time.monotonic


class Bucket:
    """An allowance that flows in evenly, up to that of a minute. It may be overdrawn."""

    def __init__(self, a_minute: int) -> None:
        self.most = a_minute
        self._level, self._then = float(a_minute), _now()

    @property
    def level(self) -> float:
        """Return what is left; below 0 if it is overdrawn."""
        now = _now()
        self._level = min(self.most, self._level + (now - self._then) * self.most / 60)
        self._then = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> int:
        """Return after how many whole seconds the level is reached; 0 if it is already."""
        return math.ceil(max(0.0, level - self.level) * 60 / self.most)


class Account:
    """The use that one API key, or all clients without one, make of a quota."""

    def __init__(self, quota: Quota) -> None:
        self._most_open, self._open, self._reserved = quota.concurrent_requests, 0, 0
        given = {"requests": quota.requests_per_minute, "tokens": quota.tokens_per_minute}
        self._buckets = {name: Bucket(limit) for name, limit in given.items() if limit is not None}

    def begin(self) -> Headers:
        """Count a request, and return headers of its answer. Raises HttpError 429 for one too many."""
        if self._most_open is not None and self._open >= self._most_open:
            raise self._refusal(f"{self._open} requests of this key are open, and no more may be", 1)
        for name in self._buckets:
            self._check(name)
        self._open += 1
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1)
        return self._headers()

    def reserve(self, tokens: int, first: bool) -> None:
        """Take tokens that a request may need. Raises HttpError 429 if none is left for its `first` ones."""
        if (bucket := self._buckets.get("tokens")) is not None:
            if first:
                self._check("tokens")
            bucket.take(tokens)
            self._reserved += tokens

    def end(self, reserved: int, used: int) -> None:
        """Give back the reserved tokens that a request did not use."""
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


class Accounts:
    """An account for each API key, and one for all clients without a key."""

    def __init__(self, quotas: Quotas, keys: Mapping[bytes, str]) -> None:
        """`keys` has the name of each key, or ""."""
        self._by_key = {key: Account(quotas.of(name)) for key, name in keys.items()}
        self._without_key = Account(quotas.default)

    def of(self, key: bytes) -> Account:
        return self._by_key.get(key, self._without_key)
