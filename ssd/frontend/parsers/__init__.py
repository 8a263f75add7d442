"""Parsers of a model's answer: thoughts, text, calls of tools.

`source.py` reads text that comes in pieces. `tools.py`, `pythonic.py` and `xml.py` have the formats of calls,
`reasoning.py` has the formats of thoughts, `harmony.py` both of gpt-oss. `answer.py` chooses among them and combines
them.

**A format of your own** is a subclass of `ToolParser` (or `ReasoningParser`) and an entry point in the group
`ssd.tool_parsers` (`ssd.reasoning_parsers`). `--tool-call-parser NAME` then chooses it, or its `fits` does."""
