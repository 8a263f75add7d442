"""`ssd chat`: talk with a model, on a terminal or line by line from a file."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from ssd.cli.command import GroupedCommand, main_option
from ssd.cli.options import address_options, local_engine_options, sampling_options, speculation_changes
from ssd.cli.session import LOG, Terminated, connect, no_chat, process_setup, speculating, summary
from ssd.client import Client, Completion
from ssd.config.params import SamplingDefaults, SamplingParams
from ssd.errors import RequestError, UsageError
from ssd.ipc.connection import validate
from ssd.ipc.public import ChatMessage, Generate, Metrics, printable
from ssd.launch.options import EngineOptions

_MAX_TOKENS = 1024
_EXAMPLES = """
ssd chat
ssd chat --model ./model.gguf --draft ./small.gguf
ssd chat --address http://127.0.0.1:8000 --system "Be brief."
"""
_PARAMETERS = SamplingParams.__struct_fields__
_WORDS = {"none": None, "true": True, "false": False}
_QUOTES = '"""'
_HELP = """\
/set               show the sampling parameters
/set NAME VALUE    change one, as /set temperature 0.7 or /set stop ["END"]
/stats             what the answers of this session took
/save FILE         write the conversation to a new FILE: Markdown if it ends in .md, else JSON
/system TEXT       set the system message; /system "" removes it, /system alone shows it
/retry             ask the last question again
/clear             begin a new conversation
/help              show this
/exit              leave, as Ctrl-D does
A message of several lines stands between two \"\"\", or each of its lines but the last ends with \\.
Ctrl-C stops an answer. A line that begins with a space is never a command. What you type during an answer is kept."""


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@local_engine_options
@main_option("--system", help="What to tell the model before the conversation.")
@sampling_options(max_tokens=_MAX_TOKENS)
@address_options
@click.pass_context
def chat(
    context: click.Context,
    system: str | None,
    address: str | None,
    keys: Path | None,
    engine: EngineOptions,
    **sampling: Any,
) -> None:
    """Talk with a model; /help lists the program's own commands.

    A message of several lines stands between two \"\"\", or all its lines but the last end with a backslash. Without a
    terminal, each line of standard input is a message, and the first failure ends the chat. Answers go to standard
    output, everything else to standard error."""
    conversation = Conversation(SamplingDefaults().params(**sampling), system)
    validate(Generate(0, messages=conversation.question("hello"), params=conversation.params))
    changes = {} if address is None else speculation_changes(context, engine)
    with process_setup(), connect(address, keys, engine, chat=True) as client:
        served = client.describe()
        if not served.chat:
            raise UsageError(no_chat(served.model))
        conversation.params = speculating(served.sampling.params(**sampling), served, changes)
        _ChatSession(client, printable(served.model), conversation).run()


