"""A streamed chat with a running engine, through the `openai` package (`pip install openai`).

    ssd launch                                                # prints `http: URL`, here http://127.0.0.1:8000
    python examples/openai_client.py http://127.0.0.1:8000

Any program that speaks OpenAI's interface needs the base URL only. Give the server's key as `api_key`, if it has one.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a short story about a lighthouse keeper."}],
        max_tokens=64,
        temperature=0.8,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if (usage := chunk.usage) and (parts := usage.completion_tokens_details):  # the last chunk
            print(f"\n({usage.completion_tokens} tokens, {parts.accepted_prediction_tokens} guessed by the draft)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "http://127.0.0.1:8000")
