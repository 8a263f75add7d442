"""Thoughts of Mistral's and Gemma's models."""

from __future__ import annotations

from ssd.frontend.parsers.reasoning import ReasoningParser


class MistralThink(ReasoningParser):
    """`[THINK]...[/THINK]`: Magistral."""

    opening, closing = "[THINK]", "[/THINK]"


class Gemma4Think(ReasoningParser):
    """`<|channel>thought...<channel|>`: Gemma 4."""

    opening, closing = "<|channel>thought", "<channel|>"
    special = frozenset({"<|channel>"})
