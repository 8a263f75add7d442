"""What a draft in a folder is worth, on sets of prompts: a table, and what an engine with it begins with.

    python -m tools.distill.report smollm2 smollm2-draft --evaluate-on humaneval --evaluate-on spec_bench.jsonl

A JSONL file whose lines have a `category` or a `task` has a row for each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import click
import msgspec
import torch
from torch import Tensor

from ssd import LLM, SamplingParams
from ssd.errors import SsdError, UsageError
from ssd.execution.runner import Runner, device_of
from ssd.frontend.tokenization import Tokenizer
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import hub
from ssd.models.checkpoint import inspect
from ssd.models.draft_kinds import PLAIN, draft_kind, kinds
from ssd.models.families.llama import Llama
from ssd.plugins.bench.datasets import texts
from ssd.plugins.bench.environment import environment, runs_on
from ssd.tuning.costs import CostTable
from ssd.tuning.estimates import kind_of
from ssd.tuning.knowledge import PRIOR_FILE, Knowledge, file_of, read
from tools.distill import head
from tools.distill.card import table
from tools.distill.corpus import LONGEST, longest_text, within
from tools.distill.evaluation import RULES, Answer, Draft, Tally, agreement, evaluate, paths
from tools.distill.layouts import EAGLE3
from tools.distill.shards import Conversation
from tools.distill.teacher import load_runner, score

_ALL = 10**6  # most prompts of a data set that are read
_CATEGORY = ("category", "task")  # fields of a line that say what kind of prompt it is
_LOOKAHEAD = 4
_FAN_OUTS = range(1, 17)  # all, so that the hits of each rank are known
_STEP_ROWS = (1, 8)  # sizes of a forward of the draft that the card gives times of
_TEMPERATURES = (0.0, 0.7, 1.0)  # one of each kind that engines tell apart (`ssd.tuning.estimates.kind_of`)


@click.command(help=__doc__)
@click.argument("target")
@click.argument("draft")
@click.option("--evaluate-on", multiple=True, required=True, help="humaneval, a JSONL file, hub:org/name.")
@click.option("--evaluate-prompts", type=click.IntRange(min=1), default=32, show_default=True, help="Of each row.")
@click.option("--answer-tokens", type=click.IntRange(min=1), default=320, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help=f"Where to leave evaluation.json and {PRIOR_FILE}.")
def main(
    target: str,
    draft: str,
    evaluate_on: tuple[str, ...],
    evaluate_prompts: int,
    answer_tokens: int,
    device: str,
    out: Path | None,
) -> None:
    try:
        sets = fitting(hub.ensure(target), prompt_sets(evaluate_on), answer_tokens, evaluate_prompts)
        hub.ensure(draft)
        report, known = measured(target, draft, sets, answer_tokens, device)
    except SsdError as error:
        raise click.ClickException(str(error)) from None
    click.echo("\n".join(table(report)))
    if out is not None:
        write(out, report, known)


def prompt_sets(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the prompts of data sets by name, those of a JSONL file by category if its lines have one.

    Raises UsageError for a file without prompts."""
    found: dict[str, list[str]] = {}
    for name in names:
        prompts, categories, file = texts(name, _ALL), list[str | None](), Path(name)
        if file.is_file():
            lines = [json.loads(line) for line in file.read_text("utf-8-sig").split("\n") if line.strip()]
            categories = [next((line[key] for key in _CATEGORY if key in line), None) for line in lines]
        for prompt, category in zip(prompts, categories or [None] * len(prompts), strict=True):
            found.setdefault(f"{file.stem}, {category}" if category else file.stem, []).append(prompt)
    return found


def fitting(target: Path, sets: dict[str, list[str]], answer_tokens: int, most: int) -> dict[str, list[str]]:
    """Return the first `most` prompts of each set that leave room for an answer. Raises UsageError if none does."""
    tokenizer, room = Tokenizer(target), longest_text(inspect(target)) - answer_tokens
    found = {name: within(tokenizer, prompts, room)[:most] for name, prompts in sets.items()}
    if empty := [name for name, prompts in found.items() if not prompts]:
        raise UsageError(f"no prompt of {empty[0]!r} leaves room for an answer of {answer_tokens} tokens")
    return found


