"""Finds a checkpoint's folder by a name: `smollm2`, a folder, `x.gguf`, `org/name` or `org/name:Q4_K_M`."""

from __future__ import annotations

import re
from pathlib import Path

from ssd.errors import UsageError, did_you_mean
from ssd.models.download import first_line
from ssd.models.pull import BUILTIN, pull

_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?::(\w[\w.-]*))?")  # org/name or org/name:QUANT
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_BESIDE = ["tokenizer*", "*.jinja", "generation_config.json"]  # of a GGUF file
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


def resolve(name: str, revision: str | None = None) -> Path:
    """Return the folder of a built-in model, local checkpoint, GGUF file or (then downloaded) hub model.

    `org/name:Q4_K_M` is the GGUF file of this type at the hub. `revision` (branch, tag or commit) is for hub names
    only. Raises UsageError if there is no such model, or a built-in one has not been pulled."""
    path = Path(name).expanduser()
    is_folder = name != "" and path.is_dir()  # an empty name would be the working directory
    is_gguf = path.suffix == ".gguf" and path.is_file()
    at_hub = _HUB_NAME.fullmatch(name) if name not in BUILTIN and not is_folder and not is_gguf else None
    if path.suffix == ".gguf" and not path.exists():
        raise UsageError(f"no such file: {path}")
    if revision is not None and at_hub is None:
        raise UsageError(f"{name!r} is not a hub model, so it has no revision {revision!r}")
    if name in BUILTIN:
        model = BUILTIN[name]
        if not model.present:
            raise UsageError(f"model {name!r} is not on this machine yet: run `ssd pull {name}`")
        return model.directory
    if is_folder:
        return _with_config(path, str(path))
    if at_hub and (quant := at_hub[2]):
        found = _from_hub(at_hub[1], revision, _gguf_patterns(quant), [])
        path, is_gguf = _gguf_of_type(found, name, quant), True
    if is_gguf:
        from ssd.models.gguf.importing import checkpoint_of

        return checkpoint_of(path)
    if at_hub:
        hint = f"; if it has GGUF files, say which of their types, as in {name}:Q4_K_M"
        return _with_config(_from_hub(name, revision, _HUB_FILES, _NOT_HUB_FILES), f"{name!r} on the hub", hint)
    raise UsageError(
        f"no model {name!r}: not a folder, not a .gguf file, not a hub name (org/name, or org/name:Q4_K_M), "
        f"not a built-in model ({', '.join(BUILTIN)}){did_you_mean(name, BUILTIN)}"
    )


def ensure(name: str, revision: str | None = None) -> Path:
    """Pull a built-in model that is missing, with progress on stderr, then `resolve` the name."""
    if name in BUILTIN and not BUILTIN[name].present:
        pull(name)
    return resolve(name, revision)


def _with_config(directory: Path, named: str, hint: str = "") -> Path:
    if not (directory / "config.json").is_file():
        raise UsageError(f"{named} is not a checkpoint: it has no config.json{hint}")
    return directory


def _gguf_patterns(quant: str) -> list[str]:
    spelt = sorted({quant, quant.lower(), quant.upper()})
    return [*(f"*{one}{end}.gguf" for one in spelt for end in ("", "-*-of-*")), *_BESIDE]


def _gguf_of_type(directory: Path, name: str, quant: str) -> Path:
    ends = re.compile(rf"(?:.*[-._])?{re.escape(quant)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = sorted(file for file in directory.rglob("*.gguf") if ends.fullmatch(file.name))
    found = [file for file in found if not file.name.startswith("mmproj")]  # vision towers
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(str(file.relative_to(directory)) for file in found)
        raise UsageError(f"{name!r} on the hub is more than one GGUF file: say more of the name ({listed})")
    raise UsageError(f"{name!r} on the hub: no GGUF file there ends in {quant}.gguf")


def _from_hub(name: str, revision: str | None, wanted: list[str], unwanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:  # the library's own errors and those of its HTTP client have no common base
        cause, hint = first_line(error), ""
        if isinstance(error, LocalEntryNotFoundError):  # nothing is cached, and nobody answers
            cause = "HF_HUB_OFFLINE is set" if "traffic has been disabled" in cause else cause.removeprefix("Got: ")
            hint = (
                ". Without a network give a folder or .gguf file from elsewhere, or a built-in model (ssd models); "
                "HF_ENDPOINT names a mirror"
            )
        raise UsageError(f"cannot get {name!r} from the hub: {cause}{hint}") from error
