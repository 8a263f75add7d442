"""`python -m peers DESCRIPTOR`: a contestant, as `peers.worker` starts it."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from peers.serving import serve

serve(Connection(int(sys.argv[1])))
