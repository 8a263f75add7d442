"""The fixtures of the frontend's tests, for the doors."""

from tests.frontend.conftest import coder, hasty, http, scripted, sentencepiece, thinker

__all__ = ["coder", "hasty", "http", "scripted", "sentencepiece", "thinker"]
