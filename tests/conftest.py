"""The same surroundings for the tests wherever they run."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from ssd.system.files import cache_dir

# One compute thread, read when torch is first imported: tiny models gain nothing from more, and threads that wait for
# each other lose a lot.
os.environ["OMP_NUM_THREADS"] = "1"
# Triton's kernels run on the CPU, which it has to know when it is first imported; tests/gpu says otherwise.
os.environ["TRITON_INTERPRET"] = "1"


_PLUGINS = Path(__file__).parent.parent / "ssd" / "plugins"
_MARKERS = ("bench", "mock", "monitor")  # plugins that tests of the core need
collect_ignore = [] if (_PLUGINS / "bench").is_dir() else ["tools"]  # tools read prompts and describe machines by it


def _leave_the_users_tables_alone() -> None:
    """Give this run a cache folder of its own, in which only what takes long to make is the user's."""
    users, own = cache_dir(), Path(tempfile.mkdtemp(prefix="ssd-tests-"))
    for name in ("kernels", "models", "datasets", "downloads"):
        (users / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(users / name)
    os.environ["SSD_CACHE"] = str(own)
    atexit.register(shutil.rmtree, own, ignore_errors=True)


if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    _leave_the_users_tables_alone()

# A shell starts background jobs with Ctrl-C ignored, and children would inherit that; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, however busy the machine is: what fails here fails everywhere.
# `pytest --hypothesis-profile=search` tries others; with `unshrunk` no simpler example is looked for.
ANY_SPEED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("search", **ANY_SPEED)
settings.register_profile("repeat", derandomize=True, **ANY_SPEED)
settings.register_profile("unshrunk", derandomize=True, phases=(Phase.explicit, Phase.generate), **ANY_SPEED)
settings.load_profile("repeat")


# Collecting makes half a million objects, and all of them stay: looking for garbage among them takes half of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is looked for among the tests' own objects."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with a test that may take longer than others come first, so that no worker is left with one at the end.

    Tests of the core that need a plugin, as their markers say, are left out where it was removed."""
    removed = [name for name in _MARKERS if not (_PLUGINS / name).is_dir()]
    if left_out := [item for item in items if any(map(item.get_closest_marker, removed))]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    longest: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), marker.args[0] if marker else 0.0)
    items.sort(key=lambda item: -longest[item.path])


@pytest.fixture(params=["kernels", "torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with our kernels and once as on a machine without a C compiler."""
    if request.param == "torch":
        monkeypatch.setattr("ssd.kernels.library.functions", lambda: None)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay what a GPU captures, instead of calling it again; in torch's operations."""
    from tests.capture.replay import replay_captures

    replay_captures(monkeypatch)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of a target and of a draft that agrees with it about every other time, loaded."""
    from tests.draft.audit import world_in

    return world_in(tmp_path_factory.mktemp("world"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own. The kernels in it are those of all: to compile them again takes a while."""
    from ssd.kernels import build  # which remembers where they lie

    kernels, cache = cache_dir() / "kernels", tmp_path / "cache"
    cache.mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    monkeypatch.setenv("SSD_CACHE", str(cache))
    build.library.cache_clear()
    yield cache
    build.library.cache_clear()


@pytest.fixture
def products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a row the same bits wherever it lies in a tile, as a GPU does.

    Triton's interpreter multiplies by NumPy's BLAS. OpenBLAS's kernels for Haswell and Zen do not promise it.
    """
    import numpy as np
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Take back the compute threads that a test's code has given this process: every later test would be slow."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
