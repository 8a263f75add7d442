"""What other programs send first, with their tools. Clients add a model and where it is."""

from __future__ import annotations

from typing import Any


def _tool(name: str, description: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _number(description: str, default: int) -> dict[str, Any]:
    return {"type": "integer", "description": description, "default": default}


def _maybe(kind: dict[str, Any], description: str) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "null"}], "default": None, "description": description}


# Like those of Open WebUI 0.12: built-in tools, in a chat about nothing yet.
OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Say hello."}],
    "tools": [
        _tool(
            "get_current_timestamp",
            "Get the current Unix timestamp in seconds and the current date and time in ISO format. Use this whenever "
            "the answer depends on the present time.",
        ),
        _tool(
            "calculate_timestamp",
            "Get a Unix timestamp relative to now, for filters by time in other tools.",
            days_ago=_number("Number of days to go back from now", 0),
            weeks_ago=_number("Number of weeks to go back from now", 0),
            months_ago=_number("Number of months to go back from now", 0),
            years_ago=_number("Number of years to go back from now", 0),
        ),
        _tool(
            "search_memories",
            "Search the user's stored memories for information that is relevant to the query.",
            ("query",),
            query=_text("The search query"),
            count=_number("Number of memories to return", 5),
        ),
        _tool("add_memory", "Store a new memory about the user.", ("content",), content=_text("The memory to store")),
        _tool(
            "replace_memory_content",
            "Change the content of a stored memory.",
            ("memory_id", "content"),
            memory_id=_text("The id of the memory"),
            content=_text("The new content"),
        ),
        _tool(
            "search_notes",
            "Search the user's notes by title and content.",
            ("query",),
            query=_text("The search query"),
            count=_number("Maximum number of notes to return", 5),
            start_timestamp=_maybe({"type": "integer"}, "Only notes updated after this Unix timestamp"),
            end_timestamp=_maybe({"type": "integer"}, "Only notes updated before this Unix timestamp"),
        ),
        _tool("view_note", "Get the full content of a note.", ("note_id",), note_id=_text("The id of the note")),
        _tool(
            "search_chats",
            "Search the user's previous conversations by title and message content.",
            ("query",),
            query=_text("The search query"),
            count=_number("Maximum number of chats to return", 5),
        ),
        _tool(
            "query_knowledge_files",
            "Search the knowledge files that are attached to the model, and return relevant passages.",
            ("query",),
            query=_text("The search query"),
            knowledge_ids=_maybe({"type": "array", "items": {"type": "string"}}, "Limits the search to these"),
            count=_number("Maximum number of passages", 5),
        ),
    ],
}

# Recorded from CrewAI 1.15.30, whose dependencies do not agree with those of the other agents.
CREWAI: dict[str, Any] = {
    "messages": [
        {
            "role": "system",
            "content": "You are Greeter. You are friendly.\nYour personal goal is: Greet people",
        },
        {
            "role": "user",
            "content": "\nCurrent Task: Say hello.\n\nThis is the expected criteria for your final answer: A greeting\n"
            "you MUST return the actual complete content as the final answer, not a summary.",
        },
    ],
    "max_tokens": 100,
    "temperature": 0.0,
    "tool_choice": "auto",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather of a city.",
                "strict": True,
                "parameters": {
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                    "type": "object",
                    "additionalProperties": False,
                },
            },
        }
    ],
}
