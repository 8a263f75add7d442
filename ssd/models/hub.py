"""From what a person typed (`smollm2`, a folder, `x.gguf`, `org/name`) to a folder with a checkpoint in it."""

from __future__ import annotations

import re
from pathlib import Path

from ssd.errors import UsageError
from ssd.models.pull import BUILTIN, pull

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


def resolve(name: str, revision: str | None = None) -> Path:
    """The folder of a built-in model, of a local checkpoint, of a GGUF file (converted unless it has been), or of a hub
    model (downloaded unless it is cached).

    `revision` (branch, tag or commit) is for hub names only. Raises UsageError when there is no such model, when a
    built-in one has not been pulled, and when the hub cannot be reached and has nothing cached."""
    path = Path(name).expanduser()
    is_folder = name != "" and path.is_dir()  # an empty name would be the working directory
    is_gguf = path.suffix == ".gguf" and path.is_file()
    is_hub_name = name not in BUILTIN and not is_folder and not is_gguf and _HUB_NAME.fullmatch(name) is not None
    if revision is not None and not is_hub_name:
        raise UsageError(f"{name!r} is not a hub model, so it has no revision {revision!r}")
    if name in BUILTIN:
        model = BUILTIN[name]
        if not model.present:
            raise UsageError(f"model {name!r} is not on this machine yet: run `ssd pull {name}`")
        return model.directory
    if is_folder:
        return _with_config(path)
    if is_gguf:
        from ssd.models.gguf_import import checkpoint_of

        return checkpoint_of(path)
    if is_hub_name:
        return _with_config(_from_hub(name, revision))
    raise UsageError(
        f"no model {name!r}: not a folder, not a .gguf file, not a hub name (org/name), "
        f"not a built-in model ({', '.join(BUILTIN)})"
    )


def ensure(name: str, revision: str | None = None) -> Path:
    """Like `resolve`, but a built-in model that is missing is pulled first, with progress on stderr."""
    if name in BUILTIN and not BUILTIN[name].present:
        pull(name)
    return resolve(name, revision)


def _with_config(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise UsageError(f"{directory} is not a checkpoint: it has no config.json")
    return directory


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES)
        )
    except Exception as error:  # the library's own errors and those of its HTTP client have no common base
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(f"cannot get {name!r} from the hub: {cause}") from error
