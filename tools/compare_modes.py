"""Speed of `ar`, `sd` and `ssd` side by side on one pair of models, with what theory predicts (docs/performance.md).

    python tools/compare_modes.py ../shared/data/gsm8k.jsonl --prompts 20 --tokens 128

The modes take turns prompt by prompt (A B C A B C) on one engine, batch 1, chat format, end of text ignored; the ids
of `sd` and `ssd` are compared with those of `ar` in the same run. `predicted` is Theorem 7 (for `sd`: E / (1 + T))
applied to the measured verification time, acceptance lengths, hit rate and waits; `ratio` is measured over predicted,
so what it leaves out is the engine's own overhead. `--profile` writes the profile of the pair that `ssd plan` reads
(docs/planning.md); it needs one -k and one temperature, and adds runs of `ssd` with other fan-outs, for the misses.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
from environment import environment
from prompts import from_jsonl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import LLM, SamplingParams, profile
from ssd.cli.options import FanOut, Lookahead
from ssd.client import Completion
from ssd.config import Quantize
from ssd.errors import UsageError
from ssd.ipc.messages import Metrics
from ssd.measured import profile_of
from ssd.params import MAX_LOOKAHEAD, Speculation
from ssd.speculation.theory import speedup_sd, speedup_ssd

# With --profile, each is a row of `ssd` with so many guesses for every accepted length.
_FAN_OUTS = (1, 2, 4)


@click.command(help=__doc__)
@click.argument("prompts_file", type=click.Path(exists=True, path_type=Path))
@click.option("--target", default="smollm2", show_default=True)
@click.option("--draft", multiple=True, help="As of ssd launch: several are a cascade.")
@click.option("--quantize", type=click.Choice(["none", "int8"]), default="none", show_default=True)
@click.option("--draft-quantize", type=click.Choice(["none", "int8"]), help="As of ssd launch.")
@click.option("--prompts", "count", default=20, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("-k", "--num-speculative-tokens", "lookahead", type=Lookahead(1, MAX_LOOKAHEAD), default="auto")
@click.option("--fan-out", type=FanOut(), default="auto")
@click.option("--backup", multiple=True, default=("auto",), show_default=True, help="one ssd column each")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 1.0), show_default=True)
@click.option("--transformers/--no-transformers", "peer", default=False, help="also transformers' own generate")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write every figure here")
@click.option("--profile", "profile_path", type=click.Path(path_type=Path), help="write a profile for ssd plan here")
def main(
    prompts_file: Path,
    target: str,
    draft: tuple[str, ...],
    quantize: Quantize,
    draft_quantize: Quantize | None,
    count: int,
    tokens: int,
    lookahead: int,
    fan_out: tuple[int, ...],
    backup: tuple[str, ...],
    temperatures: tuple[float, ...],
    peer: bool,
    json_path: Path | None,
    profile_path: Path | None,
) -> None:
    if profile_path and (not lookahead or len(temperatures) != 1):
        raise click.UsageError("--profile needs one K and one temperature: -k 4 --temperature 0")
    prompts = from_jsonl(prompts_file, count)
    settings = {"ar": Speculation("ar"), "sd": Speculation("sd", lookahead)}
    settings |= {f"ssd {name}": Speculation("ssd", lookahead, fan_out, name) for name in backup}
    if profile_path:
        settings |= {_fan_out_row(count): Speculation("ssd", lookahead, (count,), "none") for count in _FAN_OUTS}
    report: dict[str, Any] = {"environment": environment(), "k": lookahead, "fan_out": fan_out, "rows": []}
    console = Console(width=160)
    with LLM(target, draft, quantize=quantize, draft_quantize=draft_quantize) as llm:
        for temperature in temperatures:
            runs = _interleaved(llm, prompts, settings, temperature, tokens)
            rows = [_row(name, temperature, runs[name], runs["ar"]) for name in settings]
            report["rows"] += rows
            console.print(_table(rows, f"T = {temperature}: medians over {count} prompts, {tokens} tokens"))
    if profile_path:
        source = {key: str(value) for key, value in report["environment"].items()}
        source |= {"target": target, "draft": ", ".join(draft) or "built-in", "temperature": str(temperatures[0])}
        source |= {"prompts": f"{count} of {prompts_file.name}", "tokens": str(tokens), "k": str(lookahead)}
        _write_profile(profile_path, f"{target} at T = {temperatures[0]:g}", runs, source)
    if peer:
        report["transformers"] = {threads: _transformers(target, prompts[:3], tokens, threads) for threads in (1, 2)}
        console.print("transformers generate, tok/s by threads:", report["transformers"])
    console.print(report["environment"])
    if json_path:
        json_path.write_text(json.dumps(report, indent=1))


def _interleaved(
    llm: LLM, prompts: list[str], settings: dict[str, Speculation], temperature: float, tokens: int
) -> dict[str, list[Completion]]:
    runs: dict[str, list[Completion]] = {name: [] for name in settings}
    for setting in settings.values():  # warm-up, apart
        llm.generate("Warm up.", SamplingParams(max_tokens=16, ignore_eos=True, speculation=setting))
    reader = [*settings.values()][-1]
    for index, prompt in enumerate(track(prompts, description=f"T = {temperature}", transient=True)):
        # Target and draft keep the prompts that they have read: no mode's turn may be the one that reads them.
        llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True, speculation=reader), chat=True)
        for name, setting in settings.items():
            params = SamplingParams(
                temperature=temperature, seed=index, max_tokens=tokens, ignore_eos=True, speculation=setting
            )
            runs[name] += llm.generate(prompt, params, chat=True)
    return runs


def _fan_out_row(count: int) -> str:
    return f"ssd F={count}"


def _write_profile(file: Path, name: str, runs: dict[str, list[Completion]], source: dict[str, str]) -> None:
    metrics = {row: [run.metrics for run in completions] for row, completions in runs.items()}
    by_fan_out = {count: metrics[_fan_out_row(count)] for count in _FAN_OUTS}
    try:
        profile.write(profile_of(name, metrics["ar"], metrics["sd"], by_fan_out, source), file)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"wrote {file}", err=True)


def _row(name: str, temperature: float, runs: list[Completion], reference: list[Completion]) -> dict[str, Any]:
    metrics = [run.metrics for run in runs]
    speeds = [m.tokens_per_second for m in metrics]
    pairs = [m.tokens_per_second / r.metrics.tokens_per_second for m, r in zip(metrics, reference, strict=True)]
    quartiles = statistics.quantiles(speeds, n=4)
    return {
        "mode": name,
        "temperature": temperature,
        "tok_s": statistics.median(speeds),
        "tok_s_quartiles": [quartiles[0], quartiles[2]],
        "over_ar": statistics.median(pairs),
        "acceptance_length": _mean(metrics, "mean_acceptance_length"),
        "on_hit": _mean(metrics, "mean_acceptance_length_on_hit"),
        "on_miss": _mean(metrics, "mean_acceptance_length_on_miss"),
        "hit_rate": sum(m.hits for m in metrics) / max(1, sum(m.hits + m.misses for m in metrics)),
        "verify_ms": _mean(metrics, "verify_ms"),
        "tree_step_ms": metrics[-1].draft_step_ms,
        "wait_ms": _mean(metrics, "draft_wait_ms"),
        "overhead_ms": _mean(metrics, "round_overhead_ms"),
        "measured_over_predicted": statistics.median(m.tokens_per_second / _predicted(m) for m in metrics),
        "equal_to_ar": sum(a.token_ids == b.token_ids for a, b in zip(runs, reference, strict=True)),
    }


def _predicted(m: Metrics) -> float:
    """Tokens per second that theory gives for the measured parts."""
    per_second = 1e3 / m.verify_ms
    if m.mode == "ar":
        return per_second
    wait = m.draft_wait_ms / m.verify_ms
    if m.mode == "sd":
        return per_second * speedup_sd(m.mean_acceptance_length, wait)
    if not m.hits:  # plain decoding, or nothing but misses
        return per_second * speedup_sd(m.mean_acceptance_length, wait)
    # Filling the cache overlaps with the verification; only misses wait, and the mean wait is over all rounds.
    on_miss = wait / max(1e-9, 1 - m.hit_rate)
    return per_second * speedup_ssd(
        m.hit_rate, m.mean_acceptance_length_on_hit, m.mean_acceptance_length_on_miss, 0.0, on_miss
    )


def _mean(metrics: list[Metrics], field: str) -> float:
    return statistics.fmean(getattr(m, field) for m in metrics)


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*[_cell(value) for value in row.values()])
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(f"{item:.1f}" for item in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _transformers(target: str, prompts: list[str], tokens: int, threads: int) -> float:
    """Median tok/s of `transformers.generate` on the same weights, greedy, decode only (first token apart)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ssd.models import hub

    torch.set_num_threads(threads)
    directory = hub.resolve(target)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    speeds = []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        times = []
        for length in (1, tokens):
            began = time.perf_counter()
            model.generate(**inputs, max_new_tokens=length, min_new_tokens=length, do_sample=False)
            times.append(time.perf_counter() - began)
        speeds.append((tokens - 1) / (times[1] - times[0]))
    return statistics.median(speeds)


if __name__ == "__main__":
    main()
