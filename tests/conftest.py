"""One compute thread: tiny models gain nothing from more, and threads that wait for each other lose a lot."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, which is after this
