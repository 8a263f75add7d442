"""`tools/distill` from end to end on a tiny target, as a maintainer runs it."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch.multiprocessing import ProcessRaisedException

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.layers.linear import Activations
from ssd.plugins.bench import datasets
from ssd.tuning import knowledge
from ssd.tuning.estimates import kind_of
from ssd.tuning.knowledge import Knowledge
from ssd.tuning.tuner import Tuning
from tests.models import ggufs, tiny
from tools.distill import job, report, training, writing
from tools.distill.__main__ import main
from tools.distill.card import card
from tools.distill.corpus import CorpusPlan, ShardWriter, Workers, write_corpus
from tools.distill.kinds import DOCUMENT_TASKS, FOLLOW_UPS, KINDS
from tools.distill.shards import Conversation, conversations
from tools.distill.student import Store, Student, StudentPlan, build, round_in_training
from tools.distill.teacher import load_runner

FLAGS = ["--conversations", "48", "--shard", "16", "--answer-tokens", "24", "--batch", "16"]
STUDENT = ["--layers", "0,2", "--epochs", "6", "--learning-rate", "0.003", "--evaluate-prompts", "4"]


def distill(target: Path, out: Path, *flags: str, code: int = 0) -> str:
    """What the command says on stderr, in this process: it has imported everything already."""
    done = CliRunner().invoke(main, [str(target), "--out", str(out), *FLAGS, *flags])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.llama(tmp_path_factory.mktemp("target"), vocab_size=300, num_hidden_layers=3)
    return tiny.tokenizer(directory)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft")
    distill(target, out, *STUDENT)
    return out


def test_the_loss_falls_and_the_draft_is_better_than_chance(draft: Path) -> None:
    log = [json.loads(line) for line in (draft / "training.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in log] == [1, 2, 3, 4, 5, 6]
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[-1]["held_out_agreement"][0] > 10 / 300
    report = json.loads((draft / "evaluation.json").read_text())
    assert all(row["acceptance"] > 10 / 300 for row in report["rows"])
    assert {row["rule"] for row in report["rows"]} == {"coupled", "rejection"}
    assert "tokens per round" in (draft / "README.md").read_text()
    assert ("measured_on" in report) == ("A forward of the draft alone takes" in (draft / "README.md").read_text())


def test_the_card_has_the_time_of_a_step_and_where_it_was_measured() -> None:
    report = {"k": 4, "rows": [], "tree_step_ms": 2.0, "verify_ms": 9.0}
    assert "forward of the draft" not in card("name", {"target": "t"}, [], report)
    measured = report | {"step_ms": {1: 0.5, 8: 1.25}, "measured_on": "1+1 cores, a processor"}
    expected = "A forward of the draft alone takes 0.50 ms for 1 row and 1.25 ms for 8 rows (1+1 cores, a processor)."
    assert expected in card("name", {"target": "t"}, [], measured)


def test_engines_with_the_draft_begin_with_what_was_evaluated(draft: Path) -> None:
    known = knowledge.read(draft / knowledge.PRIOR_FILE, knowledge.Knowledge)
    assert known is not None and len(known.laws) == 3 and not known.tables
    report = json.loads((draft / "evaluation.json").read_text())
    rows = [row for row in report["rows"] if row["rule"] == "coupled"]
    assert [kind_of(row["temperature"]) for row in rows] == [0, 1, 2]  # the held-out prompts alone
    for row, law in zip(rows, known.laws, strict=True):
        samples = [count for _, count in law.acceptance]
        reached = row["by_position"][: len(samples)]
        assert [rate for rate, _ in law.acceptance] == pytest.approx(reached, abs=1e-4)
        assert not any(row["by_position"][len(samples) :])
        assert samples == sorted(samples, reverse=True)
        missed = 1.0
        for fan_out, (rate, _) in enumerate(law.hits, start=1):
            missed *= 1 - rate
            assert 1 - missed == pytest.approx(row["hit_rate"][str(fan_out)], abs=2e-3)
        assert law.hits[0][1] == samples[0]  # every round
    tuning = Tuning()
    tuning.recall(Knowledge(), known)
    assert tuning.estimates.learners[2].acceptance[0] == known.laws[2].acceptance[0][0]


def test_the_draft_shares_the_embedding_of_its_target(draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
    config = json.loads((draft / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["shared_with_target"] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_a_folder_made_from_something_else_is_refused(target: Path, draft: Path) -> None:
    assert "begun with another seed" in distill(target, draft, *STUDENT, "--seed", "1", code=1)


def test_a_corpus_of_an_earlier_version_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    """Its shards do not say what their conversations derive from."""
    recipe = json.loads((draft / "work" / "recipe.json").read_text())
    del recipe["version"]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "recipe.json").write_text(json.dumps(recipe))
    assert "begun with another version" in distill(target, tmp_path, *STUDENT, code=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "0,3"], "layers are 0 to 2"),
        ([], "either --layers or --width"),
        (["--width", "12"], "multiple of 8"),
        (["--layers", "0,2", "--format", "speculators"], "--format speculators is for --kind eagle3"),
        (["--layers", "0,2", "--own-head"], "--own-head is for --kind eagle3"),
        (["--layers", "0,2", "--feed-forward", "64"], "--feed-forward is for --kind eagle3"),
        (["--layers", "0,2", "--store", "int4"], "--store int4 takes layers of a multiple of 64 inputs"),
        (["--layers", "0,2", "--keep-features", "1,4"], "--keep-features 4: the target has 3 layers"),
        (["--layers", "0,2", "--shard", "1"], "--shard must be 2 or more"),
        (["--layers", "0,2", "--answer-tokens", "250"], "a conversation has at most 256 tokens"),
        (["--layers", "0,2", "--answer-tokens", "1280"], "--answer-tokens 1280 leaves no room for a prompt"),
        (["--layers", "0,2", "--conversations", "9"], "9 are too few to train on"),
        (["--layers", "0,2", "--evaluate-on", "nowhere.jsonl"], "no dataset 'nowhere.jsonl'"),
    ],
)
def test_flags_that_do_not_fit_are_refused_first(target: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    assert message in distill(target, tmp_path, *flags, code=1).replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_another_shape_is_refused_first(target: Path, draft: Path, tmp_path: Path) -> None:
    for flags, message in {
        ("--layers", "0"): "has num_hidden_layers 2, the student 1",
        ("--width", "16", "--depth", "2"): "has hidden_size 32, the student 16",
    }.items():
        said = distill(target, tmp_path, *flags, "--begin", str(draft), code=1)
        assert message in said.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_a_chat_template_is_refused_first(target: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(target, tmp_path / "target")
    (plain / "chat_template.jinja").unlink()
    assert "has no chat template" in distill(plain, tmp_path / "out", "--layers", "0", code=1).replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_evaluated_messages_were_not_trained_on(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, evaluated, measured = set[str](), list[str](), job.measured

    def spied_train(student: Any, data: Any, *rest: Any) -> Any:
        trained.update(example.text.opening for example in data)
        return training.train(student, data, *rest)

    def spied_measured(name: str, folder: str, sets: dict[str, list[str]], *rest: Any) -> Any:
        evaluated.extend(sets["held out"])
        return measured(name, folder, sets, *rest)

    monkeypatch.setattr(job, "train", spied_train)
    monkeypatch.setattr(job, "measured", spied_measured)
    distill(target, tmp_path, "--work", str(draft / "work"), *STUDENT, "--epochs", "1")
    known = {text.opening for file in (draft / "work").glob("*.safetensors") for text in conversations(file)}
    assert evaluated and trained and trained | set(evaluated) == known
    assert not trained & set(evaluated)


@pytest.mark.thorough
def test_what_was_interrupted_goes_on_with_the_same_data(target: Path, draft: Path, tmp_path: Path) -> None:
    """As if the first run had been killed after its first shard."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("recipe.json", "corpus-00000.safetensors"):
        shutil.copy(draft / "work" / name, work)
    kept = (work / "corpus-00000.safetensors").stat().st_mtime_ns
    distill(target, tmp_path, *STUDENT, "--epochs", "1", "--until", "train")
    assert (work / "corpus-00000.safetensors").stat().st_mtime_ns == kept
    for index in range(3):
        name = f"corpus-0000{index}.safetensors"
        ours, theirs = (load_file(folder / "work" / name) for folder in (tmp_path, draft))
        assert all((ours[kind] == theirs[kind]).all() for kind in ours)


