"""`tools/distill --kind eagle3` on a tiny target: what it trains is what the engine runs, and worth having."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ssd.config.engine import Features
from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainCache
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import borrowed
from ssd.plugins.drafts.head_drafter import HeadContext
from tests.draft import pair
from tests.draft.pair import Draft, Pair, Texts
from tests.exactness.plain import Plain
from tests.models import tiny
from tests.plugins.drafts import heads
from tests.tools.test_distill import FLAGS, distill
from tools.distill import head
from tools.distill.corpus import CorpusPlan, Workers, write_corpus
from tools.distill.head import HeadPlan
from tools.distill.shards import Conversation, conversations
from tools.distill.student import Store, round_in_training
from tools.distill.teacher import load_runner
from tools.distill.training import Example, examples

ROOT = Path(__file__).parents[2]
LAYERS = (1, 2, 3)
HEAD = ["--kind", "eagle3", "--layers", "1,2,3", "--conversations", "12", "--shard", "6", "--epochs", "40"]
HEAD += [
    "--learning-rate",
    "0.01",
    "--batch-tokens",
    "128",
    "--unroll",
    "4",
    "--draft-vocab",
    "200",
    "--dtype",
    "float32",
]
TOKENS, LOOKAHEAD = 24, 3
GREEDY = (0, 2, 4, 6)  # conversations that are answered at temperature 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is sure of what it says."""
    folder = tmp_path_factory.mktemp("target")
    return tiny.tokenizer(tiny.llama(folder, vocab_size=300, num_hidden_layers=3, std=0.4))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(12)))
    return file


