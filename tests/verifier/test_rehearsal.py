"""What a fresh process knows of its machine before the first request: real processes on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssd import LLM, SamplingParams
from ssd.config.params import Mode, Speculation
from ssd.ipc.board import BoardReader, size_bytes
from ssd.ipc.process import memory_file
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.tuning.costs import FAR, NEAR, SITUATIONS, Costs
from ssd.verifier import rehearsal
from ssd.verifier.rehearsal import Experience, PairRehearsal, TargetRehearsal
from tests.models import tiny

PROMPTS = [tiny.token_ids(40, seed) for seed in range(3)]


@pytest.fixture
def pair(tmp_path: Path, own_cache: Path) -> tuple[str, str]:
    """A target and its draft, of which nothing is known yet."""
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", seed=3, vocab_size=300))
    return str(target), str(tiny.noisy_copy(target, tmp_path / "draft", noise=0.02))


def params(mode: Mode, temperature: float) -> list[SamplingParams]:
    asked = Speculation(mode, 0, (), "auto")
    return [
        SamplingParams(temperature=temperature, seed=n, max_tokens=60, ignore_eos=True, speculation=asked)
        for n in range(len(PROMPTS))
    ]


def known(cache: Path) -> tuple[Path, dict[str, dict[str, float]]]:
    """The file of what was measured, and its tables."""
    (file,) = (file for file in (cache / "tables").glob("*.json") if not file.name.endswith(".draft.json"))
    return file, json.loads(file.read_text())["tables"]


def test_a_machine_is_measured_once(pair: tuple[str, str], tmp_path: Path) -> None:
    with LLM(*pair, dtype="float32", max_num_seqs=4) as llm:
        plain = [llm.generate(PROMPTS, params("ar", temperature)) for temperature in (0.0, 0.8)]
        auto = [llm.generate(PROMPTS, params("auto", temperature)) for temperature in (0.0, 0.8)]
    assert [[c.token_ids for c in turn] for turn in auto] == [[c.token_ids for c in turn] for turn in plain]
    assert all("predicted for the next rounds" in c.metrics.plan for turn in auto for c in turn)
    assert not any(c.metrics.plan for turn in plain for c in turn)
    file, tables = known(tmp_path / "cache")
    if not tables:  # other work disturbed the measuring: the next process measures again
        tables = {situation: {"1": 0.001, "8": 0.002} for situation in SITUATIONS}
    assert set(tables) == set(SITUATIONS)
    content = json.loads(file.read_text()) | {"tables": tables}
    content["tables"]["verify"]["1000"] = 5.0  # nobody measures that
    file.write_text(json.dumps(content))
    with LLM(*pair, dtype="float32", max_num_seqs=4) as llm:
        again = llm.generate(PROMPTS, params("auto", 0.0))
    assert [c.token_ids for c in again] == [c.token_ids for c in plain[0]]
    assert known(tmp_path / "cache")[1]["verify"]["1000"] == 5.0


def test_times_with_a_draft_that_came_late_are_saved_at_once(pair: tuple[str, str], tmp_path: Path) -> None:
    experience = Experience(resolve(EngineOptions(target=pair[0], draft=pair[1:])))
    experience.save()  # the draft loads still
    for table in experience.tuning.estimates.costs.tables.values():
        table.set(1, 0.01)
    experience.measured()
    experience.save()
    assert all(known(tmp_path / "cache")[1].values())


class ScriptedVerifications(TargetRehearsal):
    """Verifications whose seconds follow from the size, `slower` times as many from the second look on."""

    def __init__(self, slower: float) -> None:
        self._slower, self._seen = slower, set[int]()
        self.looks, self._most = 0, 8

    def room(self, text: int) -> bool:
        return True

    def begin(self) -> None:
        pass

    end = begin

    def verify(self, tokens: int, text: int = NEAR) -> float:
        if text == FAR:
            return 2 * min(1.0, self._slower) * (4 + tokens) / 1e3
        if tokens == 1 and 2 in self._seen:  # the sizes begin again
            self._seen.clear()
            self.looks += 1
        self._seen.add(tokens)
        return (4 + tokens) / 1e3 * (1.0 if self.looks == 0 else self._slower)


def empty_board() -> BoardReader:
    return BoardReader(memory_file("board", size_bytes(1)), 1, 300)


@pytest.mark.parametrize(("slower", "agree"), [(1.4, False), (1.1, True), (0.7, False)])
def test_times_are_kept_if_a_second_look_agrees(slower: float, agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_PATIENCE_S", 0.0)  # this draft never answers
    costs, machine = Costs(), ScriptedVerifications(slower)
    for _ in PairRehearsal(machine, lambda _: True, empty_board(), None).fill(costs):
        pass
    assert machine.looks > 0 and costs.disturbed is not agree
    assert costs.tables["verify"].at(1) == pytest.approx(min(1.0, slower) * 0.005)
    assert costs.written().get("verify") == (costs.tables["verify"].seconds if agree else None)
    assert costs.text == pytest.approx({"verify": 1 / (FAR - NEAR)})


def test_a_slow_target_is_measured_up_to_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of 1.5 billion parameters: the first sizes say little of those of a batch."""
    monkeypatch.setattr(rehearsal, "_PATIENCE_S", 0.0)
    costs, machine = Costs(), ScriptedVerifications(1.0)
    machine._most = 64
    monkeypatch.setattr(machine, "verify", lambda tokens, text=NEAR: 0.06 + 0.005 * tokens)
    for _ in PairRehearsal(machine, lambda _: True, empty_board(), None).fill(costs):
        pass
    assert {4, 8, 12, 16} < {*costs.tables["verify"].seconds} and 24 not in costs.tables["verify"].seconds


def test_without_a_draft_the_target_alone_is_measured() -> None:
    costs, machine = Costs(), ScriptedVerifications(1.0)
    for _ in PairRehearsal(machine, None, empty_board(), None).fill(costs):
        pass
    assert {name for name, table in costs.tables.items() if table.known} == {"verify"}


def test_times_of_an_interrupted_look_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_PATIENCE_S", 0.0)
    costs, machine = Costs(), ScriptedVerifications(1.0)
    work = PairRehearsal(machine, lambda _: True, empty_board(), None).fill(costs)
    for _ in range(3):
        next(work)
    work.close()
    assert costs.tables["verify"].known and not costs.written()


def test_without_a_draft_prompt_lookup_remains(pair: tuple[str, str]) -> None:
    target, _ = pair
    text = [*PROMPTS[0], *PROMPTS[0], *PROMPTS[0]]
    with LLM(target, "", dtype="float32") as llm:
        answers = [llm.generate([text], params(mode, 0.0)[:1])[0] for mode in ("ar", "ngram", "auto")]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert all(answer.metrics.hits + answer.metrics.misses == 0 for answer in answers)
