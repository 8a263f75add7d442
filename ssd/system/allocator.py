"""Freed memory that the C library keeps for later use."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Give freed memory back to the system, after work that needed much more memory than it kept.

    glibc keeps freed memory that lies below memory in use, which may be half the size of the weights. With a C library
    that has no `malloc_trim`, this does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
