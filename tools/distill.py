"""Distil a draft from a target: it writes a corpus, teaches on it, and the result is measured (docs/distillation.md).

    python tools/distill.py smollm2 --out /tmp/draft --layers 0,1,2,3,4,27,28,29

Every stage leaves files in OUT or OUT/work and goes on where it was interrupted: run the same command again.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from distillation import student as students
from distillation.card import card
from distillation.corpus import CorpusPlan, read_prompts, write_corpus
from distillation.evaluation import Path as AnswerPath
from distillation.evaluation import evaluate, paths
from distillation.shards import metadata, shard_path
from distillation.teacher import load_runner, write_laws
from distillation.training import TrainingPlan, examples, train

from ssd import LLM, SamplingParams
from ssd.execution.runner import device_of
from ssd.models import hub

STAGES = ("corpus", "teacher", "train", "evaluate")
_TOP = 32
_TEACHER_TOKENS = 2048
_HELD_OUT = 128  # conversations at the end of the corpus that are not trained on
_LOOKAHEAD = 4
_FAN_OUTS = (1, 3, 5)


class Numbers(click.ParamType):
    """ "0,1,2" as a tuple of numbers."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)


@click.command(help=__doc__)
@click.argument("target")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), help="Corpus and teacher's laws; default OUT/work.")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), help="JSONL of prompts; default: own ones.")
@click.option("--conversations", default=4096, show_default=True)
@click.option("--shard", default=256, show_default=True, help="Conversations of a shard.")
@click.option("--answer-tokens", default=320, show_default=True)
@click.option("--layers", type=Numbers(), default=(), help="The target's layers to begin with, over its embedding.")
@click.option("--width", default=0, help="Or: an independent model of this width (a multiple of 64).")
@click.option("--depth", default=4, show_default=True, help="And so many layers.")
@click.option("--epochs", default=4, show_default=True)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--batch-tokens", default=1024, show_default=True, help="Tokens of a training step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--batch", default=128, show_default=True, help="Conversations written at a time, by each engine.")
@click.option("--engine-cpus", multiple=True, help="Cores of a corpus engine, as 0-2,5; again for another engine.")
@click.option("--evaluate-on", multiple=True, type=click.Path(exists=True, path_type=Path), help="JSONL of prompts.")
@click.option("--evaluate-prompts", default=32, show_default=True, help="At most so many of each file.")
@click.option("--until", type=click.Choice(STAGES), default=STAGES[-1], show_default=True, help="Last stage to run.")
def main(
    target: str,
    out: Path,
    work: Path | None,
    prompts: Path | None,
    conversations: int,
    shard: int,
    answer_tokens: int,
    layers: tuple[int, ...],
    width: int,
    depth: int,
    epochs: int,
    learning_rate: float,
    batch_tokens: int,
    seed: int,
    device: str,
    batch: int,
    engine_cpus: tuple[str, ...],
    evaluate_on: tuple[Path, ...],
    evaluate_prompts: int,
    until: str,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work = work or out / "work"
    corpus = CorpusPlan(conversations, shard, answer_tokens, seed=seed)
    options = {"dtype": "bfloat16", "max_num_seqs": batch, "max_num_batched_tokens": 1024, "device": device}
    engines = [options | {"target_cpus": cpus} for cpus in engine_cpus] or [options]
    write_corpus(target, work, corpus, read_prompts(prompts), engines)
    if until == "corpus":
        return
    where = device_of(device)
    write_laws(target, work, corpus.shards, _TOP, _TEACHER_TOKENS, torch.bfloat16, where)
    if until == "teacher":
        return
    directory = hub.resolve(target)
    plan = TrainingPlan(epochs, batch_tokens, learning_rate, seed=seed)
    shape = students.StudentPlan(layers, width, depth)
    student = students.build(directory, shape).to(where)
    data = examples(work, corpus.shards)
    cut = max(1, len(data) - _HELD_OUT)
    log = train(student, data[:cut], data[cut:], plan, out)
    students.write(student, directory, out)
    if until == "train":
        return
    sets = {path.stem: read_prompts(path)[:evaluate_prompts] for path in evaluate_on}
    asked: list[str] = json.loads(metadata(shard_path(work, "corpus", corpus.shards[-1]))["prompts"])
    sets["held out"] = asked[-_HELD_OUT:][:evaluate_prompts]
    report = _evaluate(target, out, sets, answer_tokens, device)
    (out / "evaluation.json").write_text(json.dumps(report, indent=1))
    recipe = {"target": target, "corpus": corpus, "student": shape, "training": plan, "tokens": sum(_tokens(data))}
    (out / "README.md").write_text(card(out.name, recipe, log, report))
    click.echo(f"{out}: {json.dumps(report)}")


def _evaluate(target: str, out: Path, sets: dict[str, list[str]], tokens: int, device: str) -> dict[str, Any]:
    """Acceptance and hit rates on each set of prompts, and how long a tree step and a verification take."""
    found: list[tuple[str, float, list[AnswerPath]]] = []
    with LLM(target, str(out), max_num_seqs=16, device=device, draft_device=device) as llm:
        for name, prompts in sets.items():
            found += [(name, t, paths(llm, prompts, t, tokens)) for t in (0.0, 0.7, 1.0)]
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        timed = [llm.generate(prompt, params, chat=True)[0].metrics for prompt in next(iter(sets.values()))[:4]]
    where, longest = device_of(device), 2 * _TEACHER_TOKENS
    judge = load_runner(target, torch.float32, where, longest)
    draft = load_runner(str(out), torch.bfloat16, where, longest, lender=target)
    rows = [
        {"prompts": name, "temperature": t, "rule": rule}
        | evaluate(draft, judge, answers, rule, _LOOKAHEAD, _FAN_OUTS).figures()
        for name, t, answers in found
        for rule in (("coupled", "rejection") if t > 0 else ("coupled",))
    ]
    return {
        "k": _LOOKAHEAD,
        "rows": rows,
        "tree_step_ms": fmean(m.draft_step_ms for m in timed),
        "verify_ms": fmean(m.verify_ms for m in timed),
    }


def _tokens(data: list[Any]) -> list[int]:
    return [example.text.answer for example in data]


if __name__ == "__main__":
    main()
