"""`ssd edge`: a frontend and a draft in front of an engine elsewhere. Real processes, and a link that breaks."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.client import Client
from ssd.client.results import Completion
from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.engine import EngineConfig, Upstream
from ssd.config.params import SamplingParams, Speculation
from ssd.errors import UsageError
from ssd.ipc import keys
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from ssd.plugins.remote.configuration import check_address, edge_config, next_port
from tests.models import tiny
from tests.plugins.remote.world import LinkThread, free_port, kill
from tests.scripted_engine import PATIENCE_S

PROMPTS = [tiny.token_ids(n, n) for n in (4, 9, 22)]
# A verification that a draft on this machine has time to prepare for.
TIMES = DeviceTimes(verify=ForwardTime(0.02), depth=ForwardTime(0.0))
SPECULATION = Speculation("ssd", 3, (3,), "none")


@dataclass
class World:
    """An engine, an edge in front of it, a client of each, and the link to the engine's clients' socket."""

    cloud: Engine
    edge: Engine
    direct: Client
    client: Client
    link: LinkThread
    config: EngineConfig
    model: Path

    def until_hits(self) -> None:
        """Ask through the edge until its draft is of use."""
        deadline = time.monotonic() + PATIENCE_S
        while not sum(found.metrics.hits for found in self.client.generate(PROMPTS, params(speculation=SPECULATION))):
            assert time.monotonic() < deadline, "the draft is of no use"


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "ignore_eos": True, "seed": 5, "store": False} | given)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("edge")
    target = tiny.tokenizer(tiny.llama(folder / "target", seed=3, vocab_size=300))
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.02)
    (draft / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    for name in ("keys", "draft-keys"):
        keys.new_server(folder / name)
        for client in ("laptop", "phone"):
            keys.new_client(folder / name, client)
    ports = free_port(), free_port()
    bind, draft_bind = (f"tcp://127.0.0.1:{port}" for port in ports)
    server = ServerOptions(
        http=False,
        zmq_bind=bind,
        zmq_keys=str(folder / "keys"),
        draft_bind=draft_bind,
        draft_keys=str(folder / "draft-keys"),
        draft_prompts="own",
    )
    options = EngineOptions(target=str(target), mode="ssd", max_num_seqs=4)
    link = LinkThread(ports[0])
    upstream = Upstream(
        connect=link.address,
        draft_connect=draft_bind,
        keys=str(folder / "keys/clients/laptop"),
        draft_keys=str(folder / "draft-keys/clients/laptop"),
    )
    with Engine(replace(resolve(options, server), emulate=TIMES)) as cloud:
        phone = folder / "keys/clients/phone"
        with Client(bind, keys=phone) as direct:
            found = direct.describe()
            config = edge_config(upstream, found, str(draft), None, EngineOptions(), ServerOptions(port=0))
            with Engine(config) as edge, Client(edge.address) as client:
                yield World(cloud, edge, direct, client, link, config, target)
    link.close()


def same(one: Completion, other: Completion) -> bool:
    """Whether two answers agree in all but their times."""
    plain = [replace(answer, metrics=other.metrics) for answer in (one, other)]
    return plain[0] == plain[1]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.8, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "ignore_eos": False, "max_tokens": 40, "stop_token_ids": list(range(0, 300, 9))},
        {"presence_penalty": 1.0, "min_tokens": 3},
        {"pooling": "mean"},
        {"pooling": "last"},
    ],
)
def test_an_edge_answers_as_its_engine_does(world: World, asked: dict[str, Any]) -> None:
    direct, through = (one.generate(PROMPTS, params(**asked)) for one in (world.direct, world.client))
    assert all(same(*pair) for pair in zip(direct, through, strict=True))


def test_texts_that_end_an_answer_are_found_here(world: World) -> None:
    (whole,) = world.direct.generate(["Hello"], params(max_tokens=40))
    stop = whole.text[len(whole.text) // 2 :][:3]
    assert stop and same(*(one.generate(["Hello"], params(max_tokens=40, stop=[stop]))[0] for one in both(world)))
    assert world.client.generate(["Hello"], params(max_tokens=40, stop=[stop]))[0].finish_reason == "stop"


def both(world: World) -> tuple[Client, Client]:
    return world.direct, world.client


def test_http_is_served_here(world: World) -> None:
    body = {"prompt": "Hello", "max_tokens": 16, "seed": 5, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{world.edge.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    (direct,) = world.direct.generate(["Hello"], params())
    assert found["choices"][0]["text"] == direct.text


def test_its_draft_reads_its_own_requests_only(world: World) -> None:
    world.until_hits()
    for _ in range(3):
        assert not any(
            answer.metrics.hits for answer in world.direct.generate(PROMPTS, params(speculation=SPECULATION))
        )
    world.until_hits()


def test_a_second_edge_has_a_draft_of_its_own(world: World) -> None:
    upstream, model = world.config.upstream, world.config.draft
    assert upstream is not None and model is not None
    for name in ("keys", "draft_keys"):
        folder = getattr(upstream, name).replace("laptop", "phone")
        upstream = replace(upstream, **{name: folder})
    server = ServerOptions(http=False)
    config = edge_config(upstream, world.direct.describe(), model, None, EngineOptions(), server)
    asked = params(speculation=SPECULATION, temperature=0.8)
    expected = [found.token_ids for found in world.direct.generate(PROMPTS, asked)]
    with Engine(config) as edge, Client(edge.address) as client:
        deadline, hits = time.monotonic() + PATIENCE_S, [0, 0]
        while not all(hits):
            assert time.monotonic() < deadline, "a draft is of no use"
            for index, one in enumerate((world.client, client)):
                found = one.generate(PROMPTS, asked)
                assert [answer.token_ids for answer in found] == expected
                hits[index] = sum(answer.metrics.hits for answer in found)
    world.until_hits()


def test_a_lost_connection_costs_no_request_and_no_token(world: World) -> None:
    asked = params(max_tokens=100, temperature=0.8, logprobs=1)
    direct = world.direct.generate(PROMPTS, asked)
    for lose in (world.link.reset, lambda: kill(world.cloud.pids["frontend"])):
        timer = threading.Timer(0.8, lose)
        timer.start()
        through = world.client.generate(PROMPTS, asked)
        timer.join()
        assert all(same(*pair) for pair in zip(direct, through, strict=True))


def test_a_request_that_is_given_up_ends_upstream(world: World) -> None:
    stream = world.client.stream(PROMPTS[0], params(max_tokens=100_000 // 2000))
    next(stream)
    stream.close()
    assert len(world.client.generate(PROMPTS, params())) == len(PROMPTS)


def test_its_processes_are_replaced(world: World) -> None:
    (before,) = world.client.generate(PROMPTS[:1], params())
    for role in ("draft", "target"):
        kill(world.edge.pids[role])
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                (after,) = world.client.generate(PROMPTS[:1], params())
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert same(before, after)
    world.until_hits()


def test_texts_are_made_with_the_tokenizer_of_the_engines_model(world: World, tmp_path: Path) -> None:
    model = tiny.renumbered(world.model, tmp_path / "draft")
    tiny.edit(model, eos_token_id=2)
    server = ServerOptions(http=False)
    upstream, found = world.config.upstream, world.direct.describe()
    assert upstream is not None
    alone = edge_config(upstream, found, str(model), None, EngineOptions(), server)
    with pytest.raises(UsageError, match="texts become tokens here: give --target"):
        Engine(alone).start()
    texts = tmp_path / "texts"  # the target's files without its weights
    shutil.copytree(world.model, texts, ignore=shutil.ignore_patterns("*.safetensors"))
    config = edge_config(upstream, found, str(model), str(texts), EngineOptions(), server)
    with Engine(config) as edge, Client(edge.address) as client:
        direct, through = (one.generate(["Hello"], params())[0] for one in (world.direct, client))
        assert same(direct, through)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is another machine: give --keys"):
        check_address("tcp://cloud.example:5555", None)
    with pytest.raises(UsageError, match="give an address such as"):
        next_port("cloud:5555")
    with pytest.raises(UsageError, match="give --draft-connect"):
        next_port("tcp://cloud.example:65535")
    assert next_port("tcp://[::1]:5555") == "tcp://[::1]:5556"
    own = ServerOptions(http=False, draft_bind="tcp://127.0.0.1:5556", draft_prompts="own")
    with pytest.raises(UsageError, match="--draft-prompts own goes by the names of keys"):
        resolve(EngineOptions(), own)
    with pytest.raises(UsageError, match="--draft-prompts own is for a draft on another machine"):
        resolve(EngineOptions(), ServerOptions(http=False, draft_prompts="own"))
