"""Bodies that other programs send first, with their tools. Clients add a model and where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SENT: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
OPEN_WEBUI, CREWAI = _SENT["OPEN_WEBUI"], _SENT["CREWAI"]