@pytest.fixture(scope="module")
def trained(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command as a program."""
    out = tmp_path_factory.mktemp("head")
    asked = [target, "--out", out, *FLAGS, *HEAD, "--prompts", prompts]
    command = [sys.executable, "-m", "tools.distill", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.thorough
def test_own_prompts_are_answered(prompts: Path, trained: Path) -> None:
    files = [trained / "work" / f"corpus-0000{index}.safetensors" for index in range(2)]
    assert [len(load_file(file)["lengths"]) for file in files] == [6, 6]
    asked = [text.opening for file in files for text in conversations(file)]
    assert asked == [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]


def test_a_shard_whose_prompts_are_all_too_long_is_empty(target: Path, tmp_path: Path) -> None:
    plan = CorpusPlan(4, 2, 24, features=(1,))
    write_corpus(str(target), tmp_path, plan, ["x " * 2000] * 2 + ["say 1", "say 2"], Workers(batch=2))
    assert [len(conversations(tmp_path / f"corpus-0000{index}.safetensors")) for index in range(2)] == [0, 2]
    assert len(examples(tmp_path, plan.shards)) == 2


def example(text: Conversation) -> Example:
    return Example(text, torch.zeros(text.answer, 1, dtype=torch.long), torch.ones(text.answer, 1))


def run(target: Runner, prompts: list[list[int]], speculation: Speculation, draft: Draft | None = None) -> Texts:
    settings = draft.config if draft else pair.config(speculation, vocab_size=300)
    return Pair(settings, target, draft).run(prompts, pair.params(len(prompts), TOKENS))


@pytest.mark.thorough
def test_it_speculates_well_where_it_was_untrained_not_at_all(target: Path, trained: Path, tmp_path: Path) -> None:
    texts = [text for index in range(2) for text in conversations(trained / "work" / f"corpus-0000{index}.safetensors")]
    untrained, model = tmp_path / "untrained", load_runner(str(target), torch.float32, tiny.CPU, 256)
    data = examples(trained / "work", range(2))
    head.build(target, HeadPlan(LAYERS, vocab=200), model, data).write(target, untrained)
    prompts = [texts[number].token_ids[: texts[number].prompt] for number in GREEDY]
    runner = tiny.runner(target, torch.float64)
    alone = run(runner, prompts, Speculation("ar")).ids
    accepted = {}
    for folder in (trained, untrained):
        features = Features(kind="eagle3", layers=LAYERS, width=heads.WIDTH)
        settings = pair.config(Speculation("sd", LOOKAHEAD, (3,), "jit"), vocab_size=300, features=features)
        found = run(runner, prompts, settings.speculation, Draft(settings, heads.runner(folder, target)))
        assert found.ids == alone
        accepted[folder] = sum(m.accepted_tokens for m in found.metrics) / sum(m.rounds for m in found.metrics)
    assert accepted[trained] > 0.25 + accepted[untrained]


@pytest.mark.thorough
def test_the_folder_is_a_draft_as_it_is(target: Path, trained: Path) -> None:
    config = resolve(EngineOptions(target=str(target), draft=(str(trained),)))
    assert config.features is not None and config.features.layers == LAYERS
    assert (trained / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    tensors = load_file(trained / "model.safetensors")
    assert not {"lm_head.weight", "embed_tokens.weight"} & tensors.keys()
    ids = tensors["d2t"] + torch.arange(200)
    assert ids.tolist() == sorted(set(ids.tolist()))


@pytest.mark.thorough
def test_its_card_tells_what_it_is_worth(trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "training.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    rows = json.loads((trained / "evaluation.json").read_text())["rows"]
    assert {row["rule"] for row in rows} == {"coupled", "rejection"}
    assert "- unroll: 4" in (trained / "README.md").read_text()


def logits(folder: Path, target: Path, int8: bool) -> Tensor:
    """What the head says after each of three tokens, from made-up features."""
    checkpoint = borrowed(inspect(folder), inspect(target))
    runner = Runner(registry.load(checkpoint, torch.float32, tiny.CPU, 64, int8=int8), 16, 4)
    model: Any = runner.model
    chain_cache = ChainCache.new(model.shape, 1, 1, torch.float32, tiny.CPU)
    row = Row([5, 6, 7], 0, range(2), outputs=3)
    features = model.fuse(torch.linspace(-1, 1, 3 * heads.WIDTH).sin().view(3, -1))
    context = HeadContext(runner.context([row]), [], runner.cache, chain_cache, features)
    return runner.run(row.token_ids, context, [0, 1, 2])


def test_a_head_in_8_bits_is_the_one_that_an_engine_in_8_bits_rounds(target: Path, tmp_path: Path) -> None:
    """Untrained it predicts with its target's rows, and leaves them there."""
    answers = [example(Conversation(tiny.token_ids(200, seed=2, vocab_size=300), 5))]
    runner = load_runner(str(target), torch.float32, tiny.CPU, 256)
    student = head.build(target, HeadPlan((0, 1, 3), 120), runner, answers)
    student.scales.fill_(1)  # written weights are then the rounded ones
    for store in ("bfloat16", "int8"):
        for name, parameter in student.named_trainable():
            parameter.data = parameter.data if name == "lm_head.weight" else parameter.data.bfloat16().float()
        student.write(target, tmp_path / store, store)
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    assert "lm_head.weight" not in tensors and tensors["midlayer.mlp.down_proj.weight"].dtype == torch.int8
    assert tensors["norm.weight"].dtype == tensors["fc.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]["ignore"] == ["fc"]
    assert torch.equal(*(logits(tmp_path / store, target, int8=True) for store in ("bfloat16", "int8")))
    assert resolve(EngineOptions(target=str(target), draft=(str(tmp_path / "int8"),))).features is not None


@pytest.mark.parametrize("store", ["bfloat16", "int8"])
@pytest.mark.parametrize("vocab", [0, 120])
def test_both_layouts_are_the_same_head(target: Path, tmp_path: Path, vocab: int, store: Store) -> None:
    runner = load_runner(str(target), torch.float32, tiny.CPU, 256)
    student = head.build(target, HeadPlan((0, 1, 3), vocab, own_head=True), runner, [])
    student.head.data += 0.1 * torch.randn(student.head.shape)
    student.write(target, tmp_path / "sglang", store)
    student.write(target, tmp_path / "speculators", store, "speculators")
    assert torch.equal(*(logits(tmp_path / layout, target, int8=False) for layout in ("sglang", "speculators")))
    tensors = load_file(tmp_path / "speculators" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in tensors and not any("midlayer" in name for name in tensors)
    if vocab:
        assert tensors["t2d"].nonzero().flatten().tolist() == (tensors["d2t"] + torch.arange(vocab)).tolist()
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert resolve(EngineOptions(target=str(target), draft=(str(tmp_path / "speculators"),))).features is not None


@pytest.mark.parametrize("vocab", [0, 120])
def test_the_engine_runs_what_was_trained(target: Path, tmp_path: Path, vocab: int) -> None:
    """Its logits at every place of a speculation are those of a plain forward of the folder that it writes."""
    runner = load_runner(str(target), torch.float32, tiny.CPU, 256)
    answers = [example(Conversation(tiny.token_ids(200, seed=2, vocab_size=300), 5))]
    student = head.build(target, HeadPlan((0, 1, 3), vocab, own_head=True), runner, answers)
    student.scales.fill_(1)  # written weights are then the rounded ones
    for _, parameter in student.named_trainable():
        parameter.data = (parameter + 0.1 * torch.randn(parameter.shape)).bfloat16().float()
    student.write(target, tmp_path / "head")
    plain = heads.PlainHead(tmp_path / "head", Plain(target), torch.float32)
    text = Conversation(tiny.token_ids(20, seed=1, vocab_size=300), 6)
    states = torch.cat([plain.target.states(text.token_ids)[layer] for layer in (0, 1, 3)], -1).float()
    expected = plain.unroll(torch.tensor([text.token_ids]), states[None], 4)
    for step, found in enumerate(student.logits([text], 4)):
        known = found[:, plain.ids]
        assert found.isfinite().sum(1).tolist() == [vocab or 300] * text.answer
        assert (known - expected[step][0, text.prompt - 2 - step : -1]).abs().max() <= 1e-4


@pytest.mark.parametrize("store", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("own_head", [False, True])
def test_the_stored_head_is_the_one_that_was_trained(tmp_path: Path, store: Store, own_head: bool) -> None:
    """With scales that are no power of two, whose rounding would show."""
    sizes = {"vocab_size": 300, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}
    target = tiny.llama(tmp_path / "target", **sizes)
    runner = load_runner(str(target), torch.float32, tiny.CPU, 256)
    student = head.build(target, HeadPlan(LAYERS, 120, own_head=own_head), runner, [])
    student.scales.copy_(torch.linspace(0.3, 7, len(student.scales)))
    for name, parameter in student.named_trainable():
        if store == "bfloat16" or not name.endswith("_proj.weight"):
            scales = student.scales if name == "fc.weight" else 1.0
            parameter.data = (parameter / scales).bfloat16().float() * scales
    round_in_training(student, store)
    student.write(target, tmp_path / "head", store)
    text = Conversation(tiny.token_ids(20, seed=1, vocab_size=300), 6)
    stored = head.load(target, tmp_path / "head", runner)
    for ours, theirs in zip(student.logits([text], 3), stored.logits([text], 3), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert (ours - theirs).abs().nan_to_num().max() <= 1e-4


def begun(target: Path, draft: Path, plan: HeadPlan, scale: float = 1.0) -> head.HeadStudent:
    student = head.build(target, plan, load_runner(str(target), torch.float32, tiny.CPU, 256), [])
    student.scales.fill_(scale)
    student.begin_with(draft, target)
    return student


@pytest.mark.parametrize("layout", ["midlayer", "layers.0"])
def test_a_head_begins_with_the_weights_of_another(target: Path, tmp_path: Path, layout: str) -> None:
    """In either layout; rows of its `lm_head` by token."""
    sizes = {"vocab_size": 300, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    draft = heads.head(tmp_path / "draft", predicted=90, layer=layout, **sizes)
    student = begun(target, draft, HeadPlan(LAYERS, 120, own_head=True), scale=2.0)
    tensors = load_file(draft / "model.safetensors")
    assert torch.equal(student.fc.weight, 2 * tensors["fc.weight"])
    ours, theirs = student.midlayer.self_attn.q_proj.weight, tensors[f"{layout}.self_attn.q_proj.weight"]
    assert torch.equal(ours, theirs)
    known = (tensors["d2t"] + torch.arange(90)).tolist()
    table = load_file(target / "model.safetensors")["lm_head.weight"]
    shared = 0
    for place, token in enumerate(student.ids.tolist()):
        row = tensors["lm_head.weight"][known.index(token)] if token in known else table[token]
        shared += token in known
        assert torch.equal(student.head[place], row)
    assert 0 < shared < 90


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"after \(0, 1, 2\) layers, not \(1, 2, 3\)"),
        ({"intermediate_size": 60}, "has intermediate_size 60, the student 52"),
        ({"norm_before_residual": True}, "has norm_before_residual"),
        ({"vocab_size": 200}, "vocabularies of 300 and 200 tokens"),
    ],
)
def test_no_head_begins_with_another_shape(target: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": 300, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    draft = heads.head(tmp_path / "draft", predicted=90, **sizes | fields)
    with pytest.raises(UsageError, match=message):
        begun(target, draft, HeadPlan(LAYERS, 120))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "1,2,4"], "after 4 layers, the target has 3"),
        (["--layers", "1,2"], "must be 3 layers"),
        ([], "after (2, 1, 0) layers"),
        (["--layers", "1,2,3", "--draft-vocab", "301"], "the target has 300 ids"),
        (["--layers", "1,2,3", "--width", "16"], "a head is as wide as its target"),
        (["--layers", "1,2,3", "--keep-features", "1,3"], "--keep-features lacks 2, which the head reads"),
        (["--layers", "1,2,3", "--store", "int4"], "--store int4 takes layers of a multiple of 64 inputs"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_first(
    target: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    assert message in distill(target, tmp_path, "--kind", "eagle3", *flags, code=1).replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_head_does_not_begin_with_a_decoder(target: Path, tmp_path: Path) -> None:
    flags = ("--kind", "eagle3", "--layers", "1,2,3", "--begin", str(target))
    said = distill(target, tmp_path, *flags, code=1).replace("\n", " ")
    assert "is a decoder, the student is an EAGLE-3 head" in said
    assert list(tmp_path.iterdir()) == []


def test_another_kind_of_draft_in_the_same_folder_is_refused(
    target: Path, prompts: Path, trained: Path, tmp_path: Path
) -> None:
    flags = ["0,2" if flag == "1,2,3" else flag for flag in HEAD if flag not in ("--kind", "eagle3")]
    assert "begun with another student" in distill(
        target, shutil.copytree(trained, tmp_path / "head"), *flags, "--prompts", str(prompts), code=1
    )
