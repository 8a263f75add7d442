"""Every family over several ranks against the same checkpoint whole; what cannot be split is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.law import Law
from ssd.layers.ranks import Ranks
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.families.llama import SPLITS, Llama
from ssd.models.split import Share
from ssd.models.weights import Weights
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import argmax, perturbed
from tests.models import tiny
from tests.models.knobs import FAMILIES
from tests.ranks import part, side_by_side

TOLERANCE = 1e-4
TEXT, OTHER = tiny.token_ids(60, 0), tiny.token_ids(33, 1)
# What two ranks can share, and three.
SIX: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "hidden_size": 48,
    "intermediate_size": 54,
}


def batches() -> list[list[Row]]:
    """A text in parts, the last of them beside another text, in scattered pages."""
    pages, others = list(range(0, 64, 2)), list(range(63, 0, -2))
    return [
        [Row(TEXT[:40], 0, pages, 40)],
        [Row(TEXT[40:41], 40, pages, 1)],
        [Row(TEXT[41:], 41, pages, 19), Row(OTHER, 0, others, 33, slot=1)],
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    check_two_ranks(*FAMILIES[family], tmp_path)


def check_two_ranks(kind: str, knobs: dict[str, Any], folder: Path) -> None:
    directory = tiny.model(kind, folder, **knobs)
    whole = tiny.runner(directory)
    expected = [whole.forward(rows) for rows in batches()]

    def logits(ranks: Ranks) -> list[Tensor]:
        runner = part(directory, ranks)
        assert runner.model.shape.heads * 2 == whole.model.shape.heads
        return [runner.forward(rows) for rows in batches()]

    for ours, theirs in zip(side_by_side(2, logits)[0], expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= TOLERANCE


def test_neighbours_share_key_heads_that_are_fewer_than_ranks(tmp_path: Path) -> None:
    """Two key heads at four ranks: the first is that of ranks 0 and 1."""
    directory = tiny.model("llama", tmp_path)
    expected = tiny.runner(directory).forward(batches()[0])
    ours = side_by_side(4, lambda ranks: part(directory, ranks).forward(batches()[0]))[0]
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", [2, 3])
def test_a_row_is_the_same_bits_in_any_company(size: int, tmp_path: Path) -> None:
    """Also where the ranks' sums are of three numbers, whose order then matters."""
    directory = tiny.model("llama", tmp_path, **SIX)
    alone = [Row(TEXT[:50], 0, range(16), 1), Row(TEXT[50:51], 50, range(16), 1)]
    verified = Row(TEXT[50:58], 50, range(16), 8)
    company = [Row(OTHER[:17], 0, range(16, 32), 1, slot=1), verified, Row(OTHER, 0, range(32, 48), 33, slot=2)]

    def logits(ranks: Ranks) -> tuple[Tensor, Tensor]:
        runner = part(directory, ranks, deterministic=True)
        one = [runner.forward([row]) for row in alone][1]
        return one[0], runner.forward(company)[1]

    one, beside = side_by_side(size, logits)[0]
    assert torch.equal(one, beside)


@pytest.mark.parametrize("int8", [False, True])
def test_samples_are_those_of_all_the_logits(int8: bool, tmp_path: Path) -> None:
    """The token and the score that each part sends decide as if the parts were one vector."""
    directory = tiny.model("llama", tmp_path, vocab_size=257)
    rows = [Row(TEXT[:n], 0, range(16 * n, 16 * n + 16), n, slot=n) for n in (1, 7, 20)]
    laws = [Law(), Law(0.8, seed=5), Law(2.0, seed=6)]

    def both(ranks: Ranks) -> tuple[Tensor, list[int]]:
        runner = part(directory, ranks, int8=int8)
        return runner.forward(rows), runner.sample(rows, laws)

    logits, samples = side_by_side(2, both)[0]
    noise = NoiseCache(257)
    chunks = zip(logits.split([1, 7, 20]), rows, laws, strict=True)
    assert samples == argmax(torch.cat([perturbed(chunk, law, row.predicted, noise) for chunk, row, law in chunks]))
    assert min(samples) < 128 < max(samples)


