"""Random weights with synthetic acceptance: the cost of real models, and the agreement that was stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.config.emulation import StatedAgreement
from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.shards import ShardRunner
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.layers.ranks import SINGLE, Ranks
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.plugins.bench.emulation import chains
from ssd.plugins.bench.emulation.agreement import acceptance_length
from ssd.plugins.bench.emulation.synthetic import Scripted, scripted
from tests.draft.pair import Draft, Pair, config
from tests.models import tiny
from tests.ranks import side_by_side

ASKED = StatedAgreement(0.7, 0.7, 4, 3)
VOCABULARY = chains.VOCABULARY + 75  # so that it is a multiple of nothing, and there are tokens beyond the script
CONFIG = {**tiny.SIZES, "model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two folders that have a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, layers in (("target", 2), ("draft", 1)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    return {"target": str(folder / "target"), "draft": (str(folder / "draft"),), "load_format": "dummy"}


def model(directory: str, role: Any, dtype: torch.dtype = torch.float32, ranks: Ranks = SINGLE) -> Scripted:
    checkpoint = inspect(Path(directory), weights=False)
    return scripted(registry.load(checkpoint, dtype, tiny.CPU, 1300, dummy=True, ranks=ranks), ASKED, role, ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_says_what_the_script_says_after_its_last_token(models: dict[str, Any], dtype: torch.dtype) -> None:
    tokens = [0, 5, 33, chains.VOCABULARY - 1, chains.VOCABULARY + 5]
    for role, directory, states in zip(
        ("target", "draft"), (models["target"], *models["draft"]), chains.pair(ASKED), strict=True
    ):
        found = Runner(model(directory, role, dtype), 4, 16).forward([Row(tokens, 0, range(4), len(tokens))])
        expected = chains.logits(states)[[0, 5, 33, chains.VOCABULARY - 1, 5]]
        assert torch.equal(found[:, : chains.VOCABULARY].float(), expected)
        assert (found[:, chains.VOCABULARY :] < expected.min() - 500).all()


def test_the_models_own_forward_is_run(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = model(models["target"], "target")
    run: list[str] = []
    for name in ("forward", "logits"):
        own = getattr(found._model, name)
        monkeypatch.setattr(found._model, name, lambda *given, name=name, own=own: run.append(name) or own(*given))
    Runner(found, 4, 16).forward([Row([1, 2], 0, range(4))])
    assert run == ["forward", "logits"]


def test_several_ranks_say_it_in_parts(models: dict[str, Any]) -> None:
    rows = [Row([3, 900, 7], 0, range(4), 3)]

    def logits(ranks: Ranks) -> torch.Tensor:
        return ShardRunner(model(models["target"], "target", ranks=ranks), 4, 16, ranks=ranks).forward(rows)

    one, two = (side_by_side(size, logits)[0] for size in (1, 2))
    assert one.shape == (3, VOCABULARY) and torch.equal(one, two)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_as_often_as_stated(models: dict[str, Any], temperature: float) -> None:
    speculation = Speculation("sd", ASKED.lookahead, (3,), "jit")
    settings = config(speculation, vocab_size=VOCABULARY, num_pages=800, draft_num_pages=800, max_model_len=1200)
    target, draft = (
        Runner(model(directory, role), 800, settings.page_size)
        for role, directory in (("target", models["target"]), ("draft", models["draft"][0]))
    )
    wanted = SamplingParams(temperature, seed=3, max_tokens=700, speculation=speculation)
    (metrics,) = Pair(settings, target, Draft(settings, draft)).run([[1, 2, 3]], [wanted]).metrics
    assert metrics.drafted_tokens > 500
    expected = (acceptance_length(ASKED) - 1) / ASKED.lookahead
    assert metrics.accepted_tokens / metrics.drafted_tokens == pytest.approx(expected, rel=0.15)


def test_every_mode_of_an_engine_says_the_same(models: dict[str, Any]) -> None:
    stated = {"synthetic_acceptance_length": acceptance_length(ASKED), "synthetic_hit_rate": 0.7}
    modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
    with LLM(**models, **stated, num_speculative_tokens=4, fan_out=3, max_model_len=2048) as llm:
        ids = {}
        for mode in modes:
            params = [
                SamplingParams(
                    t, seed=3, max_tokens=200, ignore_eos=True, speculation=Speculation(mode, 4, (3,), "jit")
                )
                for t in (0, 1)
            ]
            ids[mode] = [answer.token_ids for answer in llm.generate([[1, 2, 3], [4]], params)]
    assert ids["sd"] == ids["ssd"] == ids["ar"]
    assert len(set(ids["ar"][0])) == 200  # a greedy text goes through the script


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"load_format": "auto"}, "--synthetic-acceptance-length needs --load-format dummy"),
        ({"num_speculative_tokens": 0}, "needs -k and -f, a number each"),
        ({"fan_out": (1, 2, 3, 4, 5)}, "needs -k and -f, a number each"),
        ({"synthetic_acceptance_length": None}, "--synthetic-hit-rate needs --synthetic-acceptance-length"),
        ({"synthetic_acceptance_length": 6.0}, "with K = 4 it is from 1 to 5"),
        ({"synthetic_hit_rate": 0.1}, "a hit rate of 0.1 cannot be"),
        ({"draft": ("draft", "draft")}, "that of a target and one draft"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(models: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    given = models | {"num_speculative_tokens": 4, "fan_out": (3,), "synthetic_acceptance_length": 3.0}
    given |= {"synthetic_hit_rate": 0.7} | asked
    if "draft" in asked:
        given["draft"] = models["draft"] * 2
    if given["load_format"] == "auto":
        given |= {"target": "smollm2", "draft": ()}
    with pytest.raises(UsageError, match=message):
        resolve(EngineOptions(**given))


def test_a_small_vocabulary_has_no_room_for_the_script(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1000}))
    with pytest.raises(UsageError, match="needs a vocabulary of 1024 tokens; the target has 1000"):
        model(str(tmp_path), "target")
    with pytest.raises(UsageError, match="with --load-format dummy"):
        EngineConfig(target=str(tmp_path), draft=str(tmp_path), synthetic=ASKED)
