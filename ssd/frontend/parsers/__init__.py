"""Parsers of a model's answer: thoughts, text, calls of tools.

`source.py` reads text that comes in pieces, `answer.py` chooses and combines the parsers. `tools.py` has the base of
the formats of calls, `bare.py` the base of those in JSON, with the rule of calls without a mark. `marked.py` has the
formats in JSON; `pythonic.py`, `xml.py`, `glm.py`, `deepseek.py`, `kimi.py` and `gemma.py` have the others.
`reasoning.py` has the formats of thoughts, `harmony.py` both of gpt-oss.

**A format of your own** is a subclass of `ToolParser` (or `ReasoningParser`) and an entry point in the group
`ssd.tool_parsers` (`ssd.reasoning_parsers`). `--tool-call-parser NAME` then chooses it, or its `fits` does."""
