"""The real frontend with HTTP, and a tokenizer of another kind than the packaged one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from ssd.config.engine import ServerConfig
from ssd.frontend.http import connection
from ssd.frontend.tokenization import Tokenizer
from tests.frontend import tool_model
from tests.frontend.http_engine import HttpEngine, answering, http_engine


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of the Llama 2 kind: bytes of unknown characters as tokens, a space stripped at the beginning."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeé"]
    model = BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Reference(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    directory = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest) -> Iterator[HttpEngine]:
    """One that answers with the `IDS` of the test's module, by its `SERVER` if it has one."""
    with http_engine(getattr(request.module, "SERVER", None)) as engine, answering(engine, request.module.IDS):
        yield engine


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tool_model.Thinker]:
    """A model that thinks, and calls tools as Hermes does."""
    with tool_model.thinking(tmp_path_factory.mktemp("thinker"), tool_model.TEMPLATE, max_model_len=2048) as thinker:
        yield thinker


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tool_model.Thinker]:
    """A model whose tokenizer has Qwen's marks to fill in the middle."""
    directory = tmp_path_factory.mktemp("coder")
    tool_model.code_model(directory)
    server, size = ServerConfig(names=("scripted",), port=0), 49152 + len(tool_model.MARKS)
    with http_engine(server, target=str(directory), vocab_size=size, max_model_len=512) as engine:
        yield tool_model.Thinker(engine, Tokenizer(directory))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP gives heads and bodies little time."""
    monkeypatch.setattr(connection, "_HEAD_S", 0.2)
    monkeypatch.setattr(connection, "_BODY_S", 0.2)


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[HttpEngine]:
    """One whose target does what the test says."""
    with http_engine(getattr(request.module, "SERVER", None)) as engine:
        yield engine
