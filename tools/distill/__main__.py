"""Distil a draft from a target: it writes a corpus, teaches on it, and the result is measured (docs/distillation.md).

    python -m tools.distill smollm2 --out /tmp/draft --layers 0,1,2,3,4,27,28,29
    python -m tools.distill smollm2 --out /tmp/head --kind eagle3 --draft-vocab 16384

Every stage leaves files in OUT or OUT/work and goes on where it was interrupted: run the same command again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast, get_args

import click
import msgspec
import torch
from torch import Tensor

from ssd import LLM, SamplingParams
from ssd.bench.datasets import texts
from ssd.bench.environment import environment, runs_on
from ssd.errors import SsdError, UsageError
from ssd.execution.runner import device_of
from ssd.frontend.tokenization import Tokenizer
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import hub
from ssd.models.checkpoint import inspect
from ssd.models.llama import Llama
from ssd.planning.measured import profile_here
from ssd.tuning.costs import CostTable
from ssd.tuning.knowledge import PRIOR_FILE, Knowledge
from ssd.tuning.rounds import kind_of
from tools.distill import head
from tools.distill.card import card
from tools.distill.corpus import LONGEST, CorpusPlan, Workers, within, write_corpus
from tools.distill.evaluation import RULES, Answer, Draft, Tally, agreement, evaluate, paths
from tools.distill.head import HeadPlan, HeadStudent
from tools.distill.layouts import Layout
from tools.distill.shards import SHARD_VERSION, Conversation, claim
from tools.distill.student import Store, Student, StudentPlan, begin_with, build, round_in_training
from tools.distill.teacher import load_runner, score
from tools.distill.training import Example, TrainingPlan, computes_in_bfloat16, examples, split, train

KINDS = ("decoder", "eagle3")
STAGES = ("corpus", "train", "evaluate")
_ALL = 10**6  # most prompts of a data set that are read
_HELD_OUT = 128  # conversations, or a few more, that are not trained on
_LOOKAHEAD = 4
_FAN_OUTS = range(1, 17)  # all, so that the hits of each rank are known
_STEP_ROWS = (1, 8)  # sizes of a forward of the draft that the card gives times of
_TEMPERATURES = (0.0, 0.7, 1.0)  # one of each kind that engines tell apart (`ssd.tuning.rounds.kind_of`)


class Numbers(click.ParamType):
    """Numbers such as "0,1,2"; the value is a tuple."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)


@click.command(help=__doc__)
@click.argument("target")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), help="Where the corpus is; default OUT/work.")
@click.option("--prompts", help="User messages: humaneval, a JSONL file, hub:org/name. Default: the target's own.")
@click.option("--conversations", default=4096, show_default=True)
@click.option("--shard", default=128, show_default=True, help="Conversations of a shard.")
@click.option("--answer-tokens", default=320, show_default=True)
@click.option(
    "--keep-features",
    type=Numbers(),
    default=(),
    help="Store hidden states after these layers with the corpus (2 x width bytes a token and layer), so that training "
    "a head on them need not run the target again.",
)
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True)
@click.option(
    "--layers",
    type=Numbers(),
    default=(),
    help="The target's layers to begin with, over its embedding; of a head: after how many it reads hidden states.",
)
@click.option("--width", default=0, help="Or: an independent model of this width (a multiple of 64).")
@click.option("--depth", default=4, show_default=True, help="And so many layers.")
@click.option("--draft-vocab", default=0, help="Tokens that it predicts: the most frequent of the corpus; 0: all.")
@click.option("--unroll", default=_LOOKAHEAD, show_default=True, help="Of a head: its own states trained upon.")
@click.option("--feed-forward", default=0, help="Of a head: the width of its feed-forward; default: the target's.")
@click.option("--own-head", is_flag=True, help="Of a head: train an lm_head of its own, which other engines ask for.")
@click.option(
    "--store",
    type=click.Choice(get_args(Store)),
    default="bfloat16",
    show_default=True,
    help="Type of linear layers on disk.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(get_args(Layout)),
    default="sglang",
    show_default=True,
    help="Layout of a head's folder.",
)
@click.option(
    "--begin", type=click.Path(path_type=Path), help="Begin with the weights of this draft, of the same shape."
)
@click.option("--epochs", default=4, show_default=True)
@click.option(
    "--optimizer", type=click.Choice(("adamw", "muon")), help="Default: muon for heads, which begin at random."
)
@click.option("--learning-rate", type=float, help="Its highest. Default: 1e-3 of AdamW, 6e-3 of Muon.")
@click.option("--batch-tokens", default=1024, show_default=True, help="Tokens of a training step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", help="Of the target while it writes. Default: the device's fastest, float32 or bfloat16.")
@click.option("--workers", default=1, show_default=True, help="Processes that write, each with its share of the cores.")
@click.option("--batch", default=48, show_default=True, help="Conversations written at a time, by each worker.")
@click.option("--evaluate-on", multiple=True, help="Prompts to evaluate on, as for --prompts.")
@click.option("--evaluate-prompts", default=32, show_default=True, help="At most so many of each.")
@click.option("--until", type=click.Choice(STAGES), default=STAGES[-1], show_default=True, help="Last stage to run.")
def main(**flags: Any) -> None:
    job = Job(**flags)
    try:
        job.run()
    except SsdError as error:
        raise click.ClickException(str(error)) from None


