"""Pages of GPUs: sums of bytes, and what the driver's tool says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.config.gpus import Gpu, parsed
from ssd.errors import UsageError
from ssd.launch.memory import CONTEXT, Budget, Need, pages_on_gpus, working

GIB = 2**30
NOTHING = Need(0, 0, 0)
# 8B and 1B in bfloat16, pages of 16 tokens.
TARGET = Need(16 * GIB, GIB, 2 * 2**20)
DRAFT = Need(2 * GIB, GIB, 2**19)
H200 = Gpu(140 * GIB, 139 * GIB)


def test_the_target_gets_all_that_may_be_used_beside_its_weights() -> None:
    room = int(140 * GIB * 0.9) - 16 * GIB - GIB - CONTEXT
    assert pages_on_gpus(Budget([H200], 0.9), TARGET, [0], NOTHING, None, 100, 10) == (room // TARGET.page, 100)


def test_a_small_model_is_not_given_pages_without_end() -> None:
    small = Need(2**20, 2**20, 2**12)
    assert pages_on_gpus(Budget([H200], 0.9), small, [0], NOTHING, None, 100, 10) == (2**18, 100)
    assert pages_on_gpus(Budget([H200], 0.9), small, [0], NOTHING, None, 2**20, 10) == (2**20, 2**20)


def test_what_others_have_taken_is_not_promised() -> None:
    room = 60 * GIB - TARGET.fixed
    assert pages_on_gpus(Budget([Gpu(140 * GIB, 60 * GIB)], 0.9), TARGET, [0], NOTHING, None, 1, 1) == (
        room // TARGET.page,
        1,
    )


def test_a_draft_on_the_same_gpu_has_a_budget_of_its_own() -> None:
    found, drafts = pages_on_gpus(Budget([H200], 0.5), TARGET, [0], DRAFT, 0, 8000, 10)
    assert drafts == 8000  # what it can use, and no more
    assert found == (70 * GIB - TARGET.fixed - DRAFT.fixed - 8000 * DRAFT.page) // TARGET.page
    few, drafts = pages_on_gpus(Budget([H200], 0.16), TARGET, [0], DRAFT, 0, 8000, 10)
    assert 10 <= few - 1 <= drafts <= few < 8000  # too few for both: about as many each


def test_a_draft_elsewhere_takes_nothing_from_the_target() -> None:
    small = Gpu(16 * GIB, 15 * GIB)
    budget = Budget([H200, small], 0.9)
    alone, _ = pages_on_gpus(budget, TARGET, [0], NOTHING, None, 100, 10)
    assert pages_on_gpus(budget, TARGET, [0], DRAFT, 1, 100, 10) == (alone, 100)
    room = int(16 * GIB * 0.9) - DRAFT.fixed
    assert pages_on_gpus(budget, TARGET, [0], DRAFT, 1, 10**6, 10) == (alone, room // DRAFT.page)


def test_of_several_gpus_the_one_with_the_least_room_decides() -> None:
    budget = Budget([Gpu(40 * GIB, 40 * GIB), Gpu(30 * GIB, 30 * GIB), H200], 1.0)
    found, _ = pages_on_gpus(budget, TARGET, [0, 1], NOTHING, None, 1, 1)
    assert found == (30 * GIB - TARGET.fixed) // TARGET.page
    beside, _ = pages_on_gpus(budget, TARGET, [0, 2], DRAFT, 0, 100, 1)
    assert beside == (40 * GIB - TARGET.fixed - DRAFT.fixed - 100 * DRAFT.page) // TARGET.page


@given(
    st.integers(20, 200),
    st.floats(0.1, 1.0),
    st.integers(1, 10**5),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([[0], [0, 1], [1]]),
)
def test_nothing_is_promised_twice(
    size: int, utilization: float, wanted: int, draft_gpu: int | None, target_gpus: list[int]
) -> None:
    """Whatever is found fits, on every GPU; otherwise the message says where it does not."""
    budget = Budget([Gpu(size * GIB, (size - 1) * GIB), Gpu(2 * size * GIB, size * GIB)], utilization)
    try:
        found, drafts = pages_on_gpus(budget, TARGET, target_gpus, DRAFT, draft_gpu, wanted, 1)
    except UsageError as error:
        assert "has no room on cuda:" in str(error)
        return
    assert found >= 1 and 1 <= drafts <= wanted
    for gpu in (0, 1):
        used = TARGET.fixed + found * TARGET.page if gpu in target_gpus else 0
        used += DRAFT.fixed + drafts * DRAFT.page if gpu == draft_gpu else 0
        assert used <= budget.of(gpu)


def test_what_does_not_fit_is_said_with_every_number() -> None:
    small = Budget([Gpu(16 * GIB, 15 * GIB)], 0.9)
    with pytest.raises(UsageError) as caught:
        pages_on_gpus(small, TARGET, [0], NOTHING, None, 100, 512)
    assert str(caught.value) == (
        "the target has no room on cuda:0: it needs 16.0 GiB of weights, 2.0 GiB to work in, 1.0 GiB for the keys and "
        "values of one sequence, and 14.4 GiB of cuda:0 may be used (--gpu-memory-utilization 0.9 of 16.0 GiB, 15.0 "
        "GiB free); lower --max-model-len or --max-num-batched-tokens"
    )
    with pytest.raises(UsageError, match=r"the draft has no room .* beside the target's 19.0 GiB.*--draft-device"):
        pages_on_gpus(Budget([Gpu(20 * GIB, 20 * GIB)], 1.0), TARGET, [0], DRAFT, 0, 100, 512)


def test_a_forward_works_in_what_its_tokens_and_logits_need() -> None:
    assert working(256, 64, 4096, 14336, 128256) == 4 * 256 * (6 * 4096 + 2 * 14336) + 16 * 64 * 128256


SAID = "0, GPU-aa11, 100, 90, 9.0\n1, GPU-bb22, 200, 150, 8.6\n2, GPU-ab33, 300, 300, 12.1\n"
ALL = [
    Gpu(100 << 20, 90 << 20, (9, 0)),
    Gpu(200 << 20, 150 << 20, (8, 6)),
    Gpu(300 << 20, 300 << 20, (12, 1)),
]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("0,7,1", [0]),
        ("-1", []),
        ("GPU-bb22", [1]),
        ("GPU-a", []),  # of two
        ("GPU-aa,1", [0, 1]),
    ],
)
def test_gpus_are_those_that_cuda_shows(visible: str | None, chosen: list[int]) -> None:
    assert parsed(SAID, visible) == [ALL[index] for index in chosen]


@pytest.mark.parametrize("said", ["0, GPU-aa11, [N/A], [N/A]\n", "No devices were found\n", "0\n"])
def test_what_is_no_table_tells_nothing(said: str) -> None:
    assert parsed(said, None) is None
