"""Page allocation and prefix caching, without tensors. Its invariants are in docs/invariants.md."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

from ssd.errors import SsdError
from ssd.execution.batch import StateUse


class OutOfPages(SsdError):
    """No page is free: the scheduler preempts a sequence, and clients never see this error."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full page: its tokens and, through `parent`, all before them."""
    text = ",".join(map(str, token_ids)).encode()
    return hashlib.blake2b(parent + text, digest_size=16).digest()


class SavedStates:
    """Owns `slots` for states at page boundaries, found by the hash of the page before.

    A slot that sequences are about to begin from is not given to another text."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._free = list(slots)[::-1]
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()  # last used last
        self._hashes: dict[int, bytes] = {}
        self._users: Counter[int] = Counter()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._by_hash

    def use(self, digest: bytes) -> int:
        """Return the slot of a text; it stays as it is until `release`."""
        self._by_hash.move_to_end(digest)
        self._users[slot := self._by_hash[digest]] += 1
        return slot

    def release(self, slot: int) -> None:
        self._users[slot] -= 1
        if not self._users[slot] and slot not in self._hashes:
            self._free.append(slot)

    def take(self) -> int | None:
        """Return a free slot, or the one used longest ago; None if all are in use."""
        if not self._free:
            unused = next((digest for digest, slot in self._by_hash.items() if not self._users[slot]), None)
            if unused is not None:
                self.forget(unused)
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, digest: bytes, slot: int) -> bool:
        """Make a taken slot findable; free the slot and return False if another one has its text."""
        if digest in self._by_hash:
            self._by_hash.move_to_end(digest)
            self.give_back(slot)
            return False
        self._by_hash[digest], self._hashes[slot] = slot, digest
        return True

    def forget(self, digest: bytes) -> None:
        slot = self._by_hash.pop(digest, None)
        if slot is not None:
            del self._hashes[slot]
            if not self._users[slot]:
                self._free.append(slot)


class PagePool:
    """Owns `count` pages of `size` tokens: free, live (referenced), or cached (unreferenced but findable).

    `salt` starts every hash chain: model and dtype. `state_slots`, where layers have states, are for states at page
    boundaries: found by the same hashes, and lost with the page before them."""

    def __init__(self, count: int, size: int, salt: str = "", state_slots: Sequence[int] | None = None) -> None:
        self.count, self.size = count, size
        self.states = None if state_slots is None else SavedStates(state_slots)
        self._root = hashlib.blake2b(f"{salt}/{size}".encode(), digest_size=16).digest()
        self._references = [0] * count
        self._free = [True] * count
        self._free_count = count
        self._content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # page -> (hash, its token ids)
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, findable; oldest first

    def root(self, salt: str) -> bytes:
        """Return the first hash of all texts with this salt, which share no page with others."""
        if not salt:
            return self._root
        # Clients choose salts: the hash of a salt must never equal the hash of a page with the same text.
        return hashlib.blake2b(salt.encode(), key=self._root, person=b"salt", digest_size=16).digest()

    @property
    def available(self) -> int:
        return self._free_count + len(self._cached)

    @property
    def live(self) -> int:
        return self.count - self.available

    def allocate(self, after: int | None = None) -> int:
        """Allocate a private page, if possible after `after`: neighbours are read without gathering.

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
        """Return the start of the longest free run, or its middle if a live page lies before it."""
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
        if self.states is not None:
            self.states.forget(digest)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page; a sequence's last pages are evicted first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._content:
                    self._cached[page] = None
                else:
                    self._free[page] = True
                    self._free_count += 1

    def find(self, token_ids: Sequence[int], most: int, before: Sequence[bytes], root: bytes) -> list[bytes]:
        """Return the hashes of cached pages that continue `token_ids` after `before`, up to `most` tokens.

        A page is found only if its token ids are the same too."""
        found: list[bytes] = []
        parent = before[-1] if before else root
        for start in range(len(before) * self.size, most - self.size + 1, self.size):
            ids = tuple(token_ids[start : start + self.size])
            parent = chain_hash(parent, ids)
            page = self._by_hash.get(parent)
            if page is None or self._content[page][1] != ids:
                break
            found.append(parent)
        return found

    def reference(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages with these hashes, each with one reference more."""
        pages = [self._by_hash[digest] for digest in hashes]
        for page in pages:
            self._cached.pop(page, None)
            self._references[page] += 1
        return pages

    def share(self, page: int, digest: bytes, ids: tuple[int, ...]) -> None:
        """Make a full page of accepted tokens findable, unless another has its content."""
        if digest not in self._by_hash and page not in self._content:
            self._by_hash[digest] = page
            self._content[page] = (digest, ids)

    def check(self) -> None:
        """Raise AssertionError unless the pages add up and the indices agree. For tests."""
        live = sum(references > 0 for references in self._references)
        assert live + len(self._cached) + self._free_count == self.count
        assert sum(self._free) == self._free_count
        assert all(self._content[page][0] == digest for digest, page in self._by_hash.items())
        assert len(self._by_hash) == len(self._content)
        assert all(self._references[page] == 0 and page in self._content for page in self._cached)
        assert not any(self._free[page] and self._references[page] for page in range(self.count))


class PageTable:
    """The pages of one sequence, in order. Full pages are shared with sequences of the same `salt`.

    Rejected draft tokens change nothing here: the computed length goes back, pages stay. Where layers have states,
    `held` tokens are in the sequence's own."""

    def __init__(self, pool: PagePool, salt: str = "") -> None:
        self._pool, self.salt = pool, salt
        self._root = pool.root(salt)
        self.pages: list[int] = []
        self._hashes: list[bytes] = []  # of the pages that are findable
        self.held = 0
        self._source: int | None = None  # the slot that `held` was found in; None once it is the sequence's own
        self._branch = 0  # tokens whose pages were found, but no state
        self._saves: tuple[int, int] | None = None  # tokens and slot of the state that a row saves
        self._lasts = True  # it outlives the next one that this sequence saves
        self._passing: bytes | None = None  # hash of the saved state that the next one replaces

    def adopt_prefix(self, token_ids: Sequence[int], computed: int = 0, most: int | None = None) -> int:
        """Take cached pages that continue the `computed` tokens; return how many are computed now.

        At most `most` tokens are taken, by default all but the last, whose logits are needed. Where layers have states,
        the pages must end with one."""
        first, states = computed // self._pool.size, self._pool.states
        assert len(self._hashes) == first
        most = len(token_ids) - 1 if most is None else most
        found = self._pool.find(token_ids, most, self._hashes, self._root)
        if states is not None:
            self._branch = (first + len(found)) * self._pool.size
            while found and found[-1] not in states:
                found.pop()
        if not found:
            return computed
        pages = self._pool.reference(found)
        self._pool.release(self.pages[first:])  # the partly filled page, if it was found in full
        self.pages[first:] = pages
        self._hashes += found
        computed = len(self.pages) * self._pool.size
        if states is not None:
            self._release_source()
            self.held, self._source = computed, states.use(found[-1])
        return computed

    def missing(self, length: int) -> int:
        """Return how many pages `length` tokens lack."""
        return max(0, -(-length // self._pool.size) - len(self.pages))

    def grow(self, length: int) -> None:
        """Allocate pages for `length` tokens. Raises `OutOfPages`, but keeps those allocated until then."""
        for _ in range(self.missing(length)):
            self.pages.append(self._pool.allocate(self.pages[-1] if self.pages else None))

    def share_computed(self, token_ids: Sequence[int], computed: int) -> None:
        """Make full pages of `computed` accepted tokens findable, and the state that was saved."""
        size = self._pool.size
        for index in range(len(self._hashes), computed // size):
            ids = tuple(token_ids[index * size : (index + 1) * size])
            self._hashes.append(chain_hash(self._hashes[-1] if self._hashes else self._root, ids))
            self._pool.share(self.pages[index], self._hashes[-1], ids)
        states = self._pool.states
        if states is not None and self._saves is not None and self._saves[0] <= computed:
            (tokens, slot), self._saves = self._saves, None
            digest = self._hashes[tokens // size - 1]
            if states.keep(digest, slot) and not self._lasts:
                self._passing = digest

    def use_state(self, written: int, lasting: bool = False) -> StateUse | None:
        """Return a row's use of states, which leaves the state after `written` tokens; None: no states.

        Later tokens of the row may be rejected. The row also saves the state at its last page boundary, or at the end
        of pages that were found without a state. That replaces the state saved before, unless it was such an end or
        `lasting` (the end of a prompt)."""
        states = self._pool.states
        if states is None:
            return None
        branches = self.held < self._branch <= written
        boundary = self._branch if branches else written // self._pool.size * self._pool.size
        if boundary > self.held and self._saves is None:
            if self._passing is not None:
                states.forget(self._passing)
                self._passing = None
            if (slot := states.take()) is not None:
                self._saves, self._lasts = (boundary, slot), lasting or branches
        saved, save = self._saves or (0, -1)
        return StateUse(self.held, self._source, written, save if saved > self.held else -1, saved)

    def state_computed(self, held: int) -> None:
        """Note that the row has run: the own state is that after `held` tokens."""
        self._release_source()
        self.held = held

    def _release_source(self) -> None:
        if self._source is not None and self._pool.states is not None:
            self._pool.states.release(self._source)
        self._source = None

    def free(self) -> None:
        self._release_source()
        if self._saves is not None and self._pool.states is not None:
            self._pool.states.give_back(self._saves[1])
        self._pool.release(self.pages)
        self.pages, self._hashes, self.held, self._branch = [], [], 0, 0
        self._saves = self._passing = None
