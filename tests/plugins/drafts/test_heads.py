"""EAGLE-3 heads as files: read in the layouts that there are, refused with the cause where they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.config.engine import WeightFormat
from ssd.draft.chain_cache import ChainCache
from ssd.draft.process import load as load_drafts
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.paged import PagedContext
from ssd.launch.memory import Sized, host_weights
from ssd.launch.options import EngineOptions, chosen
from ssd.launch.resolve import resolve
from ssd.models.checkpoint import inspect
from ssd.models.pairs import borrowed
from ssd.models.sizes import weights
from ssd.plugins.drafts.eagle3_config import check_head
from ssd.plugins.drafts.eagle3_model import Eagle3
from ssd.plugins.drafts.head_drafter import HeadContext
from ssd.verifier.loading import load as load_target
from tests.exactness.plain import Plain
from tests.models import tiny
from tests.plugins.drafts import heads

TEXT = tiny.token_ids(12, 12)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokenizer(heads.target(tmp_path_factory.mktemp("target") / "target"), 131)


def logits(head: Path, target: Path) -> Tensor:
    """About the tokens after each of TEXT from the second on, from the target's states; for all ids, -inf for those
    that the head does not predict."""
    runner, found = heads.runner(head, target), Plain(target).states(TEXT)
    states = torch.cat([found[layer] for layer in heads.LAYERS], -1).double()
    features = runner.model.fuse(states[:-1])  # type: ignore[attr-defined]
    chain_cache = ChainCache.new(runner.model.shape, 1, 1, torch.float64, tiny.CPU)
    row = Row(TEXT[1:], 0, range(9), outputs=len(TEXT) - 1)
    context = HeadContext(runner.context([row]), [], runner.cache, chain_cache, [features])
    found = runner.run(row.token_ids, context, list(range(len(TEXT) - 1)))
    ids = runner.model.head.ids  # type: ignore[attr-defined]
    return found if ids is None else found.new_full((len(found), 131), -torch.inf).index_copy(1, ids, found)


@pytest.mark.parametrize("predicted", [131, 40])
def test_its_logits_are_those_of_a_plain_forward(target: Path, tmp_path: Path, predicted: int) -> None:
    """In the target's ids, and nothing for those that it does not predict."""
    head = heads.head(tmp_path / "head", predicted)
    plain = heads.PlainHead(head, Plain(target))
    found = logits(head, target)
    for index in range(len(TEXT) - 1):
        expected = plain.logits(TEXT[: index + 2], index + 2)
        assert torch.equal(found[index].isfinite(), expected.isfinite()) and expected.isfinite().sum() == predicted
        assert (found[index] - expected).nan_to_num(0.0).abs().max() <= 1e-7  # angles are float32


def test_the_layer_may_go_by_another_name(target: Path, tmp_path: Path) -> None:
    one, other = heads.head(tmp_path / "one"), heads.head(tmp_path / "other", layer="layers.0")
    assert torch.equal(logits(one, target), logits(other, target))


