"""The suffix memory against a search that anyone can check, and where texts are hostile or memory is short."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.kernels.suffixes import LONGEST, Continuation, StoredText, SuffixStore

SHORT, LONG, PLACES = 3, 12, 16
ROOM = 2**20


class Reference:
    """All texts as lists. `written` has (text, tokens before it) of each token, in the order in which they came."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, list[int]]] = []
        self.written: list[tuple[int, int]] = []

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.written.append((text, len(self.texts[text][1])))
            self.texts[text][1].append(token)

    def find(self, text: int, count: int) -> Continuation | None:
        places: list[tuple[int, int, int]] = []
        for least in (LONG, SHORT):
            places = places or self._places(text, least)
        if not places:
            return None
        longest = max(matching for matching, _, _ in places)
        followed = [self.texts[other][1][start:] for matching, other, start in places if matching == longest]
        tokens: list[int] = []
        votes: list[int] = []
        while len(tokens) < count and (followed := [rest for rest in followed if rest]):
            nexts = [rest[0] for rest in followed]
            tokens.append(max(nexts, key=nexts.count))  # of several the first, which is the latest
            votes += [nexts.count(tokens[-1]), len(nexts)]
            followed = [rest[1:] for rest in followed if rest[0] == tokens[-1]]
        return Continuation(tokens, longest, votes) if tokens else None

    def _places(self, text: int, least: int) -> list[tuple[int, int, int]]:
        """Return (matching, text, start of what follows) of the latest places that end as the text does."""
        scope, own = self.texts[text]
        if len(own) < least:
            return []
        found = []
        before = self.written[: self.written.index((text, len(own) - 1))]
        for other, index in reversed(before):
            tokens = self.texts[other][1]
            if self.texts[other][0] != scope or tokens[max(0, index + 1 - least) : index + 1] != own[-least:]:
                continue
            matching = next(
                (n for n in range(index + 1) if n >= len(own) or tokens[index - n] != own[-1 - n]), index + 1
            )
            found.append((min(matching, LONGEST), other, index + 1))
            if len(found) == PLACES:
                break
        return [place for place in found if place[2] < len(self.texts[place[1]][1])]


class Both:
    """A store and its reference, which are told the same."""

    def __init__(self, size: int = ROOM) -> None:
        self.store, self.reference = SuffixStore(size), Reference()
        self.texts: list[StoredText] = []

    def begin(self, scope: int = 1) -> int:
        self.texts.append(self.store.text(scope))
        self.reference.texts.append((scope, []))
        return len(self.texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        self.texts[text].extend(tokens)
        self.reference.extend(text, tokens)

    def check(self, text: int, count: int = 16) -> None:
        assert self.texts[text].find(count) == self.reference.find(text, count)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=12)), max_size=40),
    st.integers(1, 16),
)
def test_it_finds_what_a_search_finds(steps: list[tuple[int, list[int]]], count: int) -> None:
    """Four texts in two scopes grow by turns."""
    both = Both()
    for scope in (1, 1, 2, 1):
        both.begin(scope)
    for text, tokens in steps:
        both.extend(text, tokens)
        both.check(text, count)


@pytest.mark.parametrize("seed", range(4))
def test_long_texts_lie_in_several_blocks(seed: int) -> None:
    dice, both = random.Random(seed), Both()
    parts = [[dice.randrange(50) for _ in range(dice.randrange(5, 200))] for _ in range(6)]
    texts = [both.begin(dice.randrange(2)) for _ in range(5)]
    for _ in range(40):
        text = dice.choice(texts)
        part = dice.choice(parts)
        both.extend(text, part[: dice.randrange(1, len(part))])
        both.check(text)


def test_a_repeated_text_is_continued_across_blocks() -> None:
    store, told = SuffixStore(ROOM), list(range(1000))
    store.text(1).extend(told)
    again = store.text(1)
    again.extend(told[100:120])
    assert again.find(16) == Continuation(told[120:136], 20, [1] * 32)
    again.extend(told[120:300])
    assert again.find(16) == Continuation(told[300:316], LONGEST, [1] * 32)


def test_the_likeliest_of_several_continuations_comes_first() -> None:
    store = SuffixStore(ROOM)
    for last in (7, 8, 8, 9):
        store.text(1).extend([1, 2, 3, 4, last, 5])
    text = store.text(1)
    text.extend([1, 2, 3, 4])
    assert text.find(2) == Continuation([8, 5], 4, [2, 4, 2, 2])


