"""The client library: other programs use it to send requests to a running engine (docs/protocol.md).

with Client("ipc:///tmp/ssd-xyz/client.sock") as client:
    for chunk in client.stream("Why is the sky blue?"):
        print(chunk.text, end="")

async with AsyncClient("tcp://engine.example:5555", keys="keys/laptop") as client:
    completions = await asyncio.gather(*[client.generate(prompt) for prompt in prompts])"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssd.client.blocking import Client
from ssd.client.results import ChatTurn, Completion, Conversation, Prompt, StreamChunk

if TYPE_CHECKING:
    from ssd.client.asynchronous import AsyncClient

__all__ = ["AsyncClient", "ChatTurn", "Client", "Completion", "Conversation", "Prompt", "StreamChunk"]


def __getattr__(name: str) -> Any:
    # Importing asyncio takes as long as everything else here.
    if name != "AsyncClient":
        raise AttributeError(f"module 'ssd.client' has no attribute {name!r}")
    from ssd.client.asynchronous import AsyncClient

    return AsyncClient
