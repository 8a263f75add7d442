"""`tools/distill --kind kv-injection` on a tiny target: what its layers compute, what it learns, what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from ssd.errors import UsageError
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import borrowed
from tests.models import tiny
from tests.tools.test_distill import distill
from tools.distill import kv_injection
from tools.distill.__main__ import main
from tools.distill.kv_injection import Blocks, KVInjectionPlan, KVInjectionStudent
from tools.distill.shards import Conversation
from tools.distill.student import round_in_training
from tools.distill.teacher import hidden, load_runner, score
from tools.distill.training import Example, TrainingPlan, held_out, train

LAYERS, TOKENS, ROWS = (0, 2), 40, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.llama(tmp_path_factory.mktemp("target"), num_hidden_layers=3, vocab_size=300)
    return tiny.tokenizer(directory)


@pytest.fixture(scope="module")
def data(target: Path) -> list[Example]:
    """Texts of the target's own, greedy, as examples without soft labels."""
    runner, found = load_runner(str(target), torch.float32, torch.device("cpu"), 512), []
    for seed in range(10):
        ids = torch.randint(300, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        while len(ids) < TOKENS:
            ids.append(int(score(runner, [Conversation([*ids, 0], len(ids))])[0].argmax()))
        found.append(Example(Conversation(ids, 6, str(seed)), torch.empty(0), torch.empty(0)))
    return found


def student_of(target: Path, data: list[Example], vocab: int = 0) -> KVInjectionStudent:
    runner = load_runner(str(target), torch.float32, torch.device("cpu"), 1024)
    return kv_injection.build(target, KVInjectionPlan(LAYERS, vocab, unroll=ROWS - 1), runner, data)


def one_block(student: KVInjectionStudent, features: Tensor, tokens: list[int], first: int) -> Tensor:
    """Compute a block by the definition, in double precision, row by row; its first token is at place `first`."""
    places = list(range(first, first + len(tokens)))
    x = student._embedding[torch.tensor(tokens)]
    dim, heads, kv_heads = (
        student.config.head_dim,
        student.config.num_attention_heads,
        student.config.num_key_value_heads,
    )

    def turned(vector: Tensor, place: int) -> Tensor:
        cos, sin = student._rotary(vector, torch.tensor([[place]]))
        halves = torch.cat((-vector[dim // 2 :], vector[: dim // 2]))
        return vector * cos[0, 0] + halves * sin[0, 0]

    for layer, states in zip(student.layers, features[:first].split(x.shape[1], dim=1), strict=True):
        attention, normed, context = layer.self_attn, layer.input_layernorm(x), layer.input_layernorm(states)
        rows = torch.cat((context, normed))
        where = [*range(first), *places]
        keys, values = (part(rows).unflatten(-1, (kv_heads, dim)) for part in (attention.k_proj, attention.v_proj))
        outs = []
        for row, place in enumerate(places):
            queries = attention.q_proj(normed[row]).unflatten(-1, (heads, dim))
            parts = []
            for number in range(heads):
                own = number // (heads // kv_heads)
                scores = [
                    turned(queries[number], place) @ turned(keys[n, own], where[n]) / dim**0.5
                    for n in range(first + row + 1)
                ]
                parts.append(torch.stack(scores).softmax(0) @ values[: first + row + 1, own])
            outs.append(attention.o_proj(torch.cat(parts)))
        x = x + torch.stack(outs)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return student.norm(x)


def test_a_block_is_what_its_definition_says(target: Path, data: list[Example]) -> None:
    student = student_of(target, data).double()
    text = data[0].text
    features = hidden(student._target, [text], LAYERS)[0].double()
    ids, anchors = torch.tensor([text.token_ids[:-1]]), torch.tensor([[9, 20]])
    with torch.no_grad():
        found = student.states(features[None], Blocks(ids, [range(6, TOKENS)], anchors, ROWS, 0))
        for own, anchor in zip(found[0], anchors[0].tolist(), strict=True):
            torch.testing.assert_close(
                own, one_block(student, features, text.token_ids[anchor : anchor + ROWS], anchor)
            )


def test_every_token_of_an_answer_is_predicted_once(target: Path, data: list[Example]) -> None:
    """For any block length and beginning that are drawn, also of a text that is all answer."""
    student = student_of(target, data)
    whole = Example(Conversation(data[1].text.token_ids, 1, "whole"), torch.empty(0), torch.empty(0))
    predicted, run = list[list[int]](), student._run

    def watched(texts: Any, anchors: Tensor, rows: int) -> Any:
        blocks, found = Blocks(texts.ids, texts.answers, anchors, rows, 0), run(texts, anchors, rows)
        for number, places in enumerate(blocks.places):
            own = blocks.index[(blocks.index // places.numel()) == number] % places.numel()
            predicted.append(sorted((places.flatten()[own] + 1).tolist()))
        return found

    student._run = watched  # type: ignore[method-assign]
    for seed in range(12):
        student.loss([data[0], whole], [data[0], whole], torch.Generator().manual_seed(seed))
    assert predicted == [list(range(6, TOKENS)), list(range(1, TOKENS))] * 12


def test_the_losses_of_two_processes_add_up(target: Path, data: list[Example]) -> None:
    student, batch = student_of(target, data), data[:5]
    for seed in range(4):  # blocks of several lengths
        whole, *parts = (
            student.loss(batch, own, torch.Generator().manual_seed(seed)) for own in (batch, batch[:2], batch[2:])
        )
        torch.testing.assert_close(sum(parts), whole)


def test_it_learns_what_the_target_says(target: Path, data: list[Example], tmp_path: Path) -> None:
    """On texts that it has seen; what it leaves says the same when it is read again."""
    student = student_of(target, data)
    round_in_training(student, "int8")
    plan = TrainingPlan(60, 256, 0.01, muon=True, reports=2)
    before = held_out(student, data, plan)
    log = train(student, data, data, plan, tmp_path / "saved")
    lengths = log[-1]["tokens_a_round, K = 4"]
    assert lengths["0"] > before["tokens_a_round, K = 4"]["0"] + 0.3
    student.write(target, tmp_path / "draft", "int8")
    again = student_of(target, data[:1])
    again.begin_with(tmp_path / "draft", target)
    texts = [example.text for example in data]
    for found, expected in zip(again.logits(texts, 2), student.logits(texts, 2), strict=True):
        torch.testing.assert_close(found, expected, atol=0.3, rtol=0.05)  # norms and scales in bfloat16


def test_logits_of_a_place_are_those_of_the_block_that_begins_before_it(target: Path, data: list[Example]) -> None:
    student, texts = student_of(target, data, vocab=100), [example.text for example in data[:3]]
    places = student.logits(texts, 2)
    assert [len(each) for each in places] == [sum(text.answer for text in texts)] * 3
    found = student._run(student._read(texts), torch.full((3, 1), 15), 3)
    for step, each in enumerate(places):
        rows = each.split([text.answer for text in texts])
        for own, expected in zip(rows, found.logits.unflatten(0, (3, 3))[:, step], strict=True):
            torch.testing.assert_close(own[15 + step + 1 - 6][student.ids], expected)
    behind = student.logits(texts, 2, missing=2)
    found = student._run(student._read(texts), torch.full((3, 1), 13), 5)
    for step, each in enumerate(behind):
        rows = each.split([text.answer for text in texts])
        for own, expected in zip(rows, found.logits.unflatten(0, (3, 5))[:, 2 + step], strict=True):
            torch.testing.assert_close(own[15 + step + 1 - 6][student.ids], expected)


def test_the_command_makes_a_drafter(target: Path, tmp_path: Path) -> None:
    flags = ["--kind", "kv-injection", "--layers", "0,2", "--evaluate-prompts", "2"]
    distill(target, tmp_path / "draft", *flags)
    report = json.loads((tmp_path / "draft" / "evaluation.json").read_text())
    assert {row["rule"] for row in report["rows"]} == {"coupled", "rejection"} and report["tree_step_ms"] > 0
    assert "tokens per round" in (tmp_path / "draft" / "README.md").read_text()


FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": tiny.llama,
    "llama with biases": partial(tiny.llama, attention_bias=True),
    "qwen2": partial(tiny.model, "qwen2"),
    "qwen3": tiny.qwen3,
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_drafter_of_all_layers_of_its_target_says_what_that_says(family: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny.tokenizer(family(tmp_path / "target", num_hidden_layers=3, vocab_size=300))
    runner = load_runner(str(target), torch.float32, torch.device("cpu"), 1024)
    student = kv_injection.build(target, KVInjectionPlan((0, 1, 2)), runner, [])
    text = Conversation([*range(9, 30)], 6)
    expected = score(runner, [text])
    for step, found in enumerate(student.logits([text], 2)):
        torch.testing.assert_close(found[step:], expected[step:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_keys_and_values_of_the_text_begin_as_the_targets(family: Callable[..., Path], tmp_path: Path) -> None:
    """And what is written says the same in the engine."""
    target = tiny.tokenizer(family(tmp_path / "target", num_hidden_layers=3, vocab_size=300))
    runner = load_runner(str(target), torch.float32, torch.device("cpu"), 1024)
    student, text = (
        kv_injection.build(target, KVInjectionPlan((1, 2)), runner, []),
        Conversation([*range(9, 30)], 1),
    )
    states = hidden(runner, [text], (1, 2))[0]
    student.write(target, tmp_path / "draft")
    drafter = registry.load(borrowed(inspect(tmp_path / "draft"), inspect(target)), torch.float32, tiny.CPU, 64)
    for layer, (keys, values) in zip((1, 2), drafter.context(states, torch.arange(len(states))), strict=True):
        slots = runner.cache.slots(range(9), 0, len(states))
        torch.testing.assert_close(keys, runner.cache.keys[layer][slots], atol=3e-2, rtol=3e-2)  # written in bfloat16
        torch.testing.assert_close(values, runner.cache.values[layer][slots], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--depth", "2"), "--depth: a KV-injected drafter has as many layers as --layers names"),
        (("--layers", "2,0"), "--layers: ascending layers of the target, 0 to 2, are wanted"),
        (("--layers", "1,3"), "--layers: ascending layers of the target, 0 to 2, are wanted"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_refused(
    target: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    command = [str(target), "--out", str(tmp_path / "draft"), "--kind", "kv-injection", "--answer-tokens", "24"]
    done = CliRunner().invoke(main, [*command, *flags])
    assert done.exit_code == 1 and message in done.output


def test_layers_with_more_than_the_drafters_have_are_refused(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", num_hidden_layers=3, vocab_size=300, mlp_bias=True))
    runner = load_runner(str(target), torch.float32, torch.device("cpu"), 1024)
    with pytest.raises(UsageError, match=r"the target has model.layers.0.mlp.down_proj.bias, which the layers of"):
        kv_injection.build(target, KVInjectionPlan((0, 2)), runner, [])
