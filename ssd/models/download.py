"""Downloads a file and checks its digest; builds cache folders that appear complete or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd.errors import UsageError


def fetch(folder: Path, sha256: str, download: Callable[[Path], Path]) -> Path:
    """Return the file in `folder` that has this digest, downloaded into the folder unless it is there.

    Raises UsageError for a wrong file, which is deleted."""
    complete = folder / "complete"
    if complete.is_file() and _digest(complete) == sha256:
        return complete
    shutil.rmtree(folder, ignore_errors=True)  # left by a pull that was killed
    folder.mkdir(parents=True)
    file = download(folder)
    if (found := _digest(file)) != sha256:
        size = file.stat().st_size
        file.unlink()
        raise UsageError(
            f"{file.name} is not the expected file: {size} bytes with sha256 {found}, wanted {sha256}; the download "
            "was deleted"
        )
    return file.replace(complete)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_from_hub(repository: str, commit: str, name: str, folder: Path) -> Path:
    """Download a file of a hub's `repository` ("org/name"); raise UsageError if that fails."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repository, name, revision=commit))  # the next call would retry for minutes
        return Path(hf_hub_download(repository, name, revision=commit, local_dir=folder))
    except Exception as error:  # the library's own errors and those of its HTTP client have no common base
        raise UsageError(f"cannot download {name} of {repository}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `final` at once if the block succeeds, and is removed if not."""
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
