"""A tokenizer of another kind than the packaged one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from ssd.frontend.tokenization import Tokenizer


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
