"""`--quantize int8`: every mode gives the ids of `ar` with the same rounded weights, whatever the draft's are."""

from __future__ import annotations

import pytest
import torch

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from tests.draft.pair import Draft, Pair, config
from tests.models import tiny

PAGES = 512


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runner]:
    """A target in 8 bits, and a draft that agrees with it now and then, in 8 bits and in float32."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.llama(folder / "target", seed=3, attention_bias=True)
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    return {
        name: tiny.runner(directory, pages=PAGES, deterministic=True, int8=int8)
        for name, directory, int8 in (("target", target, True), ("int8", draft, True), ("float", draft, False))
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["int8", "float"])
def test_ids_are_those_of_ar(runners: dict[str, Runner], draft: str, temperature: float) -> None:
    prompts = [tiny.token_ids(length, seed=length) for length in (1, 4, 17, 40)]
    params = [SamplingParams(temperature, seed=seed, max_tokens=40) for seed in range(len(prompts))]

    def pair(mode: Mode) -> Pair:
        settings = config(Speculation(mode), num_pages=PAGES, draft_num_pages=PAGES, deterministic=True)
        return Pair(settings, runners["target"], None if mode == "ar" else Draft(settings, runners[draft]))

    expected = pair("ar").run(prompts, params).ids
    for mode in ("sd", "ssd"):
        texts = pair(mode).run(prompts, params)
        assert texts.ids == expected
        assert sum(m.accepted_tokens for m in texts.metrics) > 10


def test_the_weights_are_what_is_rounded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Near the model's own logits, and not the same."""
    directory = tiny.llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)
    ids = tiny.token_ids(30, 1)
    expected = tiny.oracle_logits(tiny.oracle(directory), ids)
    runner = tiny.runner(directory, int8=True)
    ours = runner.forward([Row(ids, 0, range(8), len(ids))])
    error = (ours - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.03
    assert ours.dtype == torch.float32
