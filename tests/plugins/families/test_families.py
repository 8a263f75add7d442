"""The plugin's families, by the core's checks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.models import registry
from tests.draft.test_families import check_always_right, check_chains
from tests.exactness.test_embeddings import check_kind
from tests.layers import test_fused as fused
from tests.models import test_families as families
from tests.models import test_family_refusals as refusals
from tests.models import test_gguf_architectures as architectures
from tests.models import tiny
from tests.models.knobs import kinds
from tests.models.test_hostile_configs import check_lies
from tests.models.test_split import check_two_ranks
from tests.plugins.families.knobs import FAMILIES

GRANITE = {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}


def test_the_families_are_built_in() -> None:
    known = registry.families()
    assert {known[kind] for kind in kinds(FAMILIES)} == {"built in"}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> families.Pair:
    return families.made(*FAMILIES[request.param], tmp_path_factory.mktemp("model"))


test_whole_prefill = families.test_whole_prefill
test_chunks_and_single_tokens_in_fragmented_pages = families.test_chunks_and_single_tokens_in_fragmented_pages
test_ragged_batch = families.test_ragged_batch
test_hidden_states_are_shown_to_a_plan_that_keeps_them = families.test_hidden_states_are_shown_to_a_plan_that_keeps_them


@pytest.mark.parametrize("kind", kinds(FAMILIES))
def test_dummy_weights_are_the_same_wherever_they_are_made(tmp_path: Path, kind: str) -> None:
    families.check_dummy_weights(tiny.model(kind, tmp_path, **FAMILIES[kind][1]))


@pytest.mark.parametrize("kind", kinds(FAMILIES))
def test_a_field_that_lies_is_told_or_does_no_harm(kind: str, tmp_path: Path) -> None:
    check_lies(tiny.model(kind, tmp_path, **FAMILIES[kind][1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    check_two_ranks(*FAMILIES[family], tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_texts(family: str, tmp_path: Path) -> None:
    check_chains(*FAMILIES[family], tmp_path)


@pytest.mark.parametrize("family", ["olmo3", "granite"])
def test_a_draft_that_is_the_target_is_always_right(family: str, tmp_path: Path) -> None:
    check_always_right(*FAMILIES[family], tmp_path)


@pytest.mark.parametrize("kind", kinds(FAMILIES))
def test_embeddings_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_kind(*FAMILIES[kind], tmp_path)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize(("kind", "fields"), [("olmo2", {}), ("granite", {"residual_multiplier": 0.7})])
def test_a_model_computes_the_same_with_the_kernels_of_gpus(
    kind: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused.check_fused(tiny.model(kind, tmp_path, **fields), monkeypatch)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("granite", {"sliding_window": 8}, "sliding-window"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        ("olmo2", {"mlp_bias": True}, "mlp_bias"),
        ("olmo2", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must be 2 of"),
    ],
    ids=str,
)
def test_what_a_family_cannot_do_is_refused_by_name(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refusals.check_refused(*FAMILIES[family], fields, message, tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("kind", "config", "type"), [("olmo2", {}, "Q4_0"), ("granite", GRANITE, "Q5_1")])
def test_logits_of_a_gguf_are_those_of_the_checkpoint_rounded(
    kind: str, config: dict[str, Any], type: str, tmp_path: Path
) -> None:
    architectures.check_logits(kind, config, ("F32", type), tmp_path)


@pytest.mark.usefixtures("own_cache")
def test_metadata_that_asks_for_what_is_not_done_is_refused(tmp_path: Path) -> None:
    fields, message = {"granite.residual_scales": 1.0}, "granite.residual_scales 1.0 is not supported"
    architectures.check_refused("granite", GRANITE, fields, message, tmp_path)


@pytest.mark.usefixtures("own_cache")
def test_tensors_that_the_architecture_lacks_are_refused(tmp_path: Path) -> None:
    message = "'rope_freqs.weight' is not supported in architecture 'olmo2'"
    architectures.check_lacking("olmo2", "rope_freqs.weight", np.ones(8), message, tmp_path)
