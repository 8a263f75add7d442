"""The options of a draft on another machine: what cannot work is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.engine import DraftLink, Upstream
from ssd.errors import UsageError
from ssd.ipc import keys
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.plugins.remote.configuration import remote_draft
from ssd.system import registered
from tests.models import tiny
from tests.plugins.drafts import heads

BIND = "tcp://127.0.0.1:5556"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokenizer(tiny.llama(tmp_path_factory.mktemp("models") / "target", vocab_size=300))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.new_server(tmp_path / "keys")
    keys.new_client(tmp_path / "keys", "edge")
    return tmp_path / "keys"


def test_an_engine_with_a_link_has_no_draft_here(target: Path, folder: Path) -> None:
    server = ServerOptions(http=False, draft_bind="tcp://0.0.0.0:5556", draft_keys=str(folder))
    config = resolve(EngineOptions(target=str(target), mode="ssd"), server)
    assert config.link == DraftLink(bind="tcp://0.0.0.0:5556", keys=str(folder))
    assert config.draft is None and config.has_draft and not config.draft_cpus
    built_in = resolve(EngineOptions(target=str(target)), ServerOptions(http=False, draft_bind=BIND))
    assert built_in.link == DraftLink(bind=BIND) and built_in.speculation.mode == "auto"


@pytest.mark.parametrize(
    ("server", "engine", "why"),
    [
        ({"draft_bind": "tcp://0.0.0.0:5556"}, {}, "--draft-bind tcp://0.0.0.0:5556 lets other machines in"),
        ({"draft_bind": "0.0.0.0:5556"}, {}, "--draft-bind 0.0.0.0:5556: give an address such as"),
        ({"draft_bind": "tcp://127.0.0.1:70000"}, {}, "--draft-bind tcp://127.0.0.1:70000: give an address"),
        ({"draft_keys": "keys"}, {}, "give --draft-bind"),
        ({"draft_bind": BIND, "draft_keys": "nowhere"}, {}, "nowhere holds no keys of an engine"),
        ({"draft_bind": BIND}, {"draft": ("x",)}, "--draft is a draft on this machine"),
        ({"draft_bind": BIND}, {"mode": "ngram"}, "mode ngram uses no draft"),
        ({"draft_bind": BIND}, {"sampler": "rejection"}, "needs the draft's probabilities"),
        ({"draft_bind": BIND}, {"load_format": "dummy"}, "--load-format dummy has no weights"),
        (
            {"draft_bind": BIND},
            {"executor": "elsewhere", "tensor_parallel_size": 2},
            "--draft-bind is for a target on one machine, not for --executor elsewhere",
        ),
    ],
)
def test_bad_combinations(
    target: Path, server: dict[str, Any], engine: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = registered.names
    other = {registered.EXECUTORS: ["elsewhere"]}
    monkeypatch.setattr(registered, "names", lambda group: names(group) + other.get(group, []))
    with pytest.raises(UsageError, match=why.replace("(", r"\(")):
        resolve(EngineOptions(**{"target": str(target)} | engine), ServerOptions(http=False, **server))


def test_drafts_and_clients_have_a_list_of_keys_each(target: Path, folder: Path) -> None:
    server = ServerOptions(http=False, draft_bind=BIND, draft_keys=str(folder), zmq_keys=f"{folder}/../keys")
    with pytest.raises(UsageError, match="clients and drafts need a list each"):
        resolve(EngineOptions(target=str(target)), server)


def upstream(address: str, keys: Path | None = None) -> Upstream:
    return Upstream(draft_connect=address, draft_keys=None if keys is None else str(keys))


def test_a_draft_is_checked_before_it_connects(target: Path, folder: Path, tmp_path: Path) -> None:
    def refused(connect: str = BIND, keys: Path | None = None, model: Path = target) -> str:
        with pytest.raises(UsageError) as raised:
            remote_draft(upstream(connect, keys), str(model), None, EngineOptions())
        return str(raised.value)

    assert "give --keys" in refused("tcp://192.0.2.1:5556")
    assert "give an address" in refused("192.0.2.1")
    assert "holds the engine's keys" in refused(keys=folder)
    head = heads.head(tmp_path / "head", 300, vocab_size=300)
    assert "reads the target's hidden states" in refused(model=head)
    shared = tiny.noisy_copy(target, tmp_path / "shared", noise=0.0)
    tiny.edit(shared, shared_with_target=["model.embed_tokens.weight"])
    assert "give --target" in refused(model=shared)


def test_a_draft_takes_the_type_that_was_asked_for(target: Path, folder: Path) -> None:
    edge = folder / "clients" / "edge"
    far = upstream("tcp://192.0.2.1:5556", edge)
    found = remote_draft(far, str(target), str(target), EngineOptions(draft_dtype="bfloat16"))
    assert (found.upstream, found.draft) == (far, str(target))
    assert (found.target, *map(str, found.draft_formats)) == (str(target), "bfloat16")
    plain = remote_draft(upstream(BIND), str(target), None, EngineOptions(draft_weights="int8"))
    assert [str(one) for one in plain.draft_formats] == ["int8"]
    same = {"draft_formats": plain.draft_formats, "draft_num_pages": plain.draft_num_pages}
    assert plain == replace(found, upstream=upstream(BIND), **same)
