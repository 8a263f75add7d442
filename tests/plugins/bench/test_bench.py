"""`ssd bench` as a user calls it: on a tiny pair, at servers, and with what cannot be measured."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ssd.cli.main import main
from ssd.client import Client, Completion
from ssd.config.engine import NEVER_S, EngineConfig
from ssd.config.params import SamplingParams, Speculation
from ssd.errors import SsdError
from ssd.launch.supervisor import Engine
from ssd.plugins.bench import load, runs
from ssd.plugins.bench.runs import BenchTurn, perplexities
from ssd.plugins.bench.settings import Protocol, Sweep
from tests.cli.test_cli import HEAVY, assert_light
from tests.faults.engine import running_engine
from tests.models import tiny

MODES = ["ar", "ngram", "sd", "ssd", "auto"]
SMALL = ("--prompts", "3", "--tokens", "12")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.tokenizer(tiny.llama(folder / "target", vocab_size=300))
    draft = tiny.tokenizer(tiny.noisy_copy(target, folder / "draft", noise=0.01))
    return ["--target", str(target), "--draft", str(draft)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"number {n}", "and now?"]}) + "\n" for n in range(5)))
    return str(file)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def measured(tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    result = bench(*arguments, "--json", file)
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(file.read_text())
    return found | {"stdout": result.stdout}


def refused(pair: list[str], arguments: list[str], words: list[str]) -> None:
    """Assert that what cannot be measured is refused in one line, which has these words."""
    models = [] if "--address" in arguments else pair[:2] if "--draft" in arguments else pair
    dataset = [] if "--dataset" in arguments else ["--dataset", "random"]
    result = bench(*arguments, *models, *dataset)
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and result.stdout == ""
    for word in words:
        assert word in line


# -- on an engine of its own ------------------------------------------------------------------------------------------


def test_without_a_draft_its_modes_are_left_out_in_a_line(pair: list[str], texts: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = bench("latency", *pair[:2], "--dataset", texts, *SMALL, "--json", file)
    assert result.exit_code == 0, result.output
    assert [row["mode"] for row in json.loads(file.read_text())["rows"]] == ["ar", "ngram", "auto"]
    assert f"{pair[1]} has no draft: sd and ssd are left out; give --draft to compare them\n" in result.stderr
    assert "T = 0, batch 1: medians, 3 prompts of 12 tokens; over: median of pairs" in result.stdout


def test_latency_has_every_figure(pair: list[str], texts: str, tmp_path: Path) -> None:
    more = ("--temperature", "1", "-k", "3", "--perplexity")
    found = measured(tmp_path, "latency", *pair, "--dataset", texts, *SMALL, *more)
    rows = found["rows"]
    assert [row["mode"] for row in rows] == MODES
    cores = len(os.sched_getaffinity(0))
    for row in rows:
        assert row["temperature"] == 1 and row["equal_to_ar"] == row["answers"] == 3
        assert row["tok_s"] > 0 and row["verify_ms"] > 0 and row["over_ar"] > 0
        assert sum(map(int, re.findall(r"\d+", row["runs_on"]))) == cores
        assert ("+" in row["runs_on"]) == (row["mode"] == "ssd" and cores > 1)
        assert row["perplexity"] == rows[0]["perplexity"] > 1  # that of the same tokens
    assert found["workload"] | {"prompts": 3, "tokens": 12, "chat": True, "ignore_eos": True} == found["workload"]
    assert found["environment"]["cores"] and found["engine"]["target_name"] == "target"
    assert rows[MODES.index("auto")]["plan"]
    for words in (
        "T = 1",
        "over sd",
        "runs on",
        "ids = ar",
        "3/3",
        "perplexity",
        "Equal hardware",
        "auto at T = 1, batch 1",
    ):
        assert words in found["stdout"]


def test_throughput_goes_over_batches(pair: list[str], tmp_path: Path) -> None:
    arguments = ("--dataset", "random", "--input-len", "20", *SMALL, "--batch-size", "1", "--batch-size", "2")
    found = measured(tmp_path, "throughput", *pair, *arguments, "--repeats", "2", "--modes", "ar,ssd")
    rows = found["rows"]
    assert [(row["mode"], row["batch_size"]) for row in rows] == [(m, b) for b in (1, 2) for m in ("ar", "ssd")]
    # The second batch of two is filled up with the first prompt.
    assert all(row["equal_to_ar"] == row["answers"] == {1: 6, 2: 8}[row["batch_size"]] for row in rows)
    assert found["workload"]["input_len"] == 20 and "batch 2" in found["stdout"]


def test_serving_compares_the_modes_of_an_engine_of_its_own(pair: list[str], texts: str, tmp_path: Path) -> None:
    arguments = ("--dataset", texts, *SMALL, "--request-rate", "50", "--max-concurrency", "2")
    found = measured(tmp_path, "serve", *pair, *arguments)
    assert [row["mode"] for row in found["rows"]] == MODES
    for row in found["rows"]:
        assert (row["completed"], row["failed"], row["equal_to_ar"]) == (3, 0, 3)
        assert row["total_output_tokens"] == 36 and row["max_concurrent_requests"] <= 2
        assert row["mean_ttft_ms"] < row["mean_e2el_ms"] and row["p99_itl_ms"] > 0
    assert found["workload"]["request_rate"] == 50 and any("read before" in note for note in found["notes"])


# -- at a running engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(pair: list[str]) -> Iterator[Engine]:
    with running_engine(target=pair[1], draft=(pair[3],), mode="ssd", num_speculative_tokens=2) as engine:
        yield engine


def test_a_running_engine_is_asked_as_it_runs(served: Engine, texts: str, tmp_path: Path) -> None:
    found = measured(tmp_path, "serve", "--address", served.address, "--dataset", texts, *SMALL)
    (row,) = found["rows"]
    assert (row["mode"], row["k"], row["completed"], row["request_rate"]) == ("ssd", 2, 3, "inf")
    assert found["engine"]["address"] == served.address and found["notes"] == []
    found = measured(tmp_path, "serve", "--address", served.address, "--dataset", texts, *SMALL, "--modes", "ar,sd")
    assert [row["equal_to_ar"] for row in found["rows"]] == [3, 3]


def test_perplexity_is_that_of_the_answers_after_their_prompts(served: Engine, pair: list[str]) -> None:
    with Client(served.address) as client:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
        answers = client.generate([[5, 6, 7], [8, 9]], params)
        room = served.config.max_model_len - 12
        long = client.generate([tiny.token_ids(room, 0, 300)], params)
        found = perplexities(client, {"both": [BenchTurn(answers, 1.0)], "long": [BenchTurn(long, 1.0)]})
    oracle = tiny.oracle(Path(pair[1]))

    def losses(answer: Completion) -> torch.Tensor:
        ids = answer.prompt_token_ids + answer.token_ids
        logprobs = tiny.oracle_logits(oracle, ids).log_softmax(-1)
        steps = torch.arange(len(answer.prompt_token_ids), len(ids))
        return -logprobs[steps - 1, torch.tensor(ids)[steps]]

    assert found["both"] == pytest.approx(math.exp(torch.cat([losses(answer) for answer in answers]).mean()), rel=1e-3)
    # A context that is full has no place for one more token: the last one is left out.
    assert found["long"] == pytest.approx(math.exp(losses(long[0])[:-1].mean()), rel=1e-3)


def test_other_ids_than_those_of_ar_are_an_error(
    served: Engine, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is written all the same."""

    async def worse(*given: Any) -> load.Pass:
        found = await drive(*given)
        if given[-1].startswith("sd"):
            found.answers[1].token_ids[-1] ^= 1
        return found

    drive = load.drive
    monkeypatch.setattr(load, "drive", worse)
    file = tmp_path / "figures.json"
    arguments = ("--dataset", texts, *SMALL, "--modes", "ar,sd", "--json", file)
    result = bench("serve", "--address", served.address, *arguments)
    assert result.exit_code == 1
    assert "error: sd at T = 0: 1 of 3 answers have other ids than ar" in result.stderr
    assert [row["equal_to_ar"] for row in json.loads(file.read_text())["rows"]] == [3, 2]


