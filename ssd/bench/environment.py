"""Describes what a measurement ran on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ssd.config.engine import Cpus, EngineConfig


def environment() -> dict[str, Any]:
    """Return commit, machine and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpus = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {
        "commit": _said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        **({"gpus": gpus} if gpus else {}),
        "python": platform.python_version(),
        "torch": version("torch"),
        "ssd": version("ssd"),
    }


def engine_facts(config: EngineConfig) -> dict[str, Any]:
    """Return the models, and the devices and types they run on."""
    names = ("target_name", "draft_name", "device", "draft_device", "dtype", "draft_dtype", "quantize")
    more = ("draft_quantize", "target_cpus", "draft_cpus", "max_num_seqs", "max_model_len", "deterministic")
    return {name: getattr(config, name) for name in (*names, *more)}


def own_cores(config: EngineConfig) -> bool:
    """Return whether target and draft each have CPU cores of their own."""
    on_cpu = config.device == config.draft_device == "cpu"
    return on_cpu and bool(config.draft_cpus) and not set(config.target_cpus) & set(config.draft_cpus)


def hardware(config: EngineConfig, all_cores: bool) -> str:
    """Return a sentence that says whether the modes are compared on equal hardware."""
    if config.draft is None:
        return ""
    target, draft = config.device, config.draft_device
    if own_cores(config):
        target, draft = _cores(config.target_cpus), _cores(config.draft_cpus)
    elif target == draft:
        return f"Equal hardware: in every mode target and draft share {'the cores' if target == 'cpu' else target}."
    said = f"Extra hardware: the target has {target} in every mode, sd and ssd have {draft} for the draft as well"
    return f"{said}. Equal hardware: against the rows with all cores." if all_cores else f"{said}."


def _cores(cpus: Cpus) -> str:
    return f"core{'s' if len(cpus) > 1 else ''} {', '.join(map(str, cpus))}"


def _said(*command: str) -> str:
    """Return what a program prints, or "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
