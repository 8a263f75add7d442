"""The three kinds, as `ssd.models.draft_kinds.DraftKind` says. Reads configs and headers only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd.config.params import MAX_LOOKAHEAD
from ssd.models.checkpoint import Checkpoint
from ssd.models.draft_kinds import DraftKind, StepRoom
from ssd.models.pairs import DRAFT_VOCAB, SHARED
from ssd.plugins.drafts import layouts, mtp_config
from ssd.plugins.drafts.block_config import BLOCK_ROWS, check_block, fields_of, path_cells
from ssd.plugins.drafts.eagle3_config import EMBEDDING, OUTPUTS, check_head, is_head, lent_names

_TARGETS = "built-in families, most of the fallback's"


class _Lent(DraftKind):
    """A draft that reads its target's embedding and `lm_head` where it has none of its own."""

    reads_list = False  # `d2t` names the rows that predict

    def borrows(self, draft: Checkpoint, target: Checkpoint) -> list[str]:
        return [*lent_names(draft, target).values()]

    def repeated(self, draft: Checkpoint) -> int:
        """Return the rows of the target's table that predict: they are packed, and in the table."""
        names = draft.tensors.keys()
        if OUTPUTS in names and OUTPUTS not in draft.config.get(SHARED, ()):
            return 0
        known = draft.count("vocab_size")
        predicted = draft.count(DRAFT_VOCAB, known)
        kept = predicted < known or not {OUTPUTS, EMBEDDING} & names
        return draft.count("hidden_size") * predicted if kept else 0


class _Block(_Lent):
    name = "a block drafter"
    offer = ("block drafter", "--draft DRAFTER, in the layout of DSpark, DFlash or speculators", _TARGETS)
    model = f"{__package__}.block_model:BlockDraft"
    drafter, warm_up = f"{__package__}.block_drafter:BlockDrafter", f"{__package__}.block_drafter:warm_up"
    static = False

    def read_config(self, config: dict[str, Any], file: Path) -> dict[str, Any]:
        return layouts.block_of_speculators(config, file)

    def takes_config(self, config: Mapping[str, Any]) -> bool:
        return layouts.names_block(config)

    def recognises(self, model: Checkpoint) -> bool:
        return layouts.names_block(model.config)

    def layers(self, draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
        return check_block(draft, target).layers

    def room(self, draft: Checkpoint, plain: StepRoom, sequences: int, longest: int) -> StepRoom:
        """Return the room of a pass: rows of whole speculations, after every chain and every path."""
        paths = sequences * path_cells(fields_of(draft.config), MAX_LOOKAHEAD)
        return StepRoom((plain.cells + sequences) * (1 + longest), plain.cells + paths, BLOCK_ROWS)


class _Head(DraftKind):
    drafter, warm_up = f"{__package__}.head_drafter:drafter", f"{__package__}.head_drafter:warm_up"


class _Eagle3(_Head, _Lent):
    name = "an EAGLE-3 head"
    offer = ("EAGLE-3 head", "--draft HEAD, in SafeAILab's or speculators' layout", _TARGETS)
    model = f"{__package__}.eagle3_model:Eagle3"

    def read_config(self, config: dict[str, Any], file: Path) -> dict[str, Any]:
        return layouts.head_of_speculators(config, file)

    def recognises(self, model: Checkpoint) -> bool:
        return is_head(model)

    def layers(self, draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
        return check_head(draft, target)


class _Mtp(_Head):
    name = "an MTP head"
    offer = (
        "MTP head",
        "--draft mtp: layers for it in the target's own checkpoint",
        "qwen3_5_text, qwen3_5_moe_text, qwen3_next",
    )
    model, in_family = f"{__package__}.mtp_model:MTPHead", True
    in_target = True

    def recognises(self, model: Checkpoint) -> bool:
        return mtp_config.is_mtp(model)

    def of_target(self, target: Checkpoint) -> Checkpoint | None:
        return mtp_config.head_of(target)

    def layers(self, draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
        return (target.count("num_hidden_layers"),)


BLOCK, EAGLE3, MTP = _Block(), _Eagle3(), _Mtp()
