"""What pyproject.toml cannot say: the commit goes into each distribution, and compiled kernels into wheels that ask.

`SSD_PREBUILT=1 pip wheel .` makes a wheel for this platform, with kernels for the common x86-64 processors. Without it
the wheel is for every platform, and the kernels are compiled on first use."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from ssd.kernels import build  # noqa: E402
from ssd.system.version import COMMIT_FILE, commit  # noqa: E402

PREBUILT = os.environ.get("SSD_PREBUILT") == "1"


def write_commit(package: Path) -> None:
    """Write the commit of this checkout, or of the sdist that this is, into the package of a distribution."""
    if found := commit():
        file = package / COMMIT_FILE
        file.unlink(missing_ok=True)  # of an sdist it may be a hard link
        file.write_text(found + "\n")


def compile_kernels(folder: Path) -> None:
    """Compile the kernels for every level of x86-64. Ends the build where that is not possible."""
    compiler = shlex.split(build.compiler())
    if not compiler or platform.machine() != "x86_64":
        sys.exit("SSD_PREBUILT=1 needs a C compiler on x86-64")
    for level, (options, _) in build.LEVELS.items():
        build.compile_into(folder / build.file_name(level), [*compiler, *options], load=False)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "ssd"
        write_commit(package)
        if PREBUILT:
            compile_kernels(package / "kernels" / build.PREBUILT)


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "ssd")


class BdistWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not PREBUILT

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3: the kernels are loaded by ctypes."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist, "bdist_wheel": BdistWheel})
