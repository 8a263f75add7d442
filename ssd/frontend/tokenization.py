"""Text to token ids and back, and chat templates, with the `tokenizers` library alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace
from tokenizers import Tokenizer as _Tokenizer

from ssd.errors import RequestError, UsageError
from ssd.frontend.detokenization import TemplateFacts, Vocabulary
from ssd.frontend.fill_in import FillIn, fill_in
from ssd.frontend.parsers.plain import in_plain_text
from ssd.ipc.public import MAX_TEXT, CalledTool, ChatMessage, ChatOptions
from ssd.models.checkpoint import MAX_TOKENIZER, read_bounded, read_json
from ssd.models.vocabularies import BYTE, byte_alphabet
from ssd.system import registered

_Turn: TypeAlias = dict[str, Any]
_MOST_PIECE = 4096
_TAKEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
_ANSWER = ChatOptions()
_NO_TOOLS = "tools: expected a JSON array"
_CHAT, _TOOL_USE = "default", "tool_use"  # names of templates, as in transformers


class Tokenizer:
    """The tokenizer and chat template of the checkpoint in `directory`.

    The caller must bound the time and memory of the model's own regular expressions and template, as
    `ssd.frontend.text_server` does. Raises UsageError for a tokenizer that cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config, self._no_chat = {}, ""
        try:
            config = read_json(file) if (file := directory / "tokenizer_config.json").is_file() else {}
        except UsageError as error:  # it costs chat only
            self._no_chat = str(error)
        self._special = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value))
        }
        self._template_texts = _templates_of(config)
        self._template_files = {
            _CHAT: directory / "chat_template.jinja",
            _TOOL_USE: directory / "additional_chat_templates" / "tool_use.jinja",
        }
        # By whether there are tools: the template, and what makes its messages of those of OpenAI's format.
        self._templates: dict[bool, tuple[Template, Callable[[list[_Turn]], list[_Turn]]]] = {}

    @property
    def has_chat(self) -> bool:
        return bool(self._no_chat) or self._has_template(_CHAT)

    def _has_template(self, name: str) -> bool:
        return name in self._template_texts or self._template_files[name].is_file()

    def _template_text(self, tools: bool) -> str:
        name = _TOOL_USE if tools and self._has_template(_TOOL_USE) else _CHAT
        file = self._template_files[name]
        return read_bounded(file).decode() if file.is_file() else self._template_texts[name]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Twice as fast as `encode` for long texts: it keeps no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    @cached_property
    def fill_in(self) -> FillIn | None:
        return fill_in(self._tokenizer.get_vocab(), partial(self.encode, add_special_tokens=False), self._begin)

    def _begin(self) -> list[int]:
        plain, whole = (self.encode("a", add_special_tokens=special) for special in (False, True))
        return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []

    def encode_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions = _ANSWER, plain_tools: bool = False
    ) -> list[int]:
        return self.encode(self.render_chat(messages, options, plain_tools), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions = _ANSWER, plain_tools: bool = False
    ) -> str:
        """Return the text of a conversation in the model's chat format, special tokens included.

        With `plain_tools` the template gets tools, calls and results as text of messages. Raises RequestError for
        options that contradict each other, and where the template fails or adds more than `MAX_TEXT` characters."""
        if plain_tools:
            tools = _json(options.tools, list, _NO_TOOLS)
            has_system = not tools or self._has_system
            messages = in_plain_text(messages, tools, self._without_special, has_system)
            options = replace(options, tools="[]")
        if not options.continue_final_message:
            return self._render(messages, options)
        if options.add_generation_prompt:
            cause = (
                "a prompt cannot both continue the final message and begin another: set add_generation_prompt to false"
            )
            raise RequestError("invalid_request", cause)
        # Cut the text that the template writes after the last message: a mark in that message shows where it ends.
        mark, final = secrets.token_hex(8), messages[-1]
        marked = [*messages[:-1], replace(final, content=final.content + mark)]
        text, found, _ = self._render(marked, options).rpartition(mark)
        if not found:
            cause = "the chat template leaves out the final message, so nothing can continue it"
            raise RequestError("invalid_request", cause)
        return text.replace(mark, "")

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        tools = _json(options.tools, list, _NO_TOOLS)
        template, own_turns = self._chat_template(bool(tools))
        conversation = own_turns([_turn(message) for message in messages])
        variables = {**self._special, **_variables(options)}
        most = MAX_TEXT + sum(message.characters for message in messages) + len(options.tools)
        parts, length = [], 0
        try:
            for part in template.generate(
                messages=conversation,
                add_generation_prompt=options.add_generation_prompt,
                tools=tools or None,
                documents=None,
                **variables,
            ):
                parts.append(part)
                length += len(part)
                if length > most:
                    raise TemplateError(f"it makes more than {most} characters of them")
        except Exception as error:  # a template is the model's own code: any error fails this request only
            cause = str(error) or type(error).__name__
            raise RequestError("invalid_request", f"the chat template refuses these messages: {cause[:256]}") from None
        return "".join(parts)

    @cached_property
    def _has_system(self) -> bool:
        mark = secrets.token_hex(8)
        with suppress(RequestError):
            return mark in self._render([ChatMessage("system", mark), ChatMessage("user", "?")], _ANSWER)
        return False

    def _without_special(self, text: str) -> str:
        # The first character of each special token is escaped, so that none is spelled in JSON.
        for token in self._tokenizer.get_added_tokens_decoder().values():
            if token.special and token.content in text:
                text = text.replace(token.content, f"\\u{ord(token.content[0]):04x}{token.content[1:]}")
        return text

    def check_chat(self) -> TemplateFacts:
        """Return the facts of the chat template. Raises RequestError where there is no readable one."""
        self._chat_template(False)
        text = self._template_text(tools=True)
        variables = meta.find_undeclared_variables(_environment().parse(text))
        return TemplateFacts(
            "tools" in variables,
            registered.fitting(registered.TOOLS, text),
            registered.fitting(registered.REASONING, text),
            "enable_thinking" in variables,
        )

    def _chat_template(self, tools: bool) -> tuple[Template, Callable[[list[_Turn]], list[_Turn]]]:
        """Return the compiled chat template, and a function that makes its messages of those in OpenAI's format.

        Raises RequestError where there is no readable one."""
        if tools in self._templates:
            return self._templates[tools]
        if not self.has_chat:
            raise RequestError("invalid_request", "this model has no chat template; give a raw prompt")
        if self._no_chat:
            raise RequestError(
                "invalid_request", f"the chat template's special tokens are not known: {self._no_chat[:256]}"
            )
        try:
            text = self._template_text(tools)
            template = _environment().from_string(text)
        except Exception as error:  # compiling evaluates the constants of the model's own code
            cause = str(error) or type(error).__name__
            raise RequestError("invalid_request", f"the chat template cannot be read: {cause[:256]}") from None
        thoughts = registered.fitting(registered.REASONING, text)
        own_turn = registered.load(registered.REASONING, thoughts).turn if thoughts else lambda turn: turn
        calls = registered.fitting(registered.TOOLS, text)
        own_turns = registered.load(registered.TOOLS, calls).turns if calls else lambda turns, _: turns
        self._templates[tools] = template, lambda turns: own_turns([own_turn(turn) for turn in turns], text)
        return self._templates[tools]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, with U+FFFD for incomplete characters."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def vocabulary(self) -> Vocabulary:
        written = {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        bytewise = self._decodes("aĠ", "a ")
        fallback = self._decodes("<0x41>", "A")
        pieces: dict[int, bytes] = {}
        first: dict[int, bytes] = {}
        for token_id, token in written.items():
            byte = BYTE.fullmatch(token) if fallback else None
            if bytewise and _BYTES.keys() >= set(token):
                pieces[token_id] = token.translate(_LATIN).encode("latin-1")
            elif byte is not None:
                pieces[token_id] = bytes.fromhex(byte[1])
            else:
                # Some decoders strip a space from the first token, or put one between two tokens.
                once = self._tokenizer.decode([token_id], skip_special_tokens=False)
                twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
                pieces[token_id] = twice.removeprefix(once).encode()
                if pieces[token_id] != once.encode():
                    first[token_id] = once.encode()
                if len(twice) > _MOST_PIECE:
                    raise UsageError(
                        f"{self._directory / 'tokenizer.json'}: token {token_id} stands for more than {_MOST_PIECE} "
                        "characters"
                    )
        return Vocabulary(
            pieces=pieces,
            first=first,
            silent=frozenset(token_id for token_id, token in added.items() if token.special),
            longest_token=max(map(len, written.values()), default=1) or 1,
            has_chat=self.has_chat,
            fill_in_ends=frozenset() if self.fill_in is None else self.fill_in.ends,
        )

    def _decodes(self, written: str, text: str) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and decoder.decode([written]) == text


def _turn(message: ChatMessage) -> _Turn:
    turn: _Turn = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    given = {name: getattr(message, name) for name in ("tool_call_id", "name", "reasoning_content")}
    return turn | {name: value for name, value in given.items() if value}


def _arguments(call: CalledTool) -> Any:
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _variables(options: ChatOptions) -> dict[str, Any]:
    given = _json(options.template_kwargs, dict, "chat_template_kwargs: expected a JSON object")
    if taken := sorted(_TAKEN & given.keys()):
        raise RequestError("invalid_request", f"chat_template_kwargs: {taken[0]} is not for clients to set there")
    return given


def _json(text: str, kind: type, cause: str) -> Any:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, kind):
        raise RequestError("invalid_request", cause)
    return given


def _load_tokenizer(path: Path) -> _Tokenizer:
    text = read_bounded(path, MAX_TOKENIZER)
    try:
        tokenizer = _Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(f"cannot read {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _templates_of(config: dict[str, Any]) -> dict[str, str]:
    given = config.get("chat_template")
    named = given if isinstance(given, list) else [{"name": _CHAT, "template": given}]
    entries = [(entry.get("name"), entry.get("template")) for entry in named if isinstance(entry, dict)]
    found = {name: text for name, text in reversed(entries) if isinstance(name, str) and isinstance(text, str)}
    return {name: text for name, text in found.items() if name in (_CHAT, _TOOL_USE)}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja's own filter escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks answers for training. Here its text is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012  # as in the base class

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


_BYTES = byte_alphabet()
_LATIN = {ord(character): byte for character, byte in _BYTES.items()}
