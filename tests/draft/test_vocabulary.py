"""Drafts that predict a short list of ids, with ids of the text beside it; and steps in one call of our kernels."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from ssd.config.params import Mode, Speculation
from ssd.draft import vocabulary
from ssd.draft.depth_policy import DepthPolicy
from ssd.draft.drafter import Drafter, DraftSampler, LogitRows
from ssd.draft.static_shapes import StaticDrafter, TreeRunner
from ssd.draft.tree import Guess, Tree
from ssd.draft.vocabulary import DraftVocabulary, TextIds
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.features import FeaturePart, extend_tags
from ssd.ipc.messages import Admit
from ssd.kernels import cpu
from ssd.kernels.guess import Ask
from ssd.law import Law
from ssd.models import registry
from ssd.models.checkpoint import LIST_FILE, inspect
from ssd.models.head import with_list
from ssd.models.pairs import borrowed
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import filtered
from tests.draft import pair
from tests.draft.audit import PROMPTS
from tests.draft.pair import VOCABULARY, Draft, Pair, ScriptedTarget
from tests.draft.steps import assert_alike, grown, trees_of
from tests.exactness.plain import Plain
from tests.models import tiny

GREEDY, WARM = Law(), Law(temperature=0.8, seed=77)
FILTERED = replace(WARM, top_k=9, top_p=0.9, min_p=0.01)
IDS = sorted(random.Random(4).sample(range(VOCABULARY), 40))
OTHERS = [token for token in range(VOCABULARY) if token not in IDS]
# A text with ids of both kinds, one that is not listed twice.
TEXT = [IDS[3], OTHERS[7], IDS[0], OTHERS[1], OTHERS[7], IDS[5], OTHERS[30]]
OURS = cpu.multiply_floats(torch.empty(1, 1))  # on processors that have our products


def listing(directory: Path, ids: Sequence[int] = IDS[::-1]) -> Path:
    """A draft with a list of what it predicts, likeliest first."""
    save_file({"ids": torch.tensor(ids)}, directory / LIST_FILE)
    return directory


def load(directory: Path, dtype: torch.dtype, int8: bool = False, target: Path | None = None) -> Runner:
    """As the draft's process does it."""
    checkpoint = inspect(directory) if target is None else borrowed(inspect(directory), inspect(target))
    model = registry.load(with_list(checkpoint), dtype, tiny.CPU, tiny.MAX_POSITION, int8=int8, activations="int8")
    return Runner(model, 400, pair.PAGE_SIZE)


