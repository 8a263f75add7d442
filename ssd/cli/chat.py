"""`ssd chat`: talk with a model, on a terminal or line by line from a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from ssd.cli.conversation import Conversation
from ssd.cli.options import address_options, engine_options, sampling_options, speculation_changes
from ssd.cli.session import Terminated, connect, process_setup, speculating, summary
from ssd.client import Client, Completion
from ssd.errors import RequestError, UsageError
from ssd.ipc.connection import validate
from ssd.ipc.messages import Generate
from ssd.launch_config import EngineOptions
from ssd.params import SamplingParams

_MAX_TOKENS = 1024
_HELP = """\
/set               show the sampling parameters
/set NAME VALUE    change one, as /set temperature 0.7 or /set stop ["END"]
/stats             what the answers of this session took
/save FILE         write the conversation to a new FILE: Markdown if it ends in .md, else JSON
/clear             begin a new conversation
/help              show this
/exit              leave, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a space is never a command."""


@click.command()
@click.option("--system", help="What to tell the model before the conversation.")
@sampling_options(max_tokens=_MAX_TOKENS)
@address_options
@engine_options
@click.pass_context
def chat(
    context: click.Context,
    system: str | None,
    address: str | None,
    keys: Path | None,
    engine: EngineOptions,
    **sampling: Any,
) -> None:
    """Talk with a model; /help lists what can be said to the program instead.

    Without a terminal, each line of standard input is a message, and the first failure ends the chat. Answers go to
    standard output, everything else to standard error.
    """
    conversation = Conversation(SamplingParams(**sampling), system)
    validate(Generate(0, messages=conversation.question("hello"), params=conversation.params))
    changes = {} if address is None else speculation_changes(context, engine)
    with process_setup(), connect(address, keys, engine) as client:
        served = client.describe()
        if not served.chat:
            raise UsageError(f"{served.model} has no chat format; use ssd generate")
        conversation.params = speculating(conversation.params, served, changes)
        _Chat(client, served.model, conversation).run()


class _Chat:
    def __init__(self, client: Client, model: str, conversation: Conversation) -> None:
        self._client, self._model, self._conversation = client, model, conversation
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": lambda argument: _tell(conversation.set(argument)),
            "/stats": lambda _: _tell(self._stats()),
            "/save": self._save,
            "/clear": lambda _: conversation.clear(),
            "/help": lambda _: _tell(_HELP),
        }

    def run(self) -> None:
        """Until the input ends or /exit."""
        if self._interactive:
            _tell(f"{self._model}. /help lists the commands, Ctrl-D ends.")
        for line in _lines(self._interactive):
            if line.rstrip() == "/exit":
                return
            try:
                self._obey(line) if line.startswith("/") else self._answer(line.strip())
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
        chunks = self._client.stream(params=conversation.params, messages=conversation.question(text))
        try:
            with closing(chunks), _display() as show:
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
        """The line under an answer."""
        tokens, why = completion.usage.completion_tokens, ""
        self._conversation.count(tokens, completion.metrics)
        if completion.finish_reason == "length":
            at_most = tokens >= self._conversation.params.max_tokens
            why = "; cut at max_tokens" if at_most else "; the context is full, /clear begins a new conversation"
        return summary(tokens, completion.metrics) + why

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


def _lines(interactive: bool) -> Iterator[str]:
    """What the user enters."""
    if not interactive:
        try:
            with open(sys.stdin.fileno(), encoding="utf-8", closefd=False) as lines:  # whatever the locale
                yield from lines
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not text: {error.reason}") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its line editing
    while True:
        try:
            yield input("> ")
        except EOFError:
            _tell("")  # leave the prompt's line
            return


def _tell(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _display() -> Iterator[Callable[[str], None]]:
    """What shows an answer as it comes: drawn Markdown on a terminal, else the text itself and a newline after it."""
    if sys.stdout.isatty():
        from rich.console import Console

        from ssd.cli.markdown import GrowingMarkdown, unechoed

        with unechoed(), GrowingMarkdown(Console()) as markdown:
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
