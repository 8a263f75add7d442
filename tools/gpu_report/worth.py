"""Evaluate the draft that was trained, and the one that it began as, on the same prompts (docs/gpu.md)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssd.bench.datasets import BUILTIN
from tools.distill.job import HELD_OUT_FILE
from tools.gpu_report import distilling
from tools.gpu_report.draft import pack_draft
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pieces import CARRIED

_SHOWN_FAN_OUTS = ("1", "2", "5")


def rows(job: Job, *, prompts: int = 16, answer_tokens: int = 96, tiny: bool = False) -> Iterator[Row]:
    """Yield tokens a round of both drafts: on held-out messages, on prompts of the tree, and on JSONL files that the
    call carries. Without a new draft the packaged one is evaluated alone.

    The new one comes first, as its speculation.json goes into draft.tar."""
    recipe = distilling.recipe(job, tiny)
    held_out = recipe.out / HELD_OUT_FILE
    sets = [str(held_out)] if held_out.is_file() else [BUILTIN]
    if recipe.tiny:
        prompts, answer_tokens = min(prompts, 2), min(answer_tokens, 16)
    else:
        sets = list(dict.fromkeys((*sets, BUILTIN, *map(str, sorted(CARRIED.glob("prompts/*.jsonl"))))))
    flags = [word for name in sets for word in ("--evaluate-on", name)]
    flags += ["--evaluate-prompts", str(prompts), "--answer-tokens", str(answer_tokens), "--device", job.device]
    drafts = {"new": (str(recipe.out), recipe.out)}
    if recipe.begin is not None:
        drafts["packaged"] = (recipe.begin, distilling.folder() / "packaged")
    for which, (draft, out) in drafts.items():
        if which == "new" and not (out / "config.json").is_file():
            yield {"name": "new draft evaluated", "state": "there is none", "ok": False}
            continue
        arguments = [str(recipe.target), draft, "--out", str(out), *flags]
        with distilling.started("tools.distill.report", arguments) as process:
            for _ in distilling.ticks(process, job):
                pass
            state = distilling.ended(process)
        yield {"name": f"{which} draft evaluated", "state": state, "ok": not state.startswith("exit")}
        if state == "done":
            yield from (row | {"draft": which} for row in figures(which, out))
            if which == "new":
                pack_draft(recipe.out, Path(job.out))


def figures(which: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of an evaluation under the coupled rule, and the sums by temperature."""
    found = json.loads((folder / "evaluation.json").read_text())
    own = [row for row in found["rows"] if row["rule"] == "coupled"]
    rounds, tokens = defaultdict[float, int](int), defaultdict[float, float](float)
    for row in own:
        rounds[row["temperature"]] += row["rounds"]
        tokens[row["temperature"]] += row["rounds"] * row["tokens_per_round"]
        yield _row(f"{which}, {row['prompts']}, T = {row['temperature']}", row)
    for temperature, count in rounds.items():
        each = tokens[temperature] / max(1, count)
        yield {"name": f"{which}, all, T = {temperature}", "tokens_per_round": each, "rounds": count}
    yield {"name": f"{which}, times", "tree_step_ms": found["tree_step_ms"], "verify_ms": found["verify_ms"]}


def _row(name: str, row: dict[str, Any]) -> Row:
    hits = {f"hits_{fan_out}": row["hit_rate"][fan_out] for fan_out in _SHOWN_FAN_OUTS if fan_out in row["hit_rate"]}
    return {"name": name} | {key: row[key] for key in ("tokens_per_round", "acceptance", "rounds")} | hits
