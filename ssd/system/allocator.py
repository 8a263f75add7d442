"""Memory that was freed and that the C library keeps for later."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Give freed memory back to the system, after work that needed much more than it left.

    glibc keeps what lies below memory in use, which may be half as much as the weights again. Other libraries have no
    such function; then this does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