def by_speculators(head: Path, folder: Path, **fields: Any) -> Path:
    """The same head as vLLM's `speculators` writes it; `fields` of its config, None for those to be left out."""
    config = json.loads((head / "config.json").read_text())
    layer = {name: value for name, value in config.items() if not name.startswith(("eagle", "draft", "norm_before"))}
    found = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "embed_requires_grad": False,
        "norm_before_residual": config.get("norm_before_residual", False),
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x/y", "architectures": []}},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
    }
    folder.mkdir()
    config = {name: value for name, value in (found | fields).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("predicted", [131, 40])
@pytest.mark.parametrize("normed", [False, True])
def test_a_head_of_speculators_is_the_same(target: Path, tmp_path: Path, predicted: int, normed: bool) -> None:
    head = heads.head(tmp_path / "head", predicted, norm_before_residual=normed)
    own = heads.edited(head, tmp_path / "own", {"embed_tokens.weight": torch.randn(131, 32)})
    for number, folder in enumerate((head, own)):
        other = by_speculators(folder, tmp_path / f"speculators{number}")
        assert torch.equal(logits(other, target), logits(folder, target))
        assert check_head(inspect(other), inspect(target)) == heads.LAYERS
    features = resolve(EngineOptions(target=str(target), draft=(str(other),))).features
    assert features is not None and features.width == 96


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "mlp"}, "speculators of type 'mlp' are not supported"),
        ({"transformer_layer_config": None}, "has no transformer_layer_config"),
        ({"norm_before_residual": None}, "norm_before_residual must be true or false"),
        ({"norm_before_fc": True}, "norm_before_fc, a norm of the hidden states, is not supported"),
        ({"target_hidden_size": 48}, "it reads hidden states of width 48"),
        ({"quantization_config": {"quant_method": "quanto"}}, "quantised weights are not read"),
        ({"transformer_layer_config": {"model_type": "qwen3", "vocab_size": 131}}, "EAGLE-3 heads of type 'qwen3'"),
        ({"transformer_layer_config": {"model_type": "llama", "vocab_size": 131}}, "hidden_size must be a positive"),
    ],
)
def test_speculators_that_are_not_read_are_refused(
    target: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    head = by_speculators(heads.head(tmp_path / "head"), tmp_path / "speculators", **fields)
    with pytest.raises(UsageError, match=message):
        resolve(EngineOptions(target=str(target), draft=(str(head),)))


def test_its_own_embedding_comes_first(target: Path, tmp_path: Path) -> None:
    head = heads.head(tmp_path / "head")
    embedding = Plain(target).weights["model.embed_tokens.weight"]
    same = heads.edited(head, tmp_path / "same", {"embed_tokens.weight": embedding})
    other = heads.edited(head, tmp_path / "other", {"embed_tokens.weight": torch.ones(131, 32)})
    assert torch.equal(logits(same, target), logits(head, target))
    assert not torch.allclose(logits(other, target), logits(head, target))


def test_the_residual_may_be_the_normed_features(target: Path, tmp_path: Path) -> None:
    """vLLM's `norm_before_residual`."""
    head = heads.head(tmp_path / "head")
    normed = heads.edited(head, tmp_path / "normed", {}, norm_before_residual=True)
    assert not torch.allclose(logits(normed, target), logits(head, target))


def test_an_old_config_is_told_by_its_tensors(target: Path, tmp_path: Path) -> None:
    head = heads.edited(heads.head(tmp_path / "head"), tmp_path / "old", {}, architectures=["LlamaForCausalLM"])
    assert logits(head, target).shape == (11, 131)


def without_rows(target: Path, head: Path, folder: Path, tied: bool) -> tuple[Path, Path, Path]:
    """A target, a head whose `lm_head` are that target's rows, and the same head without them."""
    if tied:
        target = heads.edited(target, folder / "tied", {"lm_head.weight": None}, tie_word_embeddings=True)
    tensors = load_file(head / "model.safetensors")
    count = len(tensors["lm_head.weight"])
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight" if tied else "lm_head.weight"]
    rows = table[tensors.get("d2t", torch.zeros(count, dtype=torch.long)) + torch.arange(count)]
    whole = heads.edited(head, folder / "whole", {"lm_head.weight": rows.contiguous()})
    return target, whole, heads.edited(head, folder / "without", {"lm_head.weight": None})


@pytest.mark.parametrize("predicted", [131, 40])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_without_rows_of_its_own_it_predicts_with_its_targets(
    target: Path, tmp_path: Path, predicted: int, tied: bool, own_embedding: bool
) -> None:
    head = heads.head(tmp_path / "head", predicted)
    if own_embedding:
        head = heads.edited(head, tmp_path / "own", {"embed_tokens.weight": torch.randn(131, 32)})
    target, whole, without = without_rows(target, head, tmp_path, tied)
    assert torch.equal(logits(without, target), logits(whole, target))
    assert not torch.allclose(logits(without, target), logits(head, target))
    # In memory it has the target's table besides, if it predicts only some of its tokens and has it not as embedding.
    counts = [weights(borrowed(inspect(one), inspect(target))) for one in (without, whole)]
    assert counts[0] - counts[1] == (131 * 32 if predicted < 131 and (own_embedding or not tied) else 0)


def test_a_start_counts_the_table_that_it_borrows(target: Path, tmp_path: Path) -> None:
    head = heads.head(tmp_path / "head", 40)
    target, whole, without = without_rows(target, head, tmp_path, tied=False)
    sizes = []
    for name in (whole, without):
        options = EngineOptions(target=str(target), draft=(str(name),), draft_dtype="float32", draft_weights="as-is")
        sizes.append(
            host_weights(chosen(options), Sized(inspect(target), "float32"), [inspect(name)], [WeightFormat()])
        )
        assert resolve(options).features is not None
    assert sizes[1] - sizes[0] == 4 * 131 * 32


def test_without_rows_anywhere_it_is_refused(target: Path, tmp_path: Path) -> None:
    embedding = {"embed_tokens.weight": torch.randn(131, 32)}
    head = heads.edited(heads.head(tmp_path / "head"), tmp_path / "without", {"lm_head.weight": None, **embedding})
    lost: dict[str, Tensor | None] = {"lm_head.weight": None, "model.embed_tokens.weight": None}
    with pytest.raises(UsageError, match=r"shares model.embed_tokens.weight with its target, which .*bare lacks"):
        borrowed(inspect(head), inspect(heads.edited(target, tmp_path / "bare", lost)))
    wide = heads.edited(target, tmp_path / "wide", {"lm_head.weight": torch.ones(131, 48)})
    with pytest.raises(UsageError, match=r"no lm_head.weight of its own, .* has shape \(131, 48\), not 32 wide"):
        check_head(inspect(head), inspect(wide))
    long = heads.edited(target, tmp_path / "long", {"lm_head.weight": torch.ones(132, 32)})
    with pytest.raises(UsageError, match=r"lm_head.weight has shape \(132, 32\), expected \(131, 32\)"):
        heads.runner(head, long)


@pytest.mark.parametrize(
    ("count", "fields", "layers"),
    [
        (32, {}, (2, 16, 29)),
        (4, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (1, 2, 4)),
        (36, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}}, (2, 18, 34)),
        (61, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, (2, 30, 58)),
    ],
)
def test_which_layers_it_reads(
    target: Path, tmp_path: Path, count: int, fields: dict[str, Any], layers: tuple[int, ...]
) -> None:
    head = heads.head(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (head / "config.json").write_text(json.dumps(config | fields))
    large = tmp_path / "large"
    shutil.copytree(target, large)
    assert check_head(inspect(head), inspect(tiny.edit(large, num_hidden_layers=count))) == layers


REFUSED: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], str]] = {
    "width": ({}, {"target_hidden_size": 48}, "it reads hidden states of width 48, the target's have 32"),
    "vocabulary": ({}, {"vocab_size": 130}, "vocabularies of 131 and 130 tokens"),
    "layer": ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "hidden states after 5 layers, the target has 4"),
    "order": ({}, {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}, r"after \(2, 2, 4\) layers, which do not ascend"),
    "no layers": ({}, {"eagle_aux_hidden_state_layer_ids": "low"}, "must be 3 layers, is 'low'"),
    "map": ({"d2t": None}, {}, "tensor d2t is missing, which says what its 40 tokens are"),
    "nested layers": ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}}, "must be 3 layers, is 5"),
    "no width": ({}, {"hidden_size": None}, "hidden_size must be a positive number, is None"),
    "odd width": ({}, {"target_hidden_size": "wide"}, "target_hidden_size must be a positive number, is 'wide'"),
    "no vocabulary": ({}, {"vocab_size": None}, "vocab_size must be a positive number, is None"),
    "predicted": ({}, {"draft_vocab_size": -1}, "draft_vocab_size must be a positive number, is -1"),
    "two layers": ({"layers.1.mlp.up_proj.weight": torch.ones(2)}, {}, "more than one layer are not supported"),
    "type": ({}, {"model_type": "deepseek_v3"}, "heads of type 'deepseek_v3' are not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(target: Path, tmp_path: Path, case: str) -> None:
    tensors, fields, message = REFUSED[case]
    head = heads.edited(heads.head(tmp_path / "head", 40), tmp_path / "odd", tensors, **fields)
    with pytest.raises(UsageError, match=message):
        resolve(EngineOptions(target=str(target), draft=(str(head),)))


def test_an_embedding_of_another_width_is_refused(target: Path, tmp_path: Path) -> None:
    head = heads.head(tmp_path / "head", hidden_size=48)
    with pytest.raises(UsageError, match=r"no embed_tokens.weight of its own, .* has shape \(131, 32\), not 48 wide"):
        resolve(EngineOptions(target=str(target), draft=(str(tiny.edit(head, target_hidden_size=32)),)))


def test_a_map_that_leads_nowhere_is_refused(target: Path, tmp_path: Path) -> None:
    for name, ids in {"twice": torch.zeros(40), "beyond": torch.arange(40) + 100}.items():
        odd = heads.head(tmp_path / f"{name}-head", 40)
        head = heads.edited(odd, tmp_path / name, {"d2t": (ids - torch.arange(40)).long()})
        with pytest.raises(UsageError, match="d2t does not name 40 tokens of a vocabulary of 131"):
            heads.runner(head, target)


BROKEN: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], str]] = {
    "tensor": ({"fc.weight": None}, {}, "tensor fc.weight is missing"),
    "fusion": ({"fc.weight": torch.ones(32, 64)}, {}, r"fc.weight has shape \(32, 64\), expected \(32, 96\)"),
    "scalar": (
        {"embed_tokens.weight": torch.ones(())},
        {},
        r"embed_tokens.weight has shape \(\), expected \(131, 32\)",
    ),
    "short map": ({"d2t": torch.zeros(39, dtype=torch.long)}, {}, r"d2t has shape \(39,\), expected \(40,\)"),
    "map of fractions": ({"d2t": torch.full((40,), torch.nan)}, {}, "d2t does not name 40 tokens"),
    "map out of all bounds": ({"d2t": torch.full((40,), 2**63 - 1)}, {}, "d2t does not name 40 tokens"),
    "predicts too much": ({}, {"draft_vocab_size": 200}, r"lm_head.weight has shape \(40, 32\), expected \(131, 32\)"),
    "heads": ({}, {"num_attention_heads": None}, "num_attention_heads must be a positive number, is None"),
    "activation": ({}, {"hidden_act": "gelu"}, "'gelu' is not supported"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused(target: Path, tmp_path: Path, case: str) -> None:
    """With its folder's name, by the process that loads it."""
    tensors, fields, message = BROKEN[case]
    head = heads.edited(heads.head(tmp_path / "head", 40), tmp_path / "odd", tensors, **fields)
    with pytest.raises(UsageError, match=f"{head}.*{message}"):
        load_drafts(resolve(EngineOptions(target=str(target), draft=(str(head),))))


def test_a_head_is_no_target_and_speculates_alone(target: Path, tmp_path: Path) -> None:
    head = str(heads.head(tmp_path / "head"))
    with pytest.raises(UsageError, match="can only be a draft"):
        resolve(EngineOptions(target=str(tiny.edit(heads.head(tmp_path / "other"), draft_vocab_size=None)), mode="ar"))
    with pytest.raises(UsageError, match=r"is an EAGLE-3 head, which speculates alone: give one --draft"):
        resolve(EngineOptions(target=str(target), draft=(head, head)))


def test_the_engine_is_told_what_to_show(target: Path, tmp_path: Path) -> None:
    features = resolve(EngineOptions(target=str(target), draft=(str(heads.head(tmp_path / "head", 40)),))).features
    assert features is not None and (features.layers, features.width) == ((1, 2, 4), 96)
    assert resolve(EngineOptions(target=str(target), draft=(str(target),))).features is None


def test_a_target_that_shows_nothing_is_refused(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's family that does not tell."""
    head = heads.head(tmp_path / "head")
    monkeypatch.setattr(PagedContext, "keep_hidden", lambda *_: None)
    with pytest.raises(UsageError, match=r"shows no hidden states, which the draft .*head reads"):
        load_target(resolve(EngineOptions(target=str(target), draft=(str(head),))))


def test_it_is_warm_when_it_has_loaded(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel has run, for one row and for many, before the first request."""
    sizes: list[int] = []
    forward = Eagle3.forward

    def counted(self: Eagle3, token_ids: Tensor, context: HeadContext) -> Tensor:
        sizes.append(len(token_ids))
        return forward(self, token_ids, context)

    monkeypatch.setattr(Eagle3, "forward", counted)
    load_drafts(resolve(EngineOptions(target=str(target), draft=(str(heads.head(tmp_path / "head", 40)),))))
    assert sizes[0] == 1 < sizes[-1]
