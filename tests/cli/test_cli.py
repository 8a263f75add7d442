"""What the command line says and how it ends, without an engine or with a scripted one."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from ssd import __version__
from ssd.cli.command import GroupedCommand
from ssd.cli.main import _COMMANDS, _commands, main
from ssd.config.params import Speculation
from ssd.errors import out_of_memory
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Emission, Submit
from ssd.ipc.public import ChatMessage, Metrics
from ssd.launch.supervisor import Engine
from ssd.models.pull import BUILTIN
from tests.scripted_engine import (
    MODEL,
    PATIENCE_S,
    ScriptedEngine,
    engine_config,
    following,
    gateway_thread,
    scripted_engine,
)

TARGET = BUILTIN["smollm2"].directory
PAIR = ["--target", str(TARGET), "--draft", str(MODEL)]


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input has to be found before anything starts."""

    def start(self: Engine, timeout: float = 0.0) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(Engine, "start", start)


def ssd(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(argument) for argument in arguments])


def assert_refused(result: Result, *words: str, exit_code: int = 2) -> None:
    assert result.exit_code == exit_code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert result.stdout == ""


# -- bad input: what tests/cli/mistakes.txt cannot say -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", *PAIR, "\udcff"], ["the prompt"]),
        (["generate", "hi", "--address", "\udcff"], [r"'\udcff' is not UTF-8"]),
        (["launch", "--served-model-name", "a\udcff"], ["--served-model-name", r"'a\udcff'", "UTF-8"]),
        (["launch", "--host", "\udcff", "--insecure"], ["--host", "UTF-8"]),
        (["launch", "--target", "\udcff"], ["--target", "UTF-8"]),
    ],
)
def test_what_is_not_utf_8_is_refused_in_one_line(arguments: list[str], words: list[str]) -> None:
    assert_refused(ssd(*arguments), *words)


def greedy() -> None:
    bytearray(2**62)


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_COMMANDS, "greedy", (f"{__name__}:command", ""))
    monkeypatch.setattr(sys.modules[__name__], "command", click.command()(greedy), raising=False)
    assert_refused(ssd("greedy"), "not enough memory (MemoryError)", exit_code=1)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**59)
    assert re.match(r"not enough memory \(can't allocate memory: .*bytes", out_of_memory(caught.value))


# -- help -----------------------------------------------------------------------------------------------------------


def test_help_and_version() -> None:
    for name in ("generate", "launch", "keys", "pull", "models"):
        assert name in ssd("--help").stdout
        assert ssd(name, "--help").exit_code == 0
    assert __version__ in ssd("--version").stdout


def options_of(help: str) -> list[str]:
    return re.findall(r"^  (?:-\w+, )?(--[\w-]+)", help.partition("Main options:")[2], re.MULTILINE)


def command_of(name: str) -> click.Command:
    found: click.Command = main
    for part in name.split():
        assert isinstance(found, click.Group)
        next_one = found.get_command(click.Context(found), part)
        assert next_one is not None
        found = next_one
    return found


def grouped(name: str, command: click.Command) -> Iterator[str]:
    """Yield the names of the commands with headings: this one, or those of a group."""
    if isinstance(command, GroupedCommand):
        yield name
    elif isinstance(command, click.Group):
        for part, below in command.commands.items():
            yield from grouped(f"{name} {part}", below)


GROUPED = [found for name in _commands() for found in grouped(name, command_of(name))]


@pytest.mark.parametrize("name", GROUPED)
def test_help_shows_the_main_options_and_help_all_every_option_once(name: str) -> None:
    brief, whole = ssd(*name.split(), "--help").stdout, ssd(*name.split(), "--help-all").stdout
    shown, flags = options_of(brief), options_of(whole)
    command = command_of(name)
    params = command.get_params(click.Context(command))
    count = sum(isinstance(param, click.Option) and not param.hidden for param in params)
    assert set(shown) < set(flags) and len(shown) <= 17
    assert {"--target", "--draft", "--help-all"} <= set(shown)
    assert len(flags) == len(set(flags)) == count
    assert brief.splitlines()[-1].endswith(f"{name} --help-all shows all {count} options.")
    assert whole.index("Main options:") < whole.index("Speculation:") < whole.index("Weights:")
    assert whole.index("Weights:") < whole.index("Other options:")


@pytest.mark.parametrize("name", GROUPED)
def test_help_has_three_examples_that_the_command_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.toml").touch()
    examples = ssd(*name.split(), "--help").stdout.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example.partition(">")[0])
        assert words[: 1 + len(name.split())] == ["ssd", *name.split()]
        command_of(name).make_context(name, words[1 + len(name.split()) :])


