"""Freed memory that the C library keeps for later use."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Give freed memory back to the system, where the C library can, after work that needed much more than it kept.

    glibc keeps freed memory that lies below memory in use, which may be half the size of the weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
