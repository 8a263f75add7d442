"""Page allocation and prefix caching: which sequence owns which page, and which pages hold a prefix others may share.

Pure bookkeeping, no tensors. The invariants that it keeps are in docs/invariants.md."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from ssd.errors import SsdError


class OutOfPages(SsdError):
    """No free page is left. The scheduler preempts a sequence; clients never see this error."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full page: its tokens and, through `parent`, all tokens before them."""
    text = ",".join(map(str, token_ids)).encode()
    return hashlib.blake2b(parent + text, digest_size=16).digest()


class PagePool:
    """Owns `count` pages of `size` tokens. A page is free, live (referenced), or cached (unreferenced but findable).

    `salt` starts every hash chain: it names the model and the dtype."""

    def __init__(self, count: int, size: int, salt: str = "") -> None:
        self.count, self.size = count, size
        self._root = hashlib.blake2b(f"{salt}/{size}".encode(), digest_size=16).digest()
        self._references = [0] * count
        self._free = [True] * count
        self._free_count = count
        self._content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # page -> (hash, its token ids)
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, findable; oldest first

    def root(self, salt: str) -> bytes:
        """Return the first hash of all texts with this salt: they share pages with each other alone."""
        if not salt:
            return self._root
        # Clients choose salts: the hash of a salt must never equal the hash of a page with the same text.
        return hashlib.blake2b(salt.encode(), key=self._root, person=b"salt", digest_size=16).digest()

    @property
    def available(self) -> int:
        """Return how many pages can be allocated now, free or cached."""
        return self._free_count + len(self._cached)

    @property
    def live(self) -> int:
        return self.count - self.available

    def allocate(self, after: int | None = None) -> int:
        """Allocate a private page, if possible the one following `after`: neighbours are read without gathering.

        Evict the oldest cached page if none is free. Raises `OutOfPages`."""
        page = None if after is None else after + 1
        if page is None or page >= self.count or not self._free[page]:
            page = self._start_of_run() if self._free_count else self._evict()
        if self._free[page]:
            self._free[page] = False
            self._free_count -= 1
        self._references[page] = 1
        return page

    def _start_of_run(self) -> int:
        """Return the start of the longest free run, or its middle if a live page lies before it.

        A new sequence may grow longest there."""
        best_start, best_length, start = 0, 0, None
        for page in range(self.count + 1):
            if page < self.count and self._free[page]:
                start = page if start is None else start
            elif start is not None:
                if page - start > best_length:
                    best_start, best_length = start, page - start
                start = None
        grows_into = best_start > 0 and self._references[best_start - 1] > 0
        return best_start + best_length // 2 if grows_into else best_start

    def _evict(self) -> int:
        if not self._cached:
            raise OutOfPages(f"all {self.count} pages of the KV cache are in use")
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        digest, _ = self._content.pop(page)
        del self._by_hash[digest]

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. A sequence's last pages are evicted before its first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._content:
                    self._cached[page] = None
                else:
                    self._free[page] = True
                    self._free_count += 1

    def match(self, token_ids: Sequence[int], most: int, first: int = 0, parent: bytes = b"") -> list[int]:
        """Find and reference the cached pages that continue `token_ids`, up to `most` tokens.

        The caller has the `first` pages already, the last with the hash `parent` (b"" if there are none). A page is
        found by its hash, and taken only if its token ids are the same."""
        pages: list[int] = []
        parent = parent or self._root
        for start in range(first * self.size, most - self.size + 1, self.size):
            ids = tuple(token_ids[start : start + self.size])
            parent = chain_hash(parent, ids)
            page = self._by_hash.get(parent)
            if page is None or self._content[page][1] != ids:
                break
            pages.append(page)
        for page in pages:
            self._cached.pop(page, None)
            self._references[page] += 1
        return pages

    def share(self, pages: Sequence[int], token_ids: Sequence[int], computed: int, shared: int, parent: bytes) -> bytes:
        """Make full pages of the first `computed` tokens, all accepted, findable; return the last one's hash.

        The first `shared` pages are findable already, the last with the hash `parent` (b"" if there are none). A page
        whose content is findable elsewhere stays private."""
        parent = parent or self._root
        for index in range(shared, computed // self.size):
            ids = tuple(token_ids[index * self.size : (index + 1) * self.size])
            parent = chain_hash(parent, ids)
            if parent not in self._by_hash and pages[index] not in self._content:
                self._by_hash[parent] = pages[index]
                self._content[pages[index]] = (parent, ids)
        return parent

    def check(self) -> None:
        """Raise AssertionError unless every page is free, live or cached, and the indices agree. For tests."""
        live = sum(references > 0 for references in self._references)
        assert live + len(self._cached) + self._free_count == self.count
        assert sum(self._free) == self._free_count
        assert all(self._content[page][0] == digest for digest, page in self._by_hash.items())
        assert len(self._by_hash) == len(self._content)
        assert all(self._references[page] == 0 and page in self._content for page in self._cached)
        assert not any(self._free[page] and self._references[page] for page in range(self.count))


class PageTable:
    """The pages of one sequence, in order. Full pages are shared with sequences of the same `salt`.

    Rejected draft tokens change nothing here: the sequence's computed length goes back, its pages stay."""

    def __init__(self, pool: PagePool, salt: str = "") -> None:
        self._pool, self.salt = pool, salt
        self.pages: list[int] = []
        self._shared = 0
        self._root = self._parent = pool.root(salt)

    def adopt_prefix(self, token_ids: Sequence[int], computed: int = 0, most: int | None = None) -> int:
        """Take cached pages that continue the `computed` tokens; return how many tokens are computed now.

        At most `most` tokens are taken, by default all but the last: that is computed for its logits."""
        first = computed // self._pool.size
        assert self._shared == first
        most = len(token_ids) - 1 if most is None else most
        found = self._pool.match(token_ids, most, first, self._parent)
        if not found:
            return computed
        self._pool.release(self.pages[first:])  # the partly filled page, if it was found in full
        self.pages[first:] = found
        computed = len(self.pages) * self._pool.size
        self.share_computed(token_ids, computed)
        return computed

    def missing(self, length: int) -> int:
        """Return how many pages must be allocated before `length` tokens fit."""
        return max(0, -(-length // self._pool.size) - len(self.pages))

    def grow(self, length: int) -> None:
        """Allocate pages for `length` tokens. Raises `OutOfPages`; pages allocated until then stay in the table."""
        for _ in range(self.missing(length)):
            self.pages.append(self._pool.allocate(self.pages[-1] if self.pages else None))

    def share_computed(self, token_ids: Sequence[int], computed: int) -> None:
        """Make full pages of the first `computed` tokens, all accepted, findable."""
        full = computed // self._pool.size
        if full > self._shared:
            self._parent = self._pool.share(self.pages, token_ids, computed, self._shared, self._parent)
            self._shared = full

    def free(self) -> None:
        """Give every page back."""
        self._pool.release(self.pages)
        self.pages, self._shared, self._parent = [], 0, self._root
