"""Downloads a file and checks its pinned digest, and builds cache folders, which appear complete or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd.errors import UsageError


def fetch(folder: Path, size: int, sha256: str, download: Callable[[Path], Path]) -> Path:
    """Return the file in `folder` that has `size` bytes and this digest, downloaded unless it is there.

    `download` puts a file into the folder that it is given. Raises UsageError for a wrong file, which is deleted."""
    complete, pin = folder / "complete", (size, sha256)
    if complete.is_file() and _size_and_digest(complete) == pin:
        return complete
    folder.parent.mkdir(parents=True, exist_ok=True)
    with building(folder) as fresh:
        file = download(fresh)
        found = _size_and_digest(file)
        if found != pin:
            raise UsageError(
                f"{file.name} is not the expected file: {found[0]} bytes with sha256 {found[1]}, "
                f"wanted {size} with {sha256}; the download was deleted"
            )
        file.rename(fresh / complete.name)
    return complete


def _size_and_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def download_from_hub(repository: str, commit: str, name: str, folder: Path) -> Path:
    """Download the file `name` of `repository` ("org/name") at `commit` into `folder`, and return it.

    Raises UsageError if the hub cannot be reached or has no such file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repository, name, revision=commit))  # the next call would retry for minutes
        return Path(hf_hub_download(repository, name, revision=commit, local_dir=folder))
    except Exception as error:  # the library's own errors and those of its HTTP client have no common base
        raise UsageError(f"cannot download {name} of {repository}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its type if it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `final` if the block ends without an error, and is removed if not.

    A reader sees the old folder, none, or the new one, never a mixture."""
    fresh, old = final.with_name(f".{final.name}.new"), final.with_name(f".{final.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a process that was killed
    fresh.mkdir()
    try:
        yield fresh
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        fresh.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
