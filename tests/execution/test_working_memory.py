"""What static shapes take, as it is allocated, against what is set aside for it before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssd.config.params import Speculation
from ssd.draft.static_shapes import TreeRunner
from ssd.execution.graph_shapes import draft_shapes, target_shapes
from ssd.execution.static import StaticRunner
from ssd.launch.memory import ADJUSTED, working
from ssd.models.families.llama import Llama
from ssd.models.weights import dummy
from ssd.speculation.sampling import Drawing
from tests.draft.pair import config

WIDTH, INNER, VOCAB, LONGEST, SEQUENCES, PAGES = 16, 32, 4096, 24, 4, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SPECULATION = Speculation("ssd", 4, (3,), "jit")


class Peak(TorchDispatchMode):
    """The most bytes at once of tensors that were made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: kept for key, kept in self._made.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return made


def peak(work: Callable[[], None]) -> int:
    with Peak() as found, torch.inference_mode():
        work()
    return found.most


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Llama:
    """As on a GPU, where there are no kernels of ours, and no weights packed for a CPU."""
    monkeypatch.setattr("ssd.kernels.library.functions", lambda: None)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    cpu = torch.device("cpu")
    return Llama(SIZES, dummy(request.param, cpu), request.param, cpu, LONGEST)


def test_a_draft_works_in_what_is_set_aside(model: Llama) -> None:
    """The noise and the ranking of the largest shape, and the logits that all its shapes leave in one place."""
    settings = config(SPECULATION, max_num_seqs=SEQUENCES, draft_num_pages=PAGES, vocab_size=VOCAB)
    runner = TreeRunner(model, settings, "torch")
    shape = max(draft_shapes(SEQUENCES, SEQUENCES * SPECULATION.chains), key=lambda shape: shape.tokens)
    most, largest = shape.tokens, runner._steps[shape]
    largest.batch.fill_rows([], runner.tables, runner.tree_cache, warm=True)
    aside = working(most, most, WIDTH, INNER, VOCAB) + model.dtype.itemsize * most * VOCAB
    assert runner._kept.nbytes == model.dtype.itemsize * most * VOCAB
    cold, warm = (peak(ranking.run) for ranking in largest.ranked[:2])
    assert cold <= warm
    assert aside / 2 < warm <= aside


def test_a_target_works_in_what_is_set_aside(model: Llama) -> None:
    """And the logits of every shape stay."""
    longest = 1 + SPECULATION.longest
    runner = StaticRunner(model, PAGES, 16, attention="torch", most_rows=SEQUENCES, longest=longest)
    shapes = target_shapes(SEQUENCES, longest, False)
    runner.warm_up(longest)
    kept = sum(step.logits.nbytes for step in runner.steps.values())
    assert kept == model.dtype.itemsize * sum(shape.tokens for shape in shapes) * VOCAB
    table = runner.adjustments
    assert table is not None and table._text.nbytes + table._bias.nbytes == ADJUSTED * (SEQUENCES + 1) * VOCAB
    step = runner.steps[shapes[-1]]
    most = step.shape.tokens
    aside = working(most, most, WIDTH, INNER, VOCAB) + model.dtype.itemsize * most * VOCAB
    assert peak(step.run) <= aside
    assert aside / 2 < peak(step.draws[Drawing.WARM]) <= aside