def settings(mode: Mode = "ssd", **fields: Any) -> Any:
    return pair.config(Speculation(mode, 4, (3,), **{"backup": "jit"} | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft like it with a list, and one that predicts the first 40 ids."""
    folder = tmp_path_factory.mktemp("short")
    tiny.llama(folder / "target", seed=3)
    listing(tiny.noisy_copy(folder / "target", folder / "listed", noise=0.03))
    tiny.edit(tiny.noisy_copy(folder / "target", folder / "first", noise=0.03), draft_vocab_size=40)
    return folder


# -- what it predicts --------------------------------------------------------------------------------------------------


def asked(directory: Path, law: Law, speculation: Speculation, dtype: torch.dtype) -> Guess:
    """The guess about what follows TEXT."""
    draft = Draft(pair.config(speculation), load(directory, dtype))
    ScriptedTarget(draft, 0, TEXT, law, speculation)
    guess: Guess = draft.engine.trees[0].guesses[0]
    return guess


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["calls", "one-call"])
@pytest.mark.parametrize("law", [GREEDY, WARM, FILTERED], ids=["greedy", "warm", "filtered"])
@pytest.mark.parametrize("name", ["listed", "first"])
def test_candidates_are_the_best_of_the_list_and_of_the_text(
    folder: Path, name: str, law: Law, dtype: torch.dtype
) -> None:
    known = sorted({*(IDS if name == "listed" else range(40)), *TEXT})
    guess = asked(folder / name, law, settings().speculation, dtype)
    # Filters look at what the draft predicts: elsewhere it has no logits.
    logits = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
    logits[known] = Plain(folder / name).logits(TEXT)[-1][known]
    scores = logits if law.temperature == 0 else filtered(logits[None] / law.temperature, law)[0]
    if law.temperature > 0:
        scores = scores + NoiseCache(VOCABULARY)(law.seed, len(TEXT))
    possible = int((scores > -torch.inf).sum())
    expected = scores.topk(min(possible, len(guess.candidates))).indices.tolist()
    assert guess.candidates[: len(expected)] == expected and guess.token == expected[0]
    assert guess.scores[: len(expected)] == pytest.approx(scores[expected].tolist(), abs=1e-4)


def test_ids_of_the_text_are_among_the_candidates(folder: Path) -> None:
    """Of the greedy guesses about many texts some are not listed, and all of those are in the text."""
    draft = Draft(settings(), load(folder / "listed", torch.float32))
    outside = 0
    for request in range(8):
        prompt = tiny.token_ids(20, request)
        ScriptedTarget(draft, request, prompt, GREEDY, settings().speculation)
        found = set(draft.engine.trees[request].guesses[0].candidates) - set(IDS)
        assert found <= set(prompt)
        outside += len(found)
    assert outside > 3


@pytest.mark.parametrize("c", [1.0, 0.3])
def test_draft_probs_are_over_the_whole_vocabulary(folder: Path, c: float) -> None:
    speculation = Speculation("ssd", 2, (3,), "jit", sampler="rejection", saguaro_c=c)
    guess = asked(folder / "listed", WARM, speculation, torch.float64)
    known, probs = sorted({*IDS, *TEXT}), guess.draft_probs
    assert probs is not None and probs.shape == (VOCABULARY,) and probs[guess.token] > 0
    weights = (Plain(folder / "listed").logits(TEXT)[-1][known] / WARM.temperature).exp()
    weights[weights.topk(3).indices] *= c
    assert torch.allclose(probs[known].double(), weights / weights.sum(), atol=1e-6)
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-6)


class OnlySome:
    """A grammar that allows these ids."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def possible(self, tokens: Sequence[int], drafts: Sequence[object]) -> torch.Tensor:
        row = torch.zeros(len(drafts), VOCABULARY, dtype=torch.bool)
        row[:, self._ids] = True
        return row


def test_a_grammar_masks_listed_ids_and_those_of_the_text() -> None:
    """Of two sequences with texts of different length."""
    head = SimpleNamespace(ids=torch.tensor([9, 2, 5]), table=torch.zeros(VOCABULARY, 1))
    model: Any = SimpleNamespace(shape=SimpleNamespace(outputs=3), device=tiny.CPU, head=head, logits_of=None)
    sampler = DraftSampler(DraftVocabulary(model, VOCABULARY, NoiseCache(VOCABULARY)))
    rows, texts = [], [torch.tensor([30, 7]), torch.tensor([8])]
    for request, allowed in enumerate(([5, 7, 60], [9, 8, 5])):
        tree = Tree(Admit(request, 0, 0, [1], GREEDY, settings().speculation), 1, PageTable(PagePool(4, 4)))
        tree.grammar = OnlySome(allowed)  # type: ignore[assignment]
        rows.append(LogitRows(tree, [1], [0], [[]]))
    logits = torch.tensor([[3.0, 2.0, 1.0, 5.0, 4.0], [3.0, 2.0, 1.0, 4.0, -torch.inf]])
    assert [guess.candidates for guess in sampler(logits, rows, texts)] == [[7, 5], [8, 9, 5]]


@pytest.mark.usefixtures("replayed")
def test_static_shapes_rank_the_list(folder: Path) -> None:
    model, configuration, noise = load(folder / "listed", torch.float64).model, settings(), NoiseCache(VOCABULARY)
    plain = Drafter(configuration, Runner(model, 400, pair.PAGE_SIZE), noise, VOCABULARY)
    plain.vocabulary._known = None  # ids of texts have no logits in static shapes
    static = StaticDrafter(configuration, TreeRunner(model, configuration, "torch"), noise, VOCABULARY)
    found = []
    for drafter in (plain, static):
        trees = trees_of(drafter, [GREEDY, WARM, FILTERED], [5, 9, 4], configuration.speculation)
        found.append(grown(drafter, trees))
    assert_alike(*found)
    assert {token for guesses in found[1] for guess in guesses for token in guess.candidates} <= set(IDS)


def test_the_last_different_ids_of_a_text_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "MOST_TEXT", 3)
    text, tokens = TextIds(bytes([1, 0, 0, 0, 0, 0])), [5, 0, 3, 5, 1]
    text.extend(tokens)
    assert list(text.ids) == [3, 5, 1]
    text.extend([*tokens, 0, 2, 3])
    assert list(text.ids) == [1, 2, 3]


def test_a_list_of_ids_keeps_no_more_noise_than_all_ids_would(folder: Path) -> None:
    noise = NoiseCache(VOCABULARY)
    own = DraftVocabulary(load(folder / "listed", torch.float32).model, VOCABULARY, noise).noise
    assert own is not noise and own.capacity == noise.capacity


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_the_text_is_the_targets(folder: Path, mode: Mode, law: dict[str, Any], int8: bool) -> None:
    target = tiny.runner(folder / "target", torch.float64)
    asked = pair.params(len(PROMPTS), 24, **law)
    alone = Pair(pair.config(Speculation("ar")), target).run(PROMPTS, asked).ids
    draft = Draft(settings(mode), load(folder / "listed", torch.float32, int8))
    texts = Pair(draft.config, target, draft).run(PROMPTS, asked)
    assert texts.ids == alone and sum(metrics.accepted_tokens for metrics in texts.metrics) > 10
    draft.assert_empty()


# -- what is no list ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": torch.tensor([1])}, "must have one tensor, 'ids', a list of int32 or int64"),
        ({"ids": torch.tensor([1.0])}, "must have one tensor, 'ids', a list of int32 or int64"),
        ({"ids": torch.tensor([[1]])}, "must have one tensor, 'ids', a list of int32 or int64"),
        ({"ids": torch.tensor([1, 2, 3])}, "lists 3 ids, config.json says draft_vocab_size 40"),
        ({"ids": torch.tensor([1] * 40)}, "ids does not name 40 tokens of a vocabulary of 131"),
        ({"ids": torch.arange(92, 132)}, "ids does not name 40 tokens of a vocabulary of 131"),
    ],
)
def test_what_is_no_list_is_refused(
    folder: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    odd = tiny.edit(tiny.noisy_copy(folder / "target", tmp_path / "odd", noise=0.0), draft_vocab_size=40)
    save_file(tensors, odd / LIST_FILE)
    with pytest.raises(UsageError, match=message):
        load(odd, torch.float32)


def test_a_list_that_the_target_does_not_know_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=f"the draft predicts id {max(IDS)}, the target has ids below 100"):
        Draft(pair.config(settings().speculation, vocab_size=100), load(folder / "listed", torch.float32))


