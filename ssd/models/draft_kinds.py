"""Kinds of drafts (entry points `ssd.drafts`): what the engine asks of each. Loads no torch.

A language model is the default, and needs no entry point. A draft of another kind reads hidden states of its target,
which the target sends (`ssd.ipc.features`). Its drafter takes the place of `ssd.draft.drafter.Drafter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint
from ssd.system.registered import DRAFTS, load_all

# The layer that fuses hidden states of a target, in every layout of a draft that reads them.
_FUSES = "fc.weight"
_MTP = "mtp"  # `--draft` takes this name even if the plugin that knows the kind is missing


class StepRoom(NamedTuple):
    """The largest step of a draft on a GPU: rows of logits, and cells of `depth` tokens for keys and values."""

    logits: int
    cells: int
    depth: int


class DraftKind:
    """A kind of draft; this class is that of language models, an entry point is an object of a subclass.

    Methods get checkpoints that `recognises` takes, and read configs and headers. The draft's process alone loads what
    `model`, `drafter` and `warm_up` name as `module:attribute`."""

    name = "a language model"
    """The kind in messages, with its article."""
    offer = ("model", "--draft MODEL, of any family, with the target's tokens", "any")
    """The row of `ssd models`: kind, how it is given, targets."""
    in_target = False
    """True if such drafts are in checkpoints of targets: `--draft` then takes the name of the entry point."""
    reads_list = True
    """True if the draft may predict the ids of `draft_vocab.safetensors` alone (`ssd.models.head.with_list`)."""
    model = ""
    """The class of the model, called as that of a family.

    If a token's row needs features of the token before, `Shape.features` is their width."""
    in_family = False
    """True if `model` gets the class of the `model_type` as first argument."""
    drafter = ""
    """The class of the drafter, called as `ssd.draft.drafter.Drafter`, with the FeatureArena as last argument."""
    warm_up = ""
    """A function of a runner and a number of rows, which does `Runner.warm_up`."""
    static = True
    """True if a step on a GPU may have a static shape (`ssd.draft.static_shapes`)."""

    def read_config(self, config: dict[str, Any], file: Path) -> dict[str, Any]:
        """Return the config of a draft's `file` in the fields that the engine reads; others unchanged.

        Raises UsageError for a config of this kind that is not supported."""
        return config

    def takes_config(self, config: Mapping[str, Any]) -> bool:
        """Return True if `auto_map` and `is_causal`, which are refused in other configs, do no harm in this one."""
        return False

    def recognises(self, model: Checkpoint) -> bool:
        return False

    def of_target(self, target: Checkpoint) -> Checkpoint | None:
        """Return the draft in a target's checkpoint, or None. Raises UsageError for one that is not supported."""
        return None

    def layers(self, draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
        """Return after how many target layers the draft reads hidden states, ascending.

        Raises UsageError if the draft does not fit its target."""
        return ()

    def borrows(self, draft: Checkpoint, target: Checkpoint) -> list[str]:
        """Return the names of the target's tensors that the draft reads beside its own."""
        return []

    def repeated(self, draft: Checkpoint) -> int:
        """Return how many weights are in memory twice; the draft has the tensors that it `borrows`."""
        return 0

    def room(self, draft: Checkpoint, plain: StepRoom, sequences: int, longest: int) -> StepRoom:
        """Return the room of the largest step, given that of a language model.

        `sequences`: running at once. `longest`: tokens of a speculation."""
        return plain


PLAIN = DraftKind()


def kinds() -> dict[str, DraftKind]:
    """Return the kinds that are installed, by name, without the language model's."""
    return load_all(DRAFTS)


def kind_named(name: str) -> DraftKind:
    """Return a kind by its name. Raises UsageError if no plugin that is installed knows it."""
    if (found := kinds().get(name)) is None:
        raise UsageError(
            f"no kind of draft {name!r} is installed ({_installed()}); the plugin `drafts` has block, eagle3 and mtp"
        )
    return found


def in_targets() -> dict[str, DraftKind]:
    """Return the kinds of drafts in targets' own checkpoints."""
    return {name: kind for name, kind in kinds().items() if kind.in_target}


def is_in_target(name: str) -> bool:
    """Return True if `--draft` takes this name for the draft in the target's own checkpoint."""
    return name == _MTP or name in in_targets()


def draft_kind(model: Checkpoint) -> DraftKind:
    """Return the kind of a checkpoint as a draft, the first one that recognises it.

    Raises UsageError for one that fuses hidden states and is of no kind that is installed."""
    found = next((kind for kind in kinds().values() if kind.recognises(model)), PLAIN)
    if found is PLAIN and _FUSES in model.tensors:
        raise UsageError(
            f"{model.directory} reads hidden states of a target ({_FUSES}), and is of no kind of draft that is "
            f"installed ({_installed()})"
        )
    return found


def _installed() -> str:
    return f"entry points `{DRAFTS}`: {', '.join(kinds()) or 'none'}"
