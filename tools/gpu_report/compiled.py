"""Measures a peer: transformers' own model with a static cache and torch.compile, as gpt-fast does it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tools.gpu_report.job import TINY, Job, Row
from tools.gpu_report.timing import timed
from tools.inflate.sizes import LIKE


def rows(job: Job, *, model: str = "llama-8b", context: int = 1024, counts: tuple[int, ...] = (1, 8)) -> Iterator[Row]:
    """Yield milliseconds of a forward of `counts` tokens over `context` tokens: random weights, one sequence."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    like = TINY if job.tiny else LIKE[model]
    said = like.config(2 * context)
    device = torch.device(job.device)
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=context + 64)
    # Made inside a graph, its keys would be overwritten by the next one.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, head_dim, torch.bfloat16, device)
    step = torch.compile(made.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for count in counts:
        ids = torch.ones(1, count, dtype=torch.long, device=device)
        places = torch.arange(context - count, context, device=device)
        arguments = {"input_ids": ids, "position_ids": places[None], "cache_position": places}

        def forward(arguments: dict[str, torch.Tensor] = arguments) -> None:
            with torch.inference_mode():
                torch.compiler.cudagraph_mark_step_begin()
                step(past_key_values=cache, use_cache=True, return_dict=True, **arguments)

        began = time.perf_counter()
        forward()
        job.wait()
        compiled_s = time.perf_counter() - began
        forward()
        seconds, called = timed(forward, device, 3 if job.tiny else 20)
        name = f"transformers, compiled, {model}, context {context}, {count} tokens"
        yield {"name": name, "ms": 1e3 * seconds, "host_ms": 1e3 * called, "compiled_s": compiled_s}
