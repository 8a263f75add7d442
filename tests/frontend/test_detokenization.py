"""Incremental text equals the text of all ids, whatever the tokens and however they are divided over calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.frontend.detokenization import Detokenizer, Vocabulary
from ssd.frontend.tokenization import Tokenizer
from tests.scripted_engine import MODEL

TOKENIZER = Tokenizer(MODEL)
VOCABULARY = TOKENIZER.vocabulary()
TOKENS = 49152

# Not every byte is in this vocabulary, so that some rare characters cannot be written in it.
texts = (st.text(max_size=40) | st.text(alphabet="ab é日本語🙂👩‍👧\n", max_size=40)).filter(
    lambda text: "\ufffd" not in text and TOKENIZER.decode(TOKENIZER.encode(text)) == text
)
any_ids = st.lists(st.integers(0, TOKENS - 1), max_size=40)
# Parts of characters, one byte each, and tokens that add nothing.
SINGLE = [token for token in range(TOKENS) if len(byte := VOCABULARY.piece_bytes(token)) == 1 and byte >= b"\x80"]
odd_ids = st.lists(st.sampled_from([*SINGLE, 0, 1, 2, *TOKENIZER.encode("a")]), max_size=60)
borders = st.lists(st.integers(0, 60), max_size=8)


def divide(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]


def run(chunks: Sequence[Sequence[int]], stop: Sequence[str] = (), min_tokens: int = 0) -> tuple[list[str], int, bool]:
    """(pieces of text, tokens that count, whether a stop string was found)."""
    detokenizer, pieces, count = Detokenizer(VOCABULARY, stop, min_tokens), [], 0
    for chunk in chunks:
        text, used = detokenizer.feed(chunk)
        pieces.append(text)
        count += used
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces, count, detokenizer.stopped


@given(texts, borders)
def test_text_comes_back_whole_and_no_piece_splits_a_character(text: str, cuts: list[int]) -> None:
    pieces, _, _ = run(divide(TOKENIZER.encode(text), cuts))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300)
@given(any_ids | odd_ids, borders)
def test_arbitrary_ids_give_what_decode_gives(ids: list[int], cuts: list[int]) -> None:
    pieces, count, stopped = run(divide(ids, cuts))
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert (count, stopped) == (len(ids), False)


@given(st.data())
def test_a_stop_string_cuts_where_it_begins(data: st.DataObject) -> None:
    text = data.draw(texts.filter(bool))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, min(len(text), start + 12)))]
    ids = TOKENIZER.encode(text)
    pieces, count, stopped = run(divide(ids, data.draw(borders)), [stop])
    assert stopped
    assert "".join(pieces) == text[: text.find(stop)]
    # The last token that counts is the one that completes the stop string.
    assert stop in TOKENIZER.decode(ids[:count])
    assert stop not in TOKENIZER.decode(ids[: count - 1])


@settings(max_examples=200)
@given(st.text("ab🙂", max_size=30), borders, st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=4))
def test_the_division_over_calls_changes_nothing(text: str, cuts: list[int], stop: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    pieces, count, stopped = run(divide(ids, cuts), stop)
    single, single_count, single_stopped = run([[token] for token in ids], stop)
    assert ("".join(pieces), count, stopped) == ("".join(single), single_count, single_stopped)
    assert stopped == any(s in text for s in stop)
    assert not any(s in "".join(pieces) for s in stop)


@settings(max_examples=200)
@given(st.text("ab🙂", max_size=30), borders, st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=4))
def test_a_stop_string_may_be_part_of_the_text(text: str, cuts: list[int], stop: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    before, count, _ = run(divide(ids, cuts), stop)
    detokenizer, found, used = Detokenizer(VOCABULARY, stop, include_stop=True), "", 0
    for part in divide(ids, cuts):
        if not detokenizer.stopped:
            piece, more = detokenizer.feed(part)
            found, used = found + piece, used + more
    found += detokenizer.finish()
    assert used == count and text.startswith(found)
    shown = found.removeprefix("".join(before))
    assert shown in stop if detokenizer.stopped else shown == ""


@pytest.mark.parametrize("at_once", [True, False])
def test_special_tokens_may_be_part_of_the_text_but_not_the_one_that_ends_it(at_once: bool) -> None:
    ids = TOKENIZER.encode("a<|im_end|>b<|im_start|>c<|im_end|>")
    for ended, include_stop, text in (
        (True, False, "a<|im_end|>b<|im_start|>c"),
        (True, True, "a<|im_end|>b<|im_start|>c<|im_end|>"),
        (False, False, "a<|im_end|>b<|im_start|>c<|im_end|>"),
    ):
        detokenizer = Detokenizer(VOCABULARY, include_stop=include_stop, shown=VOCABULARY.silent)
        parts = [ids] if at_once else [ids[:-1], ids[-1:]]
        fed = [detokenizer.feed(part, ended=ended and part is parts[-1]) for part in parts]
        assert "".join(piece for piece, _ in fed) + detokenizer.finish() == text
        assert [count for _, count in fed] == [len(part) for part in parts]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(VOCABULARY, ["\n\nEND"])
    assert detokenizer.feed(TOKENIZER.encode("text\n\nEN"))[0] == "text"
    assert detokenizer.feed(TOKENIZER.encode("ough"))[0] == "\n\nENough"
    assert detokenizer.feed(TOKENIZER.encode("\n\n"))[0] == ""
    assert detokenizer.finish() == "\n\n"
    assert not detokenizer.stopped


def test_half_a_character_waits_for_the_other_half() -> None:
    first, *rest = TOKENIZER.encode("🦥")
    detokenizer = Detokenizer(VOCABULARY)
    assert rest, "the example needs a character of several tokens"
    assert detokenizer.feed([first]) == ("", 1)
    assert detokenizer.feed(rest) == ("🦥", len(rest))


def test_an_incomplete_character_at_the_end_is_shown_as_decode_shows_it() -> None:
    ids = TOKENIZER.encode("a🦥")[:-1]
    assert "".join(run([[token] for token in ids])[0]) == TOKENIZER.decode(ids)
    assert TOKENIZER.decode(ids).endswith("\ufffd")


class Counting(Vocabulary):
    """Counts the tokens that it is asked about."""

    asked: ClassVar[int] = 0

    def added_bytes(self, token_id: int, shown: Set[int] = frozenset()) -> tuple[bytes, bytes]:
        Counting.asked += 1
        return super().added_bytes(token_id, shown)


@pytest.mark.parametrize("token", [2, SINGLE[0]], ids=["special", "part of a character"])
@pytest.mark.parametrize("stop", [(), ("x",)])
def test_no_token_is_looked_at_twice_though_there_is_nothing_to_show(token: int, stop: tuple[str, ...]) -> None:
    Counting.asked = 0
    detokenizer = Detokenizer(Counting(VOCABULARY.pieces, VOCABULARY.first, VOCABULARY.silent), stop)
    for _ in range(500):
        detokenizer.feed([token])
    assert Counting.asked == 500


def test_a_stop_string_may_complete_at_the_very_end() -> None:
    ids = TOKENIZER.encode("a🦥")[:-1]
    pieces, _, stopped = run([ids], ["\ufffd"])
    assert ("".join(pieces), stopped) == ("a", True)


@given(text=st.text("ab é🙂日", max_size=20), cuts=borders)
def test_tokenizers_that_treat_the_first_token_differently(
    sentencepiece: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = sentencepiece.encode(text)
    detokenizer = Detokenizer(sentencepiece.vocabulary())
    pieces = [detokenizer.feed(chunk)[0] for chunk in divide(ids, cuts)]
    assert "".join([*pieces, detokenizer.finish()]) == sentencepiece.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 263), max_size=30), cuts=borders)
def test_the_division_over_calls_changes_nothing_there_either(
    sentencepiece: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    def whole(chunks: list[list[int]]) -> str:
        detokenizer = Detokenizer(sentencepiece.vocabulary())
        return "".join([detokenizer.feed(chunk)[0] for chunk in chunks] + [detokenizer.finish()])

    assert whole(divide(ids, cuts)) == whole([ids])


def test_a_stop_string_ends_nothing_before_there_are_enough_tokens() -> None:
    ids = TOKENIZER.encode("one END two END three")
    first = TOKENIZER.encode("one END")
    assert ids[: len(first)] == first
    for enough, text in ((0, "one "), (len(first) - 1, "one "), (len(first), "one END two ")):
        for chunks in ([ids], [[token] for token in ids]):
            pieces, count, stopped = run(chunks, ["END"], enough)
            assert ("".join(pieces), stopped) == (text, True)
            assert count > enough
    pieces, _, stopped = run([ids], ["END"], len(ids))
    assert ("".join(pieces), stopped) == ("one END two END three", False)
