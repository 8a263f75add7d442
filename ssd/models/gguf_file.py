"""A .gguf file that a person names as a model: converted once into the cache folder, and a checkpoint from then on."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from ssd.cache import cache_dir
from ssd.errors import UsageError
from ssd.models.gguf_import import import_gguf, read_gguf
from ssd.models.gguf_tokenizer import FILES, write_tokenizer
from ssd.models.pull import lock, progress_bar, replace


def checkpoint_of(file: Path) -> Path:
    """The folder with the checkpoint made from `file`, and from the tokenizer files beside it if there are any.

    It is made again when one of these has changed. Raises UsageError for a file that is no Llama in a GGUF, and when
    the cache cannot be written.
    """
    beside = [path for name in FILES if (path := file.with_name(name)).is_file()]
    final = cache_dir() / "gguf" / f"{file.stem}-{_state([file, *beside])}"
    if (final / "config.json").is_file():
        return final
    try:
        with progress_bar(file.name) as report, lock(final.with_name(f".{final.name}.lock"), report):
            if not (final / "config.json").is_file():
                fresh = final.with_name(f".{final.name}.new")
                shutil.rmtree(fresh, ignore_errors=True)  # left by a conversion that was killed
                fresh.mkdir()
                try:
                    reader = read_gguf(file)
                    if file.with_name("tokenizer.json") in beside:
                        for path in beside:
                            shutil.copyfile(path, fresh / path.name)
                    else:
                        write_tokenizer(reader, fresh)
                    import_gguf(reader, fresh, report)
                    replace(final, fresh)
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot store {file.name} as a checkpoint in {cache_dir()}: {error}") from error
    return final


def _state(files: list[Path]) -> str:
    """Names the files as they are now: path, size and time of the last change."""
    stats = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
