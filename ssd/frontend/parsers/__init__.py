"""Parsers of a model's answer: thoughts, text, calls of tools.

`source.py` reads text that comes in pieces, `answer.py` chooses and combines the parsers. `tools.py` has the base of
the formats of calls, `bare.py` the base of those in JSON, with the rule of calls without a mark. `marked.py` has two
formats of calls, `reasoning.py` the base of the formats of thoughts and one; a plugin has the others.

**A format of your own** is a subclass of `ToolParser` (or `ReasoningParser`) and an entry point in the group
`ssd.tool_parsers` (`ssd.reasoning_parsers`). `--tool-call-parser NAME` then chooses it, or its `fits` does."""
