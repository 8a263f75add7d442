"""Ids of every mode, for families with layers of two sizes, with sinks and with states, by the core's checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness import test_recurrent as exact
from tests.exactness.situations import World
from tests.exactness.test_deterministic import KERNELS, check_without_flag
from tests.models import tiny
from tests.plugins.families.knobs import FAMILIES, GPT_OSS, RECURRENT

CHECKED = {"gemma4_text": FAMILIES["gemma4_text"], "gpt_oss": FAMILIES["gpt_oss"], "lfm2": RECURRENT["lfm2"]}


@pytest.fixture(scope="module", params=CHECKED)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), *CHECKED[request.param])


test_ids_are_those_of_transformers = exact.test_ids_are_those_of_transformers
test_right_and_wrong_drafts_change_no_id = exact.test_right_and_wrong_drafts_change_no_id
test_sampled_ids_are_those_of_plain_decoding = exact.test_sampled_ids_are_those_of_plain_decoding
test_preempted_sequences_begin_again = exact.test_preempted_sequences_begin_again
test_conversations_over_one_prefix = exact.test_conversations_over_one_prefix
test_hits_are_as_long_as_without_a_draft = exact.test_hits_are_as_long_as_without_a_draft
test_a_draft_that_dies_takes_no_token_along = exact.test_a_draft_that_dies_takes_no_token_along
test_a_draft_token_that_is_not_a_number_leaves_no_trace = exact.test_a_draft_token_that_is_not_a_number_leaves_no_trace


@KERNELS
def test_by_our_kernels_all_rows_are_those_of_decoding_without_the_flag(tmp_path: Path) -> None:
    check_without_flag(tiny.model("gpt_oss", tmp_path, **GPT_OSS))