@dataclass(frozen=True)
class Job:
    """The command's flags by name, and its stages in order."""

    target: str
    out: Path
    work: Path | None
    prompts: str | None
    conversations: int
    shard: int
    answer_tokens: int
    keep_features: tuple[int, ...]
    kind: str
    layers: tuple[int, ...]
    width: int
    depth: int
    draft_vocab: int
    unroll: int
    feed_forward: int
    own_head: bool
    store: Store
    layout: Layout
    begin: Path | None
    epochs: int
    optimizer: str | None
    learning_rate: float | None
    batch_tokens: int
    seed: int
    device: str
    dtype: str | None
    workers: int
    batch: int
    evaluate_on: tuple[str, ...]
    evaluate_prompts: int
    until: str

    def run(self) -> None:
        stages = STAGES[: STAGES.index(self.until) + 1]
        directory = hub.ensure(self.target)
        prompts = texts(self.prompts, _ALL) if self.prompts else []
        asked = min(self.conversations, len(prompts) or self.conversations)
        corpus = CorpusPlan(asked, self.shard, self.answer_tokens, features=self.keep_features, seed=self.seed)
        if "train" in stages:
            self._build(directory)  # a plan that does not fit is told before hours of work
        work = self.work or self.out / "work"
        digest = inspect(directory).digest
        made = {"target": digest, "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()}
        claim(work / "recipe.json", made | asdict(corpus) | {"conversations": "any", "version": SHARD_VERSION})
        workers = Workers(self.workers, self.batch, self.device, self._dtype)
        write_corpus(self.target, work, corpus, prompts, workers)
        if "train" in stages:
            student, messages, log = self._train(directory, work, corpus, digest)
        if "evaluate" in stages:
            self._report(messages, corpus, student, log)

    @property
    def _dtype(self) -> str:
        return self.dtype or ("bfloat16" if computes_in_bfloat16(device_of(self.device)) else "float32")

    @property
    def _training(self) -> TrainingPlan:
        muon = (self.optimizer or ("muon" if self.kind == "eagle3" else "adamw")) == "muon"
        rate = self.learning_rate or (6e-3 if muon else 1e-3)
        return TrainingPlan(self.epochs, self.batch_tokens, rate, muon, seed=self.seed)

    @property
    def _plan(self) -> StudentPlan | HeadPlan:
        if self.kind == "decoder":
            if self.layout == "speculators":
                raise UsageError("--format speculators is for --kind eagle3")
            return StudentPlan(self.layers, self.width, self.depth, self.draft_vocab)
        if self.width:
            raise UsageError("--width: a head is as wide as its target")
        return HeadPlan(self.layers, self.draft_vocab, self.unroll, self.feed_forward, self.own_head)

    def _build(self, directory: Path, data: Sequence[Example] = ()) -> Student | HeadStudent:
        """Return the student before training."""
        plan = self._plan
        if isinstance(plan, StudentPlan):
            return build(directory, plan, data).to(device_of(self.device))
        tokens = max(LONGEST, 2 * self.batch_tokens)  # texts of a few tokens leave much of their pages empty
        runner = load_runner(self.target, getattr(torch, self._dtype), device_of(self.device), tokens)
        return head.build(directory, plan, runner, data).to(device_of(self.device))

    def _train(
        self, directory: Path, work: Path, corpus: CorpusPlan, digest: str
    ) -> tuple[Student | HeadStudent, list[str], list[dict[str, Any]]]:
        """Return the student, the opening messages that it was not trained on, and the figures of its epochs."""
        begun = {"store": self.store, "begin": inspect(self.begin).digest if self.begin else None}
        plan, training = asdict(self._plan) | begun, asdict(self._training)
        made = {"target": digest, "corpus": asdict(corpus), "student": plan, "training": training}
        claim(self.out / "recipe.json", made)
        data, held = split(examples(work, corpus.shards), _HELD_OUT)
        student = self._build(directory, data)
        if self.begin is not None:
            begin_with(student, student.named_trainable(), self.begin)
        if self.store == "int4":
            round_in_training(student)
        log = train(student, data, held, self._training, self.out)
        if isinstance(student, HeadStudent):
            student.write(directory, self.out, self.store, self.layout)
        else:
            student.write(directory, self.out, self.store)
        return student, list(dict.fromkeys(example.text.opening for example in held)), log

    def _report(
        self, messages: list[str], corpus: CorpusPlan, student: Student | HeadStudent, log: list[dict[str, Any]]
    ) -> None:
        sets = {name: texts(name, _ALL) for name in self.evaluate_on} | {"held out": messages}
        tokenizer, room = Tokenizer(self.out), LONGEST - self.answer_tokens
        sets = {Path(n).stem: within(tokenizer, found, room)[: self.evaluate_prompts] for n, found in sets.items()}
        report, known = self._evaluate(sets, student)
        (self.out / PRIOR_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
        (self.out / "evaluation.json").write_text(json.dumps(report, indent=1))
        recipe = {"target": self.target} | asdict(corpus) | asdict(self._plan) | asdict(self._training)
        (self.out / "README.md").write_text(card(self.out.name, recipe, log, report))
        click.echo(f"{self.out}: {json.dumps(report)}")

    def _evaluate(self, sets: dict[str, list[str]], student: Student | HeadStudent) -> tuple[dict[str, Any], Knowledge]:
        """Return acceptance and hit rates on each set of prompts, with the times of a tree step and a verification, and
        what an engine with this draft may begin with: those of all sets under `coupled`."""
        answers: list[tuple[str, float, list[Answer]]] = []
        devices = {"device": self.device, "draft_device": self.device}
        with LLM(self.target, str(self.out), mode="ssd", max_num_seqs=16, **devices) as llm:
            for name, prompts in sets.items():
                answers += [(name, t, paths(llm, prompts, t, self.answer_tokens)) for t in _TEMPERATURES]
            params = SamplingParams(max_tokens=64, ignore_eos=True)
            timed = [llm.generate(prompt, params, chat=True)[0].metrics for prompt in next(iter(sets.values()))[:4]]
        device = device_of(self.device)
        judge = load_runner(self.target, torch.float32, device, LONGEST)
        draft = self._draft(student)
        rows: list[dict[str, Any]] = []
        laws: list[list[Tally]] = [[] for _ in _TEMPERATURES]
        for name, t, found in answers:
            for rule in RULES if t > 0 else RULES[:1]:
                tally = evaluate(draft, judge, found, rule, _LOOKAHEAD, _FAN_OUTS)
                rows.append({"prompts": name, "temperature": t, "rule": rule} | tally.figures())
                if rule == "coupled":
                    laws[kind_of(t)].append(tally)
        report = {
            "k": _LOOKAHEAD,
            "rows": rows,
            "tree_step_ms": fmean(m.draft_step_ms for m in timed),
            "verify_ms": fmean(m.verify_ms for m in timed),
            **self._step_times(),
        }
        return report, Knowledge(tuple(map(agreement, laws)))

    def _step_times(self) -> dict[str, Any]:
        """Return what a forward of the draft takes by rows, and where; nothing if other work disturbed the engine."""
        places = {"device": self.device, "draft_device": self.device}
        config = resolve(EngineOptions(target=self.target, draft=(str(self.out),), mode="ssd", **places))
        try:
            table = CostTable(dict(profile_here(config, 0.0)[0].step_alone))
        except UsageError:
            return {}
        where = f"{runs_on(config, 'ssd')}, {environment()['cpu']}"
        return {"step_ms": {rows: 1e3 * table.at(rows) for rows in _STEP_ROWS}, "measured_on": where}

    def _draft(self, student: Student | HeadStudent) -> Draft:
        """Return what was trained, in the form that the evaluation calls."""
        if isinstance(student, HeadStudent):
            return partial(student.logits, lookahead=_LOOKAHEAD)
        runner = load_runner(str(self.out), torch.bfloat16, device_of(self.device), LONGEST, lender=self.target)
        head = cast(Llama, runner.model).head
        whole = runner.model.shape.vocab_size
        ids = torch.arange(runner.model.shape.outputs) if head.ids is None else head.ids.cpu()

        def logits(texts: Sequence[Conversation]) -> list[Tensor]:
            found = score(runner, texts).float().cpu()
            return [torch.full((len(found), whole), -torch.inf).index_copy(1, ids, found)]

        return logits


if __name__ == "__main__":
    main()
