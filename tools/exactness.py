"""Audit: ids of `sd` and `ssd` against `ar` on all HumanEval prompts (docs/exactness.md).

    python tools/exactness.py --batch 8 --out audit.jsonl

Appends one JSON line per setting: how many prompts were equal, and for each exception the first differing position
with the gap between the two best scores of the target there (scores are logits, or logits over temperature plus the
shared noise: what the argmax is taken of). Settings already in the file are not run again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from ssd import LLM, SamplingParams
from ssd.bench.datasets import human_eval
from ssd.models import hub
from ssd.params import Speculation

SETTINGS = [Speculation("ar")]
SETTINGS += [Speculation("ssd", k, f) for k in (4, 1, 8) for f in ((3,), (1,), (5, *[2] * (k - 1), 4))]
SETTINGS += [Speculation("sd", k) for k in (4, 1, 8)]


@click.command(help=__doc__)
@click.option("--batch", default=8, show_default=True, help="sequences at a time")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--tokens", default=64, show_default=True, help="new tokens per prompt")
@click.option("--prompts", "count", default=164, show_default=True)
@click.option("--only", default="", help="run only settings whose name contains this, e.g. 'ssd k4'")
@click.option("--target-cpus", help="as of `ssd launch`: two audits side by side need cores of their own")
@click.option("--draft-cpus")
@click.option("--reference", type=click.Path(path_type=Path), required=True, help="file that keeps the ids of `ar`")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    batch: int,
    temperatures: tuple[float, ...],
    tokens: int,
    count: int,
    only: str,
    reference: Path,
    out: Path,
    **cpus: str | None,
) -> None:
    prompts = human_eval()[:count]
    kept: dict[str, list[list[int]]] = json.loads(reference.read_text()) if reference.exists() else {}
    done = [json.loads(line)["name"] for line in out.read_text().splitlines()] if out.exists() else []
    with LLM("smollm2", "smollm2-draft", max_num_seqs=batch, num_speculative_tokens=8, **cpus) as llm:
        for temperature in temperatures:
            for setting in SETTINGS:
                name = _name(setting, temperature, batch)
                if name in done or only not in name:
                    continue
                ids, figures = _run(llm, prompts, setting, temperature, tokens)
                expected = kept.setdefault(f"T{temperature}", ids)  # the first run of a temperature is `ar`'s
                reference.write_text(json.dumps(kept))
                different = [i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b]
                exceptions = [_exception(prompts[i], ids[i], expected[i], temperature, i) for i in different]
                line = {"name": name, "prompts": len(ids), "equal": len(ids) - len(different), **figures}
                with out.open("a") as file:
                    file.write(json.dumps(line | {"exceptions": exceptions}) + "\n")
                click.echo(f"{line} {exceptions or ''}")


def _name(setting: Speculation, temperature: float, batch: int) -> str:
    fan_out = ",".join(map(str, setting.fan_out))
    rest = {"ar": "", "sd": f" k{setting.num_speculative_tokens}"}
    return (
        f"{setting.mode}"
        + rest.get(setting.mode, f" k{setting.num_speculative_tokens} f{fan_out}")
        + (f" T{temperature} batch{batch}")
    )


def _run(
    llm: LLM, prompts: list[str], setting: Speculation, temperature: float, tokens: int
) -> tuple[list[list[int]], dict[str, float]]:
    """The ids, and what shows that there was speculation."""
    params = [
        SamplingParams(temperature=temperature, seed=1000 + i, max_tokens=tokens, ignore_eos=True, speculation=setting)
        for i in range(len(prompts))
    ]
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    metrics = [result.metrics for result in results]
    figures = {
        "acceptance_length": 1 + sum(m.accepted_tokens for m in metrics) / sum(m.rounds for m in metrics),
        "hit_rate": sum(m.hits for m in metrics) / max(1, sum(m.hits + m.misses for m in metrics)),
        "seconds": time.perf_counter() - began,
    }
    return [result.token_ids for result in results], {name: round(value, 3) for name, value in figures.items()}


def _exception(prompt: str, ids: list[int], expected: list[int], temperature: float, index: int) -> dict[str, Any]:
    """Where two outputs part, and how close the target's two best scores are there (one plain forward)."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from ssd.speculation.noise import NoiseCache
    from ssd.speculation.sampling import Law, perturbed

    directory = hub.resolve("smollm2")
    at = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b)
    context = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(prompt).ids + expected[:at]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([context])).logits[0, -1:]
        noise = NoiseCache(logits.shape[-1])
        scores = perturbed(logits, Law(temperature, seed=1000 + index), [len(context)], noise)
        best = torch.topk(scores[0], 2).values
    return {"prompt": index, "position": at, "gap": (best[0] - best[1]).item()}


if __name__ == "__main__":
    main()
