"""The answer that a chat asks for, read of its body once: its form, its tools, and the grammar of their calls."""

from __future__ import annotations

import logging
import secrets
import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ssd.config.params import MAX_COMPILED, Structured
from ssd.errors import RequestError
from ssd.frontend.grammars import say_left_out
from ssd.frontend.http.bodies import AllowedTool, ChatRequest, ChosenTool, FunctionName, Tool
from ssd.frontend.http.bodies import Function as OfferedFunction
from ssd.frontend.http.errors import HttpError, cut, invalid, missing
from ssd.frontend.http.structured import AnswerForm, form_of
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.frontend.parsers.marked import Llama3Json
from ssd.frontend.parsers.rules import CallableFunction, Rules, Unfit, argument_check
from ssd.frontend.parsers.tools import ArgumentCheck, ToolParser

log = logging.getLogger("ssd.http")

_LETTERS = string.ascii_letters + string.digits
_ANY = {"additionalProperties": True}
_MOST_LOGGED = 64  # types
_logged: set[str] = set()
_ID_LENGTH = 9  # Mistral's chat templates refuse other lengths


class AskedAnswer(NamedTuple):
    """The form of an answer, the tools that it may call, and the `parser` that reads its calls.

    `structured` enforces calls, `named` a call of one tool by name. Calls after the first `most_calls` are dropped.
    `legacy` answers have their one call as OpenAI's older `function_call`. If there is text around calls that a grammar
    enforces, `obey` tells which calls in it are right."""

    form: AnswerForm = AnswerForm()
    tools: Sequence[Tool] = ()
    parser: type[ToolParser] | None = None
    structured: Structured | None = None
    named: bool = False
    most_calls: int | None = None
    legacy: bool = False
    obey: ArgumentCheck | None = None


def asked_answer(body: ChatRequest, format: AnswerFormat) -> AskedAnswer:
    """Return the answer that a chat asks for.

    Raises HttpError for refused tools, a choice that cannot be enforced, and forms that contradict each other."""
    if body.functions and body.tools:
        raise invalid("functions", "functions and tools mean the same; give one")
    if body.functions and body.tool_choice is not None:
        raise invalid("tool_choice", "tool_choice is about tools; function_call chooses one of functions")
    if body.functions or isinstance(body.function_call, FunctionName):
        return _asked(_with_tools(body, body.functions or ()), format)._replace(legacy=True)
    if isinstance(body.tool_choice, ChosenTool) and body.tool_choice.type == "allowed_tools":
        body = _with_allowed(body, body.tool_choice)
    return _asked(body, format)


def _with_tools(body: ChatRequest, functions: Sequence[OfferedFunction]) -> ChatRequest:
    chosen = body.function_call
    if isinstance(chosen, FunctionName) and chosen.name not in (function.name for function in functions):
        raise _not_there(chosen.name, "function_call", "functions")
    choice = ChosenTool("function", chosen) if isinstance(chosen, FunctionName) else chosen
    tools = [Tool("function", function) for function in functions]
    return replace(body, tools=tools, tool_choice=choice, parallel_tool_calls=False)


def _with_allowed(body: ChatRequest, choice: ChosenTool) -> ChatRequest:
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    names = {_name(tool) for tool in choice.allowed_tools.tools}
    if lost := names - {tool.function.name for tool in body.tools or ()}:
        raise _not_there(min(lost))
    tools = [tool for tool in body.tools or () if tool.function.name in names]
    return replace(body, tools=tools, tool_choice=choice.allowed_tools.mode)


def _name(tool: AllowedTool) -> str:
    name = tool.name if tool.function is None else tool.function.name
    if name is None:
        raise missing("tool_choice.function")
    return name


def _not_there(name: str, field: str = "tool_choice", among: str = "tools") -> HttpError:
    return invalid(field, f"{field}: there is no {cut(name)!r} among {among}")


def check_tools_are_told(format: AnswerFormat) -> None:
    if format.refuses_tools:
        cause = "the model's chat template has no place for tools; --tools auto tells them in text"
        raise invalid("tools", f"tools: {cause}")


