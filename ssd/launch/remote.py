"""Turns the options of `ssd draft` and the draft options of `ssd launch` into checked configurations."""

from __future__ import annotations

import re
from pathlib import Path

from ssd.config.engine import ITEM_BYTES, DraftLink, DType, Quantize
from ssd.config.remote import RemoteDraft
from ssd.errors import UsageError
from ssd.ipc import keys
from ssd.ipc.curve import client_keys
from ssd.ipc.listening import is_loopback
from ssd.launch import memory
from ssd.launch.options import EngineOptions, display_name
from ssd.launch.server import ServerOptions
from ssd.models import checkpoint, hub, pairs
from ssd.models.sizes import ModelSizes

_SHARE = 4  # of the free memory, the part that the KV cache may take
_BUILT_IN = {"smollm2-draft": "smollm2"}


def draft_link(options: EngineOptions, server: ServerOptions) -> DraftLink | None:
    """Return where drafts on other machines connect, if they may. Raises UsageError for what cannot work."""
    bind, folder = server.draft_bind, server.draft_keys
    if bind is None:
        if folder is not None:
            raise UsageError("--draft-keys is for a draft on another machine: give --draft-bind")
        return None
    if not is_loopback(_host("--draft-bind", bind)) and folder is None:
        raise UsageError(
            f"--draft-bind {bind} lets other machines in, which read prompts: give --draft-keys (ssd keys)"
        )
    if folder is not None:
        keys.check_server(Path(folder))
        if server.zmq_keys is not None and Path(folder).resolve() == Path(server.zmq_keys).resolve():
            raise UsageError(
                f"--draft-keys and --zmq-keys are both {folder}: a draft reads all prompts, so clients and drafts need "
                "a list each"
            )
    for given, why in (
        (any(options.draft), "--draft is a draft on this machine; with --draft-bind it is on another one"),
        (options.mode in ("ar", "ngram"), f"mode {options.mode} uses no draft: leave --draft-bind out"),
        (options.sampler == "rejection", "--sampler rejection needs the draft's probabilities: its draft must be here"),
        (options.load_format != "auto", f"--load-format {options.load_format} has no weights that a draft could fit"),
        (options.nnodes > 1, "--draft-bind is for one machine, not for --nnodes"),
    ):
        if given:
            raise UsageError(why)
    return DraftLink(bind=bind, keys=folder)


def remote_draft(
    connect: str,
    folder: Path | None,
    model: str,
    target: str | None,
    dtype: DType,
    quantize: Quantize,
    device: str,
) -> RemoteDraft:
    """Find and check what `ssd draft` was asked for. Raises UsageError for what cannot work."""
    if folder is None and not is_loopback(_host("--connect", connect)):
        raise UsageError(f"--connect {connect} is another machine: give --keys, the folder that ssd keys made there")
    if folder is not None:
        _host("--connect", connect)
        client_keys(folder)
    draft = checkpoint.inspect(hub.ensure(model))
    if pairs.is_head(draft):
        raise UsageError(f"{model} is an EAGLE-3 head, which reads the target's hidden states: it must be beside it")
    target = target or _BUILT_IN.get(model)
    lender = None if target is None else checkpoint.inspect(hub.ensure(target))
    if lender is not None:
        pairs.check_pair(lender, draft)
        draft = pairs.borrowed(draft, lender)
    elif draft.config.get(pairs.SHARED):
        raise UsageError(f"{model} shares tensors with its target: give --target, a copy of it on this machine")
    if quantize == "int8" and (dtype, device) != ("float32", "cpu"):
        raise UsageError(f"--quantize int8 works in float32 on a CPU, not in {dtype} on device {device}")
    each = ModelSizes.of(draft).kv_values_per_token * ITEM_BYTES[dtype]
    return RemoteDraft(
        connect=connect,
        keys=None if folder is None else str(folder),
        model=str(draft.directory),
        name=display_name(model),
        target=None if lender is None else str(lender.directory),
        dtype=dtype,
        quantize=quantize,
        device=device,
        cache_tokens=max(1, memory.available_bytes() // _SHARE // each),
    )


def _host(option: str, address: str) -> str:
    """Return the host of an address. Raises UsageError for one that is none."""
    found = re.fullmatch(r"tcp://(\[[^]]+\]|[^:/]+):(\d{1,5})", address)
    if found is None or int(found[2]) > 65535:
        raise UsageError(f"{option} {address}: give an address such as tcp://192.0.2.1:5556")
    return found[1].strip("[]")
