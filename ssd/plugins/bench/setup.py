"""The engine that a benchmark measures: as its options say, on emulated devices, or with a draft as right as stated."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ssd.config.emulation import DeviceTimes, StatedAgreement
from ssd.config.engine import EngineConfig
from ssd.config.params import Allocation
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.plugins.bench.emulation.agreement import acceptance_length, line
from ssd.plugins.bench.emulation.quantities import time_text

_DECIDED = (
    *("target", "draft", "revision", "load_format"),
    *("dtype", "draft_dtype", "quantize", "draft_weights", "activations"),
)
_LATE = 1.2  # a forward is late if it takes this many times its stated time


class Setup:
    """The engine of a benchmark, as its options say but for an emulation, and what its report says of the engine.

    Forwards take `times`, and models agree as often as `stated`; None: as they do. `words` name the emulation, for
    titles. `has_draft`: there is a draft without an option."""

    def __init__(self, times: DeviceTimes | None = None, stated: StatedAgreement | None = None) -> None:
        self.times, self.stated = times, stated
        self.has_draft = times is not None and stated is not None
        # A script's scores say nothing of its doubts.
        self.allocation: Allocation = "theorem" if self.has_draft else "joint"
        said = [] if times is None else [f"emulated: {emulated(times)}"]
        if stated is not None:
            length, hits = acceptance_length(stated), stated.hit_rate
            said.append(f"synthetic: acceptance length {length:.3g}, hit rate {hits:.3g}")
        self.words = "; ".join(said)

    @contextmanager
    def configured(self, options: EngineOptions) -> Iterator[EngineConfig]:
        """Yield the configuration; delete the scripted pair, if both are stated, after the block. Raises UsageError."""
        from ssd.launch.resolve import resolve

        if self.times is None:
            if self.stated is not None and options.load_format != "dummy":
                raise UsageError(
                    "--synthetic-acceptance-length needs --emulate, as a scripted pair's own speed means nothing, or "
                    "--load-format dummy"
                )
            yield replace(resolve(options), synthetic=self.stated)
            return
        with nullcontext(options) if self.stated is None else _scripted(options, self.stated) as asked:
            yield replace(resolve(asked), emulate=self.times, elastic_cores=False)

    def facts(self) -> dict[str, Any]:
        """Return the emulation as JSON; nothing if there is none."""
        if not self.words:
            return {}
        facts: dict[str, Any] = {"emulated": self.times and emulated(self.times), "synthetic": None}
        if (found := self.stated) is not None:
            facts["synthetic"] = {
                "acceptance_length": acceptance_length(found),
                "acceptance": found.acceptance,
                "hit_rate": found.hit_rate,
                "k": found.lookahead,
                "fan_out": found.fan_out,
            }
        return facts

    def notes(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Return sentences that a reader of the figures must know."""
        found = []
        if self.stated is not None:
            found.append("Synthetic: the texts of a script mean nothing; their ids are compared all the same.")
        late = {row["mode"]: row["verify_ms"] for row in rows if self._late(row)}
        if late:
            longer = ", ".join(f"{mode} ({ms:.1f} ms)" for mode, ms in late.items())
            found.append(
                f"Forwards took longer than emulated in {longer}: the models are too large, or the machine busy."
            )
        return found

    def _late(self, row: dict[str, Any]) -> bool:
        lookahead = row.get("k", 0 if row["mode"] == "ar" else "auto")
        if self.times is None or lookahead == "auto":
            return False
        tokens = row.get("batch_size", 1) * (1 + lookahead)
        return bool(row["verify_ms"] > _LATE * 1e3 * line(self.times.verify).at(tokens))


def emulated(times: DeviceTimes) -> str:
    """Return times in the notation of `--emulate`: "verify=15ms,depth=1.8ms"."""
    return f"verify={time_text(line(times.verify))},depth={time_text(line(times.depth))}"


@contextmanager
def _scripted(options: EngineOptions, stated: StatedAgreement) -> Iterator[EngineOptions]:
    from ssd.plugins.bench.emulation.chains import write_pair

    for name in _DECIDED:
        if getattr(options, name) != getattr(EngineOptions(), name):
            raise UsageError(f"--{name.replace('_', '-')} is not for a synthetic pair")
    with tempfile.TemporaryDirectory(prefix="ssd-scripted-") as folder:
        pair = write_pair(Path(folder), stated)
        # Rounded weights would make the draft agree less often than stated.
        whole = {"draft_dtype": "float32", "draft_weights": "as-is"}
        yield replace(options, target=str(pair.target), draft=(str(pair.draft),), **whole)
