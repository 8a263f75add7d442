"""Measurements on devices that are not here, with a draft that is as right as stated: for sizing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from ssd.cli.quantities import written
from ssd.emulation.agreement import Stated
from ssd.emulation.devices import DeviceTimes
from ssd.errors import UsageError
from ssd.launch_config import EngineOptions

if TYPE_CHECKING:
    from ssd.bench.figures import Row

_DECIDED = ("target", "draft", "dtype", "draft_dtype", "quantize", "draft_quantize", "load_format", "revision")
_LATE = 1.2  # times what is stated


class Emulation(NamedTuple):
    """Forwards take these `times`, if any; where something is `stated`, the models are a scripted pair, or say what one
    would say."""

    times: DeviceTimes | None
    stated: Stated | None

    @property
    def words(self) -> str:
        """For titles."""
        said = [] if self.times is None else [f"emulated: {emulated(self.times)}"]
        if self.stated is not None:
            length, hits = self.stated.acceptance_length, self.stated.hit_rate
            said.append(f"synthetic: acceptance length {length:.3g}, hit rate {hits:.3g}")
        return "; ".join(said)

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        facts: dict[str, Any] = {"emulated": self.times and emulated(self.times), "synthetic": None}
        if (found := self.stated) is not None:
            facts["synthetic"] = {
                "acceptance_length": found.acceptance_length,
                "acceptance": found.acceptance,
                "hit_rate": found.hit_rate,
                "k": found.lookahead,
                "fan_out": found.fan_out,
            }
        return facts

    def notes(self, rows: Sequence[Row]) -> list[str]:
        """What a reader has to know of the figures."""
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

    def _late(self, row: Row) -> bool:
        lookahead = row.get("k", 0)
        if self.times is None or lookahead == "auto":
            return False
        tokens = row.get("batch_size", 1) * (1 + lookahead)
        return bool(row["verify_ms"] > _LATE * 1e3 * self.times.verify.line.at(tokens))


def emulated(times: DeviceTimes) -> str:
    """For people, and as `--emulate` takes it: "verify=15ms,depth=1.8ms"."""
    return f"verify={written(times.verify.line)},depth={written(times.depth.line)}"


@contextmanager
def scripted(options: EngineOptions, emulation: Emulation) -> Iterator[EngineOptions]:
    """The options with the pair of `emulation`, if it has one, for as long as the block lasts. Raises UsageError for
    options that the pair decides, and for models of their own speed that would not say what is stated."""
    if emulation.times is None and options.load_format != "dummy":
        raise UsageError(
            "--synthetic-acceptance-length needs --emulate, as a scripted pair's own speed means nothing, or "
            "--load-format dummy"
        )
    if emulation.stated is None or emulation.times is None:
        yield options
        return
    from ssd.emulation.chains import write_pair

    for name in _DECIDED:
        if getattr(options, name) != getattr(EngineOptions(), name):
            raise UsageError(f"--{name.replace('_', '-')} is not for a synthetic pair")
    with tempfile.TemporaryDirectory(prefix="ssd-scripted-") as folder:
        pair = write_pair(Path(folder), emulation.stated)
        # Rounded, the draft would agree less often than stated.
        yield replace(options, target=str(pair.target), draft=(str(pair.draft),), draft_dtype="float32")
