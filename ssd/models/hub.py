"""From what a person typed (`smollm2`, a folder, `x.gguf`, `org/name`) to a folder with a checkpoint in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ssd.cache import cache_dir
from ssd.errors import UsageError

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


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
        BuiltinModel("smollm2-draft", "8 layers over the embedding of smollm2", "28.3M", "Apache-2.0", packaged=True),
    )
}


def resolve(name: str, revision: str | None = None) -> Path:
    """The folder of a built-in model, of a local checkpoint, of a GGUF file (converted unless it has been), or of a hub
    model (downloaded unless it is cached).

    `revision` (branch, tag or commit) is for hub names only. Raises UsageError when there is no such model, when a
    built-in one has not been pulled, and when the hub cannot be reached and has nothing cached.
    """
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
        from ssd.models.gguf_file import checkpoint_of

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
        from ssd.models.pull import pull

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
