"""`tools.asked_again`: what it asks, and a run of it on the built-in pair."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from tools.asked_again import Conversation, main


def test_given_answers_stay_and_own_ones_are_sent_back() -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    later = {"role": "user", "content": "c"}
    given = Conversation({"messages": [user, answer, later]}).turns()
    assert next(given) == [user]
    assert given.send("mine") == [user, answer, later]
    own = Conversation({"turns": ["a", "c"]}).turns()
    assert next(own) == [user]
    assert own.send("mine") == [user, {"role": "assistant", "content": "mine"}, later]
    assert [*Conversation({"prompt": "a"}).turns()] == [[user]]


def test_the_second_pass_takes_fewer_rounds_with_the_memory(tmp_path: Path) -> None:
    file, out = tmp_path / "asked.jsonl", tmp_path / "out.json"
    file.write_text("\n".join(json.dumps({"prompt": f"Tell a story of {what}."}) for what in ("rain", "snow")))
    result = CliRunner().invoke(main, [str(file), "--tokens", "48", "--repeats", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "ids: those of ar" in result.output
    rows = {(row["engine"], row["pass"]): row for row in json.loads(out.read_text())["rows"]}
    assert rows["with memory", 2]["tokens_a_round"] > 4 > rows["without memory", 2]["tokens_a_round"]
    assert rows["ar", 1]["tokens_a_round"] == 1
