"""Measure transformers' plain and assisted generation with the same pair: greedy, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ssd.frontend.tokenization import Tokenizer
from ssd.models import hub
from tools.gpu_report.job import Job, Row


def rows(job: Job) -> Iterator[Row]:
    """Yield speeds summed over the prompts that there is time for. transformers needs files with weights."""
    if job.made:
        yield {"name": "not run", "why": "a made pair has no files with weights"}
        return
    from transformers import AutoModelForCausalLM

    count, tokens = (2, 16) if job.tiny else (10, 128)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(hub.ensure(name), dtype=torch.bfloat16).to(job.device).eval()
        for name in (job.target, job.draft)
    )
    tokenizer = Tokenizer(hub.ensure(job.target))
    seconds = {"generate": 0.0, "assisted generation": 0.0}
    generated = dict.fromkeys(seconds, 0)
    fixed: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": True}
    for turn, prompt in enumerate(job.asked(count + 1)):
        ids = torch.tensor([tokenizer.encode(prompt) if isinstance(prompt, str) else prompt], device=job.device)
        for name, more in (("generate", {}), ("assisted generation", {"assistant_model": draft})):
            began = time.perf_counter()
            out = target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **fixed, **more)
            if turn:  # the first one warms up
                seconds[name] += time.perf_counter() - began
                generated[name] += out.shape[1] - ids.shape[1]
                yield {"name": f"transformers, {name}", "tok_s": generated[name] / seconds[name], "prompts": turn}
        if job.left() < 0:
            return
