"""Models that harm whoever reads their chat template or uses their tokenizer: it costs the request that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.config.params import SamplingParams
from ssd.ipc.public import ChatMessage, Generate
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from tests.attacks import http_messages
from tests.attacks.engine import AttackedEngine, attacked_engine
from tests.attacks.hostile_models import AT_LOAD, TEMPLATES, TEXTS, hostile_at_load, hostile_model
from tests.attacks.http_client import CHAT, COMPLETIONS, TOKENIZE, post
from tests.attacks.registry import Answer, Attack, Site
from tests.attacks.zeromq import peer

pytestmark = pytest.mark.mock

_PATIENCE_S = 180.0  # until a worker, which others go before, has used up its time
_LONGEST_STALL_S = 8.0
_SHORT = SamplingParams(max_tokens=2)
_KEY = "the-key-of-those-who-may-ask"


@pytest.fixture(scope="module")
def source() -> Path:
    """The folder of an honest model."""
    return Path(resolve(EngineOptions()).target)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Iterator[AttackedEngine]:
    folder = tmp_path_factory.mktemp("hostile")
    model = hostile_model(source, folder / "model")
    with attacked_engine(folder, "--target", model, api_key=_KEY) as engine:
        engine.innocents.seen()
        yield engine


def over_zeromq(site: Site, message: Generate) -> Answer:
    with peer(site) as client:
        client.send(message)
        return next(client.answers(1, _PATIENCE_S))


def chats(word: str) -> Attack:
    """A user says the word to the template, over both doors, and has its text counted. Templates that use up their time
    are asked over one door each."""
    said = [{"role": "user", "content": word}]

    def ask(site: Site) -> Iterator[Answer]:
        if word != "loops":
            yield post(site, CHAT, {"model": site.model, "messages": said, "max_tokens": 2}, patience=_PATIENCE_S)
        if word != "power":
            yield over_zeromq(site, Generate(1, messages=[ChatMessage("user", word)], params=_SHORT))
        if word not in ("loops", "power"):
            yield post(site, TOKENIZE, {"model": site.model, "messages": said}, patience=_PATIENCE_S)

    return Attack(word, "hostile_models", ask)


def texts(name: str) -> Attack:
    """A raw text that the tokenizer cannot take."""

    def ask(site: Site) -> Iterator[Answer]:
        yield post(
            site, COMPLETIONS, {"model": site.model, "prompt": TEXTS[name], "max_tokens": 2}, patience=_PATIENCE_S
        )
        yield post(site, TOKENIZE, {"model": site.model, "prompt": TEXTS[name]}, patience=_PATIENCE_S)
        yield over_zeromq(site, Generate(1, TEXTS[name], params=_SHORT))

    return Attack(name, "hostile_models", ask)


WRONG_KEYS = Attack("wrong_keys", "hostile_models", http_messages.wrong_keys)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "attack", [WRONG_KEYS, *map(chats, TEMPLATES), *map(texts, TEXTS)], ids=lambda attack: attack.name
)
def test_what_a_model_does_costs_its_own_request(engine: AttackedEngine, attack: Attack) -> None:
    engine.innocents.seen()
    pids = engine.pids
    outcome = attack.run(engine.site)
    problems = outcome.problems
    for name, innocent in engine.innocents.seen().items():
        problems += [f"innocent {name}: {problem}" for problem in innocent.problems[:3]]
        if innocent.stall_s > _LONGEST_STALL_S:
            problems.append(f"innocent {name} heard nothing while the frontend computed {innocent.stall_s:.1f} s")
    problems += [f"the {role} was replaced" for role in pids if engine.pids.get(role) != pids[role]]
    assert not problems
    assert works(engine.site, chat=True) == works(engine.site, chat=False) == "200"
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("name", AT_LOAD)
def test_a_template_that_cannot_be_read_costs_chat_and_not_the_server(name: str, source: Path, tmp_path: Path) -> None:
    model = hostile_at_load(source, tmp_path / "model", AT_LOAD[name])
    with attacked_engine(tmp_path, "--target", model) as engine:
        assert works(engine.site, chat=False) == "200"
        assert works(engine.site, chat=True) == "400"
        seen = engine.innocents.seen()
        assert not [problem for innocent in seen.values() for problem in innocent.problems]


def works(site: Site, chat: bool) -> str:
    """The status of a harmless question."""
    said = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    return post(site, CHAT if chat else COMPLETIONS, {"model": site.model, "max_tokens": 2, **said}).code