class _ChatSession:
    def __init__(self, client: Client, model: str, conversation: Conversation) -> None:
        self._client, self._model, self._conversation = client, model, conversation
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": lambda argument: _tell(conversation.set(argument)),
            "/stats": lambda _: _tell(self._stats()),
            "/save": self._save,
            "/system": lambda argument: _tell(conversation.tell(argument)),
            "/retry": lambda _: self._answer(conversation.retract()),
            "/clear": lambda _: conversation.clear(),
            "/help": lambda _: _tell(_HELP),
        }

    def run(self) -> None:
        quietly: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._interactive:
            from ssd.plugins.chat.markdown import unechoed as quietly

            _tell(f"{self._model}. /help lists the commands, Ctrl-D ends.")
        for entry in _entries(self._interactive):
            if entry.rstrip() == "/exit":
                return
            try:
                with quietly():
                    self._obey(entry) if entry.startswith("/") else self._answer(entry.strip())
            except (RequestError, UsageError) as error:
                if not self._interactive:
                    raise
                _tell(f"error: {error}")

    def _obey(self, line: str) -> None:
        name, *argument = line.split(maxsplit=1)
        if name not in self._commands:
            raise UsageError(f"no command {name}; /help lists them")
        self._commands[name]("".join(argument).strip())

    def _answer(self, text: str) -> None:
        """Show the answer to `text` and remember both; Ctrl-C ends it early."""
        if not text:
            return
        said, completion, conversation = "", None, self._conversation
        try:
            chunks = self._client.stream(conversation.question(text), conversation.params)
            with closing(chunks), LOG.held(), _display() as show:
                for chunk in chunks:
                    said += chunk.text
                    show(chunk.text)
                    completion = chunk.completion
        except RequestError as error:
            hint = "; /clear begins a new conversation" if error.code == "context_length_exceeded" else ""
            raise RequestError(error.code, f"{error}{hint}") from None
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) or not self._interactive:
                raise
        finally:
            conversation.keep(text, said)
        click.secho("stopped" if completion is None else self._counted(completion), dim=True, err=True)

    def _counted(self, completion: Completion) -> str:
        tokens, why = completion.usage.completion_tokens, ""
        self._conversation.count(tokens, completion.metrics)
        if completion.finish_reason == "length":
            at_most = tokens >= self._conversation.params.max_tokens
            why = "; cut at max_tokens" if at_most else "; the context is full, /clear begins a new conversation"
        return summary(tokens, completion.metrics, why)

    def _stats(self) -> str:
        conversation = self._conversation
        answers = f"{conversation.answers} answer{'s' * (conversation.answers != 1)}"
        return f"{answers}: {summary(conversation.tokens, conversation.metrics)}"

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("give a file: /save FILE")
        path = Path(os.path.expanduser(name))  # Path's own fails for a user that does not exist
        written = self._conversation.as_markdown if path.suffix == ".md" else self._conversation.as_json
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(written(self._model))
        except FileExistsError:
            raise UsageError(f"{path} exists; nothing was written") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        _tell(f"saved in {path}")


def _entries(interactive: bool) -> Iterator[str]:
    """Yield the messages and commands that the user enters, each of one line or more."""
    read = _ask if interactive else _piped()
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its line editing
    while (line := read("> ")) is not None:
        try:
            entry = _whole(line, read)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) or not interactive:
                raise
            _tell("")  # Ctrl-C drops a message that has begun
        else:
            yield entry


def _whole(line: str, read: Callable[[str], str | None]) -> str:
    head, opening, text = line.partition(_QUOTES)
    if opening and head.strip() in ("", "/system"):
        while _QUOTES not in text and (more := read("... ")) is not None:
            text = f"{text}\n{more}"
        return (head or " ") + text.replace(_QUOTES, "", 1)  # after a space it is no command
    while line.endswith("\\") and (more := read("... ")) is not None:
        line = f"{line[:-1]}\n{more}"
    return line