@pytest.mark.thorough
def test_a_corpus_that_stops_at_its_limit_keeps_what_was_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its conversations are beginnings of those of the whole shard; no shard is begun when time is over."""
    clock = itertools.count()
    monkeypatch.setattr(writing.time, "monotonic", lambda: float(next(clock)))

    def written(stop: float) -> list[Conversation]:
        directory = tmp_path / str(stop)
        writer = ShardWriter(str(target), directory, CorpusPlan(48, 16, 24, seed=1), [], Workers(batch=16, stop=stop))
        writer.write_shard(0)
        assert writer.is_over == (stop < math.inf)
        file = directory / "corpus-00000.safetensors"
        return conversations(file) if file.exists() else []

    whole = written(math.inf)
    steps, parts = next(clock), []
    for stop in (0.1 * steps, 0.5 * steps, *range(steps - 40, steps, 6)):
        clock = itertools.count()
        parts.append(written(stop))
    assert not parts[0] and parts[-1]
    for part in parts:
        assert all(text.answer for text in part)
        for text, same in zip(part[:10], whole, strict=False):  # the answers to the messages of the shard
            assert same.token_ids[: len(text.token_ids)] == text.token_ids and same.opening == text.opening
    sizes = [sum(text.answer for text in part) for part in (*parts, whole)]
    assert sizes == sorted(sizes) and sizes[-2] < sizes[-1]


def test_a_draft_is_trained_on_the_shards_that_there_are(target: Path, draft: Path, tmp_path: Path) -> None:
    flags = ["--layers", "0,2", "--write-seconds", "0", "--until", "train"]
    assert "no shard of the corpus yet" in distill(target, tmp_path / "none", *flags, code=1).replace("\n", " ")
    work = tmp_path / "some" / "work"
    work.mkdir(parents=True)
    for name in ("recipe.json", "corpus-00001.safetensors"):
        shutil.copy(draft / "work" / name, work)
    distill(target, tmp_path / "some", *flags, "--train-seconds", "1e-6")
    assert len(list(work.glob("*.safetensors"))) == 1
    (entry,) = [json.loads(line) for line in (tmp_path / "some" / "training.jsonl").read_text().splitlines()]
    assert entry["step"] == 1 and (tmp_path / "some" / "model.safetensors").exists()
    held = [json.loads(line)["prompt"] for line in (tmp_path / "some" / "held_out.jsonl").read_text().splitlines()]
    assert held and set(held) < {text.opening for text in conversations(work / "corpus-00001.safetensors")}


def test_texts_written_in_graph_shapes_are_those_of_ragged_batches(target: Path) -> None:
    prompts = [tiny.token_ids(3 + 5 * number, seed=number) for number in range(9)]
    requests = [writing.Request(ids, 0.7 * (number % 2), 30, number) for number, ids in enumerate(prompts)]
    found = []
    for rows in (0, 4):
        runner = load_runner(str(target), torch.float32, tiny.CPU, 128, copies=4, rows=rows, layers=(1,))
        found.append(writing.Writer(runner, frozenset((7,)), 4, 128, (1,), 5).write(requests, record=True))
    for plain, static in zip(*found, strict=True):
        assert plain.token_ids == static.token_ids and plain.ended == static.ended
        assert torch.equal(torch.stack(plain.ids), torch.stack(static.ids))
        assert torch.cat(plain.features).float().allclose(torch.cat(static.features).float(), atol=0.05)


def test_no_opening_is_taken_from_a_benchmark() -> None:
    """One of three words or more begins no prompt that the repository has; none has the form of a benchmark's."""
    texts = (text.split("{text}")[0] for group in (*KINDS.values(), FOLLOW_UPS, DOCUMENT_TASKS) for text in group)
    openings = [text.lower() for text in texts if text]
    files = (datasets.BUILTIN, *map(str, (Path(__file__).parents[2] / "examples").glob("*.jsonl")))
    prompts = [prompt.lower() for file in files for prompt in datasets.texts(file, 1000)]
    assert len(prompts) > 32
    for opening in openings:
        if len(opening.split()) >= 3:
            assert not [prompt for prompt in prompts if prompt.startswith(opening)], opening
    forms = ("summarize:", "(cnn)", "translate german to english", "from typing import", "import math", "document [")
    assert not [opening for opening in openings for form in forms if form in opening]


