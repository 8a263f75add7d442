"""The tool that compares roundings of inputs: float32 differs from itself by nothing, and every setting has a row."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ssd.layers.linear import PARTS
from tests.models import tiny
from tools.activations import main


def test_every_setting_has_a_row(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300))
    text = tmp_path / "text.md"
    text.write_text("one two three four " * 100)
    shown = CliRunner().invoke(main, [str(target), str(text), "--context", "0", "--context", "500"])
    assert shown.exit_code == 0, shown.output
    rows = [line.split("│")[1:-1] for line in shown.output.splitlines() if line.startswith("│")]
    kinds = [name for kind in PARTS for name in (kind, f"{kind}, int8 cache")]
    quality, speed = rows[: len(kinds)], rows[len(kinds) :]
    assert [row[0].strip() for row in quality] == kinds
    assert [[cell.strip() for cell in row[:2]] for row in speed] == [[n, kind] for n in ("0", "500") for kind in kinds]
    assert [cell.strip() for cell in quality[0][2:5]] == ["0.0e+00", "0.0e+00", "100.00%"]


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300))
    (tmp_path / "text.md").write_text("")
    shown = CliRunner().invoke(main, [str(target), str(tmp_path / "text.md")])
    assert shown.exit_code == 2 and "fewer than" in shown.output
