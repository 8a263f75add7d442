"""Compiled grammars, and the state of one answer in its grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssd.errors import RequestError, refused_grammar
from ssd.system.allocator import give_back_freed
from ssd.system.files import read_bounded

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_TOKENIZER = 512 << 20  # bytes
# Bounds of a grammar: lexer states take 1 to 2 kB each. The other two bound the time of a mask to some 6 ms.
_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000}
# Bounds of a grammar with which a frontend reads 4,096 characters in at most some 0.2 s: its size, and the library's.
_MAX_SHORT = 8192
_SHORT_LIMITS = {**_LIMITS, "max_lexer_states": 5_000, "step_lexer_fuel": 10_000, "max_items_in_row": 400}
_LEFT_OUT = ("Unimplemented keys", "Unknown format", "oneOf")
_SPECIAL = "\ue000"  # a private-use character: prefix of the names of special tokens


class GrammarCompiler:
    """Compiles grammars for the tokenizer of the checkpoint in `directory`. Not thread-safe.

    `ends` are the end-of-sequence ids, which a grammar allows where an answer may end. Masks have `vocab_size` entries;
    ids beyond the tokenizer's are never allowed."""

    def __init__(self, directory: Path, vocab_size: int, ends: Collection[int]) -> None:
        self._directory, self._vocab_size, self._ends = directory, vocab_size, sorted(ends)
        self._tokenizer: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None

    def load(self) -> LLTokenizer:
        """Load the tokenizer, which takes about a second for 150,000 tokens. Raises RequestError."""
        if self._tokenizer is None:
            from llguidance import LLParserLimits

            if not self._ends:
                raise refused_grammar("this model has no end-of-sequence id, so no answer could end")
            file = self._directory / "tokenizer.json"
            if not file.is_file():
                raise refused_grammar("this model has no tokenizer")
            text = read_bounded(file, _MAX_TOKENIZER)
            self._limits = LLParserLimits(**_LIMITS, verbose_errors=False)
            try:
                self._tokenizer = _tokenizer(text.decode(), self._vocab_size, self._ends)
            except BaseException as error:  # a panic of the library is no Exception
                raise refused_grammar(f"the tokenizer cannot be read: {error}") from None
            give_back_freed()
        return self._tokenizer

    def compile(self, source: str) -> Grammar:
        """Compile a grammar that `serialized` returned, and compute its first masks.

        Raises RequestError for an invalid grammar, and for one whose first masks are too complex, as with many hundred
        optional keys."""
        tokenizer = self.load()
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
        grammar = Grammar(matcher, tokenizer.vocab_size, self._vocab_size, frozenset(self._ends))
        state = grammar.begin()
        if not state.masks([])[0].any():
            raise refused_grammar("the grammar allows no text at all")
        begun = state.forced([])
        following = (int(token) for token in np.flatnonzero(state.masks(begun)[0]) if token not in self._ends)
        state.masks([*begun, *islice(following, 1)])
        return grammar


def text_matcher(source: str) -> LLMatcher | None:
    """Return a matcher of texts by their UTF-8 bytes, for a grammar in Lark's notation; None for a long one."""
    if len(source) > _MAX_SHORT:
        return None
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(**_SHORT_LIMITS, verbose_errors=False)
    return LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(source), log_level=0, limits=limits)


