"""A draft with another vocabulary than its target: what they share, and the draft in the target's ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from ssd.config.engine import WeightFormat
from ssd.config.params import Speculation
from ssd.draft.process import load
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.launch.memory import Sized, host_weights
from ssd.launch.options import EngineOptions, chosen
from ssd.models import pairs
from ssd.models.checkpoint import inspect
from ssd.models.vocabularies import translation, vocabulary_of
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

VOCABULARY = 300


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokenizer(tiny.llama(tmp_path_factory.mktemp("models") / "target", seed=3, vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    """The target itself, with other ids."""
    return tiny.renumbered(target, target.parent / "draft")


def loaded(target: Path, draft: Path, **fields: Any) -> Runner:
    speculation = Speculation("ssd", 3, (3,), "none")
    known = {"target": str(target), "draft": str(draft), "vocab_size": VOCABULARY, "num_pages": 1024}
    (runner,) = load(config(speculation, **known | fields))
    return runner


def logits(runner: Runner, text: list[int]) -> torch.Tensor:
    row = Row(text, 0, range(-(-len(text) // runner.cache.page_size)), outputs=len(text))
    return runner.run(text, runner.context([row]), list(range(len(text))))


def spelled(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    found = vocabulary_of(folder)
    assert found is not None
    return found


def test_tokenizers_that_write_bytes_differently_share_tokens(tmp_path: Path) -> None:
    words = Tokenizer(
        models.BPE({"\u2581the": 0, "<0xC3>": 1, "<0x74>": 2, "t": 3, "\u00e9": 4}, [], byte_fallback=True)
    )
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    words.add_special_tokens(["<s>"])
    bytewise = Tokenizer(models.BPE({"\u0120the": 7, "\u00c3": 8, "t": 9, "\u00c3\u00a9": 10}, []))
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<s>"])
    ours, theirs = spelled(tmp_path / "a", words), spelled(tmp_path / "b", bytewise)
    shared = {(ours[token], theirs[token]) for token in ours.keys() & theirs.keys()}
    assert shared == {(0, 7), (1, 8), (3, 9), (4, 10), (ours["\uffff<s>"], theirs["\uffff<s>"])}


def test_a_text_that_looks_like_a_special_token_is_none(tmp_path: Path) -> None:
    plain = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    special = Tokenizer(models.WordLevel({"b": 0, "a": 1}, unk_token="a"))
    special.add_special_tokens(["<s>"])
    ours, theirs = spelled(tmp_path / "a", plain), spelled(tmp_path / "b", special)
    assert ours.keys() & theirs.keys() == {"a"}


def test_a_token_without_a_counterpart_is_read_as_its_end() -> None:
    theirs = {"the": 0, "other": 1, "x": 2, "\uffff<end>": 3, "?": 4}
    found = translation(theirs, 7, {"the": 5, "her": 1, "r": 2, "x": 0, ">": 4}, 6)
    assert found.own == [5, 1, 0, 4, 0, 0, 0]
    assert found.shared == [0, 2]
    assert (
        found.words == "they share 40.0% of the smaller vocabulary (2 of 5 tokens); the draft has no 'other', for one"
    )


def test_ids_beyond_the_models_do_not_count() -> None:
    found = translation({"a": 0, "b": 1, "c": 2**31 - 1}, 2, {"a": 2**31 - 1, "b": 1}, 2)
    assert (found.own, found.shared) == ([0, 1], [1])


def test_too_little_in_common_is_refused_with_share_and_example(target: Path, tmp_path: Path) -> None:
    stranger = tiny.llama(tmp_path / "stranger", vocab_size=VOCABULARY)
    known = {f"word{index}": index for index in range(8)} | {"a": 8, "b": 9}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": known, "unk_token": "a"}}
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError) as caught:
        pairs.check_pair(inspect(target), inspect(stranger))
    assert f"stranger does not fit target {target}: they share 20.0% of the smaller vocabulary (2 of 10" in str(
        caught.value
    )
    assert "at least 25% are needed; the draft has no '<|endoftext|>', for one" in str(caught.value)


def test_a_draft_that_reads_its_targets_tensors_needs_its_tokenizer(target: Path, tmp_path: Path) -> None:
    sharing = tiny.edit(tiny.renumbered(target, tmp_path / "sharing"), **{pairs.SHARED: ["model.embed_tokens.weight"]})
    with pytest.raises(UsageError, match=r"it reads tensors of a model with the same tokenizer, but .* differs"):
        pairs.check_pair(inspect(target), inspect(sharing))


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_has_the_same_logits_in_the_targets_ids(tied: bool, tmp_path: Path) -> None:
    check_translated("llama", {"tie_word_embeddings": tied}, tmp_path)


def check_translated(kind: str, options: dict[str, Any], folder: Path) -> None:
    target = tiny.tokenizer(tiny.model(kind, folder / "target", vocab_size=VOCABULARY, **options))
    draft = tiny.renumbered(target, folder / "draft")
    found = pairs.check_pair(inspect(target), inspect(draft))
    ids = found.translation
    assert ids is not None and 200 < len(ids.shared) < VOCABULARY
    runner, plain = loaded(target, draft), tiny.runner(draft)
    own = [ids.own[token] for token in ids.shared]
    assert runner.model.head.ids.tolist() == ids.shared  # type: ignore[attr-defined]
    text = [*ids.shared[5:50:4], VOCABULARY - 1]
    expected = logits(plain, [ids.own[token] for token in text])[:, own]
    assert torch.allclose(logits(runner, text), expected, atol=1e-4)


def test_weights_in_8_bits_are_translated_too(target: Path, draft: Path) -> None:
    whole, rounded = loaded(target, draft), loaded(target, draft, draft_formats=(WeightFormat(quantize="int8"),))
    text = list(range(40, 60))
    assert (logits(whole, text).argmax(-1) == logits(rounded, text).argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_are_those_of_ar_and_speculations_hit(target: Path, draft: Path, temperature: float) -> None:
    speculation = Speculation("ssd", 3, (3,), "none")
    settings = config(speculation, vocab_size=VOCABULARY, num_pages=1024, draft_num_pages=1024)
    prompts = [tiny.token_ids(length, length, VOCABULARY) for length in (4, 9, 22)]
    verifier, asked = tiny.runner(target, pages=1024), params(3, 24, temperature)
    expected = Pair(config(Speculation("ar"), vocab_size=VOCABULARY, num_pages=1024), verifier).run(prompts, asked)
    drafts = Draft(settings, loaded(target, draft, num_pages=1024, draft_num_pages=1024))
    found = Pair(settings, verifier, drafts).run(prompts, asked)
    assert found.ids == expected.ids
    rounds, hits = (sum(getattr(one, name) for one in found.metrics) for name in ("rounds", "hits"))
    assert hits > rounds / 4  # some tokens the draft cannot propose, and reads as others
    drafts.assert_empty()


def test_a_start_counts_the_rows_of_all_the_targets_ids(target: Path, draft: Path) -> None:
    whole, options = inspect(draft), chosen(EngineOptions())
    fitted = pairs.check_pair(inspect(target), whole)
    none = Sized(inspect(target), "float32")
    sizes = [host_weights(options, none, [one], [WeightFormat()]) for one in (whole, fitted)]
    assert 0 < sizes[1] - sizes[0] < 2 * VOCABULARY * 32 * 4
