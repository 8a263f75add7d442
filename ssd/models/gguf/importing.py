"""Makes a folder with config.json and tokenizer for a GGUF, which keeps the weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd.errors import UsageError
from ssd.models.download import building
from ssd.models.gguf.config import config_of
from ssd.models.gguf.header import Header, read_header, shards_of
from ssd.models.gguf.tensors import LINK_FILE, link_to, tensors_of
from ssd.models.gguf.tokenizer import FILES, write_tokenizer
from ssd.system.files import cache_dir, lock


def import_gguf(header: Header, files: Sequence[Path], directory: Path) -> None:
    """Write config.json for GGUF `files` into `directory`. Raises UsageError if they are not supported."""
    try:
        headers = [header, *map(read_header, files[1:])]
        config = config_of(header, [(one.file, tensor) for one in headers for tensor in one.tensors])
        (directory / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
    except UsageError as error:
        raise UsageError(f"{header.file}: {error}") from error
    except (LookupError, OverflowError, TypeError, ValueError, ZeroDivisionError, StopIteration) as error:
        cause = f"lacks {error}" if isinstance(error, KeyError) else f"does not describe a model: {error}"
        raise UsageError(f"{header.file} {cause}") from error
    tensors_of(headers, config)
    pooling = _POOLINGS.get(header.fields.get(f"{header.fields['general.architecture']}.pooling_type"))
    if pooling is not None:  # an embedding model
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({pooling: True}))


_POOLINGS: Mapping[Any, str] = {
    1: "pooling_mode_mean_tokens",
    2: "pooling_mode_cls_token",
    3: "pooling_mode_lasttoken",
}
_FORMAT = 3
"""Version of the folders' content; a new number keeps older folders from being used."""


def checkpoint_of(file: Path) -> Path:
    """Return the folder that names `file`, a model's first, as its weights; make a missing or stale one.

    Config and tokenizer are copied from beside `file`, or made from its metadata. Raises UsageError for an unknown
    file, and if the cache cannot be written."""
    beside = [path for name in FILES if (path := file.with_name(name)).is_file()]
    shards = shards_of(file)
    final = cache_dir() / "gguf" / f"{file.stem}-{_state([*shards, *beside])}"
    if (final / "config.json").is_file():
        return final
    try:
        with lock(final.with_name(f".{final.name}.lock")):
            if not (final / "config.json").is_file():
                with building(final) as fresh:
                    header = read_header(file)
                    kept = beside if file.with_name("tokenizer.json") in beside else []
                    for path in kept:
                        shutil.copyfile(path, fresh / path.name)
                    write_tokenizer(header, fresh, [path.name for path in kept])
                    import_gguf(header, shards, fresh)
                    (fresh / LINK_FILE).write_text(json.dumps(link_to(shards)))
    except OSError as error:
        raise UsageError(f"cannot store {file.name} as a checkpoint in {cache_dir()}: {error.strerror}") from error
    return final


def _state(files: list[Path]) -> str:
    stats = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    return hashlib.sha256(repr((_FORMAT, stats)).encode()).hexdigest()[:16]
