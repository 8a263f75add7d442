"""The plugin's families, by the core's checks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tools.test_distill_head import HEAD

from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.execution.runner import Runner, attention_backend
from ssd.law import Law
from ssd.models import registry
from tests.draft import test_static_shapes as static_shapes
from tests.draft.pair import PAGE_SIZE, Draft, Pair, config, params
from tests.draft.test_families import check_always_right, check_chains, check_right_in_8_bits
from tests.exactness.test_embeddings import check_kind
from tests.kernels import test_int8_cache as int8_cache
from tests.layers import test_fused as fused
from tests.models import test_config_fields as config_fields
from tests.models import test_families as families
from tests.models import test_family_refusals as refusals
from tests.models import test_gguf_architectures as architectures
from tests.models import test_vocabularies as vocabularies
from tests.models import tiny
from tests.models.knobs import kinds
from tests.models.test_hostile_configs import check_lies
from tests.models.test_memory import check_floats, floats
from tests.models.test_split import check_dummy_parts, check_two_ranks, check_undivided
from tests.plugins.families.knobs import FAMILIES, GEMMA4, RECURRENT
from tests.ranks import part, side_by_side
from tests.tools.test_distill import distill

GRANITE = {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}


def test_the_families_are_built_in() -> None:
    known = registry.families()
    assert {known[kind] for kind in kinds(FAMILIES | RECURRENT)} == {"built in"}


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


@pytest.mark.parametrize("family", [name for name, (kind, _) in FAMILIES.items() if kind != "gemma4_text"])
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    check_two_ranks(*FAMILIES[family], tmp_path)


def test_a_family_that_is_not_split_says_so(tmp_path: Path) -> None:
    directory = tiny.model("gemma4_text", tmp_path, **GEMMA4)
    with pytest.raises(UsageError, match="use --tensor-parallel-size 1"):
        side_by_side(2, lambda ranks: part(directory, ranks))


def test_dummy_weights_are_parts_of_the_same_model(tmp_path: Path) -> None:
    check_dummy_parts(tiny.model("gpt2", tmp_path))


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    check_undivided(tiny.model("gpt2", tmp_path, n_inner=51), 2, "n_inner 51 cannot be divided among 2 ranks")


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_texts(family: str, tmp_path: Path) -> None:
    check_chains(*FAMILIES[family], tmp_path)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chains_read_their_path_through_any_backend(backend: str, tmp_path: Path) -> None:
    check_chains(*FAMILIES["gemma4_text"], tmp_path, attention_backend(backend, tiny.CPU, 4))


@pytest.mark.parametrize("family", ["olmo3", "granite", "gpt2", "gemma4_text", "gemma4_text experts"])
def test_a_draft_that_is_the_target_is_always_right(family: str, tmp_path: Path) -> None:
    check_always_right(*FAMILIES[family], tmp_path)


def test_a_draft_with_keys_and_values_in_8_bits_is_right_if_it_is_the_target(tmp_path: Path) -> None:
    check_right_in_8_bits(*FAMILIES["gemma4_text"], tmp_path)


def test_a_draft_without_positions_for_all_of_a_text_stops_at_its_last(tmp_path: Path) -> None:
    target = tiny.runner(tiny.model("gpt2", tmp_path / "target"), torch.float64, pages=400, page_size=PAGE_SIZE)
    short = tiny.runner(tiny.model("gpt2", tmp_path / "draft", max_position_embeddings=40), torch.float64)
    assert short.model.shape.max_position == 40
    draft = Draft(config(Speculation("ssd", 4, (2,), "jit")), Runner(short.model, 400, PAGE_SIZE))
    prompts = [tiny.token_ids(n, n) for n in (3, 38, 60)]
    texts = Pair(draft.config, target, draft).run(prompts, params(3, 60))
    assert texts.ids == Pair(config(Speculation("ar")), target).run(prompts, params(3, 60)).ids
    draft.assert_empty()


@pytest.mark.parametrize("family", ["gemma4_text", "gpt2"])
@pytest.mark.parametrize("length", [2, 30])
def test_a_draft_in_static_shapes(family: str, length: int, tmp_path: Path) -> None:
    static_shapes.check_family(*FAMILIES[family], length, tmp_path)


def test_a_prompt_runs_in_shapes(tmp_path: Path) -> None:
    static_shapes.check_prompt(*FAMILIES["gpt2"], tmp_path)


@static_shapes.SOME_LAWS
def test_several_tokens_of_a_step_are_those_of_so_many_steps(laws: tuple[Law, ...], tmp_path: Path) -> None:
    static_shapes.check_several(*FAMILIES["gpt2"], laws, tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"tie_word_embeddings": True}),
        ("gemma4_text", GEMMA4 | {"vocab_size_per_layer_input": vocabularies.VOCABULARY}),
    ],
)
def test_a_draft_has_the_same_logits_in_the_targets_ids(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    vocabularies.check_translated(kind, options, tmp_path)


@int8_cache.pytestmark
@int8_cache.ASKED
def test_ids_are_those_of_ar_with_keys_of_two_sizes_in_8_bits(asked: dict[str, Any], tmp_path: Path) -> None:
    int8_cache.check_ids("gemma4_text", GEMMA4, asked, tmp_path)


def test_what_floats_take_is_told_from_their_headers(tmp_path: Path) -> None:
    check_floats(floats("gpt2", tmp_path))


@pytest.mark.parametrize("kind", kinds(FAMILIES | RECURRENT))
def test_embeddings_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_kind(*(FAMILIES | RECURRENT)[kind], tmp_path)


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
        ("gpt2", {"activation_function": "relu"}, "activation 'relu'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_head": 5}, "no multiple"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"attention_bias": True}, "attention_bias"),
        ("gemma4_text", {"num_kv_shared_layers": 5}, "none of the 5 last ones"),
        ("gemma4_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers must not be above 5"),
        ("gemma4_text", {"layer_types": ["full_attention"] * 5 + ["chunked_attention"] * 2}, "layer_types must be 6"),
        ("gemma4_text", {"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config with sliding_window"),
        ("gemma4_text", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "no multiple of kv_heads 3"),
    ],
    ids=str,
)
def test_what_a_family_cannot_do_is_refused_by_name(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refusals.check_refused(*FAMILIES[family], fields, message, tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "config", "type"),
    [
        ("olmo2", {}, "Q4_0"),
        ("granite", GRANITE, "Q5_1"),
        ("gpt2", {}, "Q8_0"),
        ("gpt2", {"tie_word_embeddings": False, "n_inner": 96}, "Q4_0"),
    ],
)
def test_logits_of_a_gguf_are_those_of_the_checkpoint_rounded(
    kind: str, config: dict[str, Any], type: str, tmp_path: Path
) -> None:
    architectures.check_logits(kind, config, ("F32", type), tmp_path)


@pytest.mark.usefixtures("own_cache")
def test_two_ranks_of_a_gguf_give_the_logits_of_one(tmp_path: Path) -> None:
    architectures.check_two_ranks("gpt2", {}, tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "config", "field"), [("granite", GRANITE, "residual_scales"), ("gpt2", {}, "rope.freq_base")]
)
def test_metadata_that_asks_for_what_is_not_done_is_refused(
    kind: str, config: dict[str, Any], field: str, tmp_path: Path
) -> None:
    name = f"{kind}.{field}"
    architectures.check_refused(kind, config, {name: 1.0}, f"{name} 1.0 is not supported", tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "extra", "array", "message"),
    [
        ("olmo2", "rope_freqs.weight", np.ones(8), "'rope_freqs.weight' is not supported in architecture 'olmo2'"),
        ("gpt2", "blk.0.attn_q.weight", np.ones((64, 64)), "is not part of a model of architecture 'gpt2'"),
    ],
)
def test_tensors_that_the_architecture_lacks_are_refused(
    kind: str, extra: str, array: np.ndarray, message: str, tmp_path: Path
) -> None:
    architectures.check_lacking(kind, extra, array, message, tmp_path)


@pytest.mark.usefixtures("own_cache")
def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    architectures.check_missing("gpt2", {}, "position_embd.weight", tmp_path)


@pytest.mark.parametrize("same", [False, True])
def test_a_table_of_its_own_is_not_tied_whatever_the_config_says(same: bool, tmp_path: Path) -> None:
    config_fields.check_untied(tiny.model("gpt2", tmp_path, tie_word_embeddings=False), same)


@config_fields.NO_NUMBERS
def test_weights_that_are_numbers_only_with_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    config_fields.check_unscaled(tiny.model("gpt2", tmp_path), dtype)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_causal": False}, "is_causal must be true"),
        ({"scale_attn_weights": "false"}, "scale_attn_weights must be true or false"),
        ({"n_inner": 0}, "n_inner must be a positive number"),
    ],
    ids=str,
)
def test_what_would_be_computed_another_way_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    config_fields.check_refused(tiny.edit(tiny.model("gpt2", tmp_path), **fields), message)


def test_a_head_is_not_trained_for_a_target_whose_embedding_it_cannot_read(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.model("gpt2", tmp_path / "target", num_hidden_layers=3, vocab_size=300))
    assert "no tensor model.embed_tokens.weight" in distill(target, tmp_path / "out", *HEAD, code=1)
