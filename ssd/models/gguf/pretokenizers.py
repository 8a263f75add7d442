"""The rules that cut a text before byte-level BPE, by llama.cpp's names (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cl100k(digits: str) -> str:
    words = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(ending: str, digits: str) -> str:
    """Return tiktoken's o200k with another ending of words and another rule for digits."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class Cut:
    """One way to cut: `patterns` are applied in turn, then GPT-2's own expression if `gpt2`."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token stays whole, without merges
    bos: bool = False  # llama.cpp's default for a file without `add_bos_token`

    def steps(self) -> list[Any]:
        """Return the pre-tokenizers, the byte alphabet last."""
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)]


_GPT2 = Cut(gpt2=True)
_DIGITS = Cut((r"\p{N}",), gpt2=True)
_QWEN2 = Cut((_cl100k(r"\p{N}"),), nfc=True)
_QWEN35 = Cut(
    (_QWEN2.patterns[0].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),), nfc=True
)
_LLAMA3 = Cut((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, bos=True)
_GPT4O = Cut((_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = Cut(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}""",
    )
)
CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), Cut(gpt2=True, nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS),
    "command-r": Cut(_DIGITS.patterns, gpt2=True, nfc=True),
    **dict.fromkeys(("qwen2", "qwen2.5", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3),
    "qwen35": _QWEN35,
    **dict.fromkeys(("dbrx", "smaug-bpe"), Cut(_LLAMA3.patterns)),
    "stablelm2": Cut(_QWEN2.patterns),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": Cut((_o200k("", r"\p{N}"),), ignore_merges=True, bos=True),
    "deepseek-v3": _DEEPSEEK3,
}