def test_a_file_sets_what_is_no_flag_of_generate(engine: ScriptedEngine, tmp_path: Path) -> None:
    """It may be the file of a server, too."""
    command = ("generate", "hello", "--raw", "--json", "--seed", "5", "--address", engine.address)
    file = tmp_path / "ssd.toml"
    file.write_text('port = 80\nbackup = "none"\n[speculative-config]\nnum-speculative-tokens = 3')
    assert_refused(ssd(*command, "--config", file), "give an object")
    file.write_text("port = 80\nbudget = 20\n[speculative-config]\nnum_speculative_tokens = 3")
    result = ssd(*command, "--config", file)
    assert json.loads(result.stdout)["text"] == "hello 5 3"
    file.write_text('budget = 5\nfan-out = "auto"\nnum-speculative-tokens = 8')
    for words in (command, ("generate", "hello", *PAIR)):
        assert_refused(ssd(*words, "--config", file), "a budget of 5 is less than one chain for each of 9")
    file.write_text("fan-out = 99")
    assert_refused(ssd(*command, "--config", file), "--fan-out", "0 to 16", "in the file of --config")


def test_a_variable_that_nothing_reads_is_named_in_a_line() -> None:
    command = ("launch", "--dry-run")
    result = ssd(*command, SSD_MAX_NUM_SEQ="3", SSD_MODE="ar", SSD_LOG="ERROR", SSD_PDL="1")
    assert result.exit_code == 0
    hint = "warning: no setting has the name SSD_MAX_NUM_SEQ; did you mean 'SSD_MAX_NUM_SEQS'?\n"
    assert result.stderr == hint
    assert ssd(*command, SSD_MAX_NUM_SEQS="3").stderr == ""


def test_every_variable_that_the_code_reads_is_known() -> None:
    """The list that warnings go by is that of the code."""
    sources = [*Path("ssd").rglob("*.py"), *Path("tests").rglob("*.py"), Path("setup.py")]
    read = {name for file in sources for name in re.findall(r'environ[^\n]*"(SSD_[A-Z_]+)"', file.read_text())}
    read |= {name for file in Path("ssd").rglob("*.py") for name in re.findall(r'"(SSD_[A-Z_]+)"', file.read_text())}
    result = ssd("launch", "--dry-run", **dict.fromkeys(read - {"SSD_LOG"}, ""))
    assert "no setting" not in result.stderr, result.stderr


HEAVY = ["torch", "transformers"]
LIGHT = {
    "from ssd.cli.main import main; main(['--help'])": ["zmq", "msgspec", "rich", "ssd.cli.generate", *HEAVY],
    **{
        f"from ssd.cli.main import main; main({arguments})": HEAVY
        for arguments in (
            ["generate", "--help"],
            ["generate", ""],
            ["generate", "hello", "--temperature", "-1"],
            ["launch", "--max-model-len", "0"],
            ["models", "smollm2-draft"],
        )
    },
    "import ssd.client, ssd.frontend.gateway": HEAVY,
    "import ssd; ssd.SamplingParams; ssd.LLM": HEAVY,
}


def assert_light(statements: dict[str, list[str]]) -> None:
    """Assert that statements, one after the other in one process, load none of the modules beside them."""
    watched = f"""
import sys
for statement, names in {statements!r}.items():
    try:
        exec(statement)
    except SystemExit:
        pass
    loaded = [name for name in names if name in sys.modules]
    assert not loaded, (statement, loaded)
"""
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_heavy_libraries_stay_out_of_the_command_line_and_the_frontend() -> None:
    assert_light(LIGHT)


