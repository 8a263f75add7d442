"""The configurations of `ssd draft`, `ssd edge` and an engine's link, made from checked options."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ssd.config.engine import ITEM_BYTES, DraftLink, EngineConfig, Upstream
from ssd.errors import UsageError
from ssd.ipc.curve import client_keys
from ssd.ipc.keys import check_server
from ssd.ipc.listening import is_loopback
from ssd.ipc.public import Description
from ssd.launch.options import EngineOptions, chosen, display_name
from ssd.launch.resolve import draft_formats
from ssd.launch.server import ServerOptions, resolve_server, tcp_host
from ssd.models import checkpoint, hub, pairs
from ssd.models.draft_kinds import PLAIN, draft_kind
from ssd.models.pull import BUILTIN
from ssd.models.sizes import ModelSizes
from ssd.speculation.rules import acceptance_rule
from ssd.system import cgroups

PAGE_SIZE = 16
_SHARE = 4  # the KV cache takes at most the free memory divided by this


def check_address(connect: str, folder: str | None, flags: tuple[str, str] = ("--connect", "--keys")) -> None:
    """Raise UsageError for another machine without keys, and a folder without keys; `flags` name both."""
    if not is_loopback(tcp_host(flags[0], connect)) and folder is None:
        raise UsageError(f"{flags[0]} {connect} is another machine: give {flags[1]}, a folder that ssd keys made there")
    if folder is not None:
        client_keys(Path(folder))


def remote_draft(
    upstream: Upstream,
    model: str,
    target: str | None,
    asked: EngineOptions,
    flags: tuple[str, str] = ("--connect", "--keys"),
) -> EngineConfig:
    """Find and check the models, and return the draft's configuration before it knows the engine. Raises UsageError.

    `asked` has the draft's format and device. `flags` name the options for address and keys. The configuration's target
    is a copy here if `target` is given or needed, else the draft itself."""
    options = chosen(asked)
    check_address(upstream.draft_connect, upstream.draft_keys, flags)
    draft = checkpoint.inspect(hub.ensure(model))
    if (kind := draft_kind(draft)) is not PLAIN:
        raise UsageError(f"{model} is {kind.name}, which reads the target's hidden states: it must be beside it")
    shares = bool(draft.config.get(pairs.SHARED))
    if shares and target is None:
        target = next((one.name for one in BUILTIN.values() if one.draft == model), None)
    lender = None if target is None else checkpoint.inspect(hub.ensure(target), shares)
    if lender is not None:
        pairs.check_pair(lender, draft)
    elif shares:
        raise UsageError(f"{model} shares tensors with its target: give --target, a copy of it on this machine")
    formats = draft_formats(options, [draft])
    each = ModelSizes.of(draft).kv_values_per_token * max(ITEM_BYTES[one.dtype] for one in formats)
    return EngineConfig(
        target=str((lender or draft).directory),
        draft=str(draft.directory),
        draft_name=display_name(model),
        upstream=upstream,
        draft_formats=formats,
        draft_device=options.draft_device,
        page_size=PAGE_SIZE,
        draft_num_pages=max(1, cgroups.available_bytes() // _SHARE // each // PAGE_SIZE),
    )


def draft_link(options: EngineOptions, server: ServerOptions) -> DraftLink:
    """Return the link that an engine's options ask for. Raises UsageError."""
    bind, folder, own = server.draft_bind, server.draft_keys, server.draft_prompts == "own"
    if bind is None:
        option = "--draft-keys" if folder is not None else "--draft-prompts own"
        raise UsageError(f"{option} is for a draft on another machine: give --draft-bind")
    if own and (folder is None or server.zmq_keys is None or server.zmq_bind is None):
        raise UsageError(
            "--draft-prompts own goes by the names of keys: give --draft-keys, and --zmq-bind with --zmq-keys"
        )
    if not is_loopback(tcp_host("--draft-bind", bind)) and folder is None:
        raise UsageError(f"--draft-bind {bind} lets other machines in, which read prompts: give --draft-keys")
    if folder is not None:
        check_server(Path(folder))
        if server.zmq_keys is not None and Path(folder).resolve() == Path(server.zmq_keys).resolve():
            raise UsageError(
                f"--draft-keys and --zmq-keys are both {folder}: a draft reads all prompts, so clients and drafts need "
                "a list each"
            )
    for given, why in (
        (any(options.draft), "--draft is a draft on this machine; with --draft-bind it is on another one"),
        (options.load_format != "auto", f"--load-format {options.load_format} has no weights that a draft could fit"),
        (options.mode in ("ar", "ngram"), f"mode {options.mode} uses no draft: leave --draft-bind out"),
        (
            acceptance_rule(options.sampler, 1.0).needs_draft_probs,
            f"--sampler {options.sampler} needs the draft's probabilities: its draft must be here",
        ),
        (
            options.executor != "local",
            f"--draft-bind is for a target on one machine, not for --executor {options.executor}",
        ),
    ):
        if given:
            raise UsageError(why)
    return DraftLink(bind=bind, keys=folder, own=own)


def next_port(address: str) -> str:
    """Return the address with the next port, where `ssd edge` looks for the link. Raises UsageError."""
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

    Tokenizer and chat template are the `target`'s, if given, else the draft's. Raises UsageError."""
    draft = remote_draft(upstream, model, target, asked, ("--draft-connect", "--draft-keys"))
    return replace(
        draft,
        target_name=found.model,
        speculation=found.speculation,
        sampling=found.sampling,
        max_model_len=found.max_model_len,
        num_pages=-(-found.max_model_len // PAGE_SIZE) + 1,
        digest=checkpoint.inspect(Path(draft.target), weights=False).digest,
        vocab_size=found.vocab_size,
        server=resolve_server(server, found.model),
    )
