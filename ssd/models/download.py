"""Downloads from pip's configured package index, and builds cache folders, which appear complete or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssd.errors import UsageError
from ssd.system import interpreter

Report = Callable[[str, int, int], None]
"""Called with (stage, units done, units in all) as work goes on."""

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0

# pip's public `--report` fetches the whole wheel only to tell its address, so pip's package finder is asked first.
_ASK_FINDER = """
import json, sys
from pip._internal.commands import create_command
from pip._vendor.packaging.requirements import Requirement
command = create_command("download")
options, _ = command.parse_args(["--no-deps", sys.argv[1]])
with command.main_context():
    session = command.get_default_session(options)
    wanted = Requirement(sys.argv[1])
    finder = command._build_package_finder(options, session)
    best = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
    verify = session.verify if isinstance(session.verify, str) else None
    print(json.dumps({"url": best.link.url_without_fragment, "ca_file": verify, "proxies": dict(session.proxies)}))"""
_PIP_REPORT = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]


@dataclass(frozen=True)
class Location:
    """Where a file is (http, https or file), and how pip is configured to get there."""

    url: str
    ca_file: str | None = None
    proxies: dict[str, str] = field(default_factory=dict)


def locate(requirement: str) -> Location:
    """Return the address of the distribution that pip would install for `requirement` ("name==version").

    Raises UsageError if pip finds none."""
    asked = _python("-c", _ASK_FINDER, requirement)
    if asked.returncode == 0:
        return Location(**json.loads(asked.stdout))
    asked = _python(*_PIP_REPORT, requirement)
    if asked.returncode == 0:
        return Location(json.loads(asked.stdout)["install"][0]["download_info"]["url"])
    complaint = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
    raise UsageError(f"pip cannot find {requirement}: {complaint[-1]}")


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        interpreter.command(*arguments),
        env=interpreter.environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def fetch(location: Location, part: Path, size: int, sha256: str, report: Report) -> None:
    """Download into `part`, from where it ends, until it has `size` bytes, and check its digest `sha256`.

    A dropped connection is resumed while each attempt adds bytes. Raises UsageError if an attempt adds none (`part`
    stays for the next call) and if the digest is wrong (`part` is deleted)."""
    part.parent.mkdir(parents=True, exist_ok=True)
    while (have := _size(part)) < size:
        try:
            _fetch_rest(location, part, size, report)
            cause = f"the connection ended after {_size(part)} of {size} bytes"
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
        if _size(part) <= have:
            raise UsageError(f"download of {location.url} failed: {cause}; run it again to continue")
    if (actual := digest(part)) != sha256:
        part.unlink()
        raise UsageError(
            f"{location.url} is not the expected file: sha256 {actual}, wanted {sha256}; the download was deleted"
        )


def _fetch_rest(location: Location, part: Path, size: int, report: Report) -> None:
    """Append from where `part` ends, in one attempt, or start over if the server ignores the range."""
    have = _size(part)
    request = urllib.request.Request(location.url, headers={"Range": f"bytes={have}-"} if have else {})
    with _open(location, request) as response:
        resumed = str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
        done = have if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while done < size and (chunk := response.read(min(_CHUNK, size - done))):
                done += file.write(chunk)
                report("download", done, size)


def _open(location: Location, request: urllib.request.Request) -> AbstractContextManager[Any]:
    import ssl

    if not location.url.startswith(("https://", "http://", "file://")):
        raise UsageError(f"cannot download from {location.url}")
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=location.ca_file))
    ]
    if location.proxies:
        handlers.append(urllib.request.ProxyHandler(location.proxies))
    opener = urllib.request.build_opener(*handlers)
    try:
        return opener.open(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 407):
            raise UsageError(
                f"{location.url} wants credentials ({error}): fetch the wheel with `pip download --no-deps` "
                "and name its folder in PIP_FIND_LINKS"
            ) from error
        raise


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """Yield a `Report` that shows a bar on stderr, one line per stage, from its first call on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"{title}: {{task.description}}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    progress = Progress(*columns, console=Console(stderr=True))

    def report(stage: str, done: int, total: int) -> None:
        progress.start()
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()