# -- one call ----------------------------------------------------------------------------------------------------------

LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama listed": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "draft_vocab_size": 40}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral listed": ("mistral", {"sliding_window": 5}),
}


def steps_of(drafter: Drafter, calls: list[int]) -> None:
    """Count the steps in one call."""
    step = drafter._step

    def counted(*given: Any) -> Any:
        calls.append(1)
        assert step is not None
        return step(*given)

    drafter._step = counted  # type: ignore[assignment]


@pytest.mark.skipif(not OURS, reason="no products on this processor: layers have many calls")
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("case", LLAMAS)
def test_one_call_says_what_single_calls_do(case: str, int8: bool, tmp_path: Path) -> None:
    kind, knobs = LLAMAS[case]
    if "listed" in case:
        listing(tiny.model(kind, tmp_path / "draft", **knobs))
    else:
        tiny.edit(tiny.model(kind, tmp_path / "draft", **knobs), **knobs)
    found: list[list[list[Guess]]] = []
    calls: list[int] = []
    for once in (True, False):
        runner = load(tmp_path / "draft", torch.float32, int8)
        drafter = Drafter(settings(), runner, NoiseCache(VOCABULARY), VOCABULARY)
        if once:
            steps_of(drafter, calls)
        else:
            drafter._step = None
        trees = trees_of(drafter, [GREEDY, WARM, WARM.with_seed(3)], [5, 9, 4], settings().speculation)
        found.append(grown(drafter, trees))
    assert found[0] == found[1] and len(calls) == len(found[0])


