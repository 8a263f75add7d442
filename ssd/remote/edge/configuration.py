"""The configuration of the processes of `ssd edge`, made from its options and checked."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ssd.config.engine import EngineConfig, Upstream
from ssd.errors import UsageError
from ssd.ipc.public import Description
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions, resolve_server, tcp_host
from ssd.models import checkpoint
from ssd.remote.configuration import remote_draft

_PAGE_SIZE = 16


def next_port(address: str) -> str:
    """Return the address with the next port, where `ssd edge` looks for the draft link. Raises UsageError."""
    tcp_host("--connect", address)
    host, _, port = address.rpartition(":")
    if int(port) == 65535:
        raise UsageError(
            f"--connect {address} has the last port, and the draft link none after it: give --draft-connect"
        )
    return f"{host}:{int(port) + 1}"


def edge_config(
    upstream: Upstream, found: Description, model: str, target: str | None, asked: EngineOptions, server: ServerOptions
) -> EngineConfig:
    """Return the configuration for an engine `upstream` that describes itself by `found`; `model` drafts.

    Tokenizer and chat template are those of `target` if that is given, else the draft's. Raises UsageError."""
    keys = None if upstream.draft_keys is None else Path(upstream.draft_keys)
    draft = remote_draft(upstream.draft_connect, keys, model, target, asked, ("--draft-connect", "--draft-keys"))
    texts = checkpoint.inspect(Path(draft.target or draft.model), weights=False)
    pages = -(-found.max_model_len // _PAGE_SIZE) + 1
    return EngineConfig(
        target=str(texts.directory),
        target_name=found.model,
        draft=draft.model,
        draft_name=draft.name,
        upstream=replace(upstream, lender=draft.target),
        speculation=found.speculation,
        sampling=found.sampling,
        draft_formats=draft.formats,
        draft_device=draft.device,
        max_model_len=found.max_model_len,
        page_size=_PAGE_SIZE,
        num_pages=pages,
        draft_num_pages=max(1, draft.cache_tokens // _PAGE_SIZE),
        digest=texts.digest,
        vocab_size=found.vocab_size,
        server=resolve_server(server, found.model),
    )
