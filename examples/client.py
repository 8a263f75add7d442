"""Several requests at once to a running engine, over ZeroMQ, each streamed as it comes.

    ssd launch                                      # prints `ready: ADDRESS`
    python examples/client.py ADDRESS

One `AsyncClient` is one connection. Any number of tasks share it, and the engine decodes their requests in one batch.
docs/protocol.md describes the messages, for clients in other languages.
"""

from __future__ import annotations

import asyncio
import sys

from ssd import SamplingParams
from ssd.client import AsyncClient

PROMPTS = ["def fibonacci(n):", "Once upon a time there was a", "The three largest oceans are"]


async def write(client: AsyncClient, prompt: str) -> None:
    """Stream one answer: a line for each chunk, which holds the tokens of one round."""
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=7)
    async for chunk in client.stream(prompt, params):
        if chunk.completion is None:
            print(f"{prompt[:12]:12} ... {chunk.text!r}")
        else:  # the last chunk: the whole answer and its figures
            metrics = chunk.completion.metrics
            print(f"{prompt}{chunk.completion.text}\n({metrics.mean_acceptance_length:.2f} tokens per round)\n")


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        description = await client.describe()
        print(f"{description.model}, context of {description.max_model_len} tokens")
        await asyncio.gather(*[write(client, prompt) for prompt in PROMPTS])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/client.py ADDRESS, as `ssd launch` prints it")
    asyncio.run(main(sys.argv[1]))
