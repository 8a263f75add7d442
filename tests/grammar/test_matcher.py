"""Masks of a grammar are a function of the tokens before them, whatever draft was asked about."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ssd.config.params import Structured
from ssd.grammar.matcher import GrammarCompiler
from ssd.grammar.source import serialized
from ssd.models.pull import BUILTIN
from tests.grammar.test_closing import an

DIRECTORY = BUILTIN["smollm2-draft"].directory


@pytest.mark.parametrize("schema", [{"type": "object"}, {**an(a={}), "additionalProperties": True}, an(f={})], ids=str)
@pytest.mark.parametrize("by_bits", [False, True])
def test_a_rejected_draft_leaves_no_trace(schema: object, by_bits: bool) -> None:
    compiler = GrammarCompiler(DIRECTORY, 49152, [2])
    tokenizer = compiler.load()
    begun, draft, taken = (tokenizer.tokenize_str(text) for text in ('{"f":', ' "', '{"'))
    grammar = compiler.compile(serialized(Structured("json", json.dumps(schema))))
    used, fresh = grammar.begin(), grammar.begin()
    if by_bits:
        assert used.bits(begun, draft) is not None
    else:
        assert len(used.masks(begun, draft)) == len(draft) + 1
    assert len(taken) == 1 and np.array_equal(used.masks(begun + taken), fresh.masks(begun + taken))


def test_no_mask_follows_a_draft_token_that_ends_the_answer() -> None:
    """The grammar allows the end here, and a matcher that has ended has no mask: neither for the token after the end,
    nor for the end said twice. The state goes on from the committed tokens."""
    end = 2
    compiler = GrammarCompiler(DIRECTORY, 49152, [end])
    tokenizer = compiler.load()
    grammar = compiler.compile(serialized(Structured("json", json.dumps(an(f={"type": "integer"})))))
    begun, rest = tokenizer.tokenize_str('{"f":'), tokenizer.tokenize_str("1}")
    for beyond in ([], [end], rest):
        state = grammar.begin()
        masks = state.masks(begun, [*rest, end, *beyond])
        assert len(masks) == len(rest) + 1 and masks[-1][end]
        assert state.bits(begun, [*rest, end, *beyond]) is None
        assert np.array_equal(state.masks(begun + rest), masks[-1:])
