"""This user's running engines on this machine, and the ways in which people address them."""

from __future__ import annotations

import os
import re
import socket as unix
from pathlib import Path

import msgspec

from ssd.errors import UsageError
from ssd.ipc import listening, sockets
from ssd.ipc.public import printable
from ssd.ipc.run_directory import ABOUT, run_directories
from ssd.system.files import read_bounded

IPC = "ipc://"
_MOST_BYTES = 2**16
_HTTP = re.compile(r"(?:https?://)?(\[[^\]/]+\]|[^:/\[\]]+):(\d{1,5})(?:/.*)?|https?://.*")


class RunningEngine(msgspec.Struct, frozen=True):
    """The engine of a run directory: `pid` is the supervisor's; `url` is HTTP's, "" if it is not served."""

    model: str = ""
    url: str = ""
    pid: int = 0
    address: str = ""

    def __str__(self) -> str:
        who = f"{printable(self.model)}, {printable(self.url) or 'no HTTP'}, pid {self.pid}"
        return f"{self.address}  {who if self.pid else 'of another version'}"


def announce(directory: Path, model: str, url: str | None) -> None:
    about = RunningEngine(model, url or "", os.getpid(), f"{IPC}{directory}/{sockets.CLIENT}")
    (directory / ABOUT).write_bytes(msgspec.json.encode(about))


def running_engines() -> list[RunningEngine]:
    return [_about(directory) for directory in run_directories() if _answers(directory / sockets.TELEMETRY)]


def address_of(text: str) -> str:
    """Return the ZeroMQ address of the engine that `text` names: an address, HTTP's URL or host:port, or a pid.

    Raises UsageError if no engine here has that URL or pid."""
    found = _HTTP.fullmatch(text)
    if found is None and not text.isdecimal():
        return text
    engines = running_engines()
    for engine in engines:
        if text == str(engine.pid) or (found is not None and engine.url and _is_served_at(engine.url, found)):
            return engine.address
    listed = ", ".join(f"{engine.url or engine.address} (pid {engine.pid})" for engine in engines if engine.pid)
    raise UsageError(
        f"no engine of this user runs on this machine at {printable(text)}; running: {listed[:120] or 'none'}. "
        "On another machine, address its --zmq-bind: tcp://HOST:PORT"
    )


def _is_served_at(url: str, asked: re.Match[str]) -> bool:
    served = _HTTP.fullmatch(url)
    if asked[1] is None or served is None or int(asked[2]) != int(served[2]):
        return False
    try:
        listening.tcp(asked[1].strip("[]"), 0).close()  # only an address of this machine can be bound
    except (OSError, UnicodeError):
        return False
    return True


def _about(directory: Path) -> RunningEngine:
    try:
        return msgspec.json.decode(read_bounded(directory / ABOUT, _MOST_BYTES), type=RunningEngine)
    except (UsageError, msgspec.MsgspecError, UnicodeDecodeError):  # of another version
        return RunningEngine(address=f"{IPC}{directory}/{sockets.CLIENT}")


def _answers(path: Path) -> bool:
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.setblocking(False)  # it would wait for an engine that accepts no connections
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