def played(draft: Draft, law: Law, trunks: list[Any] | None = None) -> list[Any]:
    """All that a draft says in some rounds, from hidden states of the target that are random; in `trunks` each trunk
    with the candidates before its tokens."""
    found: list[Any] = []
    width = 1 if draft.config.features is None else draft.config.features.width
    choice, states = random.Random(3), torch.randn(200, width, generator=torch.Generator().manual_seed(1))

    def show(tokens: list[int]) -> None:
        tags: list[int] = []
        extend_tags(tags, tokens)
        if draft.shown is not None:
            draft.shown.write([FeaturePart(0, range(40), 0, tags)], states[: len(tokens)])

    def watch(engine: Any) -> None:
        for tree in engine.trees.values():
            guesses = [*tree.guesses.values(), *(guess for chain in tree.chains for guess in chain.guesses)]
            found.append([guess._replace(feature=None) for guess in guesses])
            if trunks is not None:
                trunks.append((list(tree.trunk), [tree.guesses[k].candidates for k in sorted(tree.guesses)]))
            found.append([guess.feature.tolist() for guess in guesses if guess.feature is not None])

    draft.watch = watch
    draft.engine._scheduler.note_step = lambda *measured: None  # type: ignore[method-assign]  # or times would choose
    show(TEXT)
    target = ScriptedTarget(draft, 0, TEXT, law, draft.config.speculation)
    for _ in range(12):
        accepted = choice.randrange(len(target.in_flight) + 1)
        token = choice.randrange(VOCABULARY)
        show([*target.tokens, *target.in_flight[:accepted], token])
        target.outcome(accepted, token, 4)
        if target.waiting:
            target.launch(4)
    return found


@pytest.mark.skipif(not OURS, reason="no products on this processor: layers have many calls")
@pytest.mark.parametrize("law", [GREEDY, WARM, replace(WARM, top_k=20)], ids=["greedy", "warm", "filtered"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_one_call_has_the_trunk_of_many(int8: bool, law: Law, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `sd`: the same trunks and candidates, in a step each. Filters need every token's logits on the host."""
    directory = tiny.model("llama", tmp_path / "draft", seed=4)
    found, forwards = [list[Any](), list[Any]()], list[int]()
    for depths, said in zip((1, 16), found, strict=True):
        monkeypatch.setattr(DepthPolicy, "depths", lambda self, trees, now, depths=depths: depths)
        runner = load(directory, torch.float32, int8)
        draft = Draft(pair.config(Speculation("sd", 5, (3,), "jit")), runner)
        played(draft, law, said)
        forwards.append(draft.forwards)
    whole = [[trunk for trunk in trunks if len(trunk[0]) == 5] for trunks in found]
    assert whole[0] == whole[1] and len(whole[0]) > 10
    assert forwards[0] == forwards[1] if law.top_k else forwards[0] > 4 * forwards[1]


@pytest.mark.skipif(not OURS, reason="no products on this processor: layers have many calls")
def test_asks_without_a_place_are_refused(tmp_path: Path) -> None:
    runner = load(tiny.model("llama", tmp_path / "draft"), torch.float32, False)
    views = runner.context([Row([5, 6], 0, range(4), 1)]).views()
    assert views is not None
    with pytest.raises(ValueError, match="1 asks behind 0 wanted tokens in 1 views"):
        runner.model.guess_step([5], (), views, [], [Ask(array("q"))], 9, 3)
