"""Verification in static shapes: the same logits as the rows have by themselves, whatever fills the rest."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, graph_shapes, smallest_fitting
from ssd.execution.runner import Runner
from ssd.execution.static import StaticContext, StaticRunner, prefill_chunks
from ssd.execution.tables import Tables
from ssd.law import Law
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import argmax, perturbed
from tests.verifier.scripted import VOCAB, ScriptedProposer, continuation, make_engine, play, submit, tiny_llama

pytestmark = pytest.mark.usefixtures("replayed")

PAGE, PAGES, ROWS, LONGEST = 4, 60, 5, 6


def static(dtype: torch.dtype = torch.float64, attention: str = "torch", deterministic: bool = False) -> StaticRunner:
    """A slot of its cache that is read before it is written makes a NaN."""
    model = tiny_llama(dtype)
    runner = StaticRunner(model, PAGES, PAGE, deterministic, attention, most_rows=ROWS, longest=LONGEST, layers=(0, 1))
    runner.cache.keys.fill_(torch.nan)
    runner.cache.values.fill_(torch.nan)
    return runner


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    dice = Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(length)] for length in lengths]


def tables(count: int, seed: int = 0) -> list[list[int]]:
    """Pages of so many sequences, in any order."""
    pages = list(range(PAGES))
    Random(seed).shuffle(pages)
    return [pages[start : start + 12] for start in range(0, 12 * count, 12)]


def rows_of(found: Sequence[list[int]], starts: Sequence[int], outputs: Sequence[int] | None = None) -> list[Row]:
    slots = list(range(ROWS))
    Random(3).shuffle(slots)
    wanted = [len(text) - start for text, start in zip(found, starts, strict=True)] if outputs is None else outputs
    return [
        Row(text[start:], start, pages, count, slot)
        for text, start, pages, count, slot in zip(found, starts, tables(len(found)), wanted, slots, strict=False)
    ]


def before(rows: Sequence[Row], found: Sequence[list[int]]) -> list[Row]:
    return [
        Row(text[: row.start], 0, row.pages, 0, row.slot) for row, text in zip(rows, found, strict=True) if row.start
    ]


def expected(rows: Sequence[Row], found: Sequence[list[int]], dtype: torch.dtype = torch.float64) -> Tensor:
    """The logits of rows, of each text by itself."""
    runner = Runner(tiny_llama(dtype), 12, PAGE)
    alone = [runner.forward([Row(text, 0, range(12), row.outputs)]) for row, text in zip(rows, found, strict=True)]
    return torch.cat(alone)


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ((1,), (0,)),
        ((9,), (3,)),
        ((7, 21), (6, 20)),
        ((20, 9, 30), (15, 8, 29)),
        ((40, 6, 6, 17, 33), (36, 0, 4, 16, 27)),
    ],
    ids=str,
)
def test_logits_are_those_of_each_row_by_itself(
    attention: str, lengths: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    dtype = torch.float64 if attention == "torch" else torch.float32  # which Triton multiplies
    runner, found = static(dtype, attention), texts(lengths)
    rows = rows_of(found, starts)
    if any(starts):
        runner.forward(before(rows, found))
    context = runner.prepare(rows)
    assert isinstance(context, StaticContext)
    got = runner.forward(rows, context)
    assert (got - expected(rows, found, dtype)).abs().max() <= (1e-10 if dtype == torch.float64 else 1e-3)


def test_what_fills_a_shape_changes_no_bit_and_lands_on_its_own_page() -> None:
    """Whatever the dummy page holds, and whoever had the slots before."""
    found = texts((20, 9, 30))
    rows = rows_of(found, (15, 8, 29))
    results = []
    for filler in (0.0, 1e30, torch.nan):
        runner = static()
        runner.forward(before(rows, found))
        others = rows_of(texts((8, 8, 8, 8, 8), 7), (0,) * 5)
        for row in others:
            runner.tables.tell([(row.slot, [PAGES - 1] * 12)])
        runner.cache.keys[:, PAGES * PAGE :] = filler
        runner.cache.values[:, PAGES * PAGE :] = filler
        kept = runner.cache.keys.clone()
        results.append(runner.forward(rows))
        written = {
            page * PAGE + p % PAGE
            for row in rows
            for p in range(row.start, row.stop)
            for page in [row.pages[p // PAGE]]
        }
        touched = ~torch.isclose(kept, runner.cache.keys, 0, 0, equal_nan=True).all(-1).all(-1).all(0)
        assert set(touched.nonzero()[:, 0].tolist()) <= written | {PAGES * PAGE}
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_rows_without_a_token_change_nothing_in_any_shape(attention: str, deterministic: bool) -> None:
    """A verification of few tokens in every shape that a GPU captures: most rows are empty, one of them among the real
    ones. Whatever the dummy page holds, real rows have the same bits, and nothing is written but their own slots."""
    dtype = torch.float64 if attention == "torch" else torch.float32
    found = texts((20, 9, 30))
    first, second, third = rows_of(found, (17, 8, 28))
    empty = Row([], second.start, second.pages, 0, second.slot)
    shapes = list(static(dtype, attention, deterministic).steps)
    assert len(shapes) == (1 if deterministic else 16)
    without = 0
    for shape in shapes if attention == "torch" else shapes[::5]:  # the kernels are slow without a GPU
        small = Row(first.token_ids[:1], first.start, first.pages, 1, first.slot)
        rows = [first, empty, third] if shape.rows > 2 and shape.tokens > 4 and shape.longest > 2 else [small]
        wanted = expected([first, third], [found[0], found[2]], dtype) if len(rows) > 1 else None
        results = []
        for filler in (0.0, 1e30, torch.nan):
            runner = static(dtype, attention, deterministic)
            runner.forward(before([first, second, third], found))
            runner.cache.keys[:, PAGES * PAGE :] = filler
            runner.cache.values[:, PAGES * PAGE :] = filler
            kept = [kind.clone() for kind in (runner.cache.keys, runner.cache.values)]
            step = runner.steps[shape]
            results.append(runner.forward(rows, StaticContext((), [(step, list(enumerate(rows)))])).clone())
            without += int((step.batch.fields["starts"].diff() == 0).sum())
            own = {slot for row in rows for slot in runner.cache.slots(row.pages, row.start, row.stop)}
            for old, new in zip(kept, (runner.cache.keys, runner.cache.values), strict=True):
                touched = ~torch.isclose(old, new, 0, 0, equal_nan=True).all(-1).all(-1).all(0)
                assert set(touched.nonzero()[:, 0].tolist()) <= own | {PAGES * PAGE}
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        if wanted is not None:
            assert (results[0] - wanted).abs().max() <= (1e-10 if dtype == torch.float64 else 1e-3)
    assert without > len(shapes)


def test_of_several_rows_of_a_sequence_the_longest_says_which_pages_it_has() -> None:
    found = Tables(2, 4, 9, torch.device("cpu"))
    found.tell([(1, [5, 3, 7]), (0, [2]), (1, [5, 3])])
    assert found.tensor.tolist() == [[2, 9, 9, 9], [5, 3, 7, 9], [9] * 4]
    found.tell([(1, [5]), (0, [2, 4])])
    assert found.tensor.tolist() == [[2, 4, 9, 9], [5, 3, 7, 9], [9] * 4]


def test_only_the_wanted_outputs_come_back() -> None:
    runner, found = static(), texts((9, 4))
    rows = rows_of(found, (3, 0), outputs=(2, 1))
    runner.forward(before(rows, found))
    assert (runner.forward(rows) - expected(rows, found)).abs().max() <= 1e-10


def test_hidden_states_are_shown() -> None:
    runner, found = static(), texts((9, 4))
    rows = rows_of(found, (3, 0))
    runner.forward(before(rows, found))
    context = runner.prepare(rows, (1,))
    runner.forward(rows, context)
    hidden = context.hidden[1].clone()
    assert context.hidden.keys() == {1} and len(hidden) == 10
    ragged = Runner.prepare(runner, rows, (1,))
    Runner.forward(runner, rows, ragged)
    torch.testing.assert_close(hidden, ragged.hidden[1])


@pytest.mark.parametrize("most_rows", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("longest", [1, 2, 5, 8, 16])
def test_every_verification_fits_a_shape(most_rows: int, longest: int) -> None:
    """However its tokens are spread, as long as there are not more of them than are worth it."""
    found, dice = graph_shapes(most_rows, longest), Random(most_rows * longest)
    assert len(found) == len(set(found)) <= 60
    for _ in range(300):
        lengths = [dice.randint(1, dice.randint(1, longest)) for _ in range(dice.randint(1, most_rows))]
        if sum(lengths) > 256 and sum(lengths) > len(lengths):
            continue
        shape = smallest_fitting(lengths, found)
        assert shape is not None
        assert shape.tokens < 2 * max(sum(lengths), len(lengths)) or shape.rows < 2 * len(lengths)


def test_the_smallest_shape_that_holds_a_batch_is_taken() -> None:
    found = graph_shapes(8, 8)
    assert smallest_fitting([5, 1, 1], found) == GraphShape(4, 8, 6)
    assert smallest_fitting([LONGEST_ROW + 1], found) is None


@pytest.mark.parametrize("shape", [GraphShape(3, 16, 16), GraphShape(2, 5, 4), GraphShape(1, 1, 1)], ids=str)
def test_chunks_are_the_rows_in_order(shape: GraphShape) -> None:
    rows = [Row(list(range(n)), s, range(9), o, i) for i, (n, s, o) in enumerate([(40, 3, 1), (1, 7, 1), (9, 0, 5)])]
    seen: dict[int, list[Row]] = {}
    for part in prefill_chunks(rows, shape):
        assert len(part) <= shape.rows and sum(len(row.token_ids) for _, row in part) <= shape.tokens
        for number, row in part:
            assert len(row.token_ids) <= shape.longest
            seen.setdefault(number, []).append(row)
    for number, row in enumerate(rows):
        cut = seen[number]
        assert [token for chunk in cut for token in chunk.token_ids] == row.token_ids
        assert [p for chunk in cut for p in range(chunk.start, chunk.stop)] == list(range(row.start, row.stop))
        assert [p for chunk in cut for p in chunk.predicted] == list(row.predicted)


@pytest.mark.usefixtures("products_of_rows")
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_deterministic_logits_are_the_same_bits_in_any_batch(attention: str) -> None:
    """In 32 bits: a prompt at once or in chunks, a verification alone or beside others, with drafts or without."""
    found = texts((38, 21))
    runner = static(torch.float32, attention, deterministic=True)
    whole = runner.forward(rows_of(found, (0, 0)))
    again = static(torch.float32, attention, deterministic=True)
    first, second = rows_of(found, (0, 0))
    cut = []
    for start, stop in ((0, 1), (1, 8), (8, 33), (33, 38)):
        tokens = first.token_ids[start:stop]
        cut.append(again.forward([Row(tokens, start, first.pages, len(tokens), first.slot)]).clone())
    assert torch.equal(torch.cat(cut), whole[:38])
    assert torch.equal(again.forward([second]), whole[38:])


def test_samples_are_those_of_the_logits() -> None:
    """Drawn where the logits are, greedy and not."""
    runner, found = static(torch.float32), texts((9, 12, 5))
    rows = rows_of(found, (3, 11, 0))
    runner.forward(before(rows, found))
    laws = [Law(0.7, seed=5), Law(), Law(1.3, seed=2**63 - 1)]
    noise = NoiseCache(VOCAB)
    logits = runner.forward(rows).clone()
    wanted = [
        perturbed(chunk, law, row.predicted, noise)
        for chunk, law, row in zip(logits.split([row.outputs for row in rows]), laws, rows, strict=True)
    ]
    assert runner.sample(rows, laws) == argmax(torch.cat(wanted))
    assert runner.sample(rows, [Law()] * 3) == argmax(logits)
    assert runner.sample([Row([1] * 40, 0, range(12))], [Law()]) is None, "a prompt has no static shape"


def test_a_sample_of_what_is_no_number_is_none() -> None:
    runner = StaticRunner(tiny_llama(broken=7), PAGES, PAGE, most_rows=2, longest=4)
    assert runner.sample([Row([3, 7], 0, range(12), 2)], [Law()])[1] == -1  # type: ignore[index]


def test_warming_up_runs_every_shape_and_leaves_no_trace() -> None:
    runner, found = static(), texts((9,))
    runner.warm_up(4)
    rows = rows_of(found, (0,), outputs=(9,))
    assert (runner.forward(rows) - expected(rows, found)).abs().max() <= 1e-10


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "law",
    [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.1, "seed": 5, "top_k": 9},
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_an_engine_says_the_same_in_static_shapes(deterministic: bool, law: dict[str, object]) -> None:
    """Prompts in chunks, drafts of any quality, arrivals, preemptions: every request gets what it gets alone."""
    prompts = texts((5, 17, 11, 3), 9)
    truths = [continuation(tuple(prompt), tuple(law.items())) for prompt in prompts]
    proposer = ScriptedProposer(
        {request: prompt + truths[request] for request, prompt in enumerate(prompts)},
        dict(enumerate(("right", "adversarial", "changing", "garbage"))),
    )
    runner = StaticRunner(tiny_llama(), 40, PAGE, deterministic, most_rows=3, longest=5)
    engine = make_engine(proposer, runner=runner, pages=40, budget=16, sequences=3)
    submits = [submit(n, p, max_tokens=12, **law) for n, p in enumerate(prompts)]
    answers = play(engine, submits, arrivals={1: 1, 2: 2, 3: 5})
    assert [answers[n].ids for n in range(4)] == [truth[:12] for truth in truths]