def test_every_third_opening_message_is_sampled_after_the_chat_template_alone(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 1; the others begin with an opening of every kind in turn."""
    asked, write = list[list[writing.Request]](), writing.Writer.write

    def spied_write(self: writing.Writer, requests: list[writing.Request], record: bool = False) -> Any:
        asked.append(requests)
        return write(self, requests, record)

    monkeypatch.setattr(writing.Writer, "write", spied_write)
    ShardWriter(str(target), tmp_path, CorpusPlan(64, 64, 24), [], Workers(batch=20)).write_shard(0)
    tokenizer = Tokenizer(target)
    before = tokenizer.encode(tokenizer.render_chat([ChatMessage("user", "MARK")]).split("MARK")[0], False)
    assert all(list(request.prompt[: len(before)]) == before for request in asked[0])
    opened = [(tokenizer.decode(r.prompt[len(before) :]), r.temperature) for r in asked[0]]
    assert len(opened) == 20
    assert opened[2::3] == [("", 1.0)] * 6
    ours = [pair for number, pair in enumerate(opened) if number % 3 != 2]
    for kind, (opening, temperature) in zip([*sorted(KINDS)] * 2, ours, strict=False):
        assert opening in KINDS[kind] and temperature == 0.9
    messages = {message for file in tmp_path.glob("*.safetensors") for message in metadata(file)}
    assert len(messages) == 20 and "" not in messages


def metadata(shard: Path) -> list[str]:
    with safe_open(shard, framework="pt") as file:
        found: list[str] = json.loads(file.metadata()["prompts"])
    return found


def test_every_conversation_names_the_message_that_it_derives_from(tmp_path: Path) -> None:
    """It opens with that message, or is about an answer to it."""
    sizes = {"vocab_size": 300, "max_position_embeddings": 1280}
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", **sizes))
    write_corpus(str(target), tmp_path, CorpusPlan(32, 32, 80, seed=3), [], Workers(batch=16))
    tokenizer, found = Tokenizer(target), conversations(tmp_path / "corpus-00000.safetensors")
    assert len({text.opening for text in found}) == 10
    answers = defaultdict[str, list[str]](list)
    about = 0
    for number, text in enumerate(found):
        asked = tokenizer.decode(text.token_ids[: text.prompt])
        if text.opening in asked:
            answers[text.opening].append(tokenizer.decode(text.token_ids[text.prompt :]).strip())
        else:
            assert any(answer in asked for answer in answers[text.opening])
            about += 1
        assert (number >= 20) == (text.opening not in asked or len(answers[text.opening]) > 2)
    assert len(found) >= 26 and 3 <= about < len(found) - 20


def test_what_derives_from_a_held_out_message_is_held_out() -> None:
    data = [
        training.Example(Conversation([0, 1], 1, opening), torch.zeros(1, 1), torch.ones(1, 1))
        for opening in "aabbccdefghijkbkjabc" + 10 * "a"
    ]
    trained, held = ({example.text.opening for example in part} for part in training.split(data, 3))
    assert held == {"k", "j"} and trained == {*"abcdefghi"}
    assert sum(map(len, training.split(data, 3))) == len(data)
    with pytest.raises(UsageError, match="9 conversations are too few"):
        training.split(data[:9], 3)
    with pytest.raises(UsageError, match="are too few"):
        training.split(data[:2] * 10, 3)  # all about one message


def prepared(target: Path, work: Path) -> tuple[Student, list[training.Example], list[training.Example]]:
    data = training.examples(work, range(3))
    return build(target, StudentPlan(layers=(1,)), data), data[4:], data[:4]


def test_the_loss_is_the_cross_entropy_over_labels_and_drawn_tokens(target: Path, draft: Path) -> None:
    """By definition, in double precision; the parts of two processes add up to it."""
    student, data, _ = prepared(target, draft / "work")
    for batch in (data[:6], data[6:9]):
        seeded = [torch.Generator().manual_seed(3) for _ in range(4)]
        whole, *parts = (
            student.loss(batch, own, generator)
            for own, generator in zip((batch, batch[:1], batch[1:]), seeded, strict=False)
        )
        (labels,) = student.labels(batch)
        known = labels.ids[labels.probabilities > 0].unique()
        assert len(known) < student.head.shape[0] < 1024  # so that no token is left out
        (states,) = student.states(batch)
        likelihoods = (states.double() @ student.head.double().T).log_softmax(-1).gather(1, labels.ids)
        expected = -(likelihoods * labels.probabilities).sum() / len(labels.ids)
        assert whole.item() == pytest.approx(expected.item(), rel=2e-2)
        assert whole.item() == pytest.approx(sum(part.item() for part in parts), rel=2e-2)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_training_goes_on_from_a_saved_state(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Interrupted in the second epoch, then resumed: the weights of a run in one piece."""
    plan, prepare = training.TrainingPlan(epochs=2), partial(prepared, target, draft / "work")

    def trained(directory: Path) -> tuple[Student, list[dict[str, Any]]]:
        student, data, held = prepare()
        with training.process_group(processes, prepare, plan, directory):
            return student, training.train(student, data, held, plan, directory)

    whole, log = trained(tmp_path / "whole")
    monkeypatch.setattr(training, "_SAVE_SECONDS", -1)
    proper, calls = Student.loss, 0

    def fails_once(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == log[0]["step"] + 2:
            raise KeyboardInterrupt
        return proper(*given)

    monkeypatch.setattr(Student, "loss", fails_once)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "broken")
    resumed, again = trained(tmp_path / "broken")
    assert calls == log[-1]["step"] + 1
    assert [entry["step"] for entry in again] == [entry["step"] for entry in log]
    for (name, ours), (_, theirs) in zip(resumed.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.thorough
def test_two_processes_train_what_one_trains(target: Path, draft: Path, tmp_path: Path) -> None:
    """But for rounding, which the optimiser amplifies."""
    flags = ["--work", str(draft / "work"), "--layers", "0,2", "--epochs", "2", "--until", "train"]
    for workers in ("1", "2"):
        distill(target, tmp_path / workers, *flags, "--workers", workers)
    one, two = (load_file(tmp_path / workers / "training.safetensors") for workers in ("1", "2"))
    begun = dict(build(target, StudentPlan(layers=(0, 2)), []).named_trainable())
    apart = sum((one[name] - two[name]).norm() ** 2 for name in begun) ** 0.5
    moved = sum((one[name] - parameter).norm() ** 2 for name, parameter in begun.items()) ** 0.5
    assert apart < 0.05 * moved
    logs = [(tmp_path / workers / "training.jsonl").read_text().splitlines() for workers in ("1", "2")]
    for ours, theirs in zip(*([json.loads(line) for line in log] for log in logs), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["held_out_agreement"] == pytest.approx(theirs["held_out_agreement"], abs=0.05)


def fails_elsewhere(parent: int) -> Any:
    if os.getpid() != parent:
        raise UsageError("no room here")


@pytest.mark.thorough
def test_a_process_that_fails_ends_the_training_with_its_error(target: Path, draft: Path, tmp_path: Path) -> None:
    data, plan = training.examples(draft / "work", range(1)), training.TrainingPlan(epochs=1)
    student = build(target, StudentPlan(layers=(1,)), data)
    others = training.process_group(2, partial(fails_elsewhere, os.getpid()), plan, tmp_path)
    with pytest.raises(ProcessRaisedException, match="no room here"), others:
        training.train(student, data[4:], data[:4], plan, tmp_path)
    assert not torch.distributed.is_initialized()


def test_a_table_has_a_row_for_each_category(target: Path, draft: Path, tmp_path: Path) -> None:
    """Of a draft that is there already, without a corpus."""
    known = {"a": {"category": "writing"}, "b": {"task": "qa"}, "c": {}, "d": {"category": "qa"}, "e": {"task": "qa"}}
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {word}"} | fields) + "\n" for word, fields in known.items()))
    assert report.prompt_sets([str(file)]) == {
        "bench, writing": ["say a"],
        "bench, qa": ["say b", "say d", "say e"],
        "bench": ["say c"],
    }
    asked = [str(target), str(draft), "--evaluate-on", str(file), "--answer-tokens", "24", "--out", str(tmp_path)]
    done = CliRunner().invoke(report.main, [*asked, "--evaluate-prompts", "2"])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [line.split(" | ")[:3] for line in done.stdout.splitlines() if line.startswith("| bench")]
    assert rows == [
        [f"| {name}", str(temperature), rule]
        for name in ("bench, writing", "bench, qa", "bench")
        for temperature in (0.0, 0.7, 1.0)
        for rule in (("coupled", "rejection") if temperature else ("coupled",))
    ]
    stored = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    prior = knowledge.read(tmp_path / knowledge.PRIOR_FILE, knowledge.Knowledge)
    greedy = [row["rounds"] for row in stored if row["temperature"] == 0]
    assert prior is not None and prior.laws[0].acceptance[0][1] == sum(greedy) > 0


def test_a_table_of_prompts_that_are_all_too_long_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "x " * 2000}) + "\n")
    done = CliRunner().invoke(report.main, [str(target), str(draft), "--evaluate-on", str(file)])
    assert done.exit_code == 1 and "no prompt of 'long' leaves room" in done.stderr


