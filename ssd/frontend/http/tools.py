"""Tools in chats: which of them an answer may call, and how template and engine are told of them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from ssd.frontend.http.bodies import ChatRequest, Said, Tool
from ssd.frontend.http.errors import HttpError, invalid
from ssd.frontend.http.exchange import encoder
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.ipc.public import MAX_TOOLS, CalledTool

_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's chat templates refuse other lengths


def offered(body: ChatRequest, format: AnswerFormat) -> Sequence[Tool]:
    """Returns the tools that an answer may call. Raises HttpError where the model cannot, or cannot be made to."""
    if body.tool_choice not in (None, "none", "auto"):
        _enforce(body)
    if not body.tools or body.tool_choice == "none":
        return ()
    if not format.takes_tools:
        raise _unsupported("tools", "tools is not supported: this model's chat template has no place for them")
    if format.tools is None:
        message = (
            "tools is not supported: how this model says calls is not known; --tool-call-parser of ssd launch says"
        )
        raise _unsupported("tools", message)
    return body.tools


def _enforce(body: ChatRequest) -> None:
    """Asks for an answer that calls a tool, any (`required`) or one by name: the place for a grammar made of `tools`.
    There is none yet: raises HttpError."""
    asked = "required" if body.tool_choice == "required" else "a tool by name"
    raise _unsupported("tool_choice", f"tool_choice: {asked} is not supported, but none and auto are")


def as_json(tools: Sequence[Tool]) -> str:
    """Returns tools as the chat template gets them. Raises HttpError for too many characters."""
    text = encoder.encode(tools).decode()
    if len(text) > MAX_TOOLS:
        raise invalid("tools", f"tools has more than {MAX_TOOLS} characters")
    return text


def calls_of(said: Said) -> list[CalledTool]:
    """Returns the calls in an earlier answer."""
    return [CalledTool(call.id, call.function.name, call.function.arguments) for call in said.tool_calls or ()]


def new_id() -> str:
    """Returns a name for a call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def _unsupported(param: str, message: str) -> HttpError:
    return invalid(param, message, "unsupported_parameter")
