"""Raw text for students that run the target in training: pieces of files, in shards like those of the corpus.

A piece is a conversation without the chat template: its first tokens are given, the rest is to be learned. Its
`opening` is the file's path. Shards have no soft labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.frontend.tokenization import Tokenizer
from tools.distill.shards import SHARD_VERSION, claim, is_done, save, shard_path

NAME = "text"
_SUFFIXES = frozenset((".md", ".rst", ".txt", ".py", ".pyi", ".html", ".c", ".h", ".cpp", ".js", ".sh", ".css", ".sql"))
_BENCHMARKS = ("gsm8k", "humaneval", "specbench")
_MOST_BYTES = 2**18  # of a file in a folder
_SHARD = 4096  # pieces
_FEWEST = 32  # tokens of a piece
# A file looks generated if a line is longer, or if more than this share of it is digits or in words that are longer.
_LONGEST_LINE, _LONGEST_WORD, _MOST_DIGITS, _MOST_LONG_WORDS = 2000, 60, 0.2, 0.1


@dataclass(frozen=True)
class TextPlan:
    """The text to cut: at most `tokens` tokens of the files in `paths`, in pieces of at most `piece` tokens."""

    paths: tuple[str, ...]
    tokens: int = 20_000_000
    piece: int = 512
    seed: int = 0


def write_text(target: Path, digest: str, directory: Path, plan: TextPlan) -> None:
    """Write the shards of the plan unless they are there; the order of files and pieces depends on its seed.

    Raises UsageError if `directory` has the text of another plan, or if there is no text."""
    claim(directory / "text.json", asdict(plan) | {"target": digest, "version": SHARD_VERSION})
    if is_done(directory, NAME, 0):
        return
    rng = Random(f"{plan.seed}/{NAME}")
    files = text_files(plan.paths)
    rng.shuffle(files)
    pieces, prompt = _cut(Tokenizer(target), files, plan)
    if not pieces:
        raise UsageError(f"--text: no text to learn from in {', '.join(plan.paths)}")
    rng.shuffle(pieces)
    for index in reversed(range(-(-len(pieces) // _SHARD))):  # the first one last: it tells that the others are there
        own = pieces[index * _SHARD : (index + 1) * _SHARD]
        places = {file: place for place, file in enumerate(dict.fromkeys(file for file, _ in own))}
        tensors = {
            "token_ids": torch.cat([piece for _, piece in own]),
            "lengths": torch.tensor([len(piece) for _, piece in own], dtype=torch.int32),
            "prompt_lengths": torch.full((len(own),), prompt, dtype=torch.int32),
            "openings": torch.tensor([places[file] for file, _ in own], dtype=torch.int32),
        }
        metadata = {"prompts": json.dumps(list(map(str, places))), "layers": "[]"}
        save(shard_path(directory, NAME, index), tensors, metadata)


def text_shards(directory: Path) -> list[int]:
    """Return the numbers of the shards of text in a folder."""
    return sorted(int(path.stem.removeprefix(f"{NAME}-")) for path in directory.glob(f"{NAME}-*.safetensors"))


def _cut(tokenizer: Tokenizer, files: Sequence[Path], plan: TextPlan) -> tuple[list[tuple[Path, Tensor]], int]:
    """Return pieces of the files' texts, no two the same, and how many first tokens of each are given.

    Texts that are generated, or there twice, are left out."""
    first = tokenizer.encode("")  # what the target expects before a text
    pieces, seen, room = list[tuple[Path, Tensor]](), set[int](), plan.tokens
    for file in files:
        text = _read(file)
        if not text.strip() or (key := hash(" ".join(text.split()))) in seen or is_generated(text):
            continue
        seen.add(key)
        ids, most = tokenizer.encode(text, add_special_tokens=False), plan.piece - len(first)
        for start in range(0, len(ids), most):
            piece = torch.tensor([*first, *ids[start : start + most]][:room], dtype=torch.int32)
            if len(piece) >= _FEWEST and (key := hash(piece.numpy().tobytes())) not in seen:
                seen.add(key)
                pieces.append((file, piece))
                room -= len(piece)
        if room < _FEWEST:
            break
    return pieces, max(1, len(first))


def text_files(paths: Sequence[str]) -> list[Path]:
    """Return files, and the files of text in folders.

    Raises UsageError for a path that is not there or is named after a benchmark; in a folder such are left out."""
    found = list[Path]()
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"--text: there is no {path}")
        if any(_is_benchmark(Path(part)) for part in path.resolve().parts):
            raise UsageError(f"--text: {path} is named after a benchmark, on which drafts are compared")
        found += sorted(_below(path)) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _below(folder: Path) -> Iterator[Path]:
    """Yield a folder's files of text; none that is hidden or named after a benchmark."""
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith(".") or _is_benchmark(Path(part)) for part in parts)
        if file.suffix in _SUFFIXES and not hidden and file.is_file() and file.stat().st_size <= _MOST_BYTES:
            yield file


def _is_benchmark(path: Path) -> bool:
    name = re.sub("[^a-z0-9]", "", path.name.lower())
    return any(benchmark in name for benchmark in _BENCHMARKS)


def _read(file: Path) -> str:
    """Return a file's text; none if it is not UTF-8."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        return ""


def is_generated(text: str) -> bool:
    """Tell whether a text looks like data or like the output of a program: minified, base64, a table of numbers."""
    long_words = sum(len(word) for word in text.split() if len(word) > _LONGEST_WORD)
    digits = sum(character.isdigit() for character in text)
    longest = max(map(len, text.splitlines()))
    return longest > _LONGEST_LINE or digits > _MOST_DIGITS * len(text) or long_words > _MOST_LONG_WORDS * len(text)
