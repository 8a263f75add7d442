"""Growing Markdown on a terminal: what is on it in the end, scrolled lines included, is the whole answer, once."""

from __future__ import annotations

import io

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ssd.plugins.chat.markdown import GrowingMarkdown, rendered, split

ANSWER = """\
# Title

Some *text* in a paragraph that is longer than the terminal is wide, so that it takes several lines of it.

- one
- two

  still two
1. first
2. second

```python
def f(x):

    return x
```
> a quote
lazily continued

| a | b |
|---|---|
| 1 | 2 |

***
A <b>tag</b> and a [link](http://example.com).

<div>
left as it is
</div>

Setext
======
the end
"""
LONG = "```\n" + "\n".join(f"line {number}" for number in range(30)) + "\n```\nafter\n"
PLAIN_SPLITS = [
    ("para", "", "para"),
    ("para\n", "", "para\n"),
    ("para\n\nne", "", "para\n\nne"),
    ("para\n\nnext\n", "para\n\n", "next\n"),
    ("- a\n- b\n\nnext\n", "- a\n- b\n\n", "next\n"),
    ("- a\n*", "", "- a\n*"),  # may become *emphasis* and belong to a
    ("para\n#", "", "para\n#"),
    ("```\na\n\nb\n", "", "```\na\n\nb\n"),
    ("a\u2028b\n\nc\n", "a\u2028b\n\n", "c\n"),
]


def screen(width: int, height: int, chunks: list[str]) -> list[str]:
    """The lines of a terminal, those that have scrolled away first, after an answer came in `chunks`."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, legacy_windows=False)
    with GrowingMarkdown(console) as markdown:
        for chunk in chunks:
            markdown.add(chunk)
            markdown._live.refresh()  # the clock decides when it is; here always
    terminal = pyte.HistoryScreen(width, height, history=10_000)
    pyte.Stream(terminal).feed(file.getvalue().replace("\n", "\r\n"))
    gone = ["".join(line[x].data for x in range(width)) for line in terminal.history.top]
    return [line.rstrip() for line in [*gone, *terminal.display] if line.strip()]


def whole(width: int, text: str) -> list[str]:
    """The same text, rendered at once."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(rendered(text))
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


@pytest.mark.parametrize(("text", "finished", "last"), PLAIN_SPLITS)
def test_blocks_are_finished_when_another_has_begun(text: str, finished: str, last: str) -> None:
    assert split(text) == (finished, last)


@pytest.mark.parametrize("height", [4, 12, 200])
@pytest.mark.parametrize("size", [3, 17, 10_000])
@pytest.mark.parametrize("text", [ANSWER, LONG, "", "word", "one\n\ntwo"])
def test_the_terminal_shows_the_whole_answer_once(text: str, size: int, height: int) -> None:
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert screen(60, height, chunks) == whole(60, text)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["a", "- b", "# c", "\n", "\n\n", "```\n", "> ", "1. ", "* ", "    ", "**", "x y "])))
def test_any_answer_in_any_pieces_is_shown_once(chunks: list[str]) -> None:
    assert screen(20, 6, chunks) == whole(20, "".join(chunks))


def test_html_is_text_and_control_characters_are_left_out() -> None:
    shown = "\n".join(screen(60, 20, [ANSWER, "\n\x1b[2Jbell\x07 \x9b31m"]))
    assert "<b>tag</b>" in shown and "<div>" in shown
    assert "[2Jbell 31m" in shown


def test_a_block_in_the_making_shows_its_end() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=8)
    with GrowingMarkdown(console) as markdown:
        markdown.add("".join(f"- item {number}\n" for number in range(30)))
        terminal = pyte.HistoryScreen(40, 8)
        pyte.Stream(terminal).feed(file.getvalue().replace("\n", "\r\n"))
        assert "item 29" in "\n".join(terminal.display)
        assert not terminal.history.top, "nothing that may still change has scrolled away"