def _tokenizer(text: str, vocab_size: int, ends: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    text = _without_special(text)
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError:  # the tokenizer has more ids than the model
        return LLTokenizer(text, eos_token=ends)


def _without_special(text: str) -> str:
    """Return a tokenizer.json with special tokens renamed, so that no text is spelled like one.

    Else `llguidance` would choose a special token for a forced text spelled like it, which may end the answer."""
    tokenizer = json.loads(text)
    special = {token["content"]: token for token in tokenizer.get("added_tokens") or () if token["special"]}
    vocabulary = tokenizer["model"].get("vocab")
    for name, token in special.items():
        token["content"] = _SPECIAL + name
        if isinstance(vocabulary, dict) and name in vocabulary:
            vocabulary[token["content"]] = vocabulary.pop(name)
    if isinstance(vocabulary, list):
        tokenizer["model"]["vocab"] = [[_SPECIAL + n if n in special else n, score] for n, score in vocabulary]
    unknown = tokenizer["model"].get("unk_token")
    if unknown in special:
        tokenizer["model"]["unk_token"] = _SPECIAL + unknown
    return json.dumps(tokenizer)


class Grammar:
    def __init__(self, root: LLMatcher, words: int, vocab_size: int, ends: frozenset[int]) -> None:
        if root.is_error():
            raise refused_grammar(root.get_error())
        self.root, self.words, self.vocab_size, self.ends = root, words, vocab_size, ends

    def left_out(self) -> list[str]:
        return [note for note in self.root.get_grammar_warnings() if note.startswith(_LEFT_OUT)]

    def begin(self) -> GrammarState:
        return GrammarState(self)


class GrammarState:
    """The state of one answer in its grammar, after `length` tokens of the answer, all of them committed.

    The tokens that a grammar allows depend on these tokens alone, not on earlier calls."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.root.deep_copy()
        self._told: tuple[int, Sequence[int]] = -1, ()
        self._masks = np.empty((0, grammar.vocab_size), dtype=np.bool_)
        self.length = 0

    def masks(self, output: Sequence[int], draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return which tokens the grammar allows after `output`, and after each of the `draft` tokens that follow it.

        Row i of [rows, vocab_size] is for the token after i draft tokens. The rows end at the first draft token that is
        not allowed or ends the answer. Asking again costs nothing. Where the grammar becomes too complex, nothing is
        allowed; if that is directly after `output`, RequestError is raised."""
        if self._told != (len(output), draft):
            self._advance(output)
            self._masks, self._told = self._along(draft), (len(output), draft)
        return self._masks

    def bits(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.int32] | None:
        """Return the mask after all draft tokens, packed; None if one of them is not allowed or ends the answer.

        None too if the grammar becomes too complex there. Raises RequestError if `output` itself is not allowed."""
        self._told = -1, ()
        self._advance(output)
        tokens = list(draft)
        if self._grammar.ends.intersection(tokens) or self._matcher.validate_tokens(tokens) < len(tokens):
            return None
        ahead = self._matcher.deep_copy()
        ahead.consume_tokens(tokens)
        bits = self._bits(ahead)
        return None if ahead.is_error() else bits

    def forced(self, output: Sequence[int]) -> list[int]:
        """Return the next tokens that the grammar forces; [] where it leaves a choice, and where it fails."""
        try:
            self._advance(output)
        except RequestError:  # `masks` raises it again
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._matcher = self._grammar.root.deep_copy()
            self._matcher.consume_tokens(list(output))
            return []
        return tokens

    def unpacked(self, bits: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Convert packed masks [n, words], int32, to booleans [n, vocab_size]."""
        count = self._grammar.vocab_size
        return np.unpackbits(bits.view(np.uint8), axis=-1, count=count, bitorder="little").view(np.bool_)

    def _advance(self, output: Sequence[int]) -> None:
        new = output[self.length :]
        if not self._matcher.consume_tokens(list(new)):
            raise refused_grammar(self._matcher.get_error())
        self.length = len(output)

    def _along(self, draft: Sequence[int]) -> NDArray[np.bool_]:
        rows = [self._bits(self._matcher)]
        if self._matcher.is_error():
            raise refused_grammar(self._matcher.get_error())
        # A copy takes some 6 us. llguidance 1.9.1 has a `rollback`, but after it masks are wrong if one was computed
        # beyond the position that it returns to.
        ahead = self._matcher.deep_copy()
        for index, token in enumerate(draft):
            possible = 0 <= token < self._grammar.vocab_size and rows[index][token >> 5] >> (token & 31) & 1
            if not possible or token in self._grammar.ends:
                break
            ahead.consume_token(token)
            rows.append(self._bits(ahead))
        return self.unpacked(np.stack(rows))

    def _bits(self, matcher: LLMatcher) -> NDArray[np.int32]:
        bits = np.zeros(-(-self._grammar.words // 32), dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            bits[:] = 0
        return bits
