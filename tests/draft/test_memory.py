"""The draft's memory does not grow with what is answered."""

from __future__ import annotations

import resource
from pathlib import Path

from msgspec.structs import replace

from ssd.draft.process import load, take_memory
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from tests.models import tiny

MIB = 2**20


def resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_cache_has_its_memory_from_the_start(tmp_path: Path) -> None:
    target = str(tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300)))
    config = resolve(EngineOptions(target=target, draft=(target,), draft_dtype="float32"))
    (small,) = load(config)
    each = (small.cache.keys.nbytes + small.cache.values.nbytes) // config.draft_num_pages
    (runner,) = load(replace(config, draft_num_pages=256 * MIB // each))
    take_memory([runner])
    before = resident()
    runner.cache.keys.fill_(1.0)
    runner.cache.values.fill_(1.0)
    assert resident() - before < 64 * MIB