def _ask(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        _tell("")  # leave the prompt's line
        return None


def _piped() -> Callable[[str], str | None]:
    lines = open(sys.stdin.fileno(), encoding="utf-8", closefd=False)  # noqa: SIM115  # in every locale

    def read(_: str) -> str | None:
        try:
            line = lines.readline()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not text: {error.reason}") from None
        return line.removesuffix("\n") if line else None

    return read


def _tell(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _display() -> Iterator[Callable[[str], None]]:
    if sys.stdout.isatty():
        from rich.console import Console

        from ssd.plugins.chat.markdown import GrowingMarkdown

        with GrowingMarkdown(Console()) as markdown:
            yield markdown.add
        return
    begun = False

    def add(text: str) -> None:
        nonlocal begun
        begun |= bool(text)
        click.echo(text, nl=False)

    try:
        yield add
    finally:
        if begun:
            click.echo()


class Conversation:
    """A chat's state without input or output. `system` is the system message, which stays first."""

    def __init__(self, params: SamplingParams, system: str | None = None) -> None:
        self.params = params
        self.answers = self.tokens = 0
        self.metrics = Metrics()
        self._system = system
        self._said: list[ChatMessage] = []
        self._before, self._retracted, self._asked = self._said, self._said, ""

    @property
    def messages(self) -> list[ChatMessage]:
        return ([] if self._system is None else [ChatMessage("system", self._system)]) + self._said

    def question(self, text: str) -> list[ChatMessage]:
        """Return the messages to send when the user says `text`. Only `keep` remembers them."""
        return [*self.messages, ChatMessage("user", text)]

    def keep(self, text: str, answer: str) -> None:
        """Remember an exchange; without any answer, restore the exchange that `retract` took back."""
        self._before, self._asked = self._said, text
        if answer:
            self._said = [*self._said, ChatMessage("user", text), ChatMessage("assistant", answer)]
        elif self._retracted:
            self._said = self._retracted
        self._retracted = []

    def retract(self) -> str:
        """Take the last exchange back, until `keep`, and return its question. Raises UsageError without one."""
        if not self._asked:
            raise UsageError("there is no question to ask again")
        self._retracted, self._said = self._said, self._before
        return self._asked

    def tell(self, system: str) -> str:
        """Change the system message ('""': to none) and return it. "" only returns it."""
        if system:
            self._system = None if system == '""' else system
        return "no system message" if self._system is None else f"system: {self._system}"

    def count(self, tokens: int, metrics: Metrics) -> None:
        self.answers += 1
        self.tokens += tokens
        self.metrics = _merged(self.metrics, metrics)

    def clear(self) -> None:
        self._said, self._asked = [], ""

    def set(self, argument: str) -> str:
        """Set a sampling parameter, for example "temperature 0.7", and return its value.

        A name alone returns its value; "" returns all values. Raises UsageError, which names the parameter and its
        bounds."""
        name, *value = re.split(r"[\s=]+", argument.strip(), maxsplit=1)
        if not name:
            return "\n".join(map(self._shown, _PARAMETERS))
        if name not in _PARAMETERS:
            raise UsageError(f"no parameter {name!r}; there are {', '.join(_PARAMETERS)}")
        if value and value[0]:
            self.params = _changed(self.params, name, value[0])
        return self._shown(name)

    def _shown(self, name: str) -> str:
        return f"{name} {msgspec.json.encode(getattr(self.params, name)).decode()}"

    def as_json(self, model: str) -> str:
        document = {"model": model, "params": self.params, "messages": self.messages}
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"

    def as_markdown(self, model: str) -> str:
        parts = [f"**{message.role}**\n\n{message.content}" for message in self.messages]
        return "\n\n".join([f"# A conversation with {model}", *parts]) + "\n"


def _changed(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """Return `params` with one parameter as typed; raise UsageError if its value is not allowed."""
    value = _typed(text)
    if isinstance(getattr(SamplingParams(), name), tuple) and not isinstance(value, list):
        value = [] if value is None else [value]
    try:
        # The JSON decoder checks the bounds and accepts the keys of logit_bias as text.
        decoded = msgspec.json.decode(msgspec.json.encode({name: value}), type=SamplingParams)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{name} {text}: {str(error).split(' - at ')[0]}") from None
    changed = replace(params, **{name: getattr(decoded, name)})
    changed.check()
    return changed


def _typed(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _merged(a: Metrics, b: Metrics) -> Metrics:
    rounds = max(1, a.rounds + b.rounds)
    seconds = a.generation_time_ms + b.generation_time_ms
    decoded = a.tokens_per_second * a.generation_time_ms + b.tokens_per_second * b.generation_time_ms
    hits, misses, accepted = a.hits + b.hits, a.misses + b.misses, a.accepted_tokens + b.accepted_tokens

    def mean(name: str) -> float:
        each: float = getattr(a, name) * a.rounds + getattr(b, name) * b.rounds
        return each / rounds

    return Metrics(
        mode=b.mode,
        rounds=a.rounds + b.rounds,
        accepted_tokens=accepted,
        hits=hits,
        misses=misses,
        mean_acceptance_length=1 + accepted / rounds,
        hit_rate=hits / max(1, hits + misses),
        tokens_per_second=decoded / seconds if seconds else 0.0,
        generation_time_ms=seconds,
        verify_ms=mean("verify_ms"),
        draft_wait_ms=mean("draft_wait_ms"),
        round_overhead_ms=mean("round_overhead_ms"),
        plan=b.plan or a.plan,
    )