@pytest.mark.parametrize(
    ("name", "plugin"), [("bench", "bench"), ("demo", "bench"), ("top", "monitor"), ("serve-ray", "ray")]
)
def test_a_command_of_a_removed_plugin_is_refused_with_its_name(name: str, plugin: str, tmp_path: Path) -> None:
    here = Path("ssd").resolve()
    (tmp_path / "ssd").mkdir()
    for file in here.iterdir():
        if file.name != "plugins":
            (tmp_path / "ssd" / file.name).symlink_to(file)
    (tmp_path / "pyproject.toml").symlink_to(here.parent / "pyproject.toml")
    command = [sys.executable, "-m", "ssd.cli.main", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: no such command {name!r}: this installation has no plugin {plugin}\n"


# -- with a running engine --------------------------------------------------------------------------------------------

TOKENIZER = Tokenizer(MODEL)
METRICS = Metrics("auto", 3, 0, 0, 1, 3, 1.5, hit_rate=0.25, tokens_per_second=40.0, plan="sd, K 3: 180 tok/s")


def echo(submit: Submit) -> Iterator[Emission]:
    """The prompt again, then the seed and the lookahead; endless for the prompt `forever`."""
    if submit.token_ids == TOKENIZER.encode("forever"):
        yield from (Emission(submit.request, [28120]) for _ in itertools.count())
    assert submit.params.speculation is not None
    numbers = TOKENIZER.encode(f" {submit.params.seed} {submit.params.speculation.num_speculative_tokens}")
    yield Emission(submit.request, submit.token_ids)
    yield Emission(submit.request, numbers, finish_reason="length", metrics=METRICS)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ExitStack() as stack:
        engine = stack.enter_context(scripted_engine())
        config = engine_config(draft=str(MODEL), speculation=Speculation("ssd", 2, (3,), "jit"))
        stack.enter_context(gateway_thread(engine, config))
        stack.enter_context(following(engine, echo))
        yield engine


def test_text_goes_to_stdout_and_the_numbers_to_stderr(engine: ScriptedEngine) -> None:
    result = ssd("generate", "hello there", "--raw", "--seed", "5", "--address", engine.address)
    assert result.exit_code == 0
    assert result.stdout == "hello there 5 2\n"
    line, plan = result.stderr.splitlines()
    assert "40.0 tok/s, auto" in line and plan == METRICS.plan
    assert "acceptance length 1.50" in line
    assert "hit rate 25%" in line


def test_json_is_one_object_with_the_documented_fields(engine: ScriptedEngine) -> None:
    result = ssd("generate", "hello", "--raw", "--json", "--seed", "5", "-k", "3", "--address", engine.address)
    assert result.exit_code == 0
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    completion = json.loads(line)
    assert list(completion) == ["text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "metrics"]
    ids = TOKENIZER.encode("hello")
    assert completion["text"] == "hello 5 3"
    assert completion["prompt_token_ids"] == ids
    assert completion["finish_reason"] == "length"
    assert completion["usage"] == {"prompt_tokens": len(ids), "completion_tokens": len(completion["token_ids"])}
    documented = ["mode", "rounds", "mean_acceptance_length", "hit_rate", "tokens_per_second", "verify_ms"]
    assert {*documented, "draft_wait_ms", "round_overhead_ms"} <= set(completion["metrics"])


def test_chat_is_the_default_of_a_model_with_a_template(engine: ScriptedEngine) -> None:
    result = ssd("generate", "hi", "--json", "--address", engine.address)
    assert json.loads(result.stdout)["prompt_token_ids"] == TOKENIZER.encode_chat([ChatMessage("user", "hi")])


def test_a_prompts_file_gives_one_object_a_line_in_input_order(engine: ScriptedEngine, tmp_path: Path) -> None:
    prompts = [f"number {n}\u2028end" for n in range(20)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"id": 1, "prompt": text}, ensure_ascii=False) for text in prompts))
    result = ssd("generate", "--raw", "--seed", "1", "--prompts-file", file, "--address", engine.address)
    assert [json.loads(line)["text"] for line in result.stdout.split("\n") if line] == [
        f"{text} 1 2" for text in prompts
    ]


def test_what_the_running_engine_refuses_ends_with_its_reason(engine: ScriptedEngine) -> None:
    result = ssd("generate", "word " * 500, "--raw", "--address", engine.address)
    assert_refused(result, "501 tokens", "context of 256", exit_code=1)


def test_of_a_prompts_file_the_line_that_is_refused_is_named(engine: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("fine", "word " * 500, "fine")))
    result = ssd("generate", "--raw", "--prompts-file", file, "--address", engine.address)
    assert_refused(result, f"{file}, line 2: ", "501 tokens", "context of 256", exit_code=1)


def test_what_is_not_said_of_speculation_stays_as_the_running_engine_has_it(engine: ScriptedEngine) -> None:
    """The engine's default is `ssd` with two draft tokens."""
    command = ("generate", "hello", "--raw", "--json", "--seed", "5", "--address", engine.address)
    for result in (ssd(*command), ssd(*command, "--sampler", "coupled"), ssd(*command, SSD_BACKUP="none")):
        assert json.loads(result.stdout)["text"] == "hello 5 2"
    assert json.loads(ssd(*command, SSD_NUM_SPECULATIVE_TOKENS="3").stdout)["text"] == "hello 5 3"
    assert json.loads(ssd(*command, "-k", "4").stdout)["text"] == "hello 5 4"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_request_and_is_told_in_the_exit_status(
    engine: ScriptedEngine, number: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-m", "ssd.cli.main", "generate", "forever", "--raw", "--address", engine.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == status
        assert errors.strip() == b""


def test_a_reader_that_leaves_is_no_traceback(engine: ScriptedEngine) -> None:
    command = [sys.executable, "-m", "ssd.cli.main", "generate", "forever", "--raw", "--address", engine.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 1