def write(directory: Path, report: dict[str, Any], known: Knowledge) -> None:
    """Write what `measured` returned to a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    (directory / PRIOR_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")


def measured(
    target: str, draft: str, sets: dict[str, list[str]], answer_tokens: int, device: str
) -> tuple[dict[str, Any], Knowledge]:
    """Return acceptance and hit rates on each set of prompts, with the times of a tree step and a verification, and
    what an engine with this draft may begin with: those of all sets under `coupled`."""
    answers: list[tuple[str, float, list[Answer]]] = []
    devices = {"device": device, "draft_device": device}
    with LLM(target, draft, mode="ssd", max_num_seqs=16, **devices) as llm:
        for name, prompts in sets.items():
            answers += [(name, t, paths(llm, prompts, t, answer_tokens)) for t in _TEMPERATURES]
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        timed = [llm.generate(prompt, params, chat=True)[0].metrics for prompt in next(iter(sets.values()))[:4]]
    target_runner = load_runner(target, torch.float32, device_of(device), LONGEST)
    logits = _draft(target, draft, target_runner)
    rows: list[dict[str, Any]] = []
    laws: list[list[Tally]] = [[] for _ in _TEMPERATURES]
    for name, t, found in answers:
        for rule in RULES if t > 0 else RULES[:1]:
            tally = evaluate(logits, target_runner, found, rule, _LOOKAHEAD, _FAN_OUTS)
            rows.append({"prompts": name, "temperature": t, "rule": rule} | tally.figures())
            if rule == "coupled":
                laws[kind_of(t)].append(tally)
    report = {
        "k": _LOOKAHEAD,
        "rows": rows,
        "tree_step_ms": fmean(m.draft_step_ms for m in timed),
        "verify_ms": fmean(m.verify_ms for m in timed),
        **_step_times(target, draft, device),
    }
    return report, Knowledge(tuple(map(agreement, laws)))


def _draft(target: str, draft: str, target_runner: Runner) -> Draft:
    """Return the draft that a folder has, in the form that the evaluation calls. `target_runner` runs the target."""
    device = target_runner.model.device
    folder = hub.resolve(draft)
    if (kind := draft_kind(inspect(folder))) is not PLAIN:
        if kind is not kinds().get(EAGLE3):
            raise UsageError(
                f"{folder} is {kind.name}: of drafts that read hidden states, only EAGLE-3 heads are evaluated"
            )
        return partial(head.load(hub.resolve(target), folder, target_runner).to(device).logits, lookahead=_LOOKAHEAD)
    runner = load_runner(draft, torch.bfloat16, device, LONGEST, lender=target)
    predicting = cast(Llama, runner.model).head
    whole = runner.model.shape.vocab_size
    ids = torch.arange(runner.model.shape.outputs) if predicting.ids is None else predicting.ids.cpu()

    def logits(texts: Sequence[Conversation]) -> list[Tensor]:
        found = score(runner, texts).float().cpu()
        return [torch.full((len(found), whole), -torch.inf).index_copy(1, ids, found)]

    return logits


def _step_times(target: str, draft: str, device: str) -> dict[str, Any]:
    """Return what a forward of the draft takes by rows, and where; nothing if other work disturbed the engine."""
    places = {"device": device, "draft_device": device}
    config = resolve(EngineOptions(target=target, draft=(draft,), mode="ssd", **places))
    found = read(file_of(config, str(build.library())), Knowledge)
    if found is None or not found.tables.get("step"):
        return {}
    costs = CostTable(found.tables["step"])
    where = f"{runs_on(config, 'ssd')}, {environment()['cpu']}"
    return {"step_ms": {rows: 1e3 * costs.at(rows) for rows in _STEP_ROWS}, "measured_on": where}


if __name__ == "__main__":
    main()