def test_scopes_never_meet() -> None:
    """However alike their texts are: many have hashes in common."""
    store = SuffixStore(ROOM)
    for scope in range(5000):
        text = store.text(scope)
        text.extend([1, 2, 3])
        assert text.find(16) is None
        text.extend([scope])


def test_scopes_never_meet_when_the_ring_goes_round() -> None:
    dice, store = random.Random(0), SuffixStore(2**16)
    words = [[dice.randrange(9) for _ in range(30)] for _ in range(20)]
    for _ in range(3000):
        scope = dice.choice((1, 2))
        text = store.text(scope)
        for _ in range(4):
            text.extend([*dice.choice(words)[: dice.randrange(3, 30)], 1000 * scope + dice.randrange(5)])
            found = text.find(16)
            assert found is None or all(token < 9 or token // 1000 == scope for token in found.tokens)


@pytest.mark.parametrize("size", [2**16, 100_000, 2**20, 64 * 2**20, 10**9])
def test_memory_is_bounded(size: int) -> None:
    store = SuffixStore(size)
    assert sum(len(part) for part in store._memory) <= size <= 24 * store.capacity * (1 + 256 / store.capacity)


def test_no_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="1000 bytes have no room"):
        SuffixStore(1000)


def test_the_oldest_text_makes_room_for_the_newest() -> None:
    store = SuffixStore(2**16)
    old, new = list(range(100)), list(range(1000, 1100))
    store.text(1).extend(old)

    def found(of: list[int]) -> bool:
        text = store.text(1)
        text.extend(of[:20])
        return text.find(1) == Continuation([of[20]], 20, [1, 1])

    assert found(old)
    for _ in range(store.capacity // 100 + 1):
        store.text(1).extend([*range(5000, 5100)])
    store.text(1).extend(new)
    assert found(new) and not found(old)


def test_a_text_longer_than_the_memory_keeps_its_end() -> None:
    dice, store = random.Random(0), SuffixStore(2**16)
    text, told = store.text(1), [dice.randrange(30_000) for _ in range(5 * store.capacity)]
    text.extend(told)
    assert len(text) == len(told)
    again = store.text(1)
    again.extend(told[-500:-480])
    found = again.find(16)
    assert found is not None and found.tokens == told[-480:-464]
    gone = store.text(1)
    gone.extend(told[:20])
    assert gone.find(16) is None


def test_a_text_whose_blocks_are_gone_goes_on() -> None:
    store = SuffixStore(2**16)
    slow = store.text(1)
    slow.extend([1, 2, 3, 4, 5, 6, 7, 8, 9])
    store.text(1).extend([100 + n % 1000 for n in range(3 * store.capacity)])
    assert slow.find(4) is None
    slow.extend([1, 2, 3])
    assert slow.find(4) is None
    slow.extend([4, 5, 1, 2, 3])
    assert slow.find(2) == Continuation([4, 5], 3, [1, 1, 1, 1])


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_text_that_repeats_itself_costs_no_more_than_another(period: int) -> None:
    """Searches that followed all of a million links would take hours."""
    store = SuffixStore(32 * 2**20)
    text = store.text(1)
    text.extend([*range(period)] * (10**6 // period))
    for _ in range(20_000):
        found = text.find(16)
        assert found is not None and found.matching == LONGEST and found.tokens[0] == len(text) % period
        text.extend([len(text) % period])


def tokens_kept(store: SuffixStore) -> int:
    """As far as whole blocks say."""
    return int(store.struct.next - store.struct.blocks - 1) * 64


def begun(store: SuffixStore, tokens: list[int], scope: int = 1) -> StoredText:
    text = store.text(scope)
    text.begin(tokens)
    text.extend(tokens[len(text) :])
    return text


@pytest.mark.parametrize("turn", [70, 100, 333])
def test_a_conversation_is_stored_once(turn: int) -> None:
    """Each of its prompts has all that was said before. What follows is found as if all had been stored."""
    dice, store = random.Random(turn), SuffixStore(2**22)
    system = [dice.randrange(30_000) for _ in range(150)]
    talks = [list(system) for _ in range(3)]
    for _ in range(12):
        for talk in talks:
            begun(store, talk).extend(answer := [dice.randrange(30_000) for _ in range(turn)])
            talk += answer
            talk += [dice.randrange(30_000) for _ in range(turn)]
    said = 150 + 3 * (12 * 2 - 1) * turn
    assert said <= tokens_kept(store) <= 1.2 * said + 3 * 24 * 64
    for talk in talks:
        for end in (155, 300, len(talk) - turn - 20):
            again = store.text(1)
            again.begin(talk[:end])
            again.extend(talk[len(again) : end])
            found = again.find(16)
            assert found is not None and found.tokens == talk[end : end + 16] and found.matching == LONGEST


def test_what_began_alike_goes_on_apart() -> None:
    dice, store = random.Random(3), SuffixStore(ROOM)
    shared = [dice.randrange(1000) for _ in range(200)]
    first = begun(store, [*shared, 1, 2, 3])
    second = begun(store, shared)
    assert tokens_kept(store) == 256 + 64
    assert second.find(3) == Continuation([1, 2, 3], LONGEST, [1] * 6)
    second.extend([7, 8, 9, 10])
    first.extend([4, 5])
    asked = begun(store, [*shared, 7, 8])
    assert asked.find(4) == Continuation([9, 10], LONGEST, [1] * 4)
    asked = begun(store, [*shared, 1, 2])
    assert asked.find(4) == Continuation([3, 4, 5], LONGEST, [1] * 6)


def test_a_text_that_goes_on_otherwise_is_stored() -> None:
    """All its pieces are known, but not behind all that a search compares."""
    dice, store = random.Random(5), SuffixStore(ROOM)
    a, x, c = ([dice.randrange(1000) for _ in range(80)] for _ in range(3))
    middle = [dice.randrange(1000) for _ in range(20)]
    begun(store, [*a, *middle, 2001, *c[:40]])
    begun(store, [*x, *middle, 2002, *c])
    begun(store, [*a, *middle, 2002, *c])
    text = begun(store, [*a, *middle])
    found = text.find(2)
    assert found is not None and found.matching == LONGEST and found.votes[:2] == [1, 2]  # both are known now


def test_little_that_is_known_is_stored_again() -> None:
    store = SuffixStore(ROOM)
    store.text(1).extend([*range(63)])
    text = store.text(1)
    text.begin([*range(63)])
    assert len(text) == 0


def test_no_text_begins_as_one_of_another_scope() -> None:
    store = SuffixStore(ROOM)
    store.text(1).extend([*range(500)])
    text = store.text(2)
    text.begin([*range(500)])
    assert len(text) == 0 and text.find(4) is None


def test_a_text_begins_as_one_that_is_half_gone() -> None:
    dice, store = random.Random(4), SuffixStore(2**16)
    old = [dice.randrange(30_000) for _ in range(store.capacity // 2)]
    begun(store, old)
    begun(store, [dice.randrange(30_000) for _ in range(3 * store.capacity // 4)])
    begun(store, old)
    again = begun(store, old[: len(old) - 20])
    found = again.find(16)
    assert found is not None and found.tokens == old[-20:-4]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_begins_and_goes_on_is_told_truly(seed: int) -> None:
    """Each continuation stands in some text behind the same tokens, in a ring that goes round."""
    dice, store = random.Random(seed), SuffixStore(2**16)
    parts = [[dice.randrange(4) for _ in range(dice.randrange(1, 150))] for _ in range(8)]
    written: list[list[int]] = []
    growing: list[tuple[StoredText, list[int]]] = []
    for _ in range(300):
        if not growing or dice.random() < 0.3:
            tokens = [token for part in dice.choices(parts, k=3) for token in part]
            written.append(tokens)
            growing.append((begun(store, tokens), tokens))
        text, tokens = dice.choice(growing)
        more = dice.choice(parts)[:20]
        text.extend(more)
        tokens += more
        found = text.find(8)
        if found is not None:
            end = [*tokens[-found.matching :], *found.tokens]
            assert any(holds(other, end) for other in written)
        growing = growing[-6:]


def holds(text: list[int], part: list[int]) -> bool:
    return any(text[start : start + len(part)] == part for start in range(len(text) - len(part) + 1))


def test_a_prompt_of_100_000_tokens_is_found_again() -> None:
    dice, store = random.Random(1), SuffixStore(64 * 2**20)
    told = [dice.randrange(50_000) for _ in range(100_000)]
    store.text(1).extend(told)
    again = store.text(1)
    again.extend(told[:99_000])
    found = again.find(16)
    assert found is not None and found.tokens == told[99_000:99_016]
