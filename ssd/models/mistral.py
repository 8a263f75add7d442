"""The Mistral family: Llama whose layers may attend to a window of the last tokens only (arXiv 2310.06825)."""

from __future__ import annotations

from ssd.models.llama import SPLITS, Llama


class Mistral(Llama):
    """A Mistral decoder; see `ssd.models.interface.Model`."""

    slides = True
    splits = SPLITS
