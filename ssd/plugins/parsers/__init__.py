"""Formats of tool calls and thoughts beside the commonest, which are in `ssd/frontend/parsers`.

`marked.py` has formats in JSON; `pythonic.py`, `xml.py`, `glm.py`, `deepseek.py`, `kimi.py` and `gemma.py` have the
others, with `values.py` for values without quotes. `harmony.py` has calls and thoughts of gpt-oss."""
