"""The plugin's families, by the core's checks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner, attention_backend
from ssd.law import Law
from ssd.models import checkpoint, hub, registry
from tests.cli.test_models import described
from tests.draft import test_static_shapes as static_shapes
from tests.draft.pair import PAGE_SIZE, Draft, Pair, config, params
from tests.draft.test_families import check_always_right, check_chains, check_right_in_8_bits
from tests.exactness.test_embeddings import check_kind
from tests.kernels import test_int8_cache as int8_cache
from tests.layers import test_fused as fused
from tests.models import ggufs, tiny
from tests.models import test_config_fields as config_fields
from tests.models import test_families as families
from tests.models import test_family_refusals as refusals
from tests.models import test_gguf_architectures as architectures
from tests.models import test_vocabularies as vocabularies
from tests.models.knobs import FULL, LINEAR, SLIDING, THETA, kinds
from tests.models.test_hostile_configs import check_lies
from tests.models.test_memory import check_floats, floats
from tests.models.test_split import check_dummy_parts, check_two_ranks, check_undivided
from tests.plugins.families.knobs import FAMILIES, GEMMA3, GEMMA4, GPT_OSS, RECURRENT
from tests.ranks import part, side_by_side
from tests.tools.test_distill import distill

GRANITE = {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}

GGUF_GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": [SLIDING, FULL],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
GGUF_GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 9,
    "num_hidden_layers": 7,
    "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: LINEAR | {"rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GGUF_GPT_OSS = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": architectures.YARN | {"truncate": False},
}
GGUF_LONGROPE = THETA | {"rope_type": "longrope", "original_max_position_embeddings": 32}
GGUF_LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
GGUF_PHI3_LONG = {"pad_token_id": 0, "rope_parameters": GGUF_LONGROPE, "original_max_position_embeddings": 32}


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


@pytest.mark.parametrize("family", ["gemma2", "gemma4_text", "gpt_oss"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chains_read_their_path_through_any_backend(family: str, backend: str, tmp_path: Path) -> None:
    check_chains(*FAMILIES[family], tmp_path, attention_backend(backend, tiny.CPU, 4))


@pytest.mark.parametrize(
    "family",
    [
        *("olmo3", "granite", "gpt2", "gpt_oss", "phi3 longrope", "phi3 partly rotated"),
        *("gemma2", "gemma3_text", "gemma4_text", "gemma4_text experts"),
    ],
)
def test_a_draft_that_is_the_target_is_always_right(family: str, tmp_path: Path) -> None:
    check_always_right(*FAMILIES[family], tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "gemma4_text", "gpt_oss"])
def test_a_draft_with_keys_and_values_in_8_bits_is_right_if_it_is_the_target(family: str, tmp_path: Path) -> None:
    check_right_in_8_bits(*FAMILIES[family], tmp_path)


def test_a_draft_without_positions_for_all_of_a_text_stops_at_its_last(tmp_path: Path) -> None:
    target = tiny.runner(tiny.model("gpt2", tmp_path / "target"), torch.float64, pages=400, page_size=PAGE_SIZE)
    short = tiny.runner(tiny.model("gpt2", tmp_path / "draft", max_position_embeddings=40), torch.float64)
    assert short.model.shape.max_position == 40
    draft = Draft(config(Speculation("ssd", 4, (2,), "jit")), Runner(short.model, 400, PAGE_SIZE))
    prompts = [tiny.token_ids(n, n) for n in (3, 38, 60)]
    texts = Pair(draft.config, target, draft).run(prompts, params(3, 60))
    assert texts.ids == Pair(config(Speculation("ar")), target).run(prompts, params(3, 60)).ids
    draft.assert_empty()


@pytest.mark.parametrize("family", ["gemma2", "gemma4_text", "gpt2"])
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
        ("gemma3_text", {"tie_word_embeddings": True}),
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
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("olmo2", {}),
        ("granite", {"residual_multiplier": 0.7}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 4, "num_hidden_layers": 6}),
        ("gemma2", {"head_dim": 16, "sliding_window": 4}),
        ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    ],
)
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
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "activation 'gelu'"),
        ("gemma3_text", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "su", "factor": 2.0}}}, "'su'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a positive number"),
        ("gpt_oss", {"mlp_bias": True}, "mlp_bias"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types must be 3 of"),
        ("phi3", {"attention_bias": True}, "attention_bias"),
        ("phi3", {"rope_parameters": {"type": "su"}}, "short_factor must be a list of 4 numbers"),
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
        ("gemma2", GGUF_GEMMA2, "Q4_0"),
        ("gemma3_text", GGUF_GEMMA3, "Q5_1"),
        ("gpt_oss", GGUF_GPT_OSS, "MXFP4"),
        ("gpt_oss", GGUF_GPT_OSS | {"attention_bias": False, "tie_word_embeddings": True}, "Q8_0"),
        ("phi3", {"pad_token_id": 0, "sliding_window": 9}, "Q8_0"),
        ("phi3", GGUF_PHI3_LONG, "Q4_0"),
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
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", {}),
        ("gemma3_text", GGUF_GEMMA3),
        ("gpt_oss", GGUF_GPT_OSS),
        ("phi3", {"pad_token_id": 0, "sliding_window": 9}),
    ],
)
def test_two_ranks_of_a_gguf_give_the_logits_of_one(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    architectures.check_two_ranks(kind, config, tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "config", "name", "message"),
    [
        ("granite", GRANITE, "granite.residual_scales", "granite.residual_scales 7.0 is not supported"),
        ("gpt2", {}, "gpt2.rope.freq_base", "gpt2.rope.freq_base 7.0 is not supported"),
        ("gemma3_text", GGUF_GEMMA3, "gemma3.rope.scale_linear", "gemma3.rope.scale_linear 7.0 is not supported"),
        ("gpt_oss", GGUF_GPT_OSS, "gpt-oss.attention.sliding_window_pattern", "_pattern 7.0 is not supported"),
        (
            *("gpt_oss", GGUF_GPT_OSS, "gpt-oss.expert_count"),
            "'blk.0.ffn_[a-z]+_exps.[a-z]+' has 6 experts, the metadata 7.0",
        ),
    ],
)
def test_metadata_that_asks_for_what_is_not_done_is_refused(
    kind: str, config: dict[str, Any], name: str, message: str, tmp_path: Path
) -> None:
    architectures.check_refused(kind, config, {name: 7.0}, message, tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "extra", "array", "message"),
    [
        ("olmo2", "rope_freqs.weight", np.ones(8), "'rope_freqs.weight' is not supported in architecture 'olmo2'"),
        ("gpt2", "blk.0.attn_q.weight", np.ones((64, 64)), "is not part of a model of architecture 'gpt2'"),
        ("phi3", "rope_factors_long.weight", np.ones(8), "lacks 'phi3.rope.scaling.original_context_length'"),
    ],
)
def test_tensors_that_the_architecture_lacks_are_refused(
    kind: str, extra: str, array: np.ndarray, message: str, tmp_path: Path
) -> None:
    architectures.check_lacking(kind, extra, array, message, tmp_path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "config", "missing"),
    [
        ("gpt2", {}, "position_embd.weight"),
        ("gpt_oss", GGUF_GPT_OSS, "blk.1.attn_sinks.weight"),
        ("gpt_oss", GGUF_GPT_OSS, "blk.1.ffn_gate_inp.bias"),
        ("gpt_oss", GGUF_GPT_OSS, "blk.1.ffn_up_exps.bias"),
    ],
)
def test_tensors_that_are_missing_are_named(kind: str, config: dict[str, Any], missing: str, tmp_path: Path) -> None:
    architectures.check_missing(kind, config, missing, tmp_path)


@pytest.mark.usefixtures("own_cache")
def test_factors_of_longrope_are_those_of_the_file(tmp_path: Path) -> None:
    """Partly rotated heads, short and long factors, the trained context and the factor of cosines."""
    rope = GGUF_LONGROPE | {"partial_rotary_factor": 0.5}
    rope |= {name: rope[name][:4] for name in ("short_factor", "long_factor")}
    tiny.tokenizer(tmp_path)
    fields = {"pad_token_id": 0, "rope_parameters": rope, "original_max_position_embeddings": 32}
    ggufs.write_model(tmp_path / "x.gguf", "phi3", **fields)
    found = checkpoint.read_config(hub.resolve(str(tmp_path / "x.gguf")))
    assert found["original_max_position_embeddings"] == 32
    read = found["rope_parameters"]
    assert (read["rope_type"], read["rope_theta"], read["partial_rotary_factor"]) == ("longrope", 10000.0, 0.5)
    for name in ("short_factor", "long_factor"):
        assert read[name] == pytest.approx(rope[name])
    assert read["attention_factor"] == pytest.approx((1 + np.log(8) / np.log(32)) ** 0.5)


def test_older_phi3_checkpoints(tmp_path: Path) -> None:
    """They call LongRoPE by other names, beside the base, and name code of their own, which is not run."""
    kind, knobs = FAMILIES["phi3 longrope"]
    directory, rows = tiny.model(kind, tmp_path, **knobs), [Row(tiny.token_ids(40, 0), 0, range(16), 40)]
    new = tiny.runner(directory).forward(rows)
    factors = {name: knobs["rope_parameters"][name] for name in ("short_factor", "long_factor")}
    for name in ("su", "yarn", "longrope"):
        old = {"rope_theta": 10000.0, "rope_scaling": {"type": name, **factors}, "rope_parameters": None}
        tiny.edit(directory, **old, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"})
        assert torch.equal(tiny.runner(directory).forward(rows), new)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize("same", [False, True])
def test_a_table_of_its_own_is_not_tied_whatever_the_config_says(kind: str, same: bool, tmp_path: Path) -> None:
    directory = tiny.model(kind, tmp_path, **FAMILIES[kind][1] | {"tie_word_embeddings": False})
    config_fields.check_untied(directory, same)


@pytest.mark.parametrize(
    "fields", [{"use_sliding_window": False}, {"rope_parameters": {FULL: {"rope_theta": 77.0}}}], ids=str
)
def test_what_a_gemma_leaves_out_means_what_it_means_to_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    config_fields.assert_as_transformers(tiny.edit(tiny.model("gemma3_text", tmp_path, **GEMMA3), **fields))


def test_a_gpt_oss_of_few_words_is_that_of_transformers(tmp_path: Path) -> None:
    without = ("layer_types", "rope_parameters", "attention_bias", "rms_norm_eps", "swiglu_alpha", "swiglu_limit")
    config_fields.assert_as_transformers(
        config_fields.rewritten(tiny.model("gpt_oss", tmp_path, **GPT_OSS), {}, without)
    )


def test_old_configs_describe_layers_by_a_rule(tmp_path: Path) -> None:
    old = {"layer_types": None, "sliding_window_pattern": 2, "rope_parameters": None, "rope_theta": 500.0}
    old |= {"rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    families.check_old(*FAMILIES["gemma3_text two bases"], old, tmp_path)


def test_rotations_of_each_kind_of_layer_are_described(tmp_path: Path) -> None:
    kind, knobs = FAMILIES["gemma3_text yarn"]
    rope = described(tiny.model(kind, tmp_path, **knobs))["rope"]
    assert "full_attention: yarn, factor 4.0" in rope and "sliding_attention: default" in rope


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
@config_fields.NO_NUMBERS
def test_weights_that_are_numbers_only_with_their_scales_are_refused(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config_fields.check_unscaled(tiny.model(kind, tmp_path, **FAMILIES[kind][1]), dtype)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        *((kind, {"is_causal": False}, "is_causal must be true") for kind in ("gpt2", "gemma2", "gemma3_text")),
        ("gpt2", {"scale_attn_weights": "false"}, "scale_attn_weights must be true or false"),
        ("gpt2", {"n_inner": 0}, "n_inner must be a positive number"),
        ("gemma3_text", {"rope_scaling": LINEAR}, "contradict each other"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "must be those of full_attention and of sliding_attention"),
        ("gemma3_text", {"sliding_window": None}, "no sliding_window that is used"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window must be a positive number"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be a"),
        ("gemma3_text", {"final_logit_softcapping": "x"}, "final_logit_softcapping must be a positive number, is 'x'"),
    ],
    ids=str,
)
def test_what_would_be_computed_another_way_is_refused(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config_fields.check_refused(tiny.edit(tiny.model(kind, tmp_path, **FAMILIES[kind][1]), **fields), message)


def test_a_head_is_not_trained_for_a_target_whose_embedding_it_cannot_read(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.model("gpt2", tmp_path / "target", num_hidden_layers=3, vocab_size=300))
    head = "--kind", "eagle3", "--layers", "1,2,3", "--dtype", "float32"
    assert "no tensor model.embed_tokens.weight" in distill(target, tmp_path / "out", *head, code=1)