def test_an_independent_draft_has_its_own_embedding(target: Path, draft: Path, tmp_path: Path) -> None:
    work = ["--work", str(draft / "work")]
    distill(target, tmp_path, *work, "--width", "16", "--depth", "1", "--epochs", "1", "--until", "train")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config.get("shared_with_target")) == (16, 1, None)
    assert load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].shape == (300, 16)


def linear(name: str) -> bool:
    return "_proj." in name


def in_8_bits(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


def test_a_target_computes_with_the_inputs_that_it_is_served_with(tmp_path: Path) -> None:
    """Those of 8 bits in GGUF's blocks."""
    ggufs.write(tmp_path / "tiny.gguf", "Q4_1", tiny.tokenizer(tmp_path))

    def logits(activations: Activations | None) -> torch.Tensor:
        runner = load_runner(str(tmp_path / "tiny.gguf"), torch.float32, tiny.CPU, 64, activations=activations)
        return runner.forward([Row(tiny.token_ids(9, seed=1), 0, range(1), outputs=9)])

    assert torch.equal(logits(None), logits("int8"))
    assert not torch.equal(logits(None), logits("float32"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("plan", [StudentPlan(layers=(0, 2), vocab=80), StudentPlan(width=16, depth=2)], ids=str)
@pytest.mark.parametrize("store", ["bfloat16", "int8"])
def test_the_engine_runs_what_was_trained(family: str, plan: StudentPlan, store: Store, tmp_path: Path) -> None:
    """Folder and config mean the same to both, for layers over a shared embedding and for an independent model."""
    target = getattr(tiny, family)(tmp_path / "target", num_hidden_layers=3)
    student = build(target, plan, [])
    for name, parameter in student.named_trainable():
        rounded = in_8_bits(parameter.data) if store == "int8" and linear(name) else parameter.data.bfloat16().float()
        parameter.data = rounded
    student.write(target, tmp_path, store)
    runner = load_runner(str(tmp_path), torch.float32, tiny.CPU, 64, lender=str(target), activations="float32")
    ids = tiny.token_ids(20, seed=1)
    found = runner.forward([Row(ids, 0, range(2), outputs=20)])
    with torch.inference_mode():
        states = student.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        expected = (states @ student.head.T)[:, : plan.vocab or None]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_trained_for_4_bits_is_what_the_engine_runs(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    target = getattr(tiny, family)(tmp_path / "target", **sizes, **({"head_dim": 16} if family == "qwen3" else {}))
    student = build(target, StudentPlan(layers=(1,)), [])
    round_in_training(student, "int4")
    for name, parameter in student.named_trainable():
        if not linear(name):
            parameter.data = parameter.data.bfloat16().float()
    student.write(target, tmp_path, "int4")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight_packed"].shape == (64, 16)
    runner = load_runner(str(tmp_path), torch.float32, tiny.CPU, 64, lender=str(target), activations="float32")
    ids = tiny.token_ids(20, seed=1)
    found = runner.forward([Row(ids, 0, range(2), outputs=20)])
    with torch.inference_mode():
        states = student.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        assert (found - states @ student.head.T).abs().max() <= 1e-4


def test_a_student_that_4_bits_do_not_fit_is_refused(target: Path) -> None:
    with pytest.raises(UsageError, match=r"--store int4 .* multiple of 64 inputs: .* has 32"):
        round_in_training(build(target, StudentPlan(layers=(1,)), []), "int4")


def test_a_student_begins_with_the_weights_of_a_draft(target: Path, draft: Path) -> None:
    student = build(target, StudentPlan(layers=(0, 2)), [])
    student.begin_with(draft)
    stored = load_file(draft / "model.safetensors")
    assert {name: (parameter - stored[name]).abs().max().item() for name, parameter in student.named_trainable()} == (
        dict.fromkeys(stored, 0.0)
    )
    for layers in ((0,), (0, 1, 2)):
        with pytest.raises(UsageError, match=f"has num_hidden_layers 2, the student {len(layers)}"):
            build(target, StudentPlan(layers=layers), []).begin_with(draft)