def test_modes_take_turns_on_the_same_prompts_and_seeds(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any, int | None]] = []
    generate = Client.generate

    def noted(client: Client, batch: list[Any], params: Any, **more: Any) -> list[Completion]:
        for prompt, each in zip(batch, params if isinstance(params, list) else [params], strict=False):
            if each.max_tokens == 5:  # neither to warm up nor to have prompts read
                asked.append((each.speculation.mode, prompt, each.seed))
        return generate(client, batch, params, **more)

    monkeypatch.setattr(Client, "generate", noted)
    settings = Sweep(("ar", "ngram", "sd", "ssd", "auto")).settings(
        Speculation(num_speculative_tokens=2, fan_out=(3,), backup="jit")
    )
    prompts: list[Any] = [[5, 6], [7, 8]]
    with Client(served.address) as client:
        protocol = Protocol(5, chat=False, seed=3)
        runs.measure(client, prompts, settings, 0.0, protocol, repeats=2)
        found = runs.measure(client, prompts[:1] * 2, settings, 0.0, protocol, batch_size=2)
    once = [(mode, prompt, 3 + number) for number, prompt in enumerate(prompts) for mode in MODES]
    assert asked == once * 2 + [(mode, prompts[0], 3 + number) for mode in MODES for number in range(2)]
    assert [[len(turn.completions) for turn in found[mode]] for mode in MODES] == [[2]] * len(MODES)


@pytest.mark.parametrize(
    "arguments", [["bench", "--help"], ["bench", "latency", "--help"], ["bench", "serve", "--request-rate", "0"]]
)
def test_heavy_libraries_stay_out_of_help_and_refusals(arguments: list[str]) -> None:
    assert_light({f"from ssd.cli.main import main; main({arguments})": ["numpy", "rich", *HEAVY]})


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Engine, timeout: float = 0.0) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(Engine, "start", start)


@pytest.mark.parametrize("command", ["latency", "serve"])
def test_a_draft_stays_until_its_mode_is_measured(
    command: str, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineConfig] = []

    def start(self: Engine, timeout: float = 0.0) -> None:
        seen.append(self.config)
        raise SsdError("enough")

    monkeypatch.setattr(Engine, "start", start)
    assert "enough" in bench(command, *pair, *SMALL, "--modes", "ar,auto").stderr
    (config,) = seen
    assert config.parks_draft and config.idle_draft_s == NEVER_S