def _asked(body: ChatRequest, format: AnswerFormat) -> AskedAnswer:
    tools, most_calls = body.tools or (), 1 if body.parallel_tool_calls is False else None
    if tools and body.tool_choice != "none":
        check_tools_are_told(format)
    form = form_of(body)
    if body.tool_choice not in (None, "none", "auto"):
        return _enforce(body, form, tools, format, most_calls)
    if not tools or body.tool_choice == "none":
        return AskedAnswer(form)
    asked = AskedAnswer(form, tools, format.tools, most_calls=most_calls)
    functions = _functions(tools, obey=False)
    if (answer := form.structured) is not None:
        if form.field != "response_format" or answer.kind not in ("json", "json_object"):
            return AskedAnswer(form, tools)  # the answer has no place for calls
        try:
            return _enforced(asked, functions, format, lambda parser, rules: parser.calls_or_answer(rules, answer))
        except RequestError:  # of the schema, which is refused in its own name when it is compiled
            return asked
    if not any(tool.function.strict for tool in tools):
        return asked
    enforced = _structured(Rules(functions, format.ids, most_calls != 1), format.tools.allowed)
    return asked._replace(structured=enforced, obey=None if enforced is None else argument_check(functions))


def _enforce(
    body: ChatRequest, form: AnswerForm, tools: Sequence[Tool], format: AnswerFormat, most_calls: int | None
) -> AskedAnswer:
    """Return an answer that must be a call: of any tool (`required`) or of one by name. Raises HttpError."""
    names = [tool.function.name for tool in tools]
    named = isinstance(body.tool_choice, ChosenTool)
    if isinstance(body.tool_choice, ChosenTool):
        name = _name(body.tool_choice)
        if name not in names:
            raise _not_there(name)
        callable = [tools[names.index(name)]]
    elif not tools:
        raise invalid("tool_choice", f"tool_choice: {body.tool_choice} needs tools")
    else:
        callable = list(tools)
    if form.field not in (None, "response_format"):  # which is about content, and there is none
        raise invalid("tool_choice", f"tool_choice and {form.field} both say what the answer must be; give one")
    asked = AskedAnswer(form, tools, format.tools, named=named, most_calls=1 if named else most_calls)
    return _enforced(asked, _functions(callable, obey=True), format, lambda parser, rules: parser.forced(rules))


def _enforced(
    asked: AskedAnswer,
    functions: Sequence[CallableFunction],
    format: AnswerFormat,
    of: Callable[[type[ToolParser], Rules], str],
) -> AskedAnswer:
    # A model whose format has no grammar calls in that of `Llama3Json`, which is plain text.
    for parser in (format.tools, Llama3Json):
        structured = _structured(Rules(functions, format.ids, asked.most_calls != 1), partial(of, parser))
        if structured is not None:
            return asked._replace(parser=parser, structured=structured)
    raise AssertionError("Llama3Json has a grammar")


def _functions(tools: Sequence[Tool], obey: bool) -> list[CallableFunction]:
    given = [tool.function for tool in tools]
    return [
        CallableFunction(each.name, each.parameters if obey or each.strict else _ANY, bool(each.strict))
        for each in given
    ]


def _structured(rules: Rules, of: Callable[[Rules], str]) -> Structured | None:
    """Return the grammar that a parser makes, or None if it makes none. Raises HttpError."""
    try:
        answer = of(rules)
        text = rules.grammar(answer)
    except (Unfit, ValueError, RecursionError) as error:
        raise invalid("tools", f"tools: {error}") from None
    if rules.left_out:
        say_left_out(tuple(sorted(rules.left_out)))
    if len(text) > MAX_COMPILED:
        raise invalid("tools", f"tools take {len(text)} characters as a grammar, which is too long")
    return Structured("compiled", text) if answer else None


def log_left_out(what: str, kind: str) -> None:
    """Log that parts of requests are left out, once for each type."""
    if (said := f"{what} of the type {cut(kind)!r}") not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(said)
        log.warning("%s are left out: they are for other servers", said)


def new_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def numbered_id(number: int) -> str:
    """Return the name of a conversation's call that came without one: the same in every turn."""
    return f"call{number:0{_ID_LENGTH - 4}}"