class _Logits:
    """A model of 5 tokens whose logits are given: `scores` [n, 5], whatever the tokens."""

    def __init__(self, scores: Tensor, ranks: Ranks, directory: Path) -> None:
        self._model = part(directory, ranks).model
        self.shape, self.dtype, self.device = self._model.shape, self._model.dtype, self._model.device
        ids = ranks.part(5)
        self._scores = scores[:, ids.start : ids.stop]

    def forward(self, token_ids: Tensor, context: object) -> Tensor:
        return token_ids[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self._scores


def test_ties_go_to_the_lowest_id_and_what_is_no_number_to_none(tmp_path: Path) -> None:
    directory, nan, inf = tiny.model("llama", tmp_path, vocab_size=5), torch.nan, torch.inf
    scores = torch.tensor(
        [
            [1.0, 7.0, 3.0, 7.0, 7.0],
            [1.0, 2.0, 3.0, 2.0, 3.0],
            [-inf, -inf, -inf, 0.5, -inf],
            [nan, 0.0, 0.0, 0.0, 9.0],
            [0.0, 0.0, 0.0, 0.0, nan],
            [0.0, 0.0, 0.0, 0.0, inf],
            [-inf] * 5,
        ]
    )

    def samples(ranks: Ranks) -> list[int]:
        runner = part(directory, ranks)
        runner.model = _Logits(scores, ranks, directory)
        return runner.sample([Row([0] * 7, 0, range(2), 7)], [Law()])

    assert side_by_side(2, samples)[0] == argmax(scores) == [1, 2, 3, -1, -1, -1, -1]


def test_a_rank_reads_its_part_only(tmp_path: Path) -> None:
    directory = tiny.model("llama", tmp_path, num_key_value_heads=1, vocab_size=130)
    known = inspect(directory)
    asked: dict[str, tuple[slice, ...]] = {}

    def read(name: str, shape: tuple[int, ...], chunk: tuple[slice, ...] = ()) -> Tensor:
        assert known.tensors[name].shape == shape
        asked[name.removeprefix("model.")] = chunk
        return torch.zeros(shape)[chunk]

    share = Share(Ranks(1, 2), SPLITS, key_heads=1)
    Llama(known.config, Weights(read, share=share), torch.float32, tiny.CPU, 64)
    rows, columns = (slice(16, 32),), (slice(None), slice(16, 32))
    assert asked["layers.0.self_attn.q_proj.weight"] == rows
    assert asked["layers.0.self_attn.k_proj.weight"] == (slice(0, 8),)  # the one head, at both
    assert asked["layers.0.self_attn.o_proj.weight"] == columns
    assert asked["layers.1.mlp.up_proj.weight"] == (slice(26, 52),)
    assert asked["layers.1.mlp.down_proj.weight"] == (slice(None), slice(26, 52))
    assert asked["embed_tokens.weight"] == asked["lm_head.weight"] == (slice(65, 130),)
    assert {name for name, chunk in asked.items() if not chunk} == {
        "norm.weight",
        *(f"layers.{layer}.{name}_layernorm.weight" for layer in (0, 1) for name in ("input", "post_attention")),
    }


def test_dummy_weights_are_parts_of_the_same_model(tmp_path: Path) -> None:
    check_dummy_parts(tiny.llama(tmp_path))


def check_dummy_parts(directory: Path) -> None:
    checkpoint = inspect(directory, weights=False)
    rows = batches()[0]

    def logits(ranks: Ranks) -> Tensor:
        runner = part(directory, ranks)
        runner.model = registry.load(checkpoint, torch.float32, tiny.CPU, 256, dummy=True, ranks=ranks)
        return runner.forward(rows)

    one, two = (side_by_side(size, logits)[0] for size in (1, 2))
    assert (one - two).abs().max() <= TOLERANCE and one.std() > 0


@pytest.mark.parametrize(
    ("size", "kind", "knobs", "message"),
    [
        (3, "llama", {}, "num_attention_heads 4 cannot be divided among 3 ranks"),
        (3, "llama", SIX | {"num_key_value_heads": 2}, "num_key_value_heads 2 cannot be divided among 3 ranks"),
        (2, "llama", {"intermediate_size": 51}, "intermediate_size 51 cannot be divided among 2 ranks"),
        (2, "llama", {"vocab_size": 1}, "a vocabulary of 1 cannot be divided among 2 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused(
    size: int, kind: str, knobs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_undivided(tiny.model(kind, tmp_path, **knobs), size, message)


def check_undivided(directory: Path, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry.load(inspect(directory), torch.float32, tiny.CPU, 64, ranks=Ranks(0, size))


def test_a_family_says_itself_how_it_is_split(tmp_path: Path) -> None:
    """One that derives from another may have layers of its own."""

    class Own(Llama):
        pass

    with pytest.raises(UsageError, match="Own has no table of splits over ranks"):
        Share.of(Own, tiny.SIZES, Ranks(0, 2))
    Share.of(Own, tiny.SIZES, Ranks(0, 1))
