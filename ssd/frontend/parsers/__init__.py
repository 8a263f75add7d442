"""Parsers of a model's answer: thoughts, text, calls of tools.

**A format of your own** is a subclass of `ToolParser` (or `ReasoningParser`) and an entry point in the group
`ssd.tool_parsers` (`ssd.reasoning_parsers`). `--tool-call-parser NAME` or its `fits` chooses it."""
