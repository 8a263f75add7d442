"""Block drafters as files: the published layouts are read and computed, and refused with the cause where they do not
fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.config.engine import Features
from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.drafter import ChainRows, PathRow
from ssd.draft.process import load as load_drafts
from ssd.draft.tree import Chain, Guess
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.ipc.features import FeaturePart, extend_tags
from ssd.ipc.messages import Admit
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.law import Law
from ssd.models.checkpoint import inspect
from ssd.plugins.drafts.block_config import check_block, fields_of
from tests.draft import pair
from tests.exactness.plain import Plain
from tests.models import tiny
from tests.plugins.drafts import blocks, heads

TEXT = tiny.token_ids(12, 12)
TRUNK = tiny.token_ids(3, 13)
CHAIN = tiny.token_ids(2, 14)
WIDTH = len(blocks.LAYERS) * tiny.SIZES["hidden_size"]
MORE = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokenizer(blocks.target(tmp_path_factory.mktemp("target") / "target"), 131)


class Drafted:
    """A drafter of the engine and its tree of TEXT, of which the target has shown the hidden states."""

    def __init__(self, runner: Runner, of: Path) -> None:
        features = Features(kind="block", layers=blocks.LAYERS, width=WIDTH)
        self.speculation = Speculation("ssd", 4, (130,), "jit")  # all tokens but one are candidates, with their scores
        draft = pair.Draft(pair.config(self.speculation, features=features), runner)
        draft.engine.handle(Admit(0, 0, 0, TEXT, Law(), self.speculation))
        self.tree, self.drafter = draft.engine.trees[0], draft.engine.drafter
        found = Plain(of).states(TEXT)
        tags: list[int] = []
        extend_tags(tags, TEXT[:-1])
        assert draft.shown is not None
        rows = torch.cat([found[layer] for layer in blocks.LAYERS], -1)[:-1]
        draft.shown.write([FeaturePart(0, range(8), 0, tags)], rows)
        assert draft.shown is not draft.features

    def path(self, trunk: Sequence[int] = ()) -> PathRow:
        """All that is not computed of the path, with a guess wanted after TEXT and after each token of `trunk`."""
        self.tree.trunk = list(trunk)
        self.tree.table.grow(len(self.tree.path))
        tokens = self.drafter.ready(self.tree, self.tree.path[self.tree.computed :])
        assert len(tokens) == len(self.tree.path) - self.tree.computed
        return PathRow(self.tree, Row(tokens, self.tree.computed, self.tree.table.pages, 1 + len(trunk)))


def scores(guess: Guess) -> Tensor:
    """[131]: of each token; NaN for the one that is not among the candidates, -inf for those never predicted."""
    found = torch.full((131,), torch.nan, dtype=torch.float64)
    return found.index_copy(0, torch.tensor(guess.candidates), torch.tensor(guess.scores, dtype=torch.float64))


def assert_follow(guesses: Sequence[Guess], plain: blocks.PlainBlock, text: Sequence[int], more: int) -> None:
    """The guesses after `text` are those of the plain drafter: a first one, and `more` each after the one before."""
    assert len(guesses) == 1 + more
    before = text[-1]
    for guess, logits in zip(guesses, plain.logits(text, len(TEXT), 1 + more), strict=True):
        expected, found = logits + plain.bias(before), scores(guess)
        given = found.isfinite() & expected.isfinite()  # beside its list, a drafter may rank the text's own tokens
        assert given.sum() >= 0.8 * expected.isfinite().sum()
        assert (found - expected)[given].abs().max() <= 1e-5  # scores and hidden states are published in float32
        before = guess.token
        assert before == int(found.nan_to_num(-torch.inf).argmax())


CASES = [
    *((layout, 131, {}) for layout in blocks.LAYOUTS),
    ("speculators-dflash", 40, {}),
    ("speculators-dspark", 40, {}),
    ("speculators-dspark", 131, {"sample_from_anchor": None}),  # an old file
    ("dflash", 131, {"sample_from_anchor": True}),
    ("dspark", 131, {"is_causal": True}),
    ("dflash", 131, {"is_causal": True}),
]


@pytest.mark.parametrize(("layout", "predicted", "fields"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_its_guesses_are_those_of_a_plain_forward(
    target: Path, tmp_path: Path, layout: str, predicted: int, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    """After the committed text; after tokens without hidden states, where each output is one that does not see the
    next; after chains. In float32 our kernels attend."""
    folder = blocks.block(tmp_path / "draft", layout, predicted, **fields)
    changed = {"from_anchor": bool(fields["sample_from_anchor"])} if "sample_from_anchor" in fields else {}
    changed |= {"causal": True} if fields.get("is_causal") else {}
    plain = blocks.PlainBlock(folder, Plain(target), layout, **changed)
    own = Drafted(blocks.runner(folder, target, dtype), target)
    (found,) = own.drafter.several([own.path()], [], [MORE]) or []
    assert_follow(found, plain, TEXT, MORE)
    own.tree.computed = len(TEXT)
    cell = own.drafter.chain_cache.take()
    assert cell is not None
    own.tree.chains.add(Chain(1, CHAIN, cell, 0))
    path = own.path(TRUNK)._replace(row=Row(TRUNK, len(TEXT), own.tree.table.pages, 1 + len(TRUNK)))
    tokens = ChainTokens(own.tree.table.pages, own.tree.base)
    tokens.add(1, cell, 0, CHAIN[-1:])
    found, chained = own.drafter.several([path], [ChainRows(own.tree, tokens)], [MORE, 2]) or []
    for index in range(len(TRUNK)):
        assert_follow(found[index : index + 1], plain, [*TEXT, *TRUNK[:index]], 0)
    assert_follow(found[len(TRUNK) :], plain, [*TEXT, *TRUNK], MORE)
    assert_follow(chained, plain, [*TEXT, *TRUNK[:1], *CHAIN], 2)


def test_the_fields_of_each_layout_are_read(target: Path, tmp_path: Path) -> None:
    for layout, has in blocks.LAYOUTS.items():
        fields = check_block(inspect(blocks.block(tmp_path / layout, layout)), inspect(target))
        assert (fields.layers, fields.block, fields.mask) == (blocks.LAYERS, blocks.BLOCK, blocks.MASK)
        assert (fields.causal, fields.from_anchor, fields.rank > 0) == (False, has.from_anchor, has.markov)
        options = EngineOptions(target=str(target), draft=(str(tmp_path / layout),))
        assert resolve(options).features == Features(kind="block", layers=blocks.LAYERS, width=WIDTH)


@pytest.mark.parametrize(
    ("theirs", "depth", "layers"),
    [(36, 5, (2, 10, 18, 26, 34)), (64, 5, (2, 17, 32, 47, 62)), (36, 1, (19,))],
)
def test_without_a_list_it_reads_the_layers_that_dflash_does(
    tmp_path: Path, theirs: int, depth: int, layers: tuple[int, ...]
) -> None:
    nested = {"mask_token_id": blocks.MASK}
    folder = blocks.block(tmp_path / "draft", "dflash", depth=depth, dflash_config=nested, num_target_layers=theirs)
    assert fields_of(inspect(folder).config).layers == layers


def test_fields_of_dflash_come_first(tmp_path: Path) -> None:
    nested = {"mask_token_id": 3, "target_layer_ids": [1], "block_size": 4, "causal": True}
    folder = blocks.block(
        tmp_path / "draft", "dflash", dflash_config=nested, mask_token_id=5, target_layer_ids=[2], block_size=9
    )
    fields = fields_of(inspect(folder).config)
    assert fields == ((2,), 4, 3, True, False, 0)


REFUSED: dict[str, tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = {
    "gated": ("dspark", {}, {"markov_head_type": "gated"}, r"config.json: markov_head_type 'gated' is not supported"),
    "rnn": ("speculators-dspark", {}, {"markov_head_type": "rnn"}, "markov_head_type 'rnn' is not supported"),
    "domino": ("dflash", {}, {"projector_type": "domino"}, "projector_type 'domino' is not supported"),
    "dflash2": ("dflash", {}, {"architectures": ["DFlash2DraftModel"]}, "a DFlash2 has other layers"),
    "family": ("dspark", {}, {"model_type": "gemma4_text"}, "model_type 'gemma4_text' is not supported"),
    "cap": ("dspark", {}, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    "scale": ("dflash", {}, {"input_embedding_scale": 5.5}, "input_embedding_scale 5.5 is not supported"),
    "sliding": (
        "dflash",
        {},
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention': only full_attention",
    ),
    "window": (
        "dflash",
        {},
        {"layer_types": None, "sliding_window": 64, "use_sliding_window": True},
        "sliding_window 64 is not supported",
    ),
    "kinds": ("dflash", {}, {"layer_types": "full"}, "layer_types must be a list of num_hidden_layers kinds"),
    "beyond": (
        "dspark",
        {},
        {"target_layer_ids": [0, 4]},
        "it reads hidden states after 5 layers, the target has 4",
    ),
    "before": ("dspark", {}, {"target_layer_ids": [-2, 2]}, "target_layer_ids must be ascending layers"),
    "order": ("dspark", {}, {"target_layer_ids": [2, 0]}, "target_layer_ids must be ascending layers"),
    "no layers": ("dspark", {}, {"target_layer_ids": []}, r"target_layer_ids must be a list of layers, is \[\]"),
    "odd layers": ("dspark", {}, {"target_layer_ids": [True]}, "target_layer_ids must be a list of layers"),
    "unknown layers": (
        "speculators-dflash",
        {},
        {"aux_hidden_state_layer_ids": None},
        "aux_hidden_state_layer_ids must be a list of layers, is None",
    ),
    "no config": ("speculators-dflash", {}, {"transformer_layer_config": None}, "has no transformer_layer_config"),
    "width": ("dspark", {}, {"hidden_size": 48}, "hidden_size must be its target's, 32, is 48"),
    "states": ("speculators-dflash", {}, {"target_hidden_size": 48}, "it reads hidden states of width 48"),
    "vocabulary": ("dspark", {}, {"vocab_size": 130}, "vocabularies of 131 and 130 tokens"),
    "mask": ("dspark", {}, {"mask_token_id": 131}, "mask_token_id must be an id of the vocabulary, is 131"),
    "odd mask": ("dspark", {}, {"mask_token_id": "mask"}, "mask_token_id must be an id of the vocabulary"),
    "no mask": ("dspark", {}, {"mask_token_id": None}, "mask_token_id must be an id of the vocabulary, is None"),
    "block": ("dflash", {}, {"block_size": 1}, "block_size must be at least 2"),
    "block of an anchor": ("dspark", {}, {"block_size": 1}, "block_size must be at least 2"),
    "odd block": ("dspark", {}, {"block_size": -3}, "block_size must be a positive number, is -3"),
    "rank": ("dspark", {}, {"markov_rank": "high"}, "markov_rank must be a positive number, is 'high'"),
    "no rank": ("dspark", {}, {"markov_rank": None}, "markov_head.markov_w1.weight is not one of the block drafter"),
    "causal": ("dspark", {}, {"is_causal": "no"}, "is_causal must be true or false, is 'no'"),
    "anchor": ("dflash", {}, {"sample_from_anchor": 1}, "sample_from_anchor must be true or false, is 1"),
    "bias": ("dspark", {"layers.0.self_attn.q_proj.bias": torch.ones(32)}, {}, "self_attn.q_proj.bias is not one of"),
    "table": ("dflash", {"markov_head.markov_w1.weight": torch.ones(131, 8)}, {}, "markov_w1.weight is not one of"),
    "more layers": ("dspark", {"layers.2.input_layernorm.weight": torch.ones(32)}, {}, "layers.2.* is not one of"),
    "more": ("dflash", {"layers.0.attention_conv.base_kernel": torch.ones(2)}, {}, "base_kernel is not one of"),
    "map": ("speculators-dspark", {"d2t": None}, {}, "tensor d2t is missing, which says what its 40 tokens are"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_or_does_not_fit_is_refused(target: Path, tmp_path: Path, case: str) -> None:
    """At the start, with the file or folder."""
    layout, tensors, fields, message = REFUSED[case]
    predicted = 40 if layout == "speculators-dspark" else 131
    draft = heads.edited(blocks.block(tmp_path / "draft", layout, predicted, **fields), tmp_path / "odd", tensors)
    with pytest.raises(UsageError, match=f"{draft}.*{message}"):
        resolve(EngineOptions(target=str(target), draft=(str(draft),)))


BROKEN: dict[str, tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = {
    "tensor": ("dflash", {"fc.weight": None}, {}, "tensor fc.weight is missing"),
    "norm": ("dflash", {"layers.1.self_attn.q_norm.weight": None}, {}, "layers.1.self_attn.q_norm.weight is missing"),
    "fusion": ("dspark", {}, {"target_layer_ids": [1]}, r"fc.weight has shape \(32, 64\), expected \(32, 32\)"),
    "first": ("dspark", {}, {"markov_rank": 7}, r"markov_w2.weight has shape \(131, 8\), expected \(131, 7\)"),
    "second": ("dspark", {"markov_head.markov_w2.weight": None}, {}, "markov_w2.weight is missing"),
    "rows": (
        "speculators-dspark",
        {},
        {"draft_vocab_size": 41},
        r"lm_head.weight has shape .40, 32., expected .41",
    ),
    "nowhere": (
        "speculators-dspark",
        {"d2t": torch.full((40,), 131)},
        {},
        "d2t does not name 40 tokens of a vocabulary of 131",
    ),
    "unknown kind": (
        "specforge",
        {},
        {"architectures": ["OtherDraftModel"]},
        "is of no kind of draft that is installed",
    ),
    "layers": ("dspark", {}, {"num_hidden_layers": 3, "layer_types": None}, "layers.2.* is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused(target: Path, tmp_path: Path, case: str) -> None:
    """With its folder's name, by the process that loads it."""
    layout, tensors, fields, message = BROKEN[case]
    predicted = 40 if layout == "speculators-dspark" else 131
    draft = heads.edited(blocks.block(tmp_path / "draft", layout, predicted, **fields), tmp_path / "odd", tensors)
    with pytest.raises(UsageError, match=f"{draft}.*{message}"):
        load_drafts(resolve(EngineOptions(target=str(target), draft=(str(draft),))))


def test_a_block_drafter_is_no_target_and_speculates_alone(target: Path, tmp_path: Path) -> None:
    draft = str(blocks.block(tmp_path / "draft", "dspark"))
    with pytest.raises(UsageError, match="can only be a draft"):
        resolve(EngineOptions(target=draft, mode="ar"))
    with pytest.raises(UsageError, match="is a block drafter, which speculates alone: give one --draft"):
        resolve(EngineOptions(target=str(target), draft=(draft, draft)))


def test_other_models_keep_their_refusals(tmp_path: Path) -> None:
    """A config of its own code, or without causal attention, is no block drafter's."""
    folder = blocks.block(tmp_path / "draft", "dflash")
    for name, field in (("auto_map", {"AutoModel": "x.Y"}), ("is_causal", False)):
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
        config.pop("auto_map")
        (folder / "config.json").write_text(json.dumps(config | {name: field}))
        with pytest.raises(UsageError, match=name):
            inspect(folder)
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": None}))
