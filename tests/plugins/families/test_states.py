"""LFM2, whose layers have states, by the core's checks of its own families with states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ssd.models.interface import Model
from tests.models import test_gguf_states as gguf_states
from tests.models import test_states as states
from tests.models import tiny
from tests.models.knobs import DEFAULT, DELTA, FULL, THETA
from tests.models.test_memory import check_states
from tests.plugins.families.knobs import LFM2, RECURRENT

GGUF = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", FULL, "conv"],
    "tie_word_embeddings": True,
    "block_auto_adjust_ff_dim": False,
    "rope_parameters": DEFAULT | THETA,
}


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tensor, Tensor]:
    return states.made(*RECURRENT[request.param], tmp_path_factory.mktemp("model"))


test_whole_text = states.test_whole_text
test_chunks_and_single_tokens = states.test_chunks_and_single_tokens
test_rejected_tokens_leave_no_trace = states.test_rejected_tokens_leave_no_trace
test_hidden_states_are_shown_after_every_layer = states.test_hidden_states_are_shown_after_every_layer


def test_old_configs_describe_the_same_model(tmp_path: Path) -> None:
    old = {"layer_types": None, "full_attn_idxs": [1], "intermediate_size": 7, "block_ff_dim": 100}
    old |= {"rope_parameters": None, "tie_word_embeddings": None, "tie_embedding": True}
    states.check_old(tiny.model("lfm2", tmp_path, **LFM2), old)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [FULL, FULL, DELTA]}, "layer_types must be 3 of"),
        ({"conv_L_cache": 1}, "conv_L_cache must be above 1"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    states.check_not_computed(tiny.model("lfm2", tmp_path, **LFM2), fields, message)


def test_dummy_weights_need_no_tensors(tmp_path: Path) -> None:
    states.check_dummy(tiny.model("lfm2", tmp_path, **LFM2))


@pytest.mark.parametrize("family", RECURRENT)
def test_the_sizes_of_states_are_those_that_a_runner_allocates(family: str, tmp_path: Path) -> None:
    check_states(*RECURRENT[family], tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_logits_of_a_gguf_are_those_of_the_checkpoint_rounded(kind: str, tmp_path: Path) -> None:
    gguf_states.check_logits("lfm2", GGUF, kind, tmp_path)
