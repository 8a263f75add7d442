"""Measure a peer: transformers' own model with a static cache and torch.compile, as gpt-fast does it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tools.gpu_report.job import TINY, Job, Row
from tools.gpu_report.timing import timed, wait
from tools.inflate.sizes import LIKE

_MODEL, _CONTEXT, _COUNTS = "llama-8b", 1024, (1, 8)


def rows(job: Job) -> Iterator[Row]:
    """Yield milliseconds of a forward of one and of eight tokens over 1,024: random weights of 8B, one sequence."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    like = TINY if job.tiny else LIKE[_MODEL]
    said = like.config(2 * _CONTEXT)
    device = torch.device(job.device)
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=_CONTEXT + 64)
    # Made inside a graph, its keys would be overwritten by the next one.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, head_dim, torch.bfloat16, device)
    step = torch.compile(made.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for count in _COUNTS:
        ids = torch.ones(1, count, dtype=torch.long, device=device)
        places = torch.arange(_CONTEXT - count, _CONTEXT, device=device)
        arguments = {"input_ids": ids, "position_ids": places[None], "cache_position": places}

        def forward(arguments: dict[str, torch.Tensor] = arguments) -> None:
            with torch.inference_mode():
                torch.compiler.cudagraph_mark_step_begin()
                step(past_key_values=cache, use_cache=True, return_dict=True, **arguments)

        began = time.perf_counter()
        forward()
        wait(device)
        compiled_s = time.perf_counter() - began
        forward()
        seconds, called = timed(forward, device, 3 if job.tiny else 20)
        name = f"transformers, compiled, {_MODEL}, context {_CONTEXT}, {count} tokens"
        yield {"name": name, "ms": 1e3 * seconds, "host_ms": 1e3 * called, "compiled_s": compiled_s}
