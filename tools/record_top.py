"""Records what `ssd top --demo` shows: ten seconds of an emulated pair that answers three clients.

    python -m tools.record_top

Writes ssd/plugins/monitor/recording.msgpack.gz (`ssd.plugins.monitor.recording`)."""

from __future__ import annotations

import gzip
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

import ssd.plugins.monitor
from ssd.client import Client
from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.params import SamplingParams
from ssd.ipc.trace_ring import WORDS
from ssd.launch.options import EngineOptions
from ssd.llm import running
from ssd.monitor.messages import Snapshot
from ssd.plugins.bench.emulation.agreement import PRESETS
from ssd.plugins.bench.setup import Setup
from ssd.plugins.monitor.subscriber import Subscriber

FILE = Path(ssd.plugins.monitor.__file__).with_name("recording.msgpack.gz")
_TIMES = DeviceTimes(verify=ForwardTime(40e-3), depth=ForwardTime(6e-3))
_CLIENTS, _WARM_S, _SECONDS = 3, 20.0, 10.0


def main() -> None:
    emulation = Setup(_TIMES, PRESETS["llama"].agreement(0.0))
    with emulation.configured(EngineOptions(mode="auto")) as config:
        config = replace(config, target_name="70B, emulated", draft_name="1B, emulated")
        with running(config) as (engine, _):
            found = _recorded(engine.address)
    FILE.write_bytes(gzip.compress(msgspec.msgpack.encode(found), mtime=0))
    print(f"{FILE}: {len(found)} snapshots, {FILE.stat().st_size} bytes")


def _recorded(address: str) -> list[Snapshot]:
    """The snapshots of some seconds, with times from 0 on and trace records numbered from 0 on."""
    end = threading.Event()
    clients = [threading.Thread(target=_ask, args=(address, number, end)) for number in range(_CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(_WARM_S)
    subscriber, found = Subscriber(address), list[Snapshot]()
    until = time.monotonic() + 1 + _SECONDS
    while time.monotonic() < until:
        snapshot = subscriber.receive(1.0)
        if snapshot is not None:
            found.append(snapshot)
    subscriber.close()
    end.set()
    for client in clients:
        client.join()
    return normalised([each for each in found if each.at >= int(1e9 * (until - _SECONDS))])


def _ask(address: str, number: int, end: threading.Event) -> None:
    with Client(address) as client:
        for turn in range(1000):
            if end.is_set():
                return
            params = SamplingParams(max_tokens=60 + 50 * ((turn + number) % 3), ignore_eos=True, store=False)
            client.generate([[number, turn, *range(20 + 40 * number)]], params)


def normalised(found: list[Snapshot]) -> list[Snapshot]:
    """Let times, and the numbers of trace records, begin with 0."""
    begin, counts = found[0].at - 100_000_000, dict.fromkeys((trace.role for trace in found[0].traces), 0)
    made = []
    for snapshot in found:
        traces = []
        for trace in snapshot.traces:
            records = np.frombuffer(trace.records, np.int64).reshape(-1, WORDS).copy()
            records = records[records[:, 1] >= begin]
            records[:, 0] = np.arange(len(records)) + counts[trace.role]
            records[:, 1] -= begin
            counts[trace.role] += len(records)
            traces.append(replace(trace, records=records.tobytes()))
        reports = [
            replace(
                report,
                rounds=[replace(each, at=each.at - begin) for each in report.rounds if each.at >= begin],
                ended=[replace(each, at=each.at - begin) for each in report.ended if each.at >= begin],
            )
            for report in snapshot.reports
        ]
        made.append(
            replace(snapshot, engine="recorded", at=snapshot.at - begin, whole=False, traces=traces, reports=reports)
        )
    return made


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch
        main()
