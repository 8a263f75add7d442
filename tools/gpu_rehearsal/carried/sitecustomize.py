"""PIN_TRITON=WORD: a constant in place of Triton's hash of its own files.

That hash differs between the builds of one version for several Pythons; with the constant a cache made here fits there.
Without PIN_TRITON nothing happens, and nothing is imported before the program imports Triton itself."""

import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType

_VERSION = "3.6.0"


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "triton.runtime.cache":
            return None
        spec = super().find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if sys.modules["triton"].__version__ == _VERSION and hasattr(module, "triton_key"):
                    module.triton_key = lambda: os.environ["PIN_TRITON"]  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("PIN_TRITON"):
    sys.meta_path.insert(0, _Finder)
